"""Images in `model(...)`: parity with transformers in float32 given the same pixels, merging, counts, parameters."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from executors import simulated
from mlx.utils import tree_flatten, tree_map
from numpy.typing import NDArray

from egemma_mlx import blas, load
from egemma_mlx.checkpoint import tensor_shapes
from egemma_mlx.config import Config
from egemma_mlx.errors import EgemmaError
from egemma_mlx.kernels import cores
from egemma_mlx.kernels.approx import on_cpu
from egemma_mlx.media.image import Patches
from egemma_mlx.models.encoder import EmbeddingGemma2, merge
from egemma_mlx.packing import pack
from egemma_mlx.random_checkpoint import write_checkpoint

Array = NDArray[Any]

UNIT, STATES = 2e-6, 5e-5
IMAGES = ("text", "image")
# In patches; a soft token is 3×3 of them.
SIZES = [(6, 3), (3, 9), (12, 6), (3, 3), (9, 9)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("images") / "c", "tiny", modalities=IMAGES)


@pytest.fixture(scope="module")
def model(folder: Path) -> EmbeddingGemma2:
    return load(folder, modalities=IMAGES)[0]


@pytest.fixture(scope="module")
def compiled(folder: Path) -> EmbeddingGemma2:
    return load(folder, modalities=IMAGES, compiled=True)[0]


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    import oracle

    return oracle.transformers_model(folder)


def draw_image(across: int, down: int, seed: int = 0) -> Patches:
    random = np.random.default_rng([across, down, seed])
    y, x = np.divmod(np.arange(across * down, dtype=np.int32), np.int32(across))
    return Patches(random.random((across * down, 768), np.float32), np.stack([x, y], axis=1))


def soft_tokens(image: Patches) -> int:
    return len(image.pixels) // 9


def draw_text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(300, 2000, length).tolist()


class Batch:
    """Inputs of texts (a number: so many tokens) and images, laid out as transformers' processor does it."""

    def __init__(self, config: Config, *inputs: Sequence[int | Patches], side: str = "right") -> None:
        self.rows: list[list[int]] = []
        self.images: list[Patches] = []
        for parts in inputs:
            row = [2]
            for part in parts:
                if isinstance(part, int):
                    row += draw_text(part, len(self.rows))
                else:
                    row += [254, *[config.image_token_id] * soft_tokens(part), 255]
                    self.images.append(part)
            self.rows.append([*row, 1])
        width = max(map(len, self.rows))
        pads = [(0, width - len(row)) if side == "right" else (width - len(row), 0) for row in self.rows]
        self.ids = np.stack([np.pad(row, pad) for row, pad in zip(self.rows, pads, strict=True)]).astype(np.int32)
        self.mask = np.stack(
            [np.pad(np.ones(len(row), np.int32), pad) for row, pad in zip(self.rows, pads, strict=True)]
        )
        most = max((len(image.pixels) for image in self.images), default=0)
        self.pixels = np.zeros((len(self.images), most, 768), np.float32)
        self.places = np.full((len(self.images), most, 2), -1, np.int32)
        for index, (pixels, positions) in enumerate(self.images):
            self.pixels[index, : len(pixels)], self.places[index, : len(pixels)] = pixels, positions

    def into(self, model: EmbeddingGemma2, **changes: Any) -> Any:
        return model(mx.array(self.ids), **{**self.arguments(), **changes})

    def arguments(self) -> dict[str, Any]:
        return {
            "attention_mask": mx.array(self.mask),
            "pixel_values": mx.array(self.pixels),
            "image_position_ids": mx.array(self.places),
        }

    def expected(self, theirs: Any) -> tuple[Array, Array]:
        """transformers' token states and the unit vectors of their masked mean, taken in float64."""
        import torch

        with torch.no_grad():
            out = theirs(
                input_ids=torch.tensor(self.ids).long(),
                attention_mask=torch.tensor(self.mask).long(),
                pixel_values=torch.tensor(self.pixels),
                image_position_ids=torch.tensor(self.places).long(),
            )
        states = out.last_hidden_state.double().numpy() * self.mask[..., None]
        mean = states.sum(axis=1) / self.mask.sum(axis=1, keepdims=True)
        return states, mean / np.linalg.norm(mean, axis=1, keepdims=True)


def apart(a: Any, b: Any) -> float:
    assert np.shape(a) == np.shape(b)
    return float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())


def check(batch: Batch, model: EmbeddingGemma2, theirs: Any) -> None:
    states, vectors = batch.expected(theirs)
    output = batch.into(model)
    assert apart(output.text_embeds, vectors) <= UNIT
    assert apart(output.last_hidden_state, states) <= STATES


def mixed(config: Config, side: str = "right") -> Batch:
    """Texts alone, images alone, both in either order, several in one."""
    a, b, c, d, e = (draw_image(*size) for size in SIZES)
    return Batch(config, [5], [a], [3, b], [c, 12], [7, d, 2, e, a], [20], side=side)


# --- parity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_an_image_alone_equals_transformers(model: EmbeddingGemma2, theirs: Any, size: tuple[int, int]) -> None:
    check(Batch(model.config, [draw_image(*size)]), model, theirs)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_mixed_batch_equals_transformers(model: EmbeddingGemma2, theirs: Any, side: str) -> None:
    check(mixed(model.config, side), model, theirs)


def test_the_compiled_forward_equals_transformers(compiled: EmbeddingGemma2, theirs: Any) -> None:
    check(mixed(compiled.config), compiled, theirs)


def test_without_a_mask_it_is_the_whole_grid(model: EmbeddingGemma2, theirs: Any) -> None:
    batch = Batch(model.config, [4, draw_image(6, 3)], [4, draw_image(3, 6)])
    assert batch.mask.all()
    output = batch.into(model, attention_mask=None)
    assert apart(output.text_embeds, batch.expected(theirs)[1]) <= UNIT


def test_placeholders_that_the_mask_hides_take_their_soft_tokens_with_them(model: EmbeddingGemma2, theirs: Any) -> None:
    batch = Batch(model.config, [4, draw_image(9, 6), 3], [draw_image(6, 3)])
    hidden = np.flatnonzero(batch.ids[0] == model.config.image_token_id)[[0, 3]]
    batch.mask[0, hidden] = 0
    check(batch, model, theirs)


@pytest.mark.parametrize("kind", ["numpy", "lists", "float64", "bfloat16", "torch"])
def test_pixels_of_any_kind_mean_the_same(model: EmbeddingGemma2, kind: str) -> None:
    batch = Batch(model.config, [3, draw_image(6, 3)], [draw_image(3, 3)])
    batch.pixels = np.round(batch.pixels * 128) / 128  # exact in bfloat16
    expected = batch.into(model).text_embeds
    pixels, places = batch.pixels, batch.places
    if kind == "torch":
        torch = pytest.importorskip("torch")
        given: tuple[Any, Any] = torch.tensor(pixels), torch.tensor(places).long()
    else:
        given = {
            "numpy": (pixels, places.astype(np.int64)),
            "lists": (pixels.tolist(), places.tolist()),
            "float64": (pixels.astype(np.float64), places),
            "bfloat16": (mx.array(pixels).astype(mx.bfloat16), mx.array(places)),
        }[kind]
    assert apart(batch.into(model, pixel_values=given[0], image_position_ids=given[1]).text_embeds, expected) == 0


def test_a_batch_equals_its_inputs_alone(model: EmbeddingGemma2) -> None:
    a, b, c, d, e = (draw_image(*size) for size in SIZES)
    inputs: list[list[int | Patches]] = [[5], [a], [3, b], [c, 12], [7, d, 2, e, a]]
    together = np.array(Batch(model.config, *inputs).into(model).text_embeds)
    for index, parts in enumerate(inputs):
        blanks: list[list[int | Patches]] = [[1]] * index  # `draw_text` goes by the row
        alone = Batch(model.config, *blanks, parts)
        assert apart(alone.into(model).text_embeds[index], together[index]) <= UNIT


def test_images_matter_and_so_does_their_order(model: EmbeddingGemma2) -> None:
    a, b = draw_image(6, 3), draw_image(6, 3, seed=1)
    vectors = [np.array(Batch(model.config, [4, x, y]).into(model).text_embeds) for x, y in ((a, b), (b, a), (a, a))]
    assert min(apart(vectors[0], vectors[1]), apart(vectors[0], vectors[2])) > 1e-3


def test_without_images_placeholders_are_padding_rows_as_in_transformers(model: EmbeddingGemma2, theirs: Any) -> None:
    import torch

    batch = Batch(model.config, [4, draw_image(6, 3)])
    with torch.no_grad():
        states = theirs(input_ids=torch.tensor(batch.ids).long()).last_hidden_state.numpy()
    assert apart(model(mx.array(batch.ids)).last_hidden_state, states) <= STATES


def test_soft_tokens_equal_transformers(model: EmbeddingGemma2, theirs: Any) -> None:
    import torch

    batch = mixed(model.config)
    with torch.no_grad():
        features = theirs.get_image_features(torch.tensor(batch.pixels), torch.tensor(batch.places).long())
    expected = torch.cat(features.pooler_output).numpy()
    soft = model.embed_images(batch.images)
    assert soft.shape == (sum(map(soft_tokens, batch.images)), 64) and soft.dtype == mx.float32
    assert apart(soft, expected) <= 1e-5 * np.abs(expected).max()
    assert model.embed_images([]).shape == (0, 64)


@pytest.mark.skipif(not on_cpu(), reason="for CPUs")
def test_soft_tokens_of_several_cores_equal_transformers(
    folder: Path, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(cores, "_FEWEST", 8)
    meetings: list[int] = []
    monkeypatch.setattr(cores, "_Meeting", lambda count, kind=cores._Meeting: meetings.append(count) or kind(count))
    model = load(folder, modalities=IMAGES)[0]
    model.update(tree_map(lambda weight: weight * 1, model.parameters()))  # lazy, as an optimiser leaves it
    batch = mixed(model.config)
    with torch.no_grad():
        features = theirs.get_image_features(torch.tensor(batch.pixels), torch.tensor(batch.places).long())
    expected = torch.cat(features.pooler_output).numpy()
    before = blas.set_threads(2)
    try:
        soft = model.embed_images(batch.images)
    finally:
        if before is not None:
            blas.set_threads(before)
    assert meetings == [3]
    assert apart(soft, expected) <= 1e-5 * np.abs(expected).max()


def test_chunks_change_no_soft_token(model: EmbeddingGemma2, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [draw_image(*size) for size in SIZES * 2]
    together = model.embed_images(images)
    monkeypatch.setattr("egemma_mlx.models.vision._CHUNK", 40)
    assert apart(model.embed_images(images), together) <= 1e-5
    for image, start in ((images[0], 0), (images[1], 2)):
        alone = model.embed_images([image])
        assert apart(alone, together[start : start + len(alone)]) <= 1e-5


@pytest.mark.parametrize("precision", ["bfloat16"])
def test_bfloat16_is_close(folder: Path, model: EmbeddingGemma2, precision: Any) -> None:
    rounded = load(folder, modalities=IMAGES, precision=precision)[0]
    batch = mixed(model.config)
    cosines = (batch.into(rounded).text_embeds * batch.into(model).text_embeds).sum(axis=1)
    assert 0.999 <= cosines.min().item() < 1 - 1e-7


@simulated
def test_the_metal_kernels_agree_with_plain_operations(folder: Path, model: EmbeddingGemma2) -> None:
    metal = load(folder, modalities=IMAGES, backend="simulator")[0]
    batch = Batch(model.config, [3, draw_image(6, 3)], [draw_image(3, 3), 2])
    assert apart(batch.into(metal).text_embeds, batch.into(model).text_embeds) <= UNIT


@pytest.mark.slow
def test_full_size_equals_transformers(tmp_path: Path) -> None:
    import oracle

    folder = write_checkpoint(tmp_path / "c", "full", modalities=IMAGES)
    model = load(folder, modalities=IMAGES)[0]
    batch = Batch(model.config, [5, draw_image(15, 12), 3], [draw_image(6, 9), draw_image(3, 3)], [10])
    check(batch, model, oracle.transformers_model(folder))


# --- merging ---------------------------------------------------------------------------------------------------------


def test_merge_puts_soft_tokens_into_their_rows_in_order() -> None:
    x0, soft = mx.zeros((6, 2)), mx.array([[1.0, 10], [2, 20], [3, 30]])
    here = mx.array([0, 1, 0, 1, 1, 0]) != 0
    assert merge(x0, here, soft)[:, 0].tolist() == [0, 1, 0, 2, 3, 0]
    assert merge(x0, here, mx.pad(soft, [(0, 3), (0, 0)]))[:, 1].tolist() == [0, 10, 0, 20, 30, 0]


def test_a_batch_with_soft_tokens_is_traced_without_reading_ids(
    model: EmbeddingGemma2, compiled: EmbeddingGemma2
) -> None:
    image = draw_image(6, 3)
    packed = pack([np.array(row, np.int32) for row in Batch(model.config, [4, image]).rows])
    for one in (model, compiled):
        nodes: list[dict[str, Any]] = []

        def pooled(tokens: mx.array, soft: mx.array, one: EmbeddingGemma2 = one) -> mx.array:
            return one.pooled(replace(packed, tokens=tokens), soft)

        mx.export_function(nodes.append, pooled, packed.tokens, model.embed_images([image]))
        assert any(node["type"] == "primitive" for node in nodes)


class Counting(EmbeddingGemma2):
    traces = 0

    def _traced(self, *arguments: Any) -> Any:
        self.traces += 1
        return super()._traced(*arguments)


def test_images_add_one_trace_a_bucket(model: EmbeddingGemma2) -> None:
    counting = Counting(model.config, compiled=True)
    for length, soft in ((60, 0), (50, 0), (40, 3), (60, 30), (45, 31), (33, 1)):
        ids = np.array([model.config.image_token_id] * soft + [5] * (length - soft), np.int32)
        counting.pooled(pack([ids]), mx.zeros((soft, 64)) if soft else None)  # lazy: nothing is computed
    assert counting.traces == 2


def test_a_text_has_the_same_bits_as_without_the_tower(folder: Path, model: EmbeddingGemma2) -> None:
    text = load(folder)[0]
    assert text.vision_tower is None
    batch = Batch(model.config, [5], [40], [12])
    ids, mask = mx.array(batch.ids), mx.array(batch.mask)
    for ours, expected in zip(model(ids, mask), text(ids, mask), strict=True):
        assert mx.array_equal(ours, expected)
    packed = pack([np.array(row, np.int32) for row in batch.rows])
    assert mx.array_equal(model.pooled(packed), text.pooled(packed))


# --- parameters ------------------------------------------------------------------------------------------------------


def test_parameters_have_the_checkpoints_names_and_shapes(model: EmbeddingGemma2) -> None:
    tree = {name: tuple(value.shape) for name, value in tree_flatten(model.parameters())}
    assert tree == tensor_shapes(model.config, IMAGES)
    assert model.vision_tower.patch_embedder.position_embedding_table.dtype == mx.bfloat16  # widened row by row


def test_images_take_440_million_parameters_and_not_740(tmp_path: Path) -> None:
    from egemma_mlx.random_checkpoint import _config

    config = Config.from_dict(_config("full", "bfloat16", {}))
    shapes = {
        towers: {
            name: value.shape for name, value in tree_flatten(EmbeddingGemma2(config, modalities=towers).parameters())
        }
        for towers in (("text",), IMAGES)
    }  # lazy: no parameter is made
    counts = {towers: sum(map(math.prod, tree.values())) for towers, tree in shapes.items()}
    assert shapes[IMAGES] == tensor_shapes(config, IMAGES)
    assert counts[("text",)] == pytest.approx(271e6, rel=0.01)
    assert counts[IMAGES] == pytest.approx(440e6, rel=0.01)
    whole = sum(map(math.prod, tensor_shapes(config, ("text", "image", "audio")).values()))
    assert whole == pytest.approx(744e6, rel=0.01)


def test_audio_is_refused(folder: Path, tmp_path: Path) -> None:
    every = write_checkpoint(tmp_path / "c", "tiny")
    with pytest.raises(EgemmaError, match="audio is not in this version"):
        load(every, modalities=("text", "image", "audio"))
    assert load(every, modalities=("image",))[0].vision_tower is not None  # text is always among them


# --- bad input -------------------------------------------------------------------------------------------------------


def test_counts_that_do_not_match_say_which_input_has_how_many(model: EmbeddingGemma2) -> None:
    a, b, c = draw_image(6, 3), draw_image(9, 3), draw_image(3, 3)
    batch = Batch(model.config, [2, a], [b, c], [4])

    def swapped(*images: Patches) -> dict[str, Any]:
        other = Batch(model.config, list(images))
        return {"pixel_values": other.pixels, "image_position_ids": other.places}

    for images, message in (
        ((a, c, b), None),  # the same sum in the same input
        ((b, a, c), r"input 0 has 2 image placeholders but the next images \(3 soft tokens\) have 3"),
        ((a, b), r"input 1 has 4 image placeholders but the next images \(3 soft tokens\) have 3"),
        ((a, b, a), r"input 1 has 4 image placeholders but the next images \(3 \+ 2 soft tokens\) have 5"),
        ((a, b, c, a), r"3 inputs have 6 image placeholders in all, none for the last 1 of 4 images \(2 soft"),
    ):
        if message is None:
            batch.into(model, **swapped(*images))
        else:
            with pytest.raises(EgemmaError, match=message):
                batch.into(model, **swapped(*images))
    with pytest.raises(EgemmaError, match=r"input 0 has 2 .* \(0 soft tokens\) have 0"):
        batch.into(model, pixel_values=np.zeros((0, 9, 768)), image_position_ids=np.zeros((0, 9, 2), np.int32))


def positions(*values: tuple[int, int]) -> Array:
    return np.array([values], np.int32)


SQUARE = tuple((x, y) for y in range(3) for x in range(3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pixel_values": None}, "expected pixel_values beside image_position_ids but got None"),
        ({"image_position_ids": None}, "expected image_position_ids beside pixel_values but got None"),
        ({"pixel_values": np.zeros((9, 768))}, r"pixel_values of shape \[images, patches, 768\] but got \(9, 768\)"),
        ({"pixel_values": np.zeros((1, 9, 300))}, r"pixel_values of shape .* but got \(1, 9, 300\)"),
        ({"pixel_values": "photo.jpg"}, "pixel_values to be an array of numbers but got"),
        ({"image_position_ids": np.zeros((1, 8, 2), np.int32)}, r"image_position_ids of shape \(1, 9, 2\)"),
        ({"image_position_ids": np.zeros((1, 9, 2))}, "image_position_ids .* an integer dtype but got float64"),
        ({"image_position_ids": positions(*SQUARE[:8], (-1, -1))}, "image 0: .* a multiple of 9 patches but got 8"),
        ({"image_position_ids": positions(*[(-1, -1)] * 9)}, "image 0: .* a multiple of 9 patches but got 0"),
        ({"image_position_ids": positions(*SQUARE[:8], (-2, 0))}, r"image 0: expected .* in 0…10239 but got -2…2"),
        ({"image_position_ids": positions(*SQUARE[:8], (10240, 0))}, r"in 0…10239 but got 0…10240"),
        ({"image_position_ids": positions(*SQUARE[:8], (3, 0))}, "each soft token"),
        ({"segments": [[0, 13]], "attention_mask": None}, "segments or pixel_values but got both"),
    ],
)  # fmt: skip
def test_bad_images_are_one_error_that_names_the_argument(
    model: EmbeddingGemma2, changes: dict[str, Any], message: str
) -> None:
    batch = Batch(model.config, [4, draw_image(3, 3)])
    with pytest.raises(EgemmaError, match=message):
        batch.into(model, **changes)


def test_images_without_the_tower_say_how_to_load_it(folder: Path, tiny_text: Path) -> None:
    text = load(folder)[0]
    batch = Batch(text.config, [draw_image(3, 3)])
    with pytest.raises(EgemmaError, match=r'expected modalities=\("text", "image"\) at load for images'):
        batch.into(text)
    with pytest.raises(EgemmaError, match=r"config\.json has no vision tower"):
        batch.into(load(tiny_text)[0])
    with pytest.raises(EgemmaError, match="image was asked for"):
        load(tiny_text, modalities=IMAGES)
