"""What an input is read as: texts, images, dicts of both; the rules are compared with sentence-transformers' own."""

from __future__ import annotations

import base64
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from egemma_mlx.config import Config
from egemma_mlx.errors import EgemmaError
from egemma_mlx.inputs import Input, is_single, read
from egemma_mlx.tokenizer import IMAGE_TOKEN, Tokenizer

Image = pytest.importorskip("PIL.Image")

PICTURE = Image.new("RGB", (20, 10), "red")
ARRAY = np.zeros((10, 20, 3), np.uint8)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with an image and a text in it."""
    PICTURE.save(tmp_path / "photo.jpg")
    shutil.copy(tmp_path / "photo.jpg", tmp_path / "LOUD.JPG")
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "folder.png").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def only(value: Any, *, images: bool = True) -> Input:
    [item] = read([value], images=images)
    return item


# --- strings ---------------------------------------------------------------------------------------------------------

STRINGS = [
    ("photo.jpg", True),
    ("LOUD.JPG", True),
    ("./photo.jpg", True),
    ("data:image/png;base64,AAAA", True),
    ("missing.jpg", False),
    ("folder.png", False),
    ("notes.txt", False),
    ("see photo.jpg", False),
    ("photo.jpg is red", False),
    ("", False),
    ("a text about .png", False),
    ("\0.png", False),
    ("x" * 10_000 + ".png", False),
    ("data:text/plain,x", False),
]


@pytest.mark.parametrize(("text", "image"), STRINGS, ids=[text[:30] for text, _ in STRINGS])
@pytest.mark.usefixtures("folder")
def test_a_string_is_an_image_where_it_names_one_as_in_sentence_transformers(text: str, image: bool) -> None:
    assert only(text) == (Input(IMAGE_TOKEN, (text,)) if image else Input(text))
    assert only(text, images=False) == Input(text)
    modality = pytest.importorskip("sentence_transformers.base.modality")
    if "\0" not in text:  # a ValueError there
        assert modality.is_image_url_or_path(text) is image


@pytest.mark.parametrize("url", ["https://example.org/a.png", "http://example.org/A.JPEG?size=3"])
def test_an_address_of_an_image_is_an_error_that_says_to_download_it(url: str) -> None:
    for value in (url, {"image": url}, {"text": "x", "image": ["photo.jpg", url]}):
        with pytest.raises(EgemmaError, match=rf"input 1: {re.escape(url)}: .*download it first"):
            read(["x", value], images=True)
    assert only(url, images=False) == Input(url)


@pytest.mark.parametrize("text", ["https://example.org/", "https://[[/a.png", "see https://example.org/a.png"])
def test_other_addresses_are_texts(text: str) -> None:
    assert only(text) == Input(text)


# --- images and dicts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [Path("photo.jpg"), b"bytes", PICTURE, ARRAY, ARRAY[..., 0]], ids=type)
def test_an_image_is_its_placeholder(value: Any) -> None:
    assert is_single(value)
    for given in (value, {"image": value}, {"image": [value]}, {"image": (value,)}):
        text, images = only(given)
        assert text == "<|image|>"
        assert len(images) == 1 and images[0] is value


def test_parts_of_a_dict_keep_their_order() -> None:
    assert only({"text": "a", "image": PICTURE}) == Input("a<|image|>", (PICTURE,))
    assert only({"image": PICTURE, "text": "a"}) == Input("<|image|>a", (PICTURE,))
    two = ("x.png", PICTURE)
    assert only({"text": ["a", "b"], "image": two}) == Input("ab<|image|><|image|>", two)
    assert only({"text": "a", "image": []}) == only({"text": "a"}) == Input("a")


def test_a_dict_says_itself_whether_a_string_is_an_image(folder: Path) -> None:
    assert only({"text": "photo.jpg"}) == Input("photo.jpg")
    assert only({"image": "missing"}) == Input("<|image|>", ("missing",))  # read, and refused, later


def test_a_text_may_say_where_its_images_go() -> None:
    text = "first <|image|>, then <|image|>."
    assert only({"image": [PICTURE, ARRAY], "text": text}).text == text
    assert only({"text": text}) == Input(text)  # for the tokenizer to refuse


def test_what_is_one_input_and_what_are_several() -> None:
    for one in ("text", {}, {"text": "x"}, Path("x"), b"", PICTURE, ARRAY, np.zeros((2, 3, 4, 3), np.uint8)):
        assert is_single(one)
    for several in ([], (), ["x"], iter(["x"]), np.array(["x", "y"]), np.array(["x", "y"], object), None, 3):
        assert not is_single(several)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "input 1: expected a text, an image or a dict of them but got NoneType"),
        (["nested"], "input 1: expected a text, an image or a dict of them but got list"),
        ({}, "input 1: expected a text or an image in the dict but it holds none"),
        ({"image": []}, "holds none"),
        ({"text": "x", "picture": PICTURE}, "input 1: expected the keys text and image but got 'picture'$"),
        ({"audio": "x.wav"}, r"but got 'audio' \(audio and video are not in this version\)"),
        ({"text": "x", "video": "x.mp4"}, r"but got 'video' \(audio and video are not in this version\)"),
        ({"role": "user", "content": "x"}, "but got 'role', 'content'"),
        ({"text": 3}, "input 1: expected text to be str or a list of them but got int"),
        ({"text": ["x", None]}, "expected text to be str or a list of them but got NoneType"),
        ({"image": None}, "input 1: expected image to be a path, .* but got NoneType"),
        ({"image": [[PICTURE]]}, "expected image to be a path, .* but got list"),
    ],
)
def test_what_is_no_input_is_an_error_with_its_index(value: Any, message: str) -> None:
    with pytest.raises(EgemmaError, match=message):
        read(["fine", value], images=True)


@pytest.mark.parametrize(
    "value", [Path("photo.jpg"), b"bytes", PICTURE, ARRAY, {"text": "x", "image": "y.png"}], ids=type
)
def test_a_text_model_says_how_to_load_one_for_images(value: Any) -> None:
    with pytest.raises(EgemmaError, match=r'^text 1: expected str .* load with modalities=\("text", "image"\)'):
        read(["x", value], images=False)


def test_no_sequence_is_an_error() -> None:
    for value in (None, 3):
        with pytest.raises(EgemmaError, match="expected a sequence of inputs but got"):
            read(value, images=True)


def test_data_uris_are_told_by_how_they_begin(folder: Path) -> None:
    uri = "data:image/jpeg;base64," + base64.b64encode((folder / "photo.jpg").read_bytes()).decode()
    assert only(uri) == only({"image": uri}) == Input("<|image|>", (uri,))


# --- ids -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tiny_text: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_text, Config.from_file(tiny_text / "config.json"))


def test_a_placeholder_becomes_its_soft_tokens_between_begin_and_end(tokenizer: Tokenizer) -> None:
    begin, soft, end = tokenizer.convert_tokens_to_ids(["<|image>", "<|image|>", "<image|>"])
    ids = tokenizer.ids(["the <|image|> of<|image|>", "the"], prompt="to ", images=[[3, 1], []]).ids
    long = "to the <|image><|image|><|image|><|image|><image|> of<|image><|image|><image|>"
    for row, text in zip(ids, [long, "to the"], strict=True):
        assert row.tolist() == tokenizer._backend.encode(text).ids  # the reference tokenizes the long string
    assert ids[0].tolist().count(begin) == ids[0].tolist().count(end) == 2 and ids[0].tolist().count(soft) == 4


@pytest.mark.parametrize(
    ("text", "counts", "message"),
    [
        ("a <|image|>", [], r"input 1 contains '<\|image\|>', which stands for media, but no media came with it"),
        ("a <|video|> <|image|>", [3], r"input 1 contains '<\|video\|>', which stands for media"),
        ("a", [3], r"input 1 has 0 '<\|image\|>' but 1 images came with it"),
        ("<|image|> <|image|>", [3], r"input 1 has 2 '<\|image\|>' but 1 images came with it"),
        ("<|image|>", [9000], "input 1 has 9004 tokens where 8192 are allowed"),
    ],
)
def test_placeholders_that_do_not_match_are_errors(
    tokenizer: Tokenizer, text: str, counts: list[int], message: str
) -> None:
    with pytest.raises(EgemmaError, match=message):
        tokenizer.ids(["fine", text], images=[[], counts])


def test_a_cut_may_take_text_but_no_part_of_an_image(tokenizer: Tokenizer) -> None:
    texts, images = ["<|image|> the the the"], [[3]]
    [whole] = tokenizer.ids(texts, images=images).ids
    assert len(whole) == 1 + 5 + 3 + 1
    for length in range(7, len(whole)):
        [cut], count = tokenizer.ids(texts, images=images, max_length=length, truncation=True)
        assert cut.tolist() == [*whole[: length - 1], tokenizer.eos_token_id] and count == 1
    for length in range(2, 7):
        with pytest.raises(EgemmaError, match=f"input 0 has images that reach beyond {length} tokens"):
            tokenizer.ids(texts, images=images, max_length=length, truncation=True)
