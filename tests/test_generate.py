"""`load` and `generate` as pipelines written for mlx-embeddings call them, and what importing the package costs."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import egemma_mlx
from egemma_mlx import generate, load
from egemma_mlx.errors import EgemmaError
from egemma_mlx.models.encoder import EmbeddingGemma2
from egemma_mlx.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
UNIT = 2e-6
TEXTS = ["the cat sleeps on the mat", "a dog", "the mountains in the north have the water of the city " * 8]


@pytest.fixture(scope="module")
def loaded(tiny_text: Path) -> tuple[EmbeddingGemma2, Tokenizer]:
    return load(tiny_text)


def apart(a: Any, b: Any) -> float:
    assert np.shape(a) == np.shape(b)
    return float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())


# --- model(tokens) ---------------------------------------------------------------------------------------------------


def test_one_text_encoded_to_an_mlx_array_goes_into_the_model(loaded: tuple[EmbeddingGemma2, Tokenizer]) -> None:
    model, tokenizer = loaded
    input_ids = tokenizer.encode(TEXTS[0], return_tensors="mlx")
    outputs = model(input_ids)
    assert outputs.text_embeds.shape == (1, 96)
    assert outputs.last_hidden_state.shape == (*input_ids.shape, 96)
    assert abs(mx.linalg.norm(outputs.text_embeds).item() - 1) < 1e-6


def test_a_padded_batch_goes_into_the_model_with_its_mask(loaded: tuple[EmbeddingGemma2, Tokenizer]) -> None:
    model, tokenizer = loaded
    inputs = tokenizer.batch_encode_plus(TEXTS, return_tensors="mlx", padding=True, truncation=True, max_length=512)
    outputs = model(inputs["input_ids"], attention_mask=inputs["attention_mask"])
    embeds = outputs.text_embeds
    similarity = embeds @ embeds.T
    assert similarity.shape == (3, 3)
    assert mx.abs(mx.diag(similarity) - 1).max().item() < 1e-6
    assert similarity.max().item() < 1 + 1e-6
    for text, vector in zip(TEXTS, embeds, strict=True):
        assert apart(model(tokenizer.encode(text, return_tensors="mlx")).text_embeds[0], vector) <= UNIT
    assert apart(model(**inputs).text_embeds, embeds) == 0


# --- generate --------------------------------------------------------------------------------------------------------


def test_generate_embeds_a_list_as_the_model_does(loaded: tuple[EmbeddingGemma2, Tokenizer]) -> None:
    model, tokenizer = loaded
    outputs = generate(model, tokenizer, texts=TEXTS)
    inputs = tokenizer(TEXTS, padding=True, return_tensors="mlx")
    for got, expected in zip(outputs, model(**inputs), strict=True):
        assert apart(got, expected) == 0


def test_generate_embeds_one_str_as_one_row(loaded: tuple[EmbeddingGemma2, Tokenizer]) -> None:
    output = generate(*loaded, TEXTS[0])
    assert output.text_embeds.shape == (1, 96)
    assert apart(output.text_embeds[0], generate(*loaded, TEXTS).text_embeds[0]) <= UNIT


def test_generate_cuts_to_max_length_keeps_eos_and_says_how_many_once(
    loaded: tuple[EmbeddingGemma2, Tokenizer],
) -> None:
    model, tokenizer = loaded
    with pytest.warns(UserWarning, match="^2 of 3 texts cut to 6 tokens$") as caught:
        output = generate(model, tokenizer, TEXTS, max_length=6)
    assert len(caught) == 1
    assert output.last_hidden_state.shape[:2] == (3, 6)
    ids = tokenizer.encode(TEXTS[2])
    alone = model(mx.array([[*ids[:5], tokenizer.eos_token_id]]))
    assert apart(output.text_embeds[2], alone.text_embeds[0]) <= UNIT


def test_generate_cuts_at_512_unless_told_otherwise(loaded: tuple[EmbeddingGemma2, Tokenizer]) -> None:
    long = "the river " * 600
    assert len(loaded[1].encode(long)) > 600
    with pytest.warns(UserWarning, match="^1 of 1 texts cut to 512 tokens$"):
        assert generate(*loaded, [long]).last_hidden_state.shape == (1, 512, 96)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = generate(*loaded, [long], truncation=False)
    assert whole.last_hidden_state.shape == (1, len(loaded[1].encode(long)), 96)


def test_generate_takes_a_max_length_beyond_the_models_as_the_models(
    loaded: tuple[EmbeddingGemma2, Tokenizer],
) -> None:
    assert generate(*loaded, TEXTS, max_length=100_000).text_embeds.shape == (3, 96)


def test_generate_passes_other_arguments_to_the_model(loaded: tuple[EmbeddingGemma2, Tokenizer]) -> None:
    assert generate(*loaded, TEXTS, validate=True, resize_shape=(4, 4)).text_embeds.shape == (3, 96)
    with pytest.raises(TypeError, match="nonsense"):
        generate(*loaded, TEXTS, nonsense=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"images": ["cat.png"]}, r"images=None: Encoder\(.*\).encode embeds images"),
        ({"images": []}, "images=None"),
        ({"texts": None}, "expected a sequence of texts but got NoneType"),
        ({"texts": [3]}, "text 0: expected str but got int"),
        ({"texts": []}, "at least one text"),
        ({"texts": TEXTS, "padding": False}, "pass padding=True"),
        ({"texts": TEXTS, "max_length": 1}, "max_length from 2 .* but got 1"),
        ({"texts": ["the river " * 9000], "truncation": False}, r"text 0 has \d+ tokens where 8192 are allowed"),
    ],
)
def test_generate_refuses(loaded: tuple[EmbeddingGemma2, Tokenizer], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(EgemmaError, match=message):
        generate(*loaded, **{"texts": TEXTS, **arguments})


# --- load ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modalities": ("text", "image")}, "image was asked for, but this checkpoint's config.json has no such tower"),
        ({"modalities": "smell"}, "modalities: expected some of text, image, audio but got 'smell'"),
        ({"precision": "float16"}, "precision 'float32' or 'bfloat16' but got 'float16' .float16 is refused"),
        ({"revision": "main"}, "expected a hub id beside revision 'main' but got the folder"),
    ],
)
def test_load_refuses(tiny_text: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(EgemmaError, match=message):
        load(tiny_text, **options)


def test_load_takes_a_path_or_a_str(tiny_text: Path, loaded: tuple[EmbeddingGemma2, Tokenizer]) -> None:
    model, tokenizer = load(str(tiny_text))
    assert apart(generate(model, tokenizer, TEXTS).text_embeds, generate(*loaded, TEXTS).text_embeds) == 0


def test_load_takes_the_folder_that_the_environment_names(tiny_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EGEMMA_MODEL", str(tiny_text))
    assert load()[0].config.text.hidden_size == 64


def test_a_loaded_model_is_evaluated_so_that_other_threads_may_use_it(tiny_text: Path) -> None:
    model, tokenizer = load(tiny_text)
    vectors: list[Any] = []

    def embed() -> None:
        vectors.append(np.array(generate(model, tokenizer, TEXTS).text_embeds))

    thread = threading.Thread(target=embed)
    thread.start()
    thread.join()
    embed()
    assert apart(*vectors) <= UNIT


# --- import ----------------------------------------------------------------------------------------------------------


def test_importing_the_package_imports_nothing_heavy() -> None:
    script = """
import sys
import egemma_mlx
egemma_mlx.__version__, dir(egemma_mlx), egemma_mlx.EgemmaError
heavy = {"mlx", "numpy", "tokenizers", "safetensors", "huggingface_hub", "tqdm"}
print(sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_package_offers_its_names_and_no_others() -> None:
    assert {"EgemmaError", "Encoder", "generate", "load"} <= set(dir(egemma_mlx))
    for name in egemma_mlx.__all__:
        assert getattr(egemma_mlx, name) is not None
    with pytest.raises(AttributeError, match="module 'egemma_mlx' has no attribute 'nonsense'"):
        egemma_mlx.nonsense  # noqa: B018
