"""The vision tower: transformers' soft tokens, over plain operations and over the Metal kernels."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from executors import SIMULATOR, simulated
from mlx.utils import tree_flatten, tree_unflatten
from numpy.typing import NDArray

from egemma_mlx import packing, simulator
from egemma_mlx.checkpoint import load_tensors, tensor_shapes
from egemma_mlx.config import Config, VisionConfig
from egemma_mlx.cost.live import peak_live_bytes
from egemma_mlx.errors import EgemmaError
from egemma_mlx.kernels import OPS, Kernels, metal_kernels
from egemma_mlx.kernels.library import Library
from egemma_mlx.kernels.selfcheck import Widths, launches
from egemma_mlx.media.image import Patches
from egemma_mlx.models.vision import PackedImages, VisionEmbedder, VisionTower, chunks, pack_images
from egemma_mlx.packing import Packed
from egemma_mlx.random_checkpoint import write_checkpoint

UNIT = 2e-6
# Patches across and down. In all 276, so that products take the form for many rows, and several tiles of attention.
SIZES = ((6, 9), (3, 3), (12, 6), (9, 6), (3, 27), (6, 1 * 3))
TOWER, EMBEDDER = "vision_tower.", "embed_vision."


def image(seed: int, width: int, height: int, patch: int = 16) -> Patches:
    y, x = np.divmod(np.arange(width * height, dtype=np.int32), np.int32(width))
    pixels = np.random.default_rng(seed).random((width * height, 3 * patch**2), np.float32)
    return Patches(pixels, np.stack([x, y], axis=1))


IMAGES = [image(seed, *size) for seed, size in enumerate(SIZES)]


class Vision(NamedTuple):
    """The two parts of a checkpoint that images go through."""

    tower: VisionTower
    embedder: VisionEmbedder

    @classmethod
    def load(cls, folder: Path, dtype: mx.Dtype | None = mx.float32) -> Vision:
        """With its weights in `dtype`; None: as stored."""
        config = Config.from_file(folder / "config.json")
        assert config.vision is not None
        tensors = load_tensors(folder, config, ("text", "image"))
        vision = cls(VisionTower(config.vision), VisionEmbedder(config.vision, config.text.hidden_size))
        for part, prefix in zip(vision, (TOWER, EMBEDDER), strict=True):
            named = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
            part.load_weights([(name, x if dtype is None else x.astype(dtype)) for name, x in named.items()])
            mx.eval(part.parameters())
        return vision

    def __call__(self, images: PackedImages, kernels: Kernels = OPS) -> mx.array:
        """Soft tokens."""
        return self.embedder(self.tower(images, self.tower.rope_table(), kernels), kernels)

    def pack(self, images: Sequence[Patches]) -> PackedImages:
        return pack_images(images, self.tower.config.pooling_kernel_size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("vision") / "plain", modalities=("text", "image"))


@pytest.fixture(scope="module")
def vision(folder: Path) -> Vision:
    return Vision.load(folder)


@pytest.fixture(scope="module")
def clipped(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoint with clipped linears, whose limits many values reach, and standardized outputs."""
    limits = {"put_min": -1.2, "put_max": 1.0, "std_bias": 0.3, "std_scale": 0.7}
    return variant(folder, tmp_path_factory.mktemp("vision") / "clipped", limits)


def variant(folder: Path, new: Path, values: dict[str, float]) -> Path:
    """A checkpoint with clipped linears and standardization: `folder`'s tensors, and these values by end of name."""
    raw = json.loads((folder / "config.json").read_text())
    raw["vision_config"] |= {"use_clipped_linears": True, "standardize": True}
    config, plain = Config.from_dict(raw), Config.from_file(folder / "config.json")
    tensors = load_tensors(folder, plain, ("text", "image"))
    random = np.random.default_rng(0)
    for name, shape in tensor_shapes(config, ("text", "image")).items():
        if name not in tensors:
            (value,) = (value for suffix, value in values.items() if name.endswith(suffix))
            spread = 0.1 if math.isfinite(value) else 0.0
            tensors[name] = mx.array(value + spread * random.standard_normal(shape).astype(np.float32))
    new.mkdir()
    (new / "config.json").write_text(json.dumps(raw))
    mx.save_safetensors(str(new / "model.safetensors"), tensors, {"format": "pt"})
    return new


def unit(rows: Any) -> NDArray[np.float64]:
    array = np.array(rows).astype(np.float64)
    return array / np.linalg.norm(array, axis=-1, keepdims=True)


def apart(a: Any, b: Any) -> float:
    """max |a − b| over rows of length 1."""
    assert np.array(a).shape == np.array(b).shape
    return float(np.abs(unit(a) - unit(b)).max())


# --- against transformers --------------------------------------------------------------------------------------------


def reference(folder: Path, images: Sequence[Patches], attention: str = "sdpa") -> tuple[NDArray[Any], NDArray[Any]]:
    """The tower's states and the soft tokens of one padded batch."""
    import oracle
    import torch

    model = oracle.transformers_model(folder)
    model.vision_tower.set_attn_implementation(attention)
    longest = max(len(image.pixels) for image in images)
    pixels = torch.zeros(len(images), longest, images[0].pixels.shape[1])
    positions = -torch.ones(len(images), longest, 2, dtype=torch.long)
    for row, one in enumerate(images):
        pixels[row, : len(one.pixels)] = torch.from_numpy(one.pixels)
        positions[row, : len(one.pixels)] = torch.from_numpy(one.positions)
    with torch.no_grad():
        found = model.get_image_features(pixels, positions)
    return found.last_hidden_state.numpy(), np.concatenate([soft.numpy() for soft in found.pooler_output])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_states_and_soft_tokens_are_those_of_transformers(folder: Path, vision: Vision, attention: str) -> None:
    states, soft = reference(folder, IMAGES, attention)
    packed = vision.pack(IMAGES)
    assert soft.shape == (sum(width * height for width, height in SIZES) // 9, 64)
    assert apart(vision.tower(packed, vision.tower.rope_table(), OPS), states) <= UNIT
    assert apart(vision(packed), soft) <= UNIT


def test_clipped_linears_and_standardized_states_are_those_of_transformers(clipped: Path, vision: Vision) -> None:
    states, soft = reference(clipped, IMAGES)
    ours = Vision.load(clipped)
    packed = ours.pack(IMAGES)
    got = ours.tower(packed, ours.tower.rope_table(), OPS)
    assert np.abs(np.array(got) - states).max() <= UNIT * np.abs(states).max()
    assert apart(ours(packed), soft) <= UNIT
    assert apart(vision(packed), soft) > 0.1  # limits and scales matter


def test_infinite_limits_clip_nothing(folder: Path, vision: Vision, tmp_path: Path) -> None:
    values = {"put_min": -math.inf, "put_max": math.inf, "std_bias": 0.0, "std_scale": 1.0}
    free = Vision.load(variant(folder, tmp_path / "free", values))
    for index, layer in enumerate(free.tower.encoder.layers):
        assert layer.mlp.up_proj.clipped, index
    free.tower.std_bias, free.tower.std_scale = mx.zeros((32,)), mx.ones((32,))
    assert mx.array_equal(free(free.pack(IMAGES)), vision(vision.pack(IMAGES)))


@pytest.mark.slow
def test_the_published_size_gives_the_soft_tokens_of_transformers(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "full", "full", modalities=("text", "image"))
    ours, images = Vision.load(folder), [image(0, 21, 30)]  # 70 soft tokens
    _, soft = reference(folder, images)
    assert soft.shape == (70, 512)
    assert apart(ours(ours.pack(images)), soft) <= UNIT


# --- packing ---------------------------------------------------------------------------------------------------------


def test_images_of_a_batch_are_as_one_at_a_time(vision: Vision) -> None:
    alone = mx.concatenate([vision(vision.pack([one])) for one in IMAGES])
    assert apart(vision(vision.pack(IMAGES)), alone) <= UNIT


def test_the_order_of_patches_is_of_no_account(vision: Vision) -> None:
    order = np.random.default_rng(0).permutation(len(IMAGES[2].pixels))
    shuffled = Patches(IMAGES[2].pixels[order], IMAGES[2].positions[order])
    packed = vision.pack([IMAGES[0], shuffled])
    assert apart(vision(packed), vision(vision.pack([IMAGES[0], IMAGES[2]]))) <= UNIT


def test_the_pool_is_by_position_and_row_by_row() -> None:
    packed = pack_images([image(0, 4, 2), image(1, 2, 4)], 2)
    assert packed.pool.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert packed.rows.segments.tolist() == [[0, 8], [8, 8]] and packed.rows.lengths == (8, 8)
    assert packed.positions.dtype == packed.pool.dtype == mx.int32 and packed.pixels.dtype == mx.float32


@pytest.mark.parametrize("size", [(4, 3), (3, 4), (1, 9), (2, 2)])
def test_patches_that_fill_no_squares_are_an_error(size: tuple[int, int]) -> None:
    with pytest.raises(EgemmaError, match=r"^\[vision\] expected each soft token to have 3×3 patches but got "):
        pack_images([image(0, 3, 3), image(1, *size)], 3)


def test_chunks_are_whole_images_in_order_of_bounded_size() -> None:
    random = np.random.default_rng(0)
    for counts in ([], [9], [20_000, 9, 9], [2520] * 7, random.integers(9, 10_080, 200).tolist()):
        parts = list(chunks(counts))
        assert [index for part in parts for index in range(*part.indices(len(counts)))] == list(range(len(counts)))
        for part in parts:
            assert sum(counts[part]) <= 2560 or len(counts[part]) == 1
        for first, second in pairwise(parts):  # no chunk could have taken the next image too
            assert sum(counts[first]) + counts[second.start] > 2560


# --- traces ----------------------------------------------------------------------------------------------------------


def as_arrays(packed: PackedImages) -> list[mx.array]:
    return [packed.pixels, packed.positions, packed.rows.positions, packed.rows.segments, packed.pool]


def traced(vision: Vision, kernels: Kernels, span: int) -> Callable[..., mx.array]:
    """The tower of arrays alone: where images lie is data."""
    table = vision.tower.rope_table()

    def run(pixels: mx.array, positions: mx.array, at: mx.array, segments: mx.array, pool: mx.array) -> mx.array:
        rows = Packed(at, at, segments, None, False, span, 0)
        return vision.embedder(vision.tower(PackedImages(pixels, positions, rows, pool), table, kernels), kernels)

    return run


def bucketed(packed: PackedImages) -> PackedImages:
    """The same images in more rows and slots than they need."""
    patches, slots = packing.bucket(packed.rows.rows + 30, len(packed.rows.lengths or ()))
    more, tokens = patches - packed.rows.rows, patches // packed.pool.shape[1]
    return PackedImages(
        pixels=mx.pad(packed.pixels, [(0, more), (0, 0)]),
        positions=mx.pad(packed.positions, [(0, more), (0, 0)]),
        rows=packed.rows.padded(patches, slots),
        pool=mx.pad(packed.pool, [(0, tokens - len(packed.pool)), (0, 0)]),
    )


def test_padding_changes_no_soft_token(vision: Vision) -> None:
    packed = vision.pack(IMAGES)
    grown, expected = bucketed(packed), vision(packed)
    assert grown.rows.rows == len(grown.pixels) > packed.rows.rows and len(grown.pool) == grown.rows.rows // 9
    got = vision(grown)
    assert np.isfinite(np.array(got)).all()
    assert apart(got[: len(expected)], expected) <= UNIT


def test_where_images_lie_is_data_to_a_trace(vision: Vision, tmp_path: Path) -> None:
    batches = (IMAGES, IMAGES[::-1][:-1])
    first, second = (as_arrays(bucketed(vision.pack(images))) for images in batches)
    run, file = traced(vision, OPS, max(width * height for width, height in SIZES)), str(tmp_path / "tower.mlxfn")
    mx.export_function(file, run, *first)
    imported = mx.import_function(file)
    for images, arrays in zip(batches, (first, second), strict=True):
        (got,), expected = imported(*arrays), vision(vision.pack(images))
        assert apart(got[: len(expected)], expected) <= UNIT


def test_the_position_lookup_is_no_product(vision: Vision) -> None:
    graph = simulator.trace(lambda *arrays: vision(with_lengths(vision, *arrays)), *as_arrays(vision.pack(IMAGES)))
    config, specs = vision.tower.config, {**graph.inputs}
    specs |= {name: simulator.Spec.of(array) for name, array in graph.constants.items()}
    products = []
    for node in graph.nodes:
        specs |= node.outputs
        if node.primitive in ("Matmul", "AddMM"):
            products.append([specs[name].shape for name in node.inputs[:2]])
    assert all(config.position_embedding_size not in shape for shapes in products for shape in shapes)
    wide = [shapes for shapes in products if shapes[1][-1] > 1]  # one column: the sum of a norm or of a softmax
    runs = len(SIZES)  # each of another length than its neighbours, and shorter than two tiles
    assert len(wide) == 2 + config.num_hidden_layers * (7 + 2 * runs)


def with_lengths(vision: Vision, pixels: mx.array, positions: mx.array, *_: mx.array) -> PackedImages:
    known = vision.pack(IMAGES)
    return PackedImages(pixels, positions, known.rows, known.pool)


# --- the Metal kernels -----------------------------------------------------------------------------------------------


@simulated
@pytest.mark.parametrize("variant", ["folder", "clipped"])
def test_over_the_metal_kernels_it_gives_the_soft_tokens_of_plain_operations(
    variant: str, request: pytest.FixtureRequest
) -> None:
    checkpoint = request.getfixturevalue(variant)
    plain, stored = Vision.load(checkpoint), Vision.load(checkpoint, dtype=None)
    kernels = metal_kernels(SIMULATOR.library, "simulator")
    for images in (IMAGES, IMAGES[1:2]):
        assert apart(stored(stored.pack(images), kernels), plain(plain.pack(images))) <= UNIT


@simulated
def test_its_compiled_graph_over_the_metal_kernels_gives_them_too(folder: Path, vision: Vision) -> None:
    stored = Vision.load(folder, dtype=None)
    packed = bucketed(stored.pack(IMAGES))
    run = traced(stored, metal_kernels(Library(mx.fast.metal_kernel), "metal"), span=512)
    graph = simulator.trace(mx.compile(run), *as_arrays(packed))
    launched = [name for call in graph.calls for name in re.findall(r'#line 1 "(\w+)\.metal"', call.source)]
    layer = ("linear_3", "qkv_prep", "flash_staged", "linear_add_norm_next", "gated", "linear_add_norm_next")
    once = ("linear", "rms_norm", "attention_bounds", "linear_add_norm", "rms_norm", "linear_short")
    expected = Counter(layer * stored.tower.config.num_hidden_layers + once)
    expected["linear_add_norm_next"] -= 1  # the last layer's, whose output nothing norms by a weight
    assert Counter(launched) == expected
    (soft,) = simulator.run(graph, as_arrays(packed))
    expected = vision(vision.pack(IMAGES))
    assert apart(soft[: len(expected)], expected) <= UNIT


def test_the_check_of_the_kernels_launches_every_pipeline_of_a_tower(folder: Path) -> None:
    config, library = Config.from_file(folder / "config.json"), Library(mx.fast.metal_kernel)
    stored, kernels = Vision.load(folder, dtype=None), metal_kernels(library, "metal")
    checked = {
        call.source for call in simulator.calls(lambda: launches(library, Widths.of(config.text, config.vision)))
    }
    for images in (IMAGES, IMAGES[1:2]):
        packed = bucketed(stored.pack(images))
        run = traced(stored, kernels, packed.rows.span)
        assert {call.source for call in simulator.calls(run, *as_arrays(packed))} <= checked


# --- memory ----------------------------------------------------------------------------------------------------------

PUBLISHED = VisionConfig(
    hidden_size=768,
    intermediate_size=3072,
    num_hidden_layers=16,
    num_attention_heads=12,
    num_key_value_heads=12,
    head_dim=64,
    patch_size=16,
    pooling_kernel_size=3,
    position_embedding_size=10_240,
    rms_norm_eps=1e-6,
    rope_theta=100.0,
    standardize=False,
    use_clipped_linears=False,
)
# Images of 280 soft tokens at most, of several aspect ratios; and smaller ones, of which a pass takes several.
DEFAULT_BUDGET = ((48, 48), (42, 60), (36, 69), (30, 30), (30, 51))
Sizes = tuple[tuple[int, int], ...]


def peak(sizes: Sizes, layers: int) -> int:
    """Bytes of activations of one pass at most, had from its trace: nothing is computed."""
    config = replace(PUBLISHED, num_hidden_layers=layers)
    vision = Vision(VisionTower(config), VisionEmbedder(config, 512))
    table = vision.tower.rope_table()
    names, weights = zip(*tree_flatten([part.parameters() for part in vision]), strict=True)
    packed = vision.pack(
        [Patches(np.zeros((w * h, 768), np.float32), image(0, w, h, patch=1).positions) for w, h in sizes]
    )

    def run(pixels: mx.array, *weights: mx.array) -> mx.array:
        for part, values in zip(vision, tree_unflatten(list(zip(names, weights, strict=True))), strict=True):
            part.update(values)
        return vision.embedder(vision.tower(replace(packed, pixels=pixels), table, OPS), OPS)

    return peak_live_bytes(simulator.trace(run, packed.pixels, *(mx.zeros(w.shape) for w in weights)))


def test_a_batch_of_images_takes_bounded_memory() -> None:
    def passes(count: int) -> set[Sizes]:
        sizes = [DEFAULT_BUDGET[index % len(DEFAULT_BUDGET)] for index in range(count)]
        return {tuple(sizes[part]) for part in chunks([width * height for width, height in sizes])}

    assert passes(32) == passes(128) and len(passes(32)) == 4
    peaks = {sizes: peak(sizes, 2) for sizes in passes(32)}
    assert max(peaks.values()) <= 0.3e9
    (first, *_) = peaks
    assert peak(first, 3) == peaks[first]  # layers come one after another
    assert peak(((96, 105),), 1) <= 1.1e9  # the largest image there is, of 1,120 soft tokens
