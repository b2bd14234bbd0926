"""Quantised checkpoints against the same numbers unpacked, in an unquantised float32 model."""

from __future__ import annotations

import importlib
import json
import math
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from executors import simulated
from mlx import nn
from numpy.typing import NDArray

from egemma_mlx import Encoder, checkpoint, cli, load, loading, quantized
from egemma_mlx.bench import __main__ as bench
from egemma_mlx.bench.quantized import agreements
from egemma_mlx.config import MODEL_TYPE, Config
from egemma_mlx.convert import convert
from egemma_mlx.dropin import register
from egemma_mlx.errors import EgemmaError
from egemma_mlx.export import export_forward
from egemma_mlx.kernels.backend import Backend
from egemma_mlx.media.image import Patches
from egemma_mlx.models.encoder import EmbeddingGemma2
from egemma_mlx.models.text import look_up
from egemma_mlx.quantized import Quantization, Scheme, expected_tensors, packed_layers
from egemma_mlx.random_checkpoint import write_checkpoint

SCHEMES = [Scheme(32, 8), Scheme(64, 8), Scheme(32, 6), Scheme(32, 4), Scheme(32, 8, "mxfp8")]
OTHERS = [Scheme(32, bits) for bits in (2, 3, 5)] + [Scheme(32, 4, "mxfp4"), Scheme(16, 4, "nvfp4")]
GATE = "language_model.layers.0.mlp.gate_proj"
TABLE = "language_model.embed_tokens"
CLOSE = 2e-6

Tensors = dict[str, mx.array]

pytestmark = [
    pytest.mark.filterwarnings("ignore:weights of .* are unpacked. on a CPU"),
    pytest.mark.filterwarnings("ignore:this checkpoint has weights of 4 bits"),
]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text and image towers, with linear layers that clip."""
    folder = write_checkpoint(tmp_path_factory.mktemp("quantized") / "images", modalities=("text", "image"))
    raw = json.loads((folder / "config.json").read_text())
    raw["vision_config"]["use_clipped_linears"] = True
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = mx.load(str(folder / "model.safetensors"))
    shapes = checkpoint.tensor_shapes(Config.from_dict(raw), ("text", "image"))
    limits = {name: mx.array(-1.5 if name.endswith("min") else 1.5) for name in shapes if name not in tensors}
    assert limits
    mx.save_safetensors(str(folder / "model.safetensors"), {**tensors, **limits})
    return folder


def pack(source: Path, target: Path, scheme: Scheme, own: dict[str, Any] | None = None, dtype: Any = None) -> Path:
    """A copy as MLX's tools make it: every layer of the checkpoint whose width is a multiple of the group size, those
    in `own` by their own numbers or not at all."""
    shutil.copytree(source, target)
    own = own or {}
    tensors: Tensors = {}
    for name, array in mx.load(str(source / "model.safetensors")).items():
        weight = array if dtype is None else array.astype(dtype)
        layer = name.removesuffix(".weight")
        numbers = own.get(layer, asdict(scheme))
        if not name.endswith(".weight") or weight.ndim != 2 or not numbers or weight.shape[1] % numbers["group_size"]:
            tensors[name] = weight
            continue
        parts = mx.quantize(weight, **numbers)
        tensors |= {f"{layer}.{part}": a for part, a in zip(("weight", "scales", "biases"), parts, strict=False)}
    mx.save_safetensors(str(target / "model.safetensors"), tensors, metadata={"format": "mlx"})
    edit(target, lambda raw: raw.update(quantization={**asdict(scheme), **own}))
    return target


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    raw = json.loads((folder / "config.json").read_text())
    change(raw)
    (folder / "config.json").write_text(json.dumps(raw))


def rewrite(folder: Path, change: Callable[[Tensors], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = mx.load(str(file))
    mx.eval(tensors)
    change(tensors)
    mx.save_safetensors(str(file), tensors)


def unpacked(packed: Path, target: Path) -> Path:
    """The same checkpoint, unquantised: each packed weight is what mx.dequantize makes of it in float32."""
    shutil.copytree(packed, target)
    numbers = json.loads((packed / "config.json").read_text())["quantization"]

    def wide(tensors: Tensors, name: str) -> mx.array | None:
        array = tensors.pop(name, None)
        return array if array is None or array.dtype == mx.uint8 else array.astype(mx.float32)

    def change(tensors: Tensors) -> None:
        for layer in [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]:
            own = numbers.get(layer, {key: numbers[key] for key in ("group_size", "bits", "mode")})
            scales, biases = wide(tensors, f"{layer}.scales"), wide(tensors, f"{layer}.biases")
            weight = mx.dequantize(tensors[f"{layer}.weight"], scales, biases, **own)
            tensors[f"{layer}.weight"] = weight.astype(mx.float32)
        for name, array in tensors.items():
            tensors[name] = array.astype(mx.float32) if array.dtype == mx.float16 else array

    rewrite(target, change)
    edit(target, lambda raw: raw.pop("quantization"))
    return target


def config_of(folder: Path) -> Config:
    return Config.from_file(folder / "config.json")


def ids(vocabulary: int, *lengths: int) -> list[NDArray[np.int32]]:
    random = np.random.default_rng(0)
    return [random.integers(10, vocabulary, length).astype(np.int32) for length in lengths]


def vectors(model: EmbeddingGemma2, *lengths: int) -> NDArray[np.float32]:
    """Of texts of these many tokens; more than 256 in all take the products of many rows."""
    texts = ids(model.config.text.vocab_size, *lengths)
    rows = mx.zeros((len(texts), max(lengths)), mx.int32)
    mask = np.zeros(rows.shape, np.int32)
    for row, text in enumerate(texts):
        rows[row, : len(text)] = mx.array(text)
        mask[row, : len(text)] = 1
    return np.array(model(rows, mx.array(mask)).text_embeds)


def layers_of(model: nn.Module, kind: type) -> set[str]:
    return {path for path, module in model.named_modules() if type(module) is kind}


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed layers stay so with plain operations too."""
    monkeypatch.setattr(loading, "on_cpu", lambda: False)
    monkeypatch.setattr(loading, "exact_products", lambda: None)


# --- vectors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES + OTHERS, ids=str)
def test_packed_layers_give_the_vectors_of_their_unpacked_weights(
    tmp_path: Path, tiny_text: Path, scheme: Scheme, on_a_gpu: None
) -> None:
    folder = pack(tiny_text, tmp_path / "packed", scheme)
    model, _ = load(folder, backend="ops")
    linear, tables = layers_of(model, nn.QuantizedLinear), layers_of(model, nn.QuantizedEmbedding)
    config = config_of(folder)
    stored = mx.load(str(folder / "model.safetensors"))
    assert linear | tables == set(packed_layers(config.quantization, checkpoint.tensor_shapes(config), stored))
    assert TABLE in tables and GATE in linear
    exact, _ = load(unpacked(folder, tmp_path / "exact"), backend="ops")
    for lengths in ((3, 5, 1), (300, 7)):
        assert np.abs(vectors(model, *lengths) - vectors(exact, *lengths)).max() <= CLOSE
    plain, _ = load(tiny_text, backend="ops")
    assert np.abs(vectors(model, 30) - vectors(plain, 30)).max() > 1e-4  # the rounding is there


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_plain_operations_on_a_cpu_unpack_all_but_the_table(tmp_path: Path, tiny_text: Path, scheme: Scheme) -> None:
    folder = pack(tiny_text, tmp_path / "packed", scheme)
    with pytest.warns(RuntimeWarning, match="weights of .* are unpacked: on a CPU MLX multiplies packed ones") as said:
        model, _ = load(folder, backend="ops")
    assert sum("unpacked" in str(warning.message) for warning in said) == 1
    assert not layers_of(model, nn.QuantizedLinear)
    assert layers_of(model, nn.QuantizedEmbedding) == {TABLE}
    exact, _ = load(unpacked(folder, tmp_path / "exact"), backend="ops")
    assert np.abs(vectors(model, 30, 3) - vectors(exact, 30, 3)).max() <= CLOSE


@simulated
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_kernels_run_beside_packed_layers(tmp_path: Path, tiny_text: Path, scheme: Scheme) -> None:
    folder = pack(tiny_text, tmp_path / "packed", scheme)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*unpacked")
        model, _ = load(folder, backend="simulator")
    assert GATE in layers_of(model, nn.QuantizedLinear)
    exact, _ = load(unpacked(folder, tmp_path / "exact"), backend="ops")
    assert np.abs(vectors(model, 20, 3) - vectors(exact, 20, 3)).max() <= CLOSE


@pytest.mark.parametrize("scheme", [Scheme(32, 8), Scheme(32, 4), Scheme(32, 8, "mxfp8")], ids=str)
def test_images(tmp_path: Path, images: Path, scheme: Scheme, on_a_gpu: None) -> None:
    folder = pack(images, tmp_path / "packed", scheme)
    model, _ = load(folder, backend="ops", modalities=("text", "image"))
    inner = "vision_tower.encoder.layers.0.self_attn.q_proj.linear"
    assert {inner, "embed_vision.embedding_projection"} <= layers_of(model, nn.QuantizedLinear)
    exact, _ = load(unpacked(folder, tmp_path / "exact"), backend="ops", modalities=("text", "image"))
    random = np.random.default_rng(0)
    grid = np.stack(np.meshgrid(np.arange(6), np.arange(3)), axis=-1).reshape(-1, 2).astype(np.int32)
    patches = [Patches(random.random((18, 768), np.float32), grid)]
    got, expected = (np.array(m.embed_images(patches)) for m in (model, exact))
    assert np.abs(got - expected).max() <= 2e-5 * np.abs(expected).max()


MIXED: dict[str, Any] = {
    "language_model.layers.0.self_attn.q_proj": {"group_size": 64, "bits": 4},
    "language_model.layers.1.mlp.up_proj": False,
    "language_model.layers.2.mlp.down_proj": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "language_model.ple.per_layer_model_projection": {"group_size": 32, "bits": 6, "mode": "affine"},
    TABLE: False,
}


@pytest.mark.parametrize("prefix", ["", "model."])
def test_layers_with_numbers_of_their_own(tmp_path: Path, tiny_text: Path, prefix: str, on_a_gpu: None) -> None:
    folder = pack(tiny_text, tmp_path / "packed", Scheme(32, 8), MIXED)
    exact, _ = load(unpacked(folder, tmp_path / "exact"), backend="ops")

    def rename(raw: dict[str, Any]) -> None:
        raw["quantization"] = {prefix * ("." in key) + key: value for key, value in raw["quantization"].items()}

    edit(folder, rename)
    rewrite(folder, lambda tensors: [tensors.update({prefix + name: tensors.pop(name)}) for name in list(tensors)])
    model, _ = load(folder, backend="ops")
    layers = dict(model.named_modules())
    assert layers["language_model.layers.0.self_attn.q_proj"].bits == 4
    assert layers["language_model.layers.2.mlp.down_proj"].mode == "mxfp8"
    assert type(layers["language_model.layers.1.mlp.up_proj"]) is nn.Linear
    assert type(layers[TABLE]) is nn.Embedding
    for lengths in ((5, 30), (300,)):
        assert np.abs(vectors(model, *lengths) - vectors(exact, *lengths)).max() <= CLOSE


@pytest.mark.parametrize("backend", ["ops", pytest.param("simulator", marks=simulated)])
def test_float16_of_a_quantised_checkpoint_is_widened(tmp_path: Path, tiny_text: Path, backend: Backend) -> None:
    folder = pack(tiny_text, tmp_path / "packed", Scheme(32, 8), dtype=mx.float16)
    model, _ = load(folder, backend=backend)
    assert model.language_model.norm.weight.dtype == mx.float32
    exact, _ = load(unpacked(folder, tmp_path / "exact"), backend="ops")
    assert np.abs(vectors(model, 20, 3) - vectors(exact, 20, 3)).max() <= CLOSE


def test_rows_of_a_table_are_not_rounded_to_the_dtype_of_its_scales() -> None:
    weight = mx.array(np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)).astype(mx.bfloat16)
    table = nn.Embedding(8, 64)
    table.weight = weight
    packed = table.to_quantized(group_size=32, bits=8)
    assert packed.scales.dtype == mx.bfloat16
    rows = look_up(packed, mx.array([3, 5]))
    scales, biases = (np.array(part[mx.array([3, 5])].astype(mx.float32)) for part in (packed.scales, packed.biases))
    q = np.array(packed.weight[mx.array([3, 5])]).view(np.uint8).reshape(2, 2, 32)
    assert rows.dtype == mx.float32
    np.testing.assert_allclose(np.array(rows), (q * scales[..., None] + biases[..., None]).reshape(2, 64), rtol=1e-6)


def test_bfloat16_rounds_what_is_not_packed(tmp_path: Path, tiny_text: Path, on_a_gpu: None) -> None:
    packed = pack(tiny_text, tmp_path / "packed", Scheme(32, 8))
    exact, rounded = (load(packed, backend="ops", precision=p)[0] for p in ("float32", "bfloat16"))
    assert np.abs(vectors(exact, 300) - vectors(rounded, 300)).max() <= CLOSE
    gate = rounded.language_model.layers[0].mlp.gate_proj
    assert (gate.weight.dtype, gate.scales.dtype) == (mx.uint32, mx.float32)
    some = pack(tiny_text, tmp_path / "some", Scheme(32, 8), {GATE: False})
    exact, rounded = (load(some, backend="ops", precision=p)[0] for p in ("float32", "bfloat16"))
    assert rounded.language_model.layers[0].mlp.gate_proj.weight.dtype == mx.bfloat16
    assert CLOSE < np.abs(vectors(exact, 300) - vectors(rounded, 300)).max() < 1e-2


def test_bfloat16_on_a_cpu_is_that_of_the_unpacked_weights(tmp_path: Path, tiny_text: Path) -> None:
    folder = pack(tiny_text, tmp_path / "packed", Scheme(32, 8))
    exact = unpacked(folder, tmp_path / "exact")
    model, other = (load(f, backend="ops", precision="bfloat16")[0] for f in (folder, exact))
    assert model.language_model.layers[0].mlp.gate_proj.weight.dtype == mx.bfloat16
    assert np.abs(vectors(model, 300) - vectors(other, 300)).max() <= CLOSE


def test_a_compiled_forward(tmp_path: Path, tiny_text: Path, on_a_gpu: None) -> None:
    folder = pack(tiny_text, tmp_path / "packed", Scheme(32, 8))
    plain, compiled = (load(folder, backend="ops", compiled=c)[0] for c in (False, True))
    assert np.abs(vectors(plain, 20, 3) - vectors(compiled, 20, 3)).max() <= CLOSE


def test_an_exported_forward(tmp_path: Path, tiny_text: Path) -> None:
    folder = pack(tiny_text, tmp_path / "packed", Scheme(32, 8))
    for backend in ("ops", "metal"):
        export_forward(folder, tmp_path / f"{backend}.mlxfn", tokens=16, backend=backend)
    model, _ = load(folder)
    (tokens,) = ids(model.config.text.vocab_size, 16)
    arrays = (mx.array(tokens), mx.arange(16, dtype=mx.int32), mx.array([[0, 16]], dtype=mx.int32))
    (got,) = mx.import_function(str(tmp_path / "ops.mlxfn"))(*arrays)
    assert np.abs(np.array(got) - vectors(model, 16)).max() <= CLOSE
    # That for Metal keeps them packed.
    assert (tmp_path / "metal.mlxfn").stat().st_size < 0.9 * (tmp_path / "ops.mlxfn").stat().st_size


# --- where MLX cannot, and what is said ------------------------------------------------------------------------------


def test_mlx_multiplies_with_every_scheme_here() -> None:
    assert {str(scheme): quantized.fault(scheme, 1e-5) for scheme in SCHEMES + OTHERS} == {
        str(scheme): None for scheme in SCHEMES + OTHERS
    }


def _raises(*_: Any, **__: Any) -> mx.array:
    raise RuntimeError("[quantized_matmul] Not implemented here.\nsecond line")


def _off(*arguments: Any, **options: Any) -> mx.array:
    return QUANTIZED_MATMUL(*arguments, **options) * 1.001


QUANTIZED_MATMUL = mx.quantized_matmul


@simulated
@pytest.mark.parametrize(
    ("product", "reason"), [(_raises, r"Not implemented here\.$"), (_off, "off by 1e-03 of the greatest value$")]
)
def test_layers_whose_products_fail_are_unpacked(
    tmp_path: Path, tiny_text: Path, monkeypatch: pytest.MonkeyPatch, product: Callable[..., mx.array], reason: str
) -> None:
    folder = pack(tiny_text, tmp_path / "packed", Scheme(32, 8))
    monkeypatch.setattr(mx, "quantized_matmul", product)
    with pytest.warns(RuntimeWarning, match=f"^weights of 8-bit affine in groups of 32 are unpacked: .*{reason}"):
        model, _ = load(folder, backend="simulator")
    assert not layers_of(model, nn.QuantizedLinear) and not layers_of(model, nn.QuantizedEmbedding)
    exact, _ = load(unpacked(folder, tmp_path / "exact"), backend="ops")
    assert np.abs(vectors(model, 9) - vectors(exact, 9)).max() <= CLOSE


@pytest.mark.parametrize(("bits", "count"), [(4, 1), (2, 1), (5, 0), (8, 0)])
def test_few_bits_are_warned_of_once(tmp_path: Path, tiny_text: Path, bits: int, count: int, on_a_gpu: None) -> None:
    folder = pack(tiny_text, tmp_path / "packed", Scheme(32, bits))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        load(folder, backend="ops")
    assert sum("4 bits or fewer" in str(warning.message) for warning in said) == len(said) == count


# --- config.json -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([8], r"quantization: expected an object with group_size and bits but got \[8\]"),
        ({"bits": 8}, "quantization: expected an object with group_size and bits"),
        ({"group_size": 64, "bits": 7}, "expected bits 2, 3, 4, 5, 6 or 8 for mode 'affine' but got 7"),
        ({"group_size": 64, "bits": "8"}, "expected bits .* but got '8'"),
        ({"group_size": 48, "bits": 8}, "expected group_size 32, 64 or 128 for mode 'affine' but got 48"),
        ({"group_size": 64, "bits": 8, "mode": "mxfp8"}, "expected group_size 32 for mode 'mxfp8' but got 64"),
        ({"group_size": 64, "bits": 8, "mode": ["affine"]}, "expected mode 'affine', 'mxfp8', 'mxfp4' or 'nvfp4'"),
        ({"group_size": 64, "bits": 8, "a.b": {"bits": 1}}, "quantization: a.b: expected bits .* but got 1"),
    ],
)
def test_what_is_no_scheme(found: Any, message: str) -> None:
    with pytest.raises(EgemmaError, match=f"^config.json: .*{message}"):
        Quantization.from_config({"quantization": found}, "config.json")


def test_other_tools_quantisation_is_refused() -> None:
    raw = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    with pytest.raises(EgemmaError, match="expected MLX's own quantisation but got quantization_config of 'gptq'"):
        Quantization.from_config(raw, "config.json")
    assert Quantization.from_config({"quantization_config": None}, "config.json") is None


def test_a_layers_own_numbers_leave_mlx_defaults_not_the_checkpoints() -> None:
    found = {
        "group_size": 32,
        "bits": 8,
        "mode": "mxfp8",
        "a": {"bits": 6},
        "model.b": {"mode": "mxfp4"},
        "c": True,
        "layers.0.d": False,
    }
    parsed = Quantization.from_config({"quantization": found}, "config.json")
    assert parsed is not None
    assert parsed.default == Scheme(32, 8, "mxfp8")
    assert parsed.overrides == {
        "a": Scheme(64, 6, "affine"),
        "b": Scheme(32, 4, "mxfp4"),
        "c": parsed.default,
        "layers.0.d": None,
    }
    # Scales decide where the layer has no numbers; mlx-vlm leaves the tower's name out of some.
    assert parsed.scheme("e", {"e.scales"}) == parsed.default and parsed.scheme("e", {}) is None
    assert parsed.scheme("language_model.layers.0.d", {"language_model.layers.0.d.scales"}) is None


def test_mlx_vlm_leaves_empty_sections(tmp_path: Path, tiny_text: Path) -> None:
    folder = pack(tiny_text, tmp_path / "packed", Scheme(32, 8))
    edit(folder, lambda raw: raw.update(vision_config={}, audio_config={}))
    assert config_of(folder).vision is config_of(folder).audio is None
    assert load(folder)[0].vision_tower is None


@pytest.mark.parametrize("scheme", SCHEMES + OTHERS, ids=str)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_the_table_of_a_packed_layer_is_what_mlx_makes(scheme: Scheme, dtype: str) -> None:
    names = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32, "U32": mx.uint32, "U8": mx.uint8}
    parts = mx.quantize(mx.ones((12, 192), names[dtype]), **asdict(scheme))
    table = scheme.tensors("layer", (12, 192))
    assert list(table) == ["layer.weight", "layer.scales", "layer.biases"][: len(parts)]
    for part, stored in zip(parts, table.values(), strict=True):
        assert part.shape == stored.shape and part.dtype in [names[known] for known in stored.dtypes]


def test_a_checkpoint_without_quantisation_expects_none(tiny_text: Path) -> None:
    shapes = checkpoint.tensor_shapes(config_of(tiny_text))
    expected = expected_tensors(None, shapes, {f"{GATE}.scales"})
    assert {name: stored.shape for name, stored in expected.items()} == shapes
    assert {stored.dtypes for stored in expected.values()} == {("BF16", "F32")}


# --- headers ---------------------------------------------------------------------------------------------------------


def test_all_faults_in_one_error_before_the_data(
    tmp_path: Path, tiny_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pack(tiny_text, tmp_path / "packed", Scheme(32, 8))
    layer = "language_model.layers.{}.mlp.up_proj".format

    def damage(tensors: Tensors) -> None:
        del tensors[f"{layer(0)}.biases"]
        tensors[f"{layer(1)}.scales"] = tensors[f"{layer(1)}.scales"][:, :1]
        tensors[f"{layer(2)}.weight"] = tensors[f"{layer(2)}.weight"].astype(mx.float32)
        tensors["language_model.norm.scales"] = mx.ones((64, 1))
        tensors[f"{layer(3)}.scales"] = tensors[f"{layer(3)}.scales"].astype(mx.uint8)
        for part in ("scales", "biases"):
            del tensors[f"{GATE}.{part}"]

    rewrite(folder, damage)
    edit(folder, lambda raw: raw["quantization"].update({GATE: {"group_size": 32, "bits": 8}}))
    monkeypatch.setattr(mx, "load", lambda path: pytest.fail(f"{path} was opened for reading"))
    with pytest.raises(EgemmaError) as error:
        checkpoint.load_tensors(folder, config_of(folder))
    message = str(error.value)
    assert message.startswith(f"{folder}: tensors do not fit config.json: ") and "\n" not in message
    for part in (
        f"3 missing: {GATE}.scales, {GATE}.biases, {layer(0)}.biases",
        "1 unexpected: language_model.norm.scales",
        f"1 misshapen: {layer(1)}.scales expected [128, 2] but got [128, 1]",
        f"1 not U32: {layer(2)}.weight is F32",
        f"1 neither BF16 nor F16 nor F32: {layer(3)}.scales is U8",
    ):
        assert part in message


def test_scales_without_quantisation_in_the_config(tmp_path: Path, tiny_text: Path) -> None:
    folder = pack(tiny_text, tmp_path / "packed", Scheme(32, 8))
    edit(folder, lambda raw: raw.pop("quantization"))
    with pytest.raises(EgemmaError, match=r"\d+ unexpected: .*\.biases.*\d+ misshapen: .*neither BF16 nor F32"):
        checkpoint.load_tensors(folder, config_of(folder))


def test_other_bits_than_the_config_says(tmp_path: Path, tiny_text: Path) -> None:
    folder = pack(tiny_text, tmp_path / "packed", Scheme(32, 8))
    edit(folder, lambda raw: raw["quantization"].update(bits=4))
    with pytest.raises(EgemmaError, match=r"misshapen: language_model\.embed_tokens\.weight expected \[2048, 8\] but"):
        checkpoint.load_tensors(folder, config_of(folder))


def test_sizes_are_those_of_the_values(tmp_path: Path, images: Path) -> None:
    for scheme in (Scheme(32, 8), Scheme(32, 6), Scheme(32, 8, "mxfp8")):
        folder = pack(images, tmp_path / str(scheme), scheme)
        assert checkpoint.tower_sizes(folder, config_of(folder)) == checkpoint.tower_sizes(images, config_of(images))


# --- convert ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "scheme"),
    [
        ({}, Scheme(64, 8)),
        ({"bits": 6, "group_size": 32}, Scheme(32, 6)),
        ({"bits": 4}, Scheme(64, 4)),
        ({"mode": "mxfp8"}, Scheme(32, 8, "mxfp8")),
    ],
)
@pytest.mark.parametrize("shard_bytes", [None, 200_000])
def test_convert(tmp_path: Path, options: dict[str, Any], scheme: Scheme, shard_bytes: int | None) -> None:
    source = write_checkpoint(tmp_path / "source", shard_bytes=shard_bytes)
    (source / ".cache").mkdir()
    target = convert(source, tmp_path / "new" / "target", **options)
    raw, before = (json.loads((folder / "config.json").read_text()) for folder in (target, source))
    assert raw == {**before, "quantization": asdict(scheme), "quantization_config": asdict(scheme)}
    kept = {
        str(file.relative_to(source))
        for file in source.rglob("*")
        if file.is_file() and ".safetensors" not in file.name and file != source / "config.json"
    }
    made = {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}
    assert made == kept | {"config.json", "model.safetensors"}
    assert all((source / file).read_bytes() == (target / file).read_bytes() for file in kept)
    assert [path.name for path in target.parent.iterdir()] == ["target"]

    config = config_of(target)
    tensors = checkpoint.load_tensors(target, config, ("text", "image", "audio"))
    layers = packed_layers(config.quantization, checkpoint.tensor_shapes(config, checkpoint.MODALITIES), tensors)
    assert TABLE in layers and set(layers.values()) == {scheme}
    assert all(layer.startswith("language_model.") for layer in layers)
    model, _ = load(target, modalities=("text", "image"))
    plain, _ = load(source)
    cosine = (vectors(model, 40) * vectors(plain, 40)).sum()
    assert cosine > (0.85 if scheme.bits == 4 else 0.98)


def test_float32_scales_pay_at_8_bits(tmp_path: Path, tiny_text: Path) -> None:
    stored = {bits: mx.load(str(convert(tiny_text, tmp_path / f"{bits}", bits=bits) / "model.safetensors"))
              for bits in (8, 6)}  # fmt: skip
    assert stored[8][f"{GATE}.scales"].dtype == mx.float32
    assert stored[6][f"{GATE}.scales"].dtype == mx.bfloat16
    weight = mx.load(str(tiny_text / "model.safetensors"))[f"{GATE}.weight"].astype(mx.float32)

    def error(parts: list[mx.array]) -> float:
        wide = [part.astype(mx.float32) for part in parts[1:]]
        return float(mx.square(mx.dequantize(parts[0], *wide, group_size=64, bits=8) - weight).mean().item())

    ours = [stored[8][f"{GATE}.{part}"] for part in ("weight", "scales", "biases")]
    theirs = mx.quantize(weight.astype(mx.bfloat16), group_size=64, bits=8)
    assert 1.2 * error(ours) < error(list(theirs))


def test_what_convert_refuses(tmp_path: Path, tiny_text: Path) -> None:
    for options in ({"bits": 5}, {"mode": "mxfp4", "bits": 4}):
        with pytest.raises(EgemmaError, match="convert: expected 8, 6 or 4 bits of 'affine' or 8 of 'mxfp8' but got"):
            convert(tiny_text, tmp_path / "t", **options)
    with pytest.raises(EgemmaError, match="convert: expected bits 8 for mode 'mxfp8' but got 4"):
        convert(tiny_text, tmp_path / "t", mode="mxfp8", bits=4)
    with pytest.raises(EgemmaError, match="expected group_size 32, 64 or 128 for mode 'affine' but got 16"):
        convert(tiny_text, tmp_path / "t", group_size=16)
    narrow = write_checkpoint(
        tmp_path / "n", modalities=("text",), hidden_size=40, intermediate_size=40, hidden_size_per_layer_input=8,
        num_attention_heads=1, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    with pytest.raises(EgemmaError, match="expected layers with a multiple of 64 inputs but got none"):
        convert(narrow, tmp_path / "t")
    used = tmp_path / "used"
    used.mkdir()
    (used / "file").touch()
    with pytest.raises(EgemmaError, match="used: expected a new or empty folder"):
        convert(tiny_text, used)
    (used / "file").unlink()
    convert(tiny_text, used)
    with pytest.raises(EgemmaError, match="expected an unquantised checkpoint but got 8-bit affine in groups of 64"):
        convert(used, tmp_path / "t")
    with pytest.raises(EgemmaError, match="expected a folder outside of"):
        convert(narrow, narrow / "inside")
    assert not (tmp_path / "t").exists() and not (narrow / "inside").exists()


def test_a_copy_is_complete_or_absent(tmp_path: Path, tiny_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: str, *_: Any, **__: Any) -> None:
        Path(file).write_bytes(b"half")
        raise RuntimeError("[save] no space left")

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(EgemmaError, match=r"target: cannot be written \(\[save\] no space left\)"):
        convert(tiny_text, tmp_path / "target")
    assert not list(tmp_path.iterdir())


def test_the_commands(tmp_path: Path, tiny_text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "target"
    assert cli.main(["convert", str(tiny_text), str(target), "--bits", "4", "--group-size", "32"]) == 0
    assert capsys.readouterr().out.startswith(f"{target}: 4-bit affine, weights 0.")
    assert cli.main(["info", "--model", str(target)]) == 0
    shown = capsys.readouterr().out
    assert "quantised   4-bit affine in groups of 32\n" in shown
    assert cli.main(["info", "--model", str(tiny_text), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["config"]["quantization"] is None and f"text {values['parameters']['text']:,}" in shown
    assert cli.main(["convert", str(target), str(tmp_path / "again")]) == 2
    assert "expected an unquantised checkpoint" in capsys.readouterr().err
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert cli.main(["embed", "--model", str(target), "hello"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("warning: ") == 2
    assert math.isclose(sum(x * x for x in json.loads(captured.out)["embedding"]), 1, rel_tol=1e-5)


# --- on the trained model --------------------------------------------------------------------------------------------


def test_the_more_bits_the_nearer(capsys: pytest.CaptureFixture[str]) -> None:
    found = {each.scheme: each for each in agreements("mini", 24)}
    assert list(found) == ["none", "8-bit affine", "6-bit affine", "4-bit affine", "mxfp8"]
    sizes = [each.bytes for each in found.values()]
    assert sizes[0] > 1.7 * sizes[1] > 1.7 * sizes[2] > 1.7 * sizes[3] and sizes[2] < sizes[4] < sizes[1]
    assert found["8-bit affine"].minimum > 0.9995 and found["8-bit affine"].mean > 0.9998
    assert found["6-bit affine"].mean > 0.997 and found["mxfp8"].mean > 0.997
    assert 0.9 < found["4-bit affine"].minimum < 0.99
    bench.main(["quantized", "--model", "mini", "--texts", "3"])
    assert capsys.readouterr().out.count("\n") == 7


# --- with the tools themselves ---------------------------------------------------------------------------------------

installed = pytest.mark.skipif(
    any(find_spec(package) is None for package in ("mlx_embeddings", "mlx_vlm")),
    reason="pip install --no-deps mlx-embeddings mlx-vlm; pip install requests",
)


@pytest.fixture
def packages() -> Iterator[None]:
    """Ends with the test: what it registers, and what mlx-vlm's own model does to transformers when it is imported."""
    from transformers import AutoProcessor

    from_pretrained = vars(AutoProcessor)["from_pretrained"]
    yield
    AutoProcessor.from_pretrained = from_pretrained
    for package in ("mlx_embeddings", "mlx_vlm"):
        name = f"{package}.models.{MODEL_TYPE}"
        for module in [module for module in sys.modules if f"{module}.".startswith(f"{name}.")]:
            del sys.modules[module]
        if parent := sys.modules.get(f"{package}.models"):
            vars(parent).pop(MODEL_TYPE, None)


def cosine(model: EmbeddingGemma2, peer: nn.Module) -> float:
    """Of a text's vectors."""
    (text,) = ids(model.config.text.vocab_size, 12)
    theirs = np.array(peer(mx.array(text)[None]).text_embeds.astype(mx.float32))
    return float((theirs * vectors(model, 12)).sum())


@installed
@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("options", "scheme"),
    [
        ({"q_bits": 8, "q_group_size": 32}, Scheme(32, 8)),
        ({"q_bits": 6, "q_group_size": 64}, Scheme(64, 6)),
        ({"q_bits": 4, "q_group_size": 32}, Scheme(32, 4)),
        ({"q_mode": "mxfp8", "q_bits": None, "q_group_size": None}, Scheme(32, 8, "mxfp8")),
    ],
)
def test_what_mlx_vlm_converts(tmp_path: Path, options: dict[str, Any], scheme: Scheme) -> None:
    source = write_checkpoint(tmp_path / "source", "tiny")
    importlib.import_module("mlx_vlm.convert").convert(str(source), str(tmp_path / "theirs"), quantize=True, **options)
    model, _ = load(tmp_path / "theirs", modalities=("text", "image"))
    assert model.config.quantization == Quantization(scheme, {})
    peer = importlib.import_module("mlx_vlm.embedding_loader").load_embedding_model(tmp_path / "theirs")
    assert cosine(model, peer) > 0.995  # they compute in bfloat16


@installed
@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("options", "scheme"),
    [
        ({"q_bits": 8, "q_group_size": 32}, Scheme(32, 8)),  # which makes float16 of the rest
        ({"q_bits": 4, "q_group_size": 32, "skip_vision": False, "dtype": "bfloat16"}, Scheme(32, 4)),
        ({"q_mode": "mxfp8", "q_bits": None, "q_group_size": None}, Scheme(32, 8, "mxfp8")),
    ],
)
def test_what_mlx_embeddings_converts(tmp_path: Path, options: dict[str, Any], scheme: Scheme) -> None:
    register()
    source = write_checkpoint(tmp_path / "source", "tiny")
    theirs = str(tmp_path / "theirs")
    importlib.import_module("mlx_embeddings.convert").convert(str(source), theirs, quantize=True, **options)
    model, _ = load(theirs, modalities=("text", "image"))
    assert model.config.quantization == Quantization(scheme, {})
    peer, _ = importlib.import_module("mlx_embeddings").load(theirs)
    assert type(peer.language_model.layers[0].mlp.gate_proj) is nn.QuantizedLinear
    assert np.abs(vectors(model, 300, 3) - vectors(peer, 300, 3)).max() <= CLOSE


@installed
@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("options", [{"bits": 8}, {"bits": 4, "group_size": 32}, {"mode": "mxfp8"}])
def test_they_load_what_we_convert(tmp_path: Path, options: dict[str, Any]) -> None:
    target = convert(write_checkpoint(tmp_path / "source", "tiny"), tmp_path / "ours", **options)
    model, _ = load(target)
    peer = importlib.import_module("mlx_vlm.embedding_loader").load_embedding_model(target)
    assert type(peer.language_model.layers[0].mlp.gate_proj) is nn.QuantizedLinear
    assert cosine(model, peer) > 0.995
    register()
    peer, _ = importlib.import_module("mlx_embeddings").load(str(target))
    assert type(peer.language_model.layers[0].mlp.gate_proj) is nn.QuantizedLinear
    assert np.abs(vectors(model, 20, 3) - vectors(peer, 20, 3)).max() <= CLOSE


def test_an_encoder(tmp_path: Path) -> None:
    """End to end, with a tokenizer: ranks stay what they are."""
    queries, documents = ["how do I bake bread?"], ["Knead the dough and bake it.", "The stock market fell on Monday."]
    plain, packed = (Encoder(folder) for folder in ("mini", convert("mini", tmp_path / "packed")))
    scores = [e.similarity(e.encode_query(queries), e.encode_document(documents)) for e in (plain, packed)]
    assert np.abs(scores[0] - scores[1]).max() < 0.02 and scores[1][0, 0] > scores[1][0, 1]
