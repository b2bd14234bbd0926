"""`Encoder`: parity with sentence-transformers, batching, options, threads, what goes to the terminal."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from egemma_mlx import Encoder
from egemma_mlx.errors import EgemmaError
from egemma_mlx.packing import pack
from egemma_mlx.random_checkpoint import write_checkpoint

ROOT = Path(__file__).parents[1]
UNIT = 2e-6
SENTENCE = "the river comes down from the mountains in the north and people of the city have their water from it"
TEXTS = [
    "a red bicycle",
    SENTENCE,
    "",
    "漢字 and emoji 🙂, tabs\tand\n\nlines",
    " ".join([SENTENCE] * 6),
    "x",
    "a red bicycle",
    "task: search result | query: a prompt in the text",
]
LONG = " ".join([SENTENCE] * 400)


@pytest.fixture(scope="module")
def encoder(tiny_text: Path) -> Encoder:
    return Encoder(tiny_text)


@pytest.fixture(scope="module")
def theirs(tiny_text: Path) -> Any:
    import oracle

    return oracle.sentence_transformer(tiny_text)


@pytest.fixture(scope="module")
def other_prompts(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The tiny checkpoint with another prompt table."""

    def folder(prompts: dict[str, str], default: str | None) -> Path:
        copy = tmp_path_factory.mktemp("prompts") / "c"
        shutil.copytree(tiny_text, copy)
        file = copy / "config_sentence_transformers.json"
        table = {**json.loads(file.read_text()), "prompts": prompts, "default_prompt_name": default}
        file.write_text(json.dumps(table))
        return copy

    return folder


def apart(a: Any, b: Any) -> float:
    assert np.shape(a) == np.shape(b)
    return float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())


def numbered(count: int, seed: int = 0) -> list[str]:
    """Texts of 1 to 60 words, all different."""
    words, draw = SENTENCE.split(), np.random.default_rng(seed)
    return [f"{i} " + " ".join(draw.choice(words, draw.integers(1, 60))) for i in range(count)]


# --- sentence-transformers -------------------------------------------------------------------------------------------


def test_encode_equals_sentence_transformers(encoder: Encoder, theirs: Any) -> None:
    assert apart(encoder.encode(TEXTS), theirs.encode(TEXTS)) <= UNIT


def test_a_single_text_is_one_vector_as_in_sentence_transformers(encoder: Encoder, theirs: Any) -> None:
    for text in (SENTENCE, ""):
        vector = encoder.encode(text)
        assert vector.shape == (96,)
        assert apart(vector, theirs.encode(text)) <= UNIT


def test_encode_query_and_encode_document_equal_sentence_transformers(encoder: Encoder, theirs: Any) -> None:
    queries, documents = encoder.encode_query(TEXTS), encoder.encode_document(TEXTS)
    assert apart(queries, theirs.encode_query(TEXTS)) <= UNIT
    assert apart(documents, theirs.encode_document(TEXTS)) <= UNIT
    plain = encoder.encode(TEXTS)
    assert min(apart(queries, documents), apart(queries, plain), apart(documents, plain)) > 0.01


def test_every_prompt_of_the_file_equals_sentence_transformers(encoder: Encoder, theirs: Any, tiny_text: Path) -> None:
    table = json.loads((tiny_text / "config_sentence_transformers.json").read_text())["prompts"]
    assert dict(encoder.prompts) == table and len(table) > 10
    for name, prompt in table.items():
        assert apart(encoder.encode(TEXTS[0], prompt_name=name), encoder.encode(prompt + TEXTS[0])) <= UNIT, name
    for name in ("STS", "Retrieval-document", "CodeRetrieval"):
        ours = encoder.encode(TEXTS[:2], prompt_name=name)
        assert apart(ours, theirs.encode(TEXTS[:2], prompt_name=name)) <= UNIT, name


def test_a_prompt_given_equals_sentence_transformers(encoder: Encoder, theirs: Any) -> None:
    for name, prompt in (("encode", "find: "), ("encode_query", ""), ("encode_document", "find: ")):
        ours, reference = getattr(encoder, name), getattr(theirs, name)
        assert apart(ours(TEXTS[:2], prompt=prompt), reference(TEXTS[:2], prompt=prompt)) <= UNIT
    clustering = encoder.encode(TEXTS[:3], prompt_name="Clustering")
    assert apart(encoder.encode_query(TEXTS[:3], prompt_name="Clustering"), clustering) <= UNIT


@pytest.mark.parametrize(
    ("prompts", "default"),
    [
        ({"query": "Q: ", "document": "D: ", "odd": "O: "}, "odd"),
        ({"passage": "P: ", "odd": "O: "}, "odd"),
        ({"odd": "O: "}, "odd"),
    ],
    ids=["a default", "passage for document", "neither query nor document"],
)
def test_another_prompt_table_is_read_as_sentence_transformers_reads_it(
    other_prompts: Callable[..., Path], prompts: dict[str, str], default: str | None
) -> None:
    import oracle

    folder = other_prompts(prompts, default)
    ours, reference = Encoder(folder), oracle.sentence_transformer(folder)
    assert dict(ours.prompts) == prompts
    for name in ("encode", "encode_query", "encode_document"):
        assert apart(getattr(ours, name)(TEXTS[:2]), getattr(reference, name)(TEXTS[:2])) <= UNIT, name


def test_truncate_dim_cuts_and_normalises_again(encoder: Encoder, theirs: Any) -> None:
    full, short = encoder.encode(TEXTS), encoder.encode(TEXTS, truncate_dim=32)
    assert short.shape == (len(TEXTS), 32)
    assert np.abs(np.linalg.norm(short, axis=1) - 1).max() < 1e-6
    assert apart(short, full[:, :32] / np.linalg.norm(full[:, :32], axis=1, keepdims=True)) < 1e-6
    reference = theirs.encode(TEXTS, truncate_dim=32, normalize_embeddings=True)
    # A cut divides by a norm below 1, and the error with it.
    assert apart(short, reference) <= UNIT / np.linalg.norm(full[:, :32], axis=1).min()
    assert encoder.encode("x", truncate_dim=1).tolist() in ([1.0], [-1.0])


def test_dimension_and_similarity_equal_sentence_transformers(encoder: Encoder, theirs: Any) -> None:
    assert encoder.get_embedding_dimension() == theirs.get_embedding_dimension() == 96
    vectors = encoder.encode(TEXTS)
    cosines = encoder.similarity(vectors[:3], vectors)
    assert cosines.shape == (3, len(TEXTS))
    assert apart(cosines, theirs.similarity(vectors[:3], vectors).numpy()) < 1e-6
    assert np.abs(np.diag(cosines) - 1).max() < 1e-6
    assert cosines[0, 6] == pytest.approx(1, abs=1e-6)  # the same text twice


# --- what comes out --------------------------------------------------------------------------------------------------


def test_vectors_come_in_the_callers_order(encoder: Encoder) -> None:
    texts = numbered(40)
    order = np.random.default_rng(1).permutation(40)
    vectors = encoder.encode(texts, batch_tokens=150)
    assert apart(encoder.encode([texts[i] for i in order], batch_tokens=150), vectors[order]) <= UNIT
    for text, vector in zip(texts[::7], vectors[::7], strict=True):
        assert apart(encoder.encode(text), vector) <= UNIT


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 1}, {"batch_size": 3}, {"batch_tokens": 1}, {"batch_tokens": 100}, {"batch_tokens": 100_000},
     {"batch_size": 2, "batch_tokens": 64}],
    ids=str,
)  # fmt: skip
def test_how_texts_are_batched_changes_no_vector(encoder: Encoder, options: dict[str, int]) -> None:
    texts = numbered(25)
    assert apart(encoder.encode(texts, **options), encoder.encode(texts)) <= UNIT


def test_batches_keep_to_both_limits(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def spy(texts: list[NDArray[np.int32]]) -> Any:
        seen.append([len(ids) for ids in texts])
        return pack(texts)

    monkeypatch.setattr("egemma_mlx.encoder.pack", spy)
    lengths = sorted(len(ids) for ids in encoder.tokenizer.ids(numbered(30)).ids)
    encoder.encode(numbered(30), batch_tokens=120, batch_size=4)
    assert sorted(length for batch in seen for length in batch) == lengths
    assert all(sum(batch) <= 120 or len(batch) == 1 for batch in seen)
    assert max(map(len, seen)) == 4


def test_encode_of_no_texts_has_shape_0_by_d(encoder: Encoder) -> None:
    for texts in ([], (), iter([])):
        vectors = encoder.encode(texts)
        assert vectors.shape == (0, 96) and vectors.dtype == np.float32
    assert encoder.encode([], truncate_dim=8).shape == (0, 8)
    assert encoder.encode_query([]).shape == (0, 96)


def test_encode_of_an_empty_text_is_a_finite_unit_vector(encoder: Encoder) -> None:
    for vectors in (encoder.encode(""), encoder.encode(["", ""])):
        assert np.isfinite(vectors).all()
        assert np.abs(np.linalg.norm(vectors, axis=-1) - 1).max() < 1e-6


def test_any_sequence_of_texts_will_do(encoder: Encoder) -> None:
    expected = encoder.encode(TEXTS)
    for texts in (tuple(TEXTS), np.array(TEXTS), np.array(TEXTS, dtype=object), iter(TEXTS)):
        assert apart(encoder.encode(texts), expected) <= UNIT


def test_unit_vectors_unless_asked_otherwise(encoder: Encoder) -> None:
    vectors = encoder.encode(TEXTS)
    assert vectors.dtype == np.float32
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-6


def test_normalize_embeddings_false_gives_the_models_pooler_output(encoder: Encoder) -> None:
    inputs = encoder.tokenizer.batch_encode_plus(TEXTS, padding=True, return_tensors="mlx")
    raw = encoder.encode(TEXTS, normalize_embeddings=False)
    lengths = np.linalg.norm(raw, axis=1)
    assert apart(raw, encoder.model(**inputs).pooler_output) <= UNIT * lengths.max()
    assert np.abs(lengths - 1).min() > 0.01
    assert np.array_equal(encoder.encode(TEXTS, normalize_embeddings=False, truncate_dim=8), raw[:, :8])


@pytest.mark.parametrize(
    ("precision", "dtype", "width"),
    [
        ("float32", np.float32, 96),
        ("int8", np.int8, 96),
        ("uint8", np.uint8, 96),
        ("binary", np.int8, 12),
        ("ubinary", np.uint8, 12),
    ],
)
def test_precisions_have_their_dtypes_and_widths(encoder: Encoder, precision: Any, dtype: Any, width: int) -> None:
    vectors = encoder.encode(TEXTS, precision=precision)
    assert vectors.dtype == dtype and vectors.shape == (len(TEXTS), width)
    assert encoder.encode([], precision=precision).shape == (0, width)
    steps = np.abs(vectors[[6, 1]].astype(np.float32) - vectors[0].astype(np.float32)).max(axis=1)
    assert steps[0] <= 1 and steps[1] > (0.1 if precision == "float32" else 1)  # the same text, and another


def test_binary_precision_holds_the_signs(encoder: Encoder) -> None:
    signs = encoder.encode(TEXTS) > 0
    assert np.array_equal(np.unpackbits(encoder.encode(TEXTS, precision="ubinary"), axis=1), signs)
    assert np.array_equal(np.unpackbits(encoder.encode(SENTENCE, precision="ubinary")), signs[1])


def test_convert_to_numpy_false_gives_an_mlx_array(encoder: Encoder) -> None:
    vectors = encoder.encode(TEXTS, convert_to_numpy=False)
    assert isinstance(vectors, mx.array) and vectors.dtype == mx.float32
    assert apart(vectors, encoder.encode(TEXTS)) <= UNIT
    assert encoder.encode("x", convert_to_numpy=False).shape == (96,)
    assert encoder.encode(TEXTS, convert_to_numpy=False, precision="ubinary").dtype == mx.uint8


# --- refusals and truncation -----------------------------------------------------------------------------------------


def test_truncation_warns_with_the_count_and_keeps_eos(encoder: Encoder) -> None:
    with pytest.warns(UserWarning, match="^2 of 3 texts cut to 12 tokens$") as caught:
        vectors = encoder.encode([SENTENCE, "x", SENTENCE[::-1]], truncation=True, max_length=12)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    for text, vector in ((SENTENCE, vectors[0]), (SENTENCE[::-1], vectors[2])):
        ids = encoder.tokenizer.encode(text)
        assert len(ids) > 12
        alone = encoder.model(mx.array([[*ids[:11], encoder.tokenizer.eos_token_id]]))
        assert apart(vector, np.array(alone.text_embeds)[0]) <= UNIT


def test_truncation_without_a_length_is_at_the_models_own_limit(tmp_path: Path) -> None:
    encoder = Encoder(write_checkpoint(tmp_path / "c", modalities=("text",), max_position_embeddings=12))
    with pytest.warns(UserWarning, match="^1 of 1 texts cut to 12 tokens$"):
        vector = encoder.encode([SENTENCE], truncation=True)
    with pytest.warns(UserWarning, match="cut to 12 tokens"):
        assert apart(encoder.encode([SENTENCE], truncation=True, max_length=12), vector) <= UNIT


def test_a_text_that_is_too_long_is_an_error_that_names_it(encoder: Encoder) -> None:
    with pytest.raises(EgemmaError, match=r"text 1 has \d+ tokens where 8192 are allowed"):
        encoder.encode(["x", LONG])
    with pytest.raises(EgemmaError, match=r"text 0 has \d+ tokens where 5 are allowed"):
        encoder.encode([SENTENCE], max_length=5)


@pytest.mark.parametrize(
    ("sentences", "options", "message"),
    [
        (["x"], {"prompt_name": "nope"}, "unknown prompt name 'nope'; the names are: .*query"),
        (["x"], {"prompt": 3}, "prompt: expected str but got int"),
        (None, {}, "expected a sequence of texts but got NoneType"),
        (b"bytes", {}, "text 0: expected str but got bytes: load with modalities"),
        (["fine", None], {}, "text 1: expected str but got NoneType"),
        (["fine", b"bytes"], {}, "text 1: expected str but got bytes"),
        ([["nested"]], {}, "text 0: expected str but got list"),
        (["see <|image|>"], {}, r"text 0 contains '<\|image\|>'"),
        (["x"], {"batch_size": 0}, "batch_size to be a positive integer but got 0"),
        (["x"], {"batch_size": True}, "batch_size to be a positive integer but got True"),
        (["x"], {"batch_tokens": -5}, "batch_tokens to be a positive integer but got -5"),
        (["x"], {"batch_tokens": 1.5}, "batch_tokens to be a positive integer but got 1.5"),
        (["x"], {"truncate_dim": 0}, "truncate_dim in 1…96 but got 0"),
        (["x"], {"truncate_dim": 97}, "truncate_dim in 1…96 but got 97"),
        (["x"], {"precision": "float16"}, "precision to be one of float32, .* but got 'float16'"),
        (["x"], {"max_length": 1}, "max_length from 2 .* but got 1"),
        (["x"], {"max_length": 9000, "truncation": True}, "max_length from 2 .* but got 9000"),
    ],
)
def test_bad_input_is_one_error_that_names_it(
    encoder: Encoder, sentences: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EgemmaError, match=message):
        encoder.encode(sentences, **options)


def test_an_error_leaves_the_encoder_working(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(packed: Any, soft: Any) -> Any:
        raise ZeroDivisionError("in a lane")

    expected = encoder.encode(TEXTS)
    with monkeypatch.context() as patch:
        patch.setattr(encoder.model, "pooled", broken)
        with pytest.raises(ZeroDivisionError, match="in a lane"):
            encoder.encode(numbered(50), batch_size=1)
    assert apart(encoder.encode(TEXTS), expected) <= UNIT


# --- threads and processes -------------------------------------------------------------------------------------------


def test_eight_threads_at_once_get_the_answers_of_one(encoder: Encoder) -> None:
    corpora = [numbered(12, seed) for seed in range(8)]
    alone = [encoder.encode(texts, batch_tokens=200) for texts in corpora]
    start = threading.Barrier(8)

    def embed(corpus: int) -> list[NDArray[np.float32]]:
        start.wait()
        return [encoder.encode(corpora[corpus], batch_tokens=200) for _ in range(3)]

    with ThreadPoolExecutor(8) as pool:
        for expected, answers in zip(alone, pool.map(embed, range(8)), strict=True):
            for vectors in answers:
                assert apart(vectors, expected) <= UNIT


def test_threads_may_ask_for_longer_and_longer_texts_at_once(tiny_text: Path) -> None:
    texts = [" ".join([SENTENCE] * n) for n in (1, 48, 2, 48)]
    lengths = [len(ids) for ids in Encoder(tiny_text).tokenizer.ids(texts).ids]
    assert max(lengths[::2]) < 1024 < lengths[1] == lengths[3]  # the first size of the RoPE tables
    expected = [Encoder(tiny_text).encode(text) for text in texts[:3]]
    fresh = Encoder(tiny_text)
    with ThreadPoolExecutor(len(texts)) as pool:
        for vector, right in zip(pool.map(fresh.encode, texts), [*expected, expected[1]], strict=True):
            assert apart(vector, right) <= UNIT


def python(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**{key: value for key, value in os.environ.items() if key != "MLX_ENABLE_TF32"}, **environment}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("threads", [0, 4])
def test_a_process_that_embedded_many_batches_ends_with_code_0(tiny_text: Path, threads: int) -> None:
    """MLX's compile cache aborts a process whose thread ends while the interpreter does."""
    script = """
import sys, threading
from egemma_mlx import Encoder
encoder = Encoder(sys.argv[1])
def work():
    encoder.encode(["word " * n for n in range(1, 40)], batch_tokens=64)
threads = [threading.Thread(target=work) for _ in range(int(sys.argv[2]))]
for thread in threads: thread.start()
work()
for thread in threads: thread.join()
print("done")
"""
    done = python(script, str(tiny_text), str(threads))
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_loading_turns_tf32_off(tiny_text: Path) -> None:
    script = "import os, sys, egemma_mlx; egemma_mlx.load(sys.argv[1]); print(os.environ['MLX_ENABLE_TF32'])"
    assert python(script, str(tiny_text)).stdout == "0\n"


def test_a_choice_of_tf32_is_respected(tiny_text: Path) -> None:
    script = "import os, sys, egemma_mlx; egemma_mlx.load(sys.argv[1]); print(os.environ['MLX_ENABLE_TF32'])"
    assert python(script, str(tiny_text), MLX_ENABLE_TF32="1").stdout == "1\n"


# --- the progress bar ------------------------------------------------------------------------------------------------


def test_a_progress_bar_goes_to_stderr_when_asked_for(encoder: Encoder, capsys: pytest.CaptureFixture[str]) -> None:
    encoder.encode(TEXTS, show_progress_bar=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{len(TEXTS)}/{len(TEXTS)}" in err


@pytest.mark.parametrize("show", [False, None])
def test_nothing_is_written_when_not_asked_or_not_on_a_terminal(
    encoder: Encoder, capsys: pytest.CaptureFixture[str], show: bool | None
) -> None:
    encoder.encode(TEXTS, show_progress_bar=show)
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_the_bar_waits_for_long_work(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for delay, shown in ((None, False), (0.0, True)):
        if delay is not None:
            monkeypatch.setattr("egemma_mlx.encoder._BAR_DELAY", delay)
        monkeypatch.setattr(sys, "stderr", Terminal())
        encoder.encode(TEXTS)
        assert bool(sys.stderr.getvalue()) is shown
