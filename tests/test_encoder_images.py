"""`Encoder` with images: parity with sentence-transformers, batches, memory, files that cannot be read, threads."""

from __future__ import annotations

import base64
import io
import json
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from egemma_mlx import Encoder, lanes
from egemma_mlx.encoder import Embedded
from egemma_mlx.errors import EgemmaError
from egemma_mlx.media.image import ImageProcessor, Patches
from egemma_mlx.packing import pack
from egemma_mlx.random_checkpoint import write_checkpoint

Image = pytest.importorskip("PIL.Image")

UNIT = 2e-6
IMAGES = ("text", "image")
SOFT = 70


def draw(width: int, height: int, seed: int = 0) -> Any:
    """A PIL image with shapes at every scale, so that a resize leaves something of it."""
    random = np.random.default_rng([width, height, seed])
    coarse = random.integers(0, 255, (-(-height // 8), -(-width // 8), 3), np.uint8).repeat(8, 0).repeat(8, 1)
    noise = random.integers(0, 60, (height, width, 3), np.uint8)
    return Image.fromarray(coarse[:height, :width] // 2 + noise)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few soft tokens an image, since what is tested does not depend on them."""
    folder = write_checkpoint(tmp_path_factory.mktemp("images") / "c", "tiny", modalities=IMAGES)
    file = folder / "processor_config.json"
    config = json.loads(file.read_text())
    config["image_processor"] |= {"max_soft_tokens": SOFT}
    file.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return Encoder(folder, modalities=IMAGES)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    """sentence-transformers over transformers' Pillow processor, whose pixels are this package's to the bit; the
    torchvision one, its default, is off by one level of 255 here and there (`test_image.py`)."""
    import oracle

    model = oracle.sentence_transformer(folder)
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    model[0].processor.image_processor = Gemma4ImageProcessorPil.from_pretrained(folder)
    return model


@dataclass
class Photos:
    a: Any
    b: Any
    path: Path

    @property
    def file(self) -> str:
        return str(self.path)

    @property
    def uri(self) -> str:
        return "data:image/png;base64," + base64.b64encode(self.path.read_bytes()).decode()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Photos:
    path = tmp_path_factory.mktemp("photos") / "wide.png"
    draw(300, 60).save(path)
    return Photos(draw(160, 100), draw(90, 170), path)


def mixed(photos: Photos) -> list[Any]:
    """Every kind of input that sentence-transformers takes too."""
    a, b = photos.a, photos.b
    return [
        "a red bicycle",
        a,
        photos.file,
        photos.uri,
        np.asarray(b),
        {"text": "the cat ", "image": a},
        {"image": a, "text": "the cat "},
        {"image": [b, photos.file], "text": "of the water"},
        {"text": ["from here ", "to there"], "image": b},
        {"text": "one <|image|> two <|image|> three", "image": [a, b]},
        {"text": photos.file},
        {"image": photos.file},
        "",
        "missing.jpg",
    ]


def apart(a: Any, b: Any) -> float:
    assert np.shape(a) == np.shape(b)
    return float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())


# --- sentence-transformers -------------------------------------------------------------------------------------------


def test_a_mixed_list_equals_sentence_transformers(encoder: Encoder, theirs: Any, photos: Photos) -> None:
    ours = encoder.encode(mixed(photos))
    assert apart(ours, theirs.encode(mixed(photos))) <= UNIT
    assert apart(ours[2], ours[3]) <= UNIT and apart(ours[2], ours[11]) <= UNIT  # one file, three ways
    assert min(apart(ours[5], ours[6]), apart(ours[2], ours[10]), apart(ours[1], ours[5])) > 1e-3


@pytest.mark.parametrize("options", [{"prompt_name": "query"}, {"prompt": "find: "}], ids=str)
def test_prompts_stand_where_sentence_transformers_puts_them(
    encoder: Encoder, theirs: Any, photos: Photos, options: dict[str, str]
) -> None:
    inputs = mixed(photos)[:7]
    assert apart(encoder.encode(inputs, **options), theirs.encode(inputs, **options)) <= UNIT


def test_encode_query_and_encode_document_of_images_equal_sentence_transformers(
    encoder: Encoder, theirs: Any, photos: Photos
) -> None:
    inputs = [photos.a, {"text": "x", "image": photos.b}]
    assert apart(encoder.encode_query(inputs), theirs.encode_query(inputs)) <= UNIT
    assert apart(encoder.encode_document(inputs), theirs.encode_document(inputs)) <= UNIT


def test_a_single_input_is_one_vector(encoder: Encoder, theirs: Any, photos: Photos) -> None:
    for value in (photos.a, np.asarray(photos.a), photos.file, {"text": "x", "image": photos.b}):
        vector = encoder.encode(value)
        assert vector.shape == (96,)
        assert apart(vector, theirs.encode(value)) <= UNIT
    assert apart(encoder.encode(photos.path), encoder.encode(photos.file)) == 0
    assert apart(encoder.encode(photos.path.read_bytes()), encoder.encode(photos.file)) == 0


def test_max_soft_tokens_equals_sentence_transformers(encoder: Encoder, theirs: Any, photos: Photos) -> None:
    ours = encoder.encode([photos.a], max_soft_tokens=140)
    expected = theirs.encode([photos.a], processing_kwargs={"image": {"max_soft_tokens": 140}})
    assert apart(ours, expected) <= UNIT
    assert apart(ours, encoder.encode([photos.a])) > 1e-4
    assert apart(encoder.encode([photos.a], max_soft_tokens=SOFT), encoder.encode([photos.a])) == 0


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"batch_size": 1}, {"batch_size": 3}, {"batch_tokens": 1}, {"batch_tokens": 100_000}], ids=str
)
def test_how_inputs_are_batched_changes_no_vector(encoder: Encoder, photos: Photos, options: dict[str, int]) -> None:
    inputs = [*mixed(photos), *(draw(50 + 40 * n, 200) for n in range(4))]
    assert apart(encoder.encode(inputs, **options), encoder.encode(inputs)) <= UNIT


def test_batches_count_soft_tokens(encoder: Encoder, photos: Photos, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def spy(texts: list[NDArray[np.int32]]) -> Any:
        seen.append([len(ids) for ids in texts])
        return pack(texts)

    monkeypatch.setattr("egemma_mlx.encoder.pack", spy)
    encoder.encode([photos.a, photos.b, "x", photos.a, "y", photos.path], batch_tokens=150)
    soft = [encoder.image_processor.soft_tokens(x) for x in (photos.a, photos.b, photos.a, photos.path)]
    assert sorted(n for batch in seen for n in batch if n > 10) == sorted(n + 4 for n in soft)
    assert all(sum(batch) <= 150 for batch in seen) and len(seen) == 2


def test_texts_have_the_same_bits_as_from_a_text_model(folder: Path, encoder: Encoder) -> None:
    texts = ["a red bicycle", "", "the river comes down from the mountains " * 5, "see photo.jpg"]
    assert np.array_equal(encoder.encode(texts), Encoder(folder).encode(texts))


def test_a_text_model_takes_every_string_for_a_text(folder: Path, photos: Photos) -> None:
    text = Encoder(folder)
    assert text.image_processor is None
    as_text = Encoder(folder, modalities=IMAGES).encode({"text": photos.file})
    assert apart(text.encode(photos.file), as_text) <= UNIT
    assert apart(text.encode([{"text": photos.file}])[0], as_text) <= UNIT


def test_pixels_live_for_their_batch_alone(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in each lane, one decoded ahead, and one that a lane is about to let go of."""
    bound = lanes._workers.start(1) + 2
    alive, most, lock = 0, 0, threading.RLock()
    decode = ImageProcessor.__call__

    def gone() -> None:
        nonlocal alive
        with lock:
            alive -= 1

    def counted(self: ImageProcessor, source: Any) -> Patches:
        nonlocal alive, most
        patches = decode(self, source)
        with lock:
            alive += 1
            most = max(most, alive)
        weakref.finalize(patches.pixels, gone)
        return patches

    monkeypatch.setattr(ImageProcessor, "__call__", counted)
    vectors = encoder.encode([draw(60, 60, seed) for seed in range(4 * bound)], batch_size=1)
    assert vectors.shape == (4 * bound, 96)
    assert 1 < most <= bound
    assert alive == 0


def test_progress_counts_inputs(encoder: Encoder, photos: Photos, capsys: pytest.CaptureFixture[str]) -> None:
    encoder.encode([photos.a, "x", Path("missing.png")], show_progress_bar=True, on_error="skip")
    assert "3/3" in capsys.readouterr().err


def test_other_options_apply(encoder: Encoder, photos: Photos) -> None:
    inputs = [photos.a, photos.b, "x"]
    full = encoder.encode(inputs)
    short = encoder.encode(inputs, truncate_dim=32, normalize_embeddings=True)
    assert apart(short, full[:, :32] / np.linalg.norm(full[:, :32], axis=1, keepdims=True)) < 1e-6
    assert encoder.encode(inputs, precision="ubinary").shape == (3, 12)
    assert encoder.similarity(full, full).shape == (3, 3)
    with pytest.warns(UserWarning, match="^1 of 2 inputs cut to 80 tokens$"):
        encoder.encode([photos.a, "the " * 100], truncation=True, max_length=80)


# --- what cannot be read ---------------------------------------------------------------------------------------------


@pytest.fixture
def broken(tmp_path: Path, photos: Photos) -> dict[str, Path]:
    """Files that are no images, and one whose header alone is."""
    stream = io.BytesIO()
    draw(400, 300).save(stream, "jpeg")
    files = {"text.png": b"a text", "cut.jpg": stream.getvalue()[:3000], "empty.gif": b""}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    return {name: tmp_path / name for name in [*files, "missing.jpg"]}


@pytest.mark.parametrize("name", ["text.png", "cut.jpg", "empty.gif", "missing.jpg"])
def test_an_image_that_cannot_be_read_is_an_error_with_index_and_file(
    encoder: Encoder, photos: Photos, broken: dict[str, Path], name: str
) -> None:
    bad = broken[name]
    for value in (bad, {"image": str(bad)}, {"text": "x", "image": [photos.a, bad]}):
        with pytest.raises(EgemmaError, match=rf"^input 2: .*{name}: "):
            encoder.encode(["x", photos.a, value, photos.b])
    assert encoder.encode(photos.a).shape == (96,)  # and works on


@pytest.mark.parametrize("options", [{}, {"batch_size": 1}, {"batch_tokens": 10_000}], ids=str)
def test_skip_embeds_the_others_and_reports(
    encoder: Encoder, photos: Photos, broken: dict[str, Path], options: dict[str, int]
) -> None:
    bad = list(broken.values())
    inputs = ["x", bad[0], photos.a, {"text": "y", "image": [photos.b, bad[1]]}, bad[2], photos.path, bad[3], "z"]
    result = encoder.encode(inputs, on_error="skip", **options)
    assert isinstance(result, Embedded)
    vectors, indices, errors = result
    assert indices.tolist() == [0, 2, 5, 7] and indices.dtype == np.int64
    assert apart(vectors, encoder.encode([inputs[index] for index in indices])) <= UNIT
    assert sorted(errors) == [1, 3, 4, 6]
    for index, name in ((1, "text.png"), (3, "cut.jpg"), (4, "empty.gif"), (6, "missing.jpg")):
        assert str(errors[index]).startswith(f"input {index}: ") and name in str(errors[index])


def test_skip_of_nothing_and_of_everything(encoder: Encoder, photos: Photos, broken: dict[str, Path]) -> None:
    vectors, indices, errors = encoder.encode([photos.a, "x"], on_error="skip")
    assert vectors.shape == (2, 96) and indices.tolist() == [0, 1] and errors == {}
    for value in ([broken["cut.jpg"], broken["text.png"]], broken["cut.jpg"]):
        vectors, indices, errors = encoder.encode(value, on_error="skip", truncate_dim=8)
        assert vectors.shape == (0, 8) and indices.tolist() == [] and len(errors) == np.size(value)
    assert encoder.encode("x", on_error="skip").vectors.shape == (1, 96)
    assert encoder.encode([], on_error="skip").vectors.shape == (0, 96)


def test_skip_is_about_images_alone(encoder: Encoder, broken: dict[str, Path]) -> None:
    with pytest.raises(EgemmaError, match=r"input 2 contains '<\|image\|>'"):
        encoder.encode([broken["text.png"], "x", "see <|image|>"], on_error="skip")


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (["x"], {"on_error": "ignore"}, "on_error 'raise' or 'skip' but got 'ignore'"),
        (["x"], {"max_soft_tokens": 100}, "70, 140, 280, 560 or 1120 .* but got 100"),
        (["x", None], {}, "input 1: expected a text, an image or a dict of them but got NoneType"),
        (["x", np.zeros((4, 4, 3))], {}, "input 1: .*expected a uint8 array .* but got float64"),
        (["x", "the " * 9000], {}, r"input 1 has \d+ tokens where 8192 are allowed"),
        ([{"text": "<|image|> <|image|>", "image": b""}], {"max_length": 3}, "input 0: image: .*empty"),
        (["https://example.org/a.png"], {}, "input 0: https://example.org/a.png: .*download it first"),
    ],
)
def test_bad_input_is_one_error_that_names_it(
    encoder: Encoder, inputs: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EgemmaError, match=message):
        encoder.encode(inputs, **options)


def test_placeholders_without_an_image_stay_errors(encoder: Encoder, photos: Photos) -> None:
    for value in ("see <|image|>", {"text": "see <|image|>"}):
        with pytest.raises(EgemmaError, match=r"input 0 contains '<\|image\|>'.*no media came"):
            encoder.encode([value])
    with pytest.raises(EgemmaError, match=r"prompt \+ input 0 has 2 '<\|image\|>' but 1 images came with it"):
        encoder.encode([photos.a], prompt="<|image|>")
    with pytest.raises(EgemmaError, match=r"contains '<\|audio\|>'"):
        encoder.encode([{"text": "<|audio|>", "image": photos.a}])


def test_a_text_encoder_refuses_what_is_about_images(folder: Path, photos: Photos) -> None:
    text = Encoder(folder)
    with pytest.raises(EgemmaError, match=r'text 1: .* load with modalities=\("text", "image"\)'):
        text.encode(["x", photos.a])
    with pytest.raises(EgemmaError, match="max_soft_tokens is about images"):
        text.encode(["x"], max_soft_tokens=70)


# --- threads ---------------------------------------------------------------------------------------------------------


def test_threads_at_once_get_the_answers_of_one(encoder: Encoder, photos: Photos) -> None:
    corpora = [[draw(60 + 10 * corpus, 80, n) for n in range(3)] + ["x", photos.path] for corpus in range(4)]
    alone = [encoder.encode(inputs, batch_size=2) for inputs in corpora]
    start = threading.Barrier(4)

    def embed(corpus: int) -> Any:
        start.wait()
        return encoder.encode(corpora[corpus], batch_size=2)

    with ThreadPoolExecutor(4) as pool:
        for expected, vectors in zip(alone, pool.map(embed, range(4)), strict=True):
            assert apart(vectors, expected) <= UNIT


@pytest.mark.parametrize("opened", [Image.open, lambda path: Image.open(path).copy()], ids=["lazily", "read"])
def test_one_pil_image_may_come_many_times(encoder: Encoder, tmp_path: Path, opened: Callable[[Path], Any]) -> None:
    draw(1200, 900).save(tmp_path / "large.png")
    expected = encoder.encode(np.asarray(Image.open(tmp_path / "large.png")))
    for vector in encoder.encode([opened(tmp_path / "large.png")] * 6, batch_size=2):
        assert apart(vector, expected) <= UNIT
