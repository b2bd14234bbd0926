"""The tokenizer against transformers, sentence-transformers' prompt rules and the ids of the official file."""

import json
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from egemma_mlx.config import Config
from egemma_mlx.errors import EgemmaError
from egemma_mlx.random_checkpoint import write_checkpoint
from egemma_mlx.tokenizer import Tokenizer

FACTS = Path(__file__).resolve().parents[2] / "shared" / "facts"
HF_FILES = FACTS / "hf_files"
CASES = json.loads((FACTS / "fixtures" / "token_ids.json").read_text())["cases"] if FACTS.exists() else []
PLACEHOLDERS = ("<|image|>", "<|video|>", "<|audio|>")
ODD_TEXTS = [
    "",
    " ",
    "hi",
    " two  spaces\tand a tab \r\n",
    "漢字かな交じり文 안녕하세요 مرحبا",
    "👨‍👩‍👧‍👦 🧿𠮷 \x00\x1f\u200b\ufeff\ufffd",
    "e\u0301 é ﬁ ½ Ⅷ",
    "▁▁a <bos>x<eos> <pad> <mask> <unk>",
    "<|image> <audio|> <h1> [multimodal] <start_of_turn> <|turn>user",
    "the state of the world " * 40,
]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", "tiny", modalities=("text",))


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> Tokenizer:
    return load(tiny_folder)


@pytest.fixture(scope="module")
def real() -> Tokenizer:
    if not HF_FILES.exists():
        pytest.skip("the official tokenizer (../shared/facts/hf_files) is not here")
    return load(HF_FILES)


@pytest.fixture(scope="module", params=["tiny", "real"])
def folder_and_tokenizer(request: pytest.FixtureRequest) -> tuple[Path, Tokenizer]:
    tokenizer = request.getfixturevalue(request.param)
    return (request.getfixturevalue("tiny_folder") if request.param == "tiny" else HF_FILES), tokenizer


def load(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder, Config.from_file(folder / "config.json"))


def one(tokenizer: Tokenizer, text: str, **options: object) -> list[int]:
    [ids] = tokenizer.ids([text], **options).ids
    return ids.tolist()


# Ids


@pytest.mark.skipif(not CASES, reason="the official ids (../shared/facts/fixtures) are not here")
def test_ids_of_the_official_tokenizer(real: Tokenizer) -> None:
    refused = [case for case in CASES if any(literal in case["text"] for literal in PLACEHOLDERS)]
    cases = [case for case in CASES if case not in refused]
    assert (len(cases), len(refused)) == (100, 4)
    batch = real.ids([case["text"] for case in cases])
    assert batch.truncated == 0
    assert all(ids.dtype == np.int32 and ids.ndim == 1 for ids in batch.ids)
    assert [(case["text"], ids.tolist()) for case, ids in zip(cases, batch.ids, strict=True)] == [
        (case["text"], case["ids"]) for case in cases
    ]
    assert [real.encode(case["text"]) for case in cases] == [case["ids"] for case in cases]
    for case in refused:
        with pytest.raises(EgemmaError, match=r"<\|(image|video|audio)\|>"):
            real.ids([case["text"]])


@pytest.mark.parametrize("text", ["<h1>", "<unused0>", "[multimodal]", "<start_of_turn>", "[toxicity=0]"])
def test_added_tokens_of_gemma_3_are_ordinary_text(real: Tokenizer, text: str) -> None:
    ids = one(real, text)
    assert len(ids) > 3
    assert real.decode(ids, skip_special_tokens=True) == text


def test_equal_to_transformers(folder_and_tokenizer: tuple[Path, Tokenizer]) -> None:
    transformers = pytest.importorskip("transformers")
    folder, ours = folder_and_tokenizer
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert (len(ours), ours.vocab_size) == (len(theirs), theirs.vocab_size)
    names = ("bos_token", "eos_token", "pad_token", "mask_token")
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]
    assert [getattr(ours, f"{name}_id") for name in names] == [getattr(theirs, f"{name}_id") for name in names]

    options: list[dict[str, object]] = [
        {},
        {"padding": True},
        {"padding": "longest", "truncation": True, "max_length": 7},
        {"padding": "max_length", "truncation": True, "max_length": 12},
        {"truncation": True, "max_length": 2},
        {"padding": "max_length", "max_length": 250},
    ]
    for option in options:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert dict(ours(ODD_TEXTS, **option)) == dict(theirs(ODD_TEXTS, **option)), option
            assert dict(ours(ODD_TEXTS[3], **option)) == dict(theirs(ODD_TEXTS[3], **option)), option
    expected = theirs(ODD_TEXTS, padding=True, return_tensors="np")
    for array_type, tensors in ((mx.array, "mlx"), (np.ndarray, "np")):
        got = ours(ODD_TEXTS, padding=True, return_tensors=tensors)
        assert list(got) == list(expected)
        for key, value in got.items():
            assert isinstance(value, array_type)
            assert value.dtype == (mx.int32 if tensors == "mlx" else np.int32)
            np.testing.assert_array_equal(np.array(value), expected[key])

    rows = theirs(ODD_TEXTS)["input_ids"]
    for skip in (False, True):
        assert ours.batch_decode(rows, skip_special_tokens=skip) == theirs.batch_decode(rows, skip_special_tokens=skip)
    assert ours.convert_ids_to_tokens(rows[3]) == theirs.convert_ids_to_tokens(rows[3])
    assert ours.convert_tokens_to_ids(["<bos>", "▁"]) == theirs.convert_tokens_to_ids(["<bos>", "▁"])


def test_a_prompt_is_part_of_the_text(tiny: Tokenizer) -> None:
    prompt = tiny.prompt("query")
    assert one(tiny, "hi there", prompt=prompt) == one(tiny, prompt + "hi there")
    assert one(tiny, "", prompt=prompt) == one(tiny, prompt)


def test_empty_inputs(tiny: Tokenizer) -> None:
    assert one(tiny, "") == [2, 1]
    assert tiny.encode("") == [2, 1]
    assert tiny.ids([]) == ([], 0)
    assert dict(tiny.batch_encode_plus([])) == dict(tiny([], padding=True)) == {"input_ids": [], "attention_mask": []}
    with pytest.raises(EgemmaError, match="at least one text"):
        tiny([], padding=True, return_tensors="mlx")


@pytest.mark.parametrize("literal", PLACEHOLDERS)
def test_placeholders_without_media_are_refused_by_name(tiny: Tokenizer, literal: str) -> None:
    bad = ["fine", f"see {literal} here"]
    calls = [
        lambda: tiny.ids(bad),
        lambda: tiny.ids(bad, max_length=3, truncation=True),
        lambda: tiny(bad, padding=True, return_tensors="mlx"),
        lambda: tiny.batch_encode_plus(bad),
    ]
    for call in calls:
        with pytest.raises(EgemmaError, match=f"^text 1 contains '{re.escape(literal)}'"):
            call()
    with pytest.raises(EgemmaError, match=f"^text 0 contains '{re.escape(literal)}'"):
        tiny.encode(literal)
    with pytest.raises(EgemmaError, match=f"^prompt \\+ text 0 contains '{re.escape(literal)}'"):
        tiny.ids(["fine"], prompt=literal)
    assert one(tiny, literal[:-1])[1:-1]


def test_length_limit(tiny: Tokenizer) -> None:
    assert tiny.max_length == 8192
    fits, over = "the" + " the" * 8189, "the" + " the" * 8190
    assert len(one(tiny, fits)) == 8192
    with pytest.raises(EgemmaError, match=r"^text 1 has 8193 tokens where 8192 are allowed"):
        tiny.ids(["the", over])
    with pytest.raises(EgemmaError, match=r"^text 0 has 8192 tokens where 8191 are allowed"):
        tiny([fits], max_length=8191)
    with pytest.raises(EgemmaError, match=r"^prompt \+ text 0 has"):
        tiny.ids([fits], prompt=tiny.prompt("query"))
    cut = tiny.ids([over, "the", over], truncation=True)
    assert cut.truncated == 2
    assert [len(ids) for ids in cut.ids] == [8192, 3, 8192]
    assert cut.ids[0].tolist() == one(tiny, fits)


def test_the_limit_follows_the_config(tmp_path: Path) -> None:
    tokenizer = load(write_checkpoint(tmp_path / "short", modalities=("text",), max_position_embeddings=16))
    assert tokenizer.max_length == 16
    with pytest.raises(EgemmaError, match="17 tokens where 16"):
        tokenizer.ids(["the" + " the" * 14])
    assert tokenizer("the", padding="max_length", return_tensors="np").input_ids.shape == (1, 16)


def test_truncation_keeps_eos(tiny: Tokenizer) -> None:
    whole = one(tiny, "the state of the world")
    for length in range(2, len(whole)):
        ids, truncated = tiny.ids(["the state of the world", ""], max_length=length, truncation=True)
        assert truncated == 1
        assert ids[0].tolist() == [*whole[: length - 1], 1]
        assert ids[1].tolist() == [2, 1]
    assert tiny.ids(["the state of the world"], max_length=len(whole), truncation=True).truncated == 0


@pytest.mark.parametrize("max_length", [1, 0, -1, 8193, 12.0, "12", True])
def test_bad_max_length(tiny: Tokenizer, max_length: object) -> None:
    with pytest.raises(EgemmaError, match=r"max_length from 2 .* to 8192"):
        tiny.ids(["hi"], max_length=max_length, truncation=True)
    with pytest.raises(EgemmaError, match=r"max_length from 2 .* to 8192"):
        tiny(["hi"], max_length=max_length, padding="max_length")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (None, "expected str but got NoneType"),
        (b"bytes", "expected str but got bytes"),
        (3, "expected str but got int"),
        (["a"], "expected str but got list"),
        ("a\ud800b", r"lone surrogate '\\ud800' at character 1"),
    ],
)
def test_what_is_not_text(tiny: Tokenizer, bad: object, message: str) -> None:
    for call in (tiny.ids, tiny, tiny.batch_encode_plus):
        with pytest.raises(EgemmaError, match=f"^text 2: .*{message}"):
            call(["a", "b", bad])
    with pytest.raises(EgemmaError, match=f"^text: .*{message}"):
        tiny.encode(bad)
    with pytest.raises(EgemmaError, match=f"^text: .*{message}"):
        tiny.document(bad)
    if bad is not None:
        with pytest.raises(EgemmaError, match=f"^title: .*{message}"):
            tiny.document("a", title=bad)
        with pytest.raises(EgemmaError, match=f"^prompt: .*{message}"):
            tiny.prompt(prompt=bad)
    with pytest.raises(EgemmaError, match=f"^prompt: .*{message}"):
        tiny.ids(["a"], prompt=bad)


@pytest.mark.parametrize("texts", ["a str", b"bytes", None, 3])
def test_texts_is_a_sequence(tiny: Tokenizer, texts: object) -> None:
    for call in (tiny.ids, tiny.batch_encode_plus):
        with pytest.raises(EgemmaError, match=f"sequence of texts but got {type(texts).__name__}"):
            call(texts)


def test_any_iterable_of_texts(tiny: Tokenizer) -> None:
    expected = [one(tiny, text) for text in ("a", "the")]
    for texts in (("a", "the"), np.array(["a", "the"]), (text for text in ("a", "the"))):
        assert [ids.tolist() for ids in tiny.ids(texts).ids] == expected


def test_threads_share_a_tokenizer(tiny: Tokenizer) -> None:
    options = [{"truncation": True, "max_length": length} for length in (3, 5, 9, 200)] * 2
    expected = [[ids.tolist() for ids in tiny.ids(ODD_TEXTS, **option).ids] for option in options]

    def work(index: int) -> bool:
        return all(
            [ids.tolist() for ids in tiny.ids(ODD_TEXTS, **options[index]).ids] == expected[index] for _ in range(50)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


# Prompts


def test_prompt_table(tiny: Tokenizer, tiny_folder: Path) -> None:
    table = json.loads((tiny_folder / "config_sentence_transformers.json").read_text())["prompts"]
    assert len(table) == 20
    assert dict(tiny.prompts) == table
    assert {name: tiny.prompt(name) for name in table} == table
    assert tiny.prompt("query") == "task: search result | query: "
    assert tiny.prompt("STS") == "task: sentence similarity | query: "
    with pytest.raises(TypeError):
        tiny.prompts["query"] = ""


def test_prompt_table_of_the_official_checkpoint(real: Tokenizer, tiny: Tokenizer) -> None:
    assert real.prompts == tiny.prompts
    assert real.default_prompt_name is None


def test_prompt_precedence(tiny: Tokenizer) -> None:
    assert tiny.prompt() == ""
    assert tiny.prompt(prompt="mine: ") == "mine: "
    assert tiny.prompt(prompt="") == ""
    with pytest.warns(UserWarning, match="'query' is ignored"):
        assert tiny.prompt("query", "mine: ") == "mine: "
    with pytest.raises(EgemmaError, match=r"unknown prompt name 'Query'; the names are: .*document, query"):
        tiny.prompt("Query")


def test_titled_documents(tiny: Tokenizer) -> None:
    assert tiny.document("Mars is red.", title="Planets") == "title: Planets | text: Mars is red."
    assert tiny.document("Mars is red.") == tiny.prompt("document") + "Mars is red."
    assert tiny.document("Mars is red.", title="") == tiny.document("Mars is red.")


# Files


@pytest.fixture
def edited(tiny_folder: Path, tmp_path: Path):
    """A folder of the tiny tokenizer, edited."""

    def edit(**changes: object) -> Path:
        for name in ("config.json", "tokenizer.json", "config_sentence_transformers.json"):
            value = json.loads((tiny_folder / name).read_text())
            if name == changes.get("file"):
                value |= {key: change for key, change in changes.items() if key != "file"}
            (tmp_path / name).write_text(json.dumps(value))
        return tmp_path

    return edit


def test_default_prompt_name(edited) -> None:
    tokenizer = load(
        edited(file="config_sentence_transformers.json", default_prompt_name="STS", prompts={"STS": "s: "})
    )
    assert tokenizer.default_prompt_name == "STS"
    assert tokenizer.prompt() == "s: "
    assert tokenizer.prompt(prompt="") == ""
    assert one(tokenizer, "hi") == one(tokenizer, "hi", prompt="")


def test_null_prompts_are_empty(edited) -> None:
    assert load(edited(file="config_sentence_transformers.json", prompts={"query": None})).prompt("query") == ""


def test_no_prompt_table(edited) -> None:
    folder = edited()
    (folder / "config_sentence_transformers.json").unlink()
    tokenizer = load(folder)
    assert tokenizer.prompts == {}
    assert tokenizer.prompt() == ""
    with pytest.raises(EgemmaError, match=r"unknown prompt name 'query'.*no prompt table"):
        tokenizer.prompt("query")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"default_prompt_name": "nope"}, "default_prompt_name .* 'nope'"),
        ({"default_prompt_name": ["query"]}, "default_prompt_name .* \\['query'\\]"),
        ({"prompts": ["query"]}, "expected prompts"),
        ({"prompts": {"query": 3}}, "expected prompts"),
    ],
)
def test_bad_prompt_tables(edited, changes: dict[str, object], message: str) -> None:
    with pytest.raises(EgemmaError, match=f"config_sentence_transformers.json: .*{message}"):
        load(edited(file="config_sentence_transformers.json", **changes))


@pytest.mark.parametrize("name", ["tokenizer.json", "config_sentence_transformers.json"])
@pytest.mark.parametrize("content", [b"", b'{"model": ', b"[]", b"\xff\xfe"])
def test_broken_files(edited, name: str, content: bytes) -> None:
    folder = edited()
    (folder / name).write_bytes(content)
    with pytest.raises(EgemmaError, match=re.escape(str(folder / name))):
        load(folder)


def test_missing_tokenizer(edited) -> None:
    folder = edited()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(EgemmaError, match=r"tokenizer\.json: no such file"):
        load(folder)


def test_the_post_processor_must_add_bos_and_eos(edited, tiny_folder: Path) -> None:
    with pytest.raises(EgemmaError, match=r"tokenizer\.json: .*BOS.*EOS.* are \[\]"):
        load(edited(file="tokenizer.json", post_processor=None))
    template = json.loads((tiny_folder / "tokenizer.json").read_text())["post_processor"]
    with pytest.raises(EgemmaError, match=r"tokenizer\.json: .*BOS.*EOS.* are \[2\]"):
        load(edited(file="tokenizer.json", post_processor={**template, "single": template["single"][:2]}))
    with pytest.raises(EgemmaError, match=r"tokenizer\.json: .*BOS.*EOS.* are \[1\]"):
        load(edited(file="tokenizer.json", post_processor={**template, "single": template["single"][1:]}))


def test_more_ids_than_embeddings_are_refused(edited, tiny_folder: Path) -> None:
    added = json.loads((tiny_folder / "tokenizer.json").read_text())["added_tokens"]
    model = json.loads((tiny_folder / "tokenizer.json").read_text())["model"]
    far = {**added[0], "id": 5000, "content": "<far>"}
    with pytest.raises(EgemmaError, match=r"tokenizer\.json: expected ids below 2048 .* got 5000"):
        load(
            edited(
                file="tokenizer.json",
                added_tokens=[*added, far],
                model={**model, "vocab": {**model["vocab"], "<far>": 5000}},
            )
        )


def test_no_added_tokens(edited, tiny: Tokenizer) -> None:
    tokenizer = load(edited(file="tokenizer.json", added_tokens=[]))
    assert one(tokenizer, "the world") == one(tiny, "the world")


def test_settings_of_the_file_do_not_cut_or_pad(edited, tiny: Tokenizer) -> None:
    folder = edited(
        file="tokenizer.json",
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 8},
            "direction": "Left",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<pad>",
        },
    )
    for text in ODD_TEXTS:
        assert one(load(folder), text) == one(tiny, text)


# The calls of mlx-embeddings' README


def test_readme_single_item(tiny: Tokenizer) -> None:
    input_ids = tiny.encode("I like reading", return_tensors="mlx")
    assert isinstance(input_ids, mx.array)
    assert input_ids.dtype == mx.int32
    assert input_ids.tolist() == [tiny.encode("I like reading")]


def test_readme_masked_language_modelling(tiny: Tokenizer) -> None:
    text = ["The capital of France is <mask>.", "The capital of Poland is <mask>."]
    inputs = tiny.batch_encode_plus(text, return_tensors="mlx", padding=True, truncation=True, max_length=512)

    def model(input_ids: mx.array, attention_mask: mx.array) -> mx.array:
        return input_ids * attention_mask

    np.testing.assert_array_equal(np.array(model(**inputs)), np.array(inputs.input_ids))
    indices = mx.array([ids.tolist().index(tiny.mask_token_id) for ids in inputs["input_ids"]])
    assert (indices > 0).all().item()
    predicted = [tiny.encode("a")[1], tiny.encode("b")[1]]
    assert tiny.decode(predicted[0]) == "a"
    assert tiny.batch_decode(predicted) == ["a", "b"]


def test_readme_batches(tiny: Tokenizer) -> None:
    texts = ["I like grapes", "I like fruits", "The slow green turtle crawls under the busy ant."]
    inputs = tiny.batch_encode_plus(texts, return_tensors="mlx", padding=True, truncation=True, max_length=512)
    lengths = [len(one(tiny, text)) for text in texts]
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (3, max(lengths))
    assert inputs.attention_mask.sum(axis=1).tolist() == lengths
    for row, mask, text in zip(inputs.input_ids.tolist(), inputs.attention_mask.tolist(), texts, strict=True):
        assert row[: sum(mask)] == one(tiny, text)
        assert set(row[sum(mask) :]) <= {tiny.pad_token_id}
        assert mask == sorted(mask, reverse=True)


def test_readme_text_first_and_by_keyword(tiny: Tokenizer) -> None:
    by_keyword = tiny(text=["a photo of 2 dogs", "a cat"], padding="max_length", max_length=24, return_tensors="np")
    assert by_keyword.input_ids.shape == (2, 24)
    query = "Query: text" + tiny.pad_token * 10
    inputs = tiny([query], return_tensors="np", padding=True)
    assert inputs["input_ids"][0, -11:].tolist() == [0] * 10 + [1]
    assert inputs["attention_mask"].all()


def test_one_text_is_flat_until_it_is_a_tensor(tiny: Tokenizer) -> None:
    ids = one(tiny, "hi")
    assert dict(tiny("hi")) == {"input_ids": ids, "attention_mask": [1] * len(ids)}
    assert dict(tiny(["hi"])) == {"input_ids": [ids], "attention_mask": [[1] * len(ids)]}
    assert tiny("hi", return_tensors="mlx").input_ids.tolist() == [ids]


def test_ragged_tensors_are_refused(tiny: Tokenizer) -> None:
    with pytest.raises(EgemmaError, match=r"texts of 2 to 3 tokens.*padding=True"):
        tiny(["", "a"], return_tensors="mlx")
    assert tiny(["a", "b"], return_tensors="mlx").input_ids.shape == (2, 3)


@pytest.mark.parametrize(
    "option", [{"padding": "left"}, {"truncation": "do_not_truncate"}, {"return_tensors": "pt"}, {"padding": None}]
)
def test_unknown_options(tiny: Tokenizer, option: dict[str, object]) -> None:
    [(name, value)] = option.items()
    with pytest.raises(EgemmaError, match=f"expected {name} to be one of .* but got {value!r}"):
        tiny(["a"], **option)


def test_truncation_warns_once_per_call(tiny: Tokenizer) -> None:
    texts = ["the state of the world", "the", "the state of the world"]
    calls = [
        lambda: tiny(texts, truncation=True, max_length=4),
        lambda: tiny.batch_encode_plus(texts, truncation=True, max_length=4),
    ]
    for call in calls:
        with pytest.warns(UserWarning, match="^2 of 3 texts cut to 4 tokens$") as caught:
            assert [len(ids) for ids in call().input_ids] == [4, 3, 4]
        assert [Path(warning.filename) for warning in caught] == [Path(__file__)]
    with pytest.warns(UserWarning, match="^1 of 1 texts cut to 4 tokens$"):
        assert len(tiny.encode(texts[0], truncation=True, max_length=4)) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny(texts, truncation=True, max_length=512)
        tiny.ids(texts, truncation=True, max_length=4)


def test_batch_encoding_attributes(tiny: Tokenizer) -> None:
    inputs = tiny("hi")
    assert inputs.input_ids is inputs["input_ids"]
    with pytest.raises(AttributeError, match="pixel_values"):
        inputs.pixel_values  # noqa: B018


# Back to text


def test_decode_round_trip(folder_and_tokenizer: tuple[Path, Tokenizer]) -> None:
    _, tokenizer = folder_and_tokenizer
    for text in (" two  spaces\tand a tab \r\n", "漢字かな 안녕 مرحبا 👨‍👩‍👧‍👦 \x00", "the state of the world"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == f"<bos>{text}<eos>"
        for form in (ids, tuple(ids), np.array(ids), mx.array(ids), mx.array(ids, dtype=mx.uint32)):
            assert tokenizer.decode(form, skip_special_tokens=True) == text
    batch = tokenizer(["the", "a"], padding=True, return_tensors="mlx").input_ids
    assert tokenizer.batch_decode(batch, skip_special_tokens=True) == ["the", "a"]
    assert tokenizer.decode([]) == ""
    for one_id in (2, np.int64(2), mx.array(2)):
        assert tokenizer.decode(one_id) == "<bos>"
        assert tokenizer.convert_ids_to_tokens(one_id) == "<bos>"


@pytest.mark.parametrize("bad", [[2, 2047], [-1], [2**40], 2.0, [[2, 1]], [[2], [2, 1]], "hi", None, [True]])
def test_what_is_not_ids(tiny: Tokenizer, bad: object) -> None:
    with pytest.raises(EgemmaError, match=r"no token of the vocabulary|one flat sequence of token ids"):
        tiny.decode(bad)


def test_tokens_and_ids(tiny: Tokenizer) -> None:
    ids = tiny.encode("the state")
    tokens = tiny.convert_ids_to_tokens(ids)
    assert tokens[0] == "<bos>"
    assert "".join(tokens[1:-1]) == "the▁state"
    assert tiny.convert_tokens_to_ids(tokens) == ids
    assert tiny.convert_tokens_to_ids("<mask>") == tiny.mask_token_id == 4
    with pytest.raises(EgemmaError, match="'no such token' is not a token"):
        tiny.convert_tokens_to_ids("no such token")
