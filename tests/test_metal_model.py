"""The whole text model over the Metal kernels: the same vectors as over plain MLX operations.

Two ways: kernel by kernel through an executor (the simulator, or the GPU of a Mac), and through MLX's own graph of the
compiled forward, whose kernels the simulator runs and whose plain nodes MLX's CPU does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from executors import Executor, executors, simulated
from numpy.typing import NDArray

from egemma_mlx import load, simulator
from egemma_mlx.config import Config
from egemma_mlx.errors import EgemmaError
from egemma_mlx.kernels import OPS, metal_kernels
from egemma_mlx.kernels.library import Library, source_folder
from egemma_mlx.kernels.norm import normalize
from egemma_mlx.loading import load_model
from egemma_mlx.models.encoder import EmbeddingGemma2
from egemma_mlx.packing import pack
from egemma_mlx.random_checkpoint import write_checkpoint

UNIT = 2e-6
# Texts per packed batch, each with its token counts: windows of 8 lie inside most of them.
BATCHES = {1: [41], 2: [30, 7], 7: [1, 2, 40, 3, 9, 0, 8], 40: [1 + 7 * i % 31 for i in range(40)]}
# Head widths 16 and 32 take flash attention, 136 and 272 the products around a softmax, 256 and 512 the flash attention
# that splits heads; 3 layers are one of each kind.
SHAPES: dict[str, dict[str, Any]] = {
    "flash": {},
    "products": {"head_dim": 136, "num_hidden_layers": 3},
    "split": {"head_dim": 256, "num_hidden_layers": 3},
}


@pytest.fixture(scope="module", params=SHAPES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("metal") / request.param
    yield write_checkpoint(folder, "tiny", modalities=("text",), **SHAPES[request.param])


def model(folder: Path, kernels: Any, compiled: bool = False) -> EmbeddingGemma2:
    return load_model(folder, Config.from_file(folder / "config.json"), kernels, compiled)


def texts(lengths: list[int]) -> list[NDArray[np.int32]]:
    random = np.random.default_rng(len(lengths))
    return [random.integers(300, 2000, length).astype(np.int32) for length in lengths]


def unit(vectors: mx.array) -> NDArray[Any]:
    return np.array(normalize(vectors))


@executors
def test_the_model_gives_the_vectors_of_plain_operations(executor: Executor, checkpoint: Path) -> None:
    plain = model(checkpoint, OPS)
    metal = model(checkpoint, metal_kernels(executor.library, executor.name), compiled=executor.name == "metal")
    for count, lengths in BATCHES.items():
        batch = pack(texts(lengths))
        vectors = unit(metal.pooled(batch))
        assert vectors.shape[0] == count
        assert np.abs(vectors - unit(plain.pooled(batch))).max() <= UNIT


@executors
def test_masks_with_holes_and_left_padding_are_the_same(executor: Executor, checkpoint: Path) -> None:
    random = np.random.default_rng(3)
    ids = mx.array(random.integers(300, 2000, (3, 40)).astype(np.int32))
    mask = random.integers(0, 2, (3, 40))
    mask[0] = np.arange(40) >= 11
    metal = model(checkpoint, metal_kernels(executor.library, executor.name))
    got, expected = metal(ids, mask), model(checkpoint, OPS)(ids, mask)
    assert mx.abs(got.text_embeds - expected.text_embeds).max().item() <= UNIT
    assert mx.abs(got.last_hidden_state - expected.last_hidden_state).max().item() <= 5e-5


def attention_of(head_dim: int) -> list[str]:
    if head_dim <= 128:
        return ["flash"]
    return ["flash_split"] if head_dim in (256, 512) else ["attention_scores", "softmax", "attention_values"]


def launches_of(config: Config, rows: int) -> list[str]:
    """The kernels of a forward in MLX's order: depth first from the output. From 256 rows on 9 a layer, below it 11 and
    per-layer embeddings for all layers at once."""
    names = ["rms_norm"]
    met: set[int | None] = set()
    short = "_short" if rows < 256 else ""

    def ending(last: str) -> list[str]:
        return [f"linear{short}", last] if short else [f"linear_{last}"]

    for index, layer in enumerate(config.text.layers):
        attention = attention_of(layer.head_dim)
        bounds = [] if layer.window in met else ["attention_bounds"]
        met.add(layer.window)
        last = index + 1 == len(config.text.layers)
        names += [
            *("linear_short_3" if short else "linear_3", "qkv_prep", *bounds, *attention, *ending("add_norm_next")),
            *(f"gated{short}", *ending("add_norm")),
            *([] if short and index else ["linear_short", "rms_norm"] if short else ["linear_rms_norm"]),
            *(f"linear_gelu_mul{short}", *ending("add_norm" if last else "add_norm_next")),
        ]
    return [*names, "pool", *(("linear_short", "rms_norm") if short else ("linear_unit",))]


def name_of(call: simulator.KernelCall) -> str:
    return max((name for name in KERNELS if call.name.startswith(f"custom_kernel_egemma_{name}_")), key=len)


KERNELS = [file.stem for file in source_folder().glob("*.metal")]


@pytest.mark.parametrize("tokens", [55, 250])
def test_the_compiled_forward_launches_each_layers_kernels_in_order(checkpoint: Path, tokens: int) -> None:
    traced = model(checkpoint, metal_kernels(Library(mx.fast.metal_kernel), "metal"), compiled=True)
    config = traced.config.text
    table = mx.array([[0, 40], [40, tokens - 40]])
    calls = simulator.calls(lambda ids: traced(ids, segments=table).text_embeds, mx.zeros((tokens,), mx.int32))
    rows, layer = {55: 64, 250: 256}[tokens], config.layers[0]  # buckets; slots are an eighth of the rows
    launched = [name_of(call).removesuffix("_staged") for call in calls]
    assert launched == launches_of(traced.config, rows)
    outputs = {name_of(call): [spec.shape for spec in call.outputs] for call in reversed(calls)}  # the first of a name
    heads = [(rows, n * layer.head_dim) for n in (layer.heads, layer.kv_heads, layer.kv_heads)]
    assert outputs["linear_short_3" if rows < 256 else "linear_3"] == heads
    assert outputs["qkv_prep"] == [(rows, n, layer.head_dim) for n in (layer.heads, layer.kv_heads, layer.kv_heads)]
    assert outputs["attention_bounds"] == [(rows, 2)]
    assert outputs["gated_short" if rows < 256 else "gated"] == [(rows, config.intermediate_size)]
    assert outputs["add_norm_next" if rows < 256 else "linear_add_norm_next"] == [(rows, config.hidden_size)] * 2
    assert outputs["add_norm" if rows < 256 else "linear_add_norm"] == [(rows, config.hidden_size)]
    assert outputs["pool"] == [(rows // 8, config.hidden_size)]
    if rows >= 256:
        assert outputs["linear_unit"] == [(rows // 8, config.embedding_dim)] * 2
    *_, attention = attention_of(layer.head_dim)
    assert outputs[attention] == [(rows, layer.heads * layer.head_dim)]
    assert outputs.get("attention_scores") == outputs.get("softmax")


@simulated
@pytest.mark.parametrize("count", BATCHES)
def test_the_compiled_forwards_own_graph_gives_the_vectors_of_plain_operations(checkpoint: Path, count: int) -> None:
    traced = model(checkpoint, metal_kernels(Library(mx.fast.metal_kernel), "metal"), compiled=True)
    lengths = BATCHES[count]
    ids = mx.array(np.concatenate(texts(lengths)))
    table = np.stack([np.cumsum([0, *lengths])[:-1], lengths], axis=1).astype(np.int32)
    graph = simulator.trace(lambda ids, table: traced(ids, segments=table).text_embeds, ids, mx.array(table))
    (vectors,) = simulator.run(graph, [ids, mx.array(table)])
    expected = model(checkpoint, OPS)(ids, segments=table).text_embeds
    assert vectors.shape == expected.shape == (count, traced.config.text.embedding_dim)
    assert mx.abs(vectors - expected).max().item() <= UNIT


def test_lengths_are_data_to_the_kernels(checkpoint: Path) -> None:
    """Nine texts and forty, 200 rows and 592: other grids, the same sources."""
    traced = model(checkpoint, metal_kernels(Library(mx.fast.metal_kernel), "metal"), compiled=True)

    def sources(rows: int, segments: int) -> set[str]:
        table = mx.array(np.stack([np.arange(segments), np.ones(segments)], axis=1).astype(np.int32))
        ids = mx.zeros((rows,), mx.int32)
        calls = simulator.calls(lambda ids, table: traced(ids, segments=table).text_embeds, ids, table)
        return {call.source for call in calls}

    assert sources(200, 9) == sources(592, 40)


@simulated
def test_load_runs_a_checkpoint_in_the_simulator(checkpoint: Path) -> None:
    simulated, tokenizer = load(checkpoint, backend="simulator")
    plain, _ = load(checkpoint, backend="ops")
    assert (simulated.kernels.name, plain.kernels.name) == ("simulator", "ops")
    inputs = tokenizer(["a few words", "and a few more of them"], padding=True, return_tensors="mlx")
    got, expected = simulated(**inputs).text_embeds, plain(**inputs).text_embeds
    assert mx.abs(got - expected).max().item() <= UNIT


def test_load_refuses_a_backend_that_is_not_here(checkpoint: Path) -> None:
    with pytest.raises(EgemmaError, match="expected backend 'auto', 'metal', 'ops', 'simulator' but got 'cuda'"):
        load(checkpoint, backend="cuda")  # type: ignore[arg-type]
    if not mx.metal.is_available():
        with pytest.raises(EgemmaError, match="expected a Metal GPU for backend 'metal'"):
            load(checkpoint, backend="metal")
        assert load(checkpoint)[0].kernels is OPS
