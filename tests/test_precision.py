"""`precision="bfloat16"`: what is rounded, what is not, and how near the vectors stay."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from egemma_mlx import Encoder, cli, load
from egemma_mlx.bench import __main__ as bench
from egemma_mlx.bench.precision import Agreement, agreements, cosine
from egemma_mlx.errors import EgemmaError
from egemma_mlx.kernels import OPS
from egemma_mlx.kernels import bfloat16 as tier
from egemma_mlx.kernels.bfloat16 import bfloat16
from egemma_mlx.kernels.linear import SHORT
from egemma_mlx.kernels.norm import normalize
from egemma_mlx.loading import resident
from egemma_mlx.packing import pack
from egemma_mlx.random_checkpoint import write_checkpoint

PRODUCTS = {"linear", "gated", "linear_gelu_mul", "linear_rms_norm", "linear_add_norm", "linear_unit"}
APART = 64  # tokens of a text from which on products are rounded
EPSILON = 2.0**-8  # between neighbouring bfloat16, at most
EPS = 1e-6


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def wide(array: mx.array) -> NDArray[np.float64]:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def rounded(array: mx.array) -> mx.array:
    return array.astype(mx.bfloat16).astype(mx.float32)


# --- kernel functions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_a_product_rounds_its_operands_and_its_result(dtype: mx.Dtype) -> None:
    x, w = normal(24, 160), normal(56, 160, seed=1).astype(dtype)
    (y,) = bfloat16(OPS).linear(x, w)
    assert y.dtype == mx.float32 and mx.array_equal(y, rounded(y))
    exact = wide(rounded(x)) @ wide(rounded(w)).T
    assert np.all(np.abs(wide(y) - exact) <= EPSILON * np.abs(exact) + 1e-5)
    unrounded = wide(x) @ wide(w).T
    assert np.abs(exact - unrounded).max() > 10 * np.abs(exact).max() * 2.0**-24


def test_on_the_cpu_the_sums_are_those_of_mlx_bfloat16_products() -> None:
    x, w = normal(24, 160), normal(56, 160, seed=1)
    (y,) = tier.linear(x, w)
    direct = (x.astype(mx.bfloat16) @ w.astype(mx.bfloat16).T).astype(mx.float32)
    # Sums in another order may round to the neighbour.
    assert float(mx.mean(y == direct)) > 0.95
    assert bool(mx.all(mx.abs(y - direct) <= EPSILON * mx.abs(direct) + 1e-5))


def test_fused_functions_are_the_product_and_then_float32() -> None:
    kernels = bfloat16(OPS)
    x, h, p = normal(24, 160), normal(24, 56, seed=1), normal(24, 56, seed=2)
    w, v, norm = normal(56, 160, seed=3), normal(56, 160, seed=4), normal(56, seed=5)
    (a, b) = kernels.linear(x, w, v)
    assert mx.array_equal(kernels.gated(x, w, v), OPS.gelu_mul(a, b))
    assert mx.array_equal(kernels.linear_gelu_mul(x, w, p), OPS.gelu_mul(a, p))
    assert mx.array_equal(
        kernels.linear_rms_norm(x, w, norm, eps=EPS, pre=0.5), OPS.rms_norm(a, norm, eps=EPS, pre=0.5)
    )
    got = kernels.linear_add_norm(x, w, h, norm, eps=EPS, next_w=norm)
    expected = OPS.add_norm(h, a, norm, eps=EPS, next_w=norm)
    assert all(mx.array_equal(*each) for each in zip(got, expected, strict=True))
    assert all(mx.array_equal(*each) for each in zip(kernels.linear_unit(x, w), (a, normalize(a)), strict=True))


def test_all_else_stays_as_it_is() -> None:
    kernels = bfloat16(OPS)
    same = {name for name, function in kernels.functions().items() if function is getattr(OPS, name)}
    assert same == set(OPS.functions()) - PRODUCTS


@pytest.mark.parametrize(
    ("lengths", "rounds"),
    [((APART, 400), True), ((APART - 1, 400), False), ((0, 300), True), ((SHORT,), True), ((SHORT - 1,), False)],
)
def test_short_texts_and_few_rows_stay_in_float32(lengths: tuple[int, ...], rounds: bool) -> None:
    kernels = bfloat16(OPS)
    batch = pack([np.arange(n, dtype=np.int32) for n in lengths])
    assert kernels.of(batch) is (kernels if rounds else OPS)
    assert OPS.of(batch) is OPS


def test_a_batch_of_lengths_that_only_the_device_knows_goes_by_its_rows() -> None:
    kernels = bfloat16(OPS)
    for rows, rounds in ((2 * SHORT, True), (SHORT - 1, False)):
        batch = pack([np.arange(rows, dtype=np.int32)]).anonymous()
        assert kernels.of(batch) is (kernels if rounds else OPS)


def test_the_encoder_keeps_short_texts_exact_beside_long_ones(tiny_text: Path) -> None:
    texts = ["a red bicycle", "the river comes down from the mountains in the north " * 30] * 2
    exact, fast = (Encoder(tiny_text, precision=precision).encode(texts) for precision in ("float32", "bfloat16"))
    away = 1 - cosine(exact, fast)
    assert away[::2].max() < 1e-10 and away[1::2].min() > 1e-9


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (normal(4, 8).astype(mx.bfloat16), normal(3, 8), "x of dtype float32 but got bfloat16"),
        (normal(4, 8), normal(3, 7), r"w of shape \(M, 8\) but got \(3, 7\)"),
        (normal(4, 8), normal(3, 8).astype(mx.float16), "w of dtype float32 or bfloat16 but got float16"),
    ],
)
def test_a_product_refuses(x: mx.array, w: mx.array, message: str) -> None:
    with pytest.raises(EgemmaError, match=message):
        tier.linear(x, w)


# --- load ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_weights_of_products_stay_in_bfloat16(stored: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", "tiny", modalities=("text",), dtype=stored)
    model, _ = load(folder, precision="bfloat16")
    text = model.language_model
    kept = getattr(mx, stored)
    for layer in text.layers:
        products = (layer.self_attn.q_proj, layer.mlp.down_proj, layer.ple_block.per_layer_projection)
        assert {product.weight.dtype for product in products} == {mx.bfloat16}
        assert {layer.input_layernorm.weight.dtype, layer.layer_scalar.dtype} == {kept}
    assert text.embedding_projection.weight.dtype == mx.bfloat16
    assert (text.norm.weight.dtype, text.embed_tokens.weight.dtype) == (kept, kept)


def test_what_no_product_takes_is_not_rounded() -> None:
    """A norm's weight, and a limit that a clipped linear layer clips at."""
    for exact in (mx.array([1.2345678]), mx.array(1.2345678)):
        kept = resident("vision_tower.encoder.layers.0.mlp.up_proj.input_max", exact, mx.bfloat16)
        assert kept.dtype == mx.float32 and kept.item() == exact.item()


def test_the_model_returns_float32(tiny_text: Path) -> None:
    model, tokenizer = load(tiny_text, precision="bfloat16")
    output = model(**tokenizer(["a red bicycle", "a dog"], padding=True, return_tensors="mlx"))
    assert {array.dtype for array in output} == {mx.float32}
    # Rounded to bfloat16 was the product, not the residual stream that goes into it.
    states, *_ = model._run(pack([np.arange(10, 10 + SHORT, dtype=np.int32)]))
    assert not mx.array_equal(states, rounded(states))


def test_compiled_and_not_agree(tiny_text: Path) -> None:
    models = [load(tiny_text, precision="bfloat16", compiled=flag)[0] for flag in (False, True)]
    for lengths, least in (((5, 80), 1 - 1e-10), ((64, 280), 0.999)):
        batch = pack([np.arange(10, 10 + n, dtype=np.int32) for n in lengths])
        plain, compiled = (np.array(model.pooled(batch)) for model in models)
        assert cosine(plain, compiled).min() > least


@pytest.mark.parametrize("precision", ["float16", "bf16", "int8", None])
def test_load_refuses_another_precision(tiny_text: Path, precision: Any) -> None:
    with pytest.raises(EgemmaError, match=f"expected precision 'float32' or 'bfloat16' but got {precision!r}") as error:
        load(tiny_text, precision=precision)
    assert ("residual stream overflows" in str(error.value)) == (precision == "float16")


@pytest.fixture
def sigterm() -> Iterator[None]:
    """What `cli.main` changes in the process."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


# --- Encoder and command line ----------------------------------------------------------------------------------------


def test_the_arithmetic_and_the_vectors_have_a_precision_each(tiny_text: Path) -> None:
    exact, fast = Encoder(tiny_text), Encoder(tiny_text, precision="bfloat16")
    texts = ["a red bicycle", "the river comes down from the mountains in the north " * 30]
    a, b = exact.encode(texts), fast.encode(texts)
    assert b.dtype == np.float32 and 1e-7 < 1 - cosine(a, b).min() < 1e-3
    assert fast.encode(texts, precision="ubinary").shape == (2, 96 // 8)
    assert np.mean(fast.encode(texts, precision="binary") == exact.encode(texts, precision="binary")) > 0.5


def test_the_command_line_has_both(tiny_text: Path, capsys: pytest.CaptureFixture[str], sigterm: None) -> None:
    command = ["embed", "--model", str(tiny_text), "a red bicycle", "--compute-precision", "bfloat16"]
    assert cli.main(command) == 0
    expected = Encoder(tiny_text, precision="bfloat16").encode(["a red bicycle"])
    printed = json.loads(capsys.readouterr().out)["embedding"]
    assert np.abs(np.array(printed) - expected[0]).max() < 1e-6
    assert cli.main([*command, "--precision", "ubinary"]) == 0
    assert len(json.loads(capsys.readouterr().out)["embedding"]) == 96 // 8
    assert cli.main([*command[:-1], "float16"]) == 2
    assert "float16" in capsys.readouterr().err


# --- how near --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bands(tiny_text: Path) -> dict[tuple[int, int], Agreement]:
    found = [each for each in agreements(tiny_text, 120, "ops") if each.contender.startswith("ops bfloat16")]
    return {(each.shortest, each.longest): each for each in found}


def test_every_vector_stays_within_0_9999(bands: dict[tuple[int, int], Agreement]) -> None:
    long, every = bands[64, 512], bands[3, 512]
    assert long.texts > 40 and every.texts == 120 == sum(each.texts for key, each in bands.items() if key != (3, 512))
    assert 0.9999 <= long.minimum <= long.mean < 1 - 1e-7
    assert every.minimum == long.minimum


def test_short_texts_are_exact(bands: dict[tuple[int, int], Agreement]) -> None:
    assert min(bands[3, 15].minimum, bands[16, 63].minimum) > 1 - 1e-10


def test_cosine_is_of_rows() -> None:
    a = np.array([[1.0, 0.0], [3.0, 4.0]], np.float32)
    b = np.array([[0.0, 2.0], [6.0, 8.0]], np.float32)
    assert cosine(a, b) == pytest.approx([0, 1])


def test_the_benchmark_prints_a_row_for_each_band(tiny_text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["precision", "--model", str(tiny_text), "--texts", "24", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [(row["shortest"], row["longest"]) for row in rows[:4]] == [(3, 512), (3, 15), (16, 63), (64, 512)]
    assert all(0.99 < row["minimum"] <= row["mean"] <= 1 and row["texts"] > 0 for row in rows)
    bench.main(["precision", "--model", str(tiny_text), "--texts", "24"])
    assert (
        capsys.readouterr().out.splitlines()[2].startswith("| ops bfloat16 beside ops float32 | 3 to 512 | 24 | 0.99")
    )
