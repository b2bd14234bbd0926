"""EmbeddingGemma 2 as one `mlx.nn.Module`: ids and a mask, or a packed batch, and images, to vectors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx import nn

from egemma_mlx import packing
from egemma_mlx.config import Config
from egemma_mlx.errors import EgemmaError
from egemma_mlx.kernels import OPS, Kernels, cores
from egemma_mlx.kernels.approx import on_cpu
from egemma_mlx.kernels.qkv import Rope
from egemma_mlx.media.image import Patches
from egemma_mlx.models import pixels
from egemma_mlx.models.text import RopeTables, TextModel, project, project_unit
from egemma_mlx.models.vision import VisionEmbedder, VisionTower, chunks, pack_images
from egemma_mlx.packing import Grid, Packed

Outputs = tuple[mx.array, mx.array, mx.array]


class EmbeddingOutput(NamedTuple):
    """What `model(...)` returns; all float32 and lazy.

    Attributes:
        last_hidden_state: [B, L, embedding_dim], projected token states, 0 at padding ([T, …] for a packed batch).
            Costs nothing unless it is read.
        text_embeds: [B, embedding_dim], unit vectors; zeros for a row without tokens.
        pooler_output: [B, embedding_dim], pooled and projected, not normalised.
    """

    last_hidden_state: mx.array
    text_embeds: mx.array
    pooler_output: mx.array


class EmbeddingGemma2(nn.Module):
    """The model, its parameters under the checkpoint's names.

    Args:
        config: of the checkpoint.
        kernels: the implementation of the kernel functions.
        compiled: run the whole forward under `mx.compile`, with T and S in buckets. None: on a GPU. (MLX's CPU
            compiler calls g++ for every fused kernel; there, leaf functions alone are compiled.)
        modalities: with "image", the vision tower is part of the model.
    """

    def __init__(
        self,
        config: Config,
        kernels: Kernels = OPS,
        compiled: bool | None = None,
        modalities: Iterable[str] = ("text",),
    ) -> None:
        super().__init__()
        self.config = config
        self.kernels = kernels
        self.compiled = _compiles(kernels) if compiled is None else compiled
        self.language_model = TextModel(config.text)
        self.vision_tower = self.embed_vision = None
        if "image" in modalities and config.vision is not None:
            self.vision_tower = VisionTower(config.vision)
            self.embed_vision = VisionEmbedder(config.vision, config.text.hidden_size)
            self._patch_rope = self.vision_tower.rope_table()
        # Layers drew their first weights, unevaluated: key upon key, a chain that MLX walks by recursion and that every
        # further model would lengthen.
        mx.eval(mx.random.state)
        self._rope = RopeTables(config.text)
        self._compiled = mx.compile(self._traced, inputs=[self.language_model.state])

    def __call__(
        self,
        input_ids: mx.array,
        attention_mask: mx.array | None = None,
        *,
        segments: mx.array | np.ndarray | None = None,
        positions: mx.array | None = None,
        pixel_values: Any = None,
        image_position_ids: Any = None,
        validate: bool = False,
    ) -> EmbeddingOutput:
        """Embed a padded batch, or a packed one.

        Nothing is evaluated. Without a mask nothing is read on the host, with one the mask alone is, before the
        forward; under `mx.compile` or `mx.export_function`, and with `segments`, nothing is. With images, ids and
        image positions are read too, and the soft tokens evaluated (`embed_images`).

        Args:
            input_ids: [B, L] integer, or [T] with `segments`.
            attention_mask: [B, L], nonzero where there is a token. Padding may be on either side, and holes are
                legal: RoPE and the window go by the column.
            segments: [S, 2] integer (start, length) of the texts in a packed row [T], starts ascending.
            positions: [T] integer, for RoPE and the window, ascending in each segment and below the model's longest
                input (8,192); with `segments` only. Default: 0…n−1 in each segment.
            pixel_values: [images, max_patches, 3·patch²] in 0…1, as transformers' processor makes them: the patches of
                all inputs' images in order. Their soft tokens replace the rows of the image placeholders in
                `input_ids`. (Placeholders without images are rows of padding.)
            image_position_ids: [images, max_patches, 2] integer (x, y) of each patch, −1 for padding.
            validate: also check contents (ids in the vocabulary, no NaN in the mask), which reads them on the host.

        Raises:
            EgemmaError: shapes or dtypes that do not fit; images without a vision tower, or of other counts than an
                input has placeholders for; with `validate`, contents.
        """
        ids = _integers(input_ids, "input_ids")
        if validate:
            _check_ids(ids, self.config.text.vocab_size)
        imaged = pixel_values is not None or image_position_ids is not None
        if segments is not None:
            if imaged:
                raise EgemmaError("[model] expected segments or pixel_values but got both")
            return self._embed_row(ids, attention_mask, segments, positions)
        if positions is not None:
            raise EgemmaError("[model] expected segments beside positions but got positions alone")
        if ids.ndim != 2:
            raise EgemmaError(f"[model] expected input_ids of shape [B, L] but got {ids.shape}")
        mask = None if attention_mask is None else _mask(attention_mask, ids)
        if mask is not None and validate and bool(mx.isnan(mask.astype(mx.float32)).any()):
            raise EgemmaError("[model] expected attention_mask of 0 and 1 but it holds NaN")
        soft = self._soft_tokens(ids, mask, pixel_values, image_position_ids) if imaged else None
        return self._embed_full_grid(ids, soft) if mask is None else self._embed_masked_grid(ids, mask, soft)

    def pooled(self, packed: Packed, soft: mx.array | None = None) -> mx.array:
        """Packed batch → pooled, projected vectors [S, embedding_dim] float32, not normalised.

        Args:
            soft: [N, hidden] from `embed_images`, for the N image placeholders of the batch in order. None: they are
                rows of padding.
        """
        return self._run(packed, soft)[1]

    def embed_images(self, images: Sequence[Patches]) -> mx.array:
        """Images → their soft tokens [Σ n/pooling², hidden] float32, in order.

        Evaluated part by part, since memory goes with the patches of one pass.

        Raises:
            EgemmaError: the model was loaded without its vision tower.
        """
        if self.vision_tower is None or self.embed_vision is None or self.config.vision is None:
            raise EgemmaError('[model] expected modalities=("text", "image") at load for images but got text alone')
        mx.eval(self.vision_tower.parameters())  # which threads may share then
        soft = [mx.zeros((0, self.config.text.hidden_size))]
        for part in chunks([len(image.pixels) for image in images]):
            packed = pack_images(images[part], self.config.vision.pooling_kernel_size)
            states = self.vision_tower(packed, self._patch_rope, self.kernels, cores.apart)
            soft.append(self.embed_vision(states, self.kernels))
            mx.eval(soft[-1])
        return mx.concatenate(soft)

    def _soft_tokens(
        self, ids: mx.array, mask: mx.array | None, pixel_values: Any, image_position_ids: Any
    ) -> mx.array | None:
        """The soft tokens of the placeholders that the mask shows."""
        if self.config.vision is None:
            raise EgemmaError("[model] expected no pixel_values: config.json has no vision tower")
        images = pixels.unpadded(pixel_values, image_position_ids, self.config.vision)
        here = np.array(ids) == self.config.image_token_id
        pooled = self.config.vision.pooling_kernel_size**2
        pixels.check_placeholders(here.sum(axis=1).tolist(), [len(image.pixels) // pooled for image in images])
        soft = self.embed_images(images)
        if mask is not None:
            soft = soft[mx.array(np.flatnonzero(np.array(mask)[here]))]
        return soft if len(soft) else None

    def _embed_full_grid(self, ids: mx.array, soft: mx.array | None) -> EmbeddingOutput:
        if ids.size == 0:
            return self._nothing(ids)
        states, pooled, unit = self._run(packing.from_grid(ids), soft)
        return EmbeddingOutput(self._project(states[: ids.size]).reshape(*ids.shape, -1), unit, pooled)

    def _embed_masked_grid(self, ids: mx.array, mask: mx.array, soft: mx.array | None) -> EmbeddingOutput:
        if ids.size == 0:
            return self._nothing(ids)
        try:
            host_mask = np.array(mask)
        except ValueError:  # being traced
            packed = packing.from_traced_grid(ids, mask)
            states, pooled, unit = self._run(packed)
            grid = self._project(states[: ids.size]).reshape(*ids.shape, -1)
            return EmbeddingOutput(mx.where((mask != 0)[..., None], grid, 0.0), unit, pooled)
        packed, rows = packing.from_masked_grid(ids, host_mask)
        states, pooled, unit = self._run(packed, soft)
        return EmbeddingOutput(packing.unpack(self._project(states), rows), unit, pooled)

    def _embed_row(
        self,
        ids: mx.array,
        attention_mask: mx.array | None,
        segments: mx.array | np.ndarray,
        positions: mx.array | None,
    ) -> EmbeddingOutput:
        if attention_mask is not None:
            raise EgemmaError("[model] expected segments or attention_mask but got both")
        if ids.ndim != 1 or ids.size == 0:
            raise EgemmaError(f"[model] expected input_ids of shape [T] beside segments but got {ids.shape}")
        segments = _segments(segments, ids.size)
        if positions is not None:
            positions = _integers(positions, "positions")
            if positions.shape != ids.shape:
                raise EgemmaError(f"[model] expected positions of shape {ids.shape} but got {positions.shape}")
        packed = packing.from_segments(ids, segments, positions, self.config.text.max_tokens)
        states, pooled, unit = self._run(packed)
        hidden = mx.where((packed.positions >= 0)[:, None], self._project(states[: ids.size]), 0.0)
        return EmbeddingOutput(hidden, unit, pooled)

    def _nothing(self, ids: mx.array) -> EmbeddingOutput:
        dim = self.config.text.embedding_dim
        vectors = mx.zeros((ids.shape[0], dim))
        return EmbeddingOutput(mx.zeros((*ids.shape, dim)), vectors, vectors)

    def _project(self, states: mx.array) -> mx.array:
        text = self.language_model
        kernels = self.kernels.exact or self.kernels
        normed = kernels.rms_norm(states, text.norm.weight, eps=text.config.rms_norm_eps)
        return project(kernels, normed, text.embedding_projection)[0]

    def _run(self, packed: Packed, soft: mx.array | None = None) -> Outputs:
        """States [≥ T, hidden] before the final norm, and pooled, projected vectors [S, embedding_dim] as they are and
        of length 1."""
        slots = packed.segments.shape[0]
        tables, kernels = self._rope(packed.reach), self.kernels.of(packed)
        if self.compiled:
            batch = packed.padded(*packing.bucket(packed.rows, slots))
            batch = (batch.gridded() if self.kernels.grids else batch).anonymous()
            grid = () if batch.grid is None else tuple(batch.grid)
            # As many rows as the batch has, so that images add one trace a bucket.
            grown = [] if soft is None else [mx.pad(soft, [(0, batch.rows - len(soft)), (0, 0)])]
            arrays, exact = (batch.tokens, batch.positions, batch.segments), kernels is self.kernels.exact
            states, pooled, unit = self._compiled(*arrays, batch.span, grid, tables, exact, grown)
        else:
            # Rows in eights for BLAS; at least eight, for a batch without a token.
            batch = packed.padded(max(-(-packed.rows // 8), 1) * 8, slots)
            states, pooled, unit = self._forward(batch, tables, kernels, soft)
        return states, pooled[:slots], unit[:slots]

    def _forward(self, packed: Packed, tables: list[Rope], kernels: Kernels, soft: mx.array | None) -> Outputs:
        text, eps = self.language_model, self.config.text.rms_norm_eps
        tokens = packed.tokens
        for placeholder in self.config.placeholder_ids:  # where no medium came, the row of padding, as in the reference
            tokens = mx.where(tokens == placeholder, self.config.text.pad_token_id, tokens)
        x0 = text.embed(tokens)
        if soft is not None:
            x0 = merge(x0, packed.tokens == self.config.image_token_id, soft)
        states = text(x0, packed, tables, kernels)
        mean = kernels.pool(states, text.norm.weight, packed, eps=eps)
        return states, *project_unit(kernels, mean, text.embedding_projection)

    def _traced(
        self,
        tokens: mx.array,
        positions: mx.array,
        segments: mx.array,
        span: int,
        grid: tuple[int, ...],
        tables: list[Rope],
        exact: bool,
        soft: list[mx.array],
    ) -> Outputs:
        """`_forward` on what a trace may depend on: arrays, the span and grid that fix sizes, and which kernels."""
        packed = Packed(tokens, positions, segments, None, False, span, 0, Grid(*grid) if grid else None)
        kernels = (self.kernels.exact or self.kernels) if exact else self.kernels
        return self._forward(packed, tables, kernels, soft[0] if soft else None)


def merge(x0: mx.array, here: mx.array, soft: mx.array) -> mx.array:
    """x0 [T, hidden] with soft [N, hidden] in the rows where `here` [T] holds, in order."""
    index = mx.cumsum(here.astype(mx.int32)) - 1
    return mx.where(here[:, None], soft[mx.maximum(index, 0)], x0)


def _compiles(kernels: Kernels) -> bool:
    """The simulator runs a kernel when it is called, so there is no graph to compile."""
    return not on_cpu() and kernels.name != "simulator"


def _array(value: Any, name: str) -> mx.array | np.ndarray:
    """An `mx.array` as it is, anything else as a numpy array of numbers."""
    if isinstance(value, mx.array):
        return value
    try:
        array = np.asarray(value)
    except ValueError:
        raise EgemmaError(f"[model] expected {name} to be an array but got rows of different lengths") from None
    if array.dtype.kind not in "biuf":
        raise EgemmaError(f"[model] expected {name} to be an array of numbers but got {type(value).__name__}")
    return array


def _integers(value: Any, name: str) -> mx.array:
    array = _array(value, name)
    array = array if isinstance(array, mx.array) else mx.array(array)
    if not mx.issubdtype(array.dtype, mx.integer):
        raise EgemmaError(f"[model] expected {name} of an integer dtype but got {array.dtype}")
    return array


def _mask(value: Any, ids: mx.array) -> mx.array:
    array = _array(value, "attention_mask")
    mask = array if isinstance(array, mx.array) else mx.array(array)
    if mask.shape != ids.shape:
        raise EgemmaError(f"[model] expected attention_mask of shape {ids.shape} but got {mask.shape}")
    if mask.dtype == mx.complex64:
        raise EgemmaError(f"[model] expected attention_mask of a boolean or real dtype but got {mask.dtype}")
    return mask


def _segments(value: Any, rows: int) -> mx.array | np.ndarray:
    table = _array(value, "segments")
    if table.ndim != 2 or table.shape[1] != 2:
        raise EgemmaError(f"[model] expected segments of shape [S, 2] but got {tuple(table.shape)}")
    if isinstance(table, mx.array):
        return _integers(table, "segments")
    if table.dtype.kind not in "iu":
        raise EgemmaError(f"[model] expected segments of an integer dtype but got {table.dtype}")
    starts, ends = table[:, 0], table.sum(axis=1)
    if (table < 0).any() or (ends > rows).any() or (starts[1:] < ends[:-1]).any():
        raise EgemmaError(f"[model] expected segments one after another within {rows} rows but got {table.tolist()}")
    return table


def _check_ids(ids: mx.array, vocab_size: int) -> None:
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        raise EgemmaError(f"[model] expected input_ids in 0…{vocab_size - 1} but got {int(ids.min())}…{int(ids.max())}")
