"""EmbeddingGemma 2 as one `mlx.nn.Module`: ids and a mask, or a packed batch, to vectors."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx import nn

from egemma_mlx import packing
from egemma_mlx.config import Config
from egemma_mlx.errors import EgemmaError
from egemma_mlx.kernels import OPS, Kernels
from egemma_mlx.kernels.approx import on_cpu
from egemma_mlx.kernels.qkv import Rope
from egemma_mlx.models.text import RopeTables, TextModel, project
from egemma_mlx.packing import Grid, Packed


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
    """

    def __init__(self, config: Config, kernels: Kernels = OPS, compiled: bool | None = None) -> None:
        super().__init__()
        self.config = config
        self.kernels = kernels
        self.compiled = _compiles(kernels) if compiled is None else compiled
        self.language_model = TextModel(config.text)
        self._rope = RopeTables(config.text)
        self._compiled = mx.compile(self._traced, inputs=[self.language_model.state])

    def __call__(
        self,
        input_ids: mx.array,
        attention_mask: mx.array | None = None,
        *,
        segments: mx.array | np.ndarray | None = None,
        positions: mx.array | None = None,
        validate: bool = False,
    ) -> EmbeddingOutput:
        """Embed a padded batch, or a packed one.

        Nothing is evaluated. Without a mask nothing is read on the host, with one the mask alone is, before the
        forward; under `mx.compile` or `mx.export_function`, and with `segments`, nothing is.

        Args:
            input_ids: [B, L] integer, or [T] with `segments`.
            attention_mask: [B, L], nonzero where there is a token. Padding may be on either side, and holes are
                legal: RoPE and the window go by the column.
            segments: [S, 2] integer (start, length) of the texts in a packed row [T], starts ascending.
            positions: [T] integer, for RoPE and the window, ascending in each segment and below the model's longest
                input (8,192); with `segments` only. Default: 0…n−1 in each segment.
            validate: also check contents (ids in the vocabulary, no NaN in the mask), which reads them on the host.

        Raises:
            EgemmaError: shapes or dtypes that do not fit; with `validate`, contents.
        """
        ids = _integers(input_ids, "input_ids")
        if validate:
            _check_ids(ids, self.config.text.vocab_size)
        if segments is not None:
            return self._embed_row(ids, attention_mask, segments, positions)
        if positions is not None:
            raise EgemmaError("[model] expected segments beside positions but got positions alone")
        if ids.ndim != 2:
            raise EgemmaError(f"[model] expected input_ids of shape [B, L] but got {ids.shape}")
        if attention_mask is None:
            return self._embed_full_grid(ids)
        mask = _mask(attention_mask, ids)
        if validate and bool(mx.isnan(mask.astype(mx.float32)).any()):
            raise EgemmaError("[model] expected attention_mask of 0 and 1 but it holds NaN")
        return self._embed_masked_grid(ids, mask)

    def pooled(self, packed: Packed) -> mx.array:
        """Packed batch → pooled, projected vectors [S, embedding_dim] float32, not normalised."""
        return self._run(packed)[1]

    def _embed_full_grid(self, ids: mx.array) -> EmbeddingOutput:
        if ids.size == 0:
            return self._nothing(ids)
        states, pooled = self._run(packing.from_grid(ids))
        return self._output(self._project(states[: ids.size]).reshape(*ids.shape, -1), pooled)

    def _embed_masked_grid(self, ids: mx.array, mask: mx.array) -> EmbeddingOutput:
        if ids.size == 0:
            return self._nothing(ids)
        try:
            host_mask = np.array(mask)
        except ValueError:  # being traced
            packed = packing.from_traced_grid(ids, mask)
            states, pooled = self._run(packed)
            grid = self._project(states[: ids.size]).reshape(*ids.shape, -1)
            return self._output(mx.where((mask != 0)[..., None], grid, 0.0), pooled)
        packed, rows = packing.from_masked_grid(ids, host_mask)
        states, pooled = self._run(packed)
        return self._output(packing.unpack(self._project(states), rows), pooled)

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
        states, pooled = self._run(packed)
        hidden = mx.where((packed.positions >= 0)[:, None], self._project(states[: ids.size]), 0.0)
        return self._output(hidden, pooled)

    def _output(self, last_hidden_state: mx.array, pooled: mx.array) -> EmbeddingOutput:
        return EmbeddingOutput(last_hidden_state, normalize(pooled), pooled)

    def _nothing(self, ids: mx.array) -> EmbeddingOutput:
        dim = self.config.text.embedding_dim
        vectors = mx.zeros((ids.shape[0], dim))
        return EmbeddingOutput(mx.zeros((*ids.shape, dim)), vectors, vectors)

    def _project(self, states: mx.array) -> mx.array:
        text = self.language_model
        kernels = self.kernels.exact or self.kernels
        normed = kernels.rms_norm(states, text.norm.weight, eps=text.config.rms_norm_eps)
        return project(kernels, normed, text.embedding_projection)[0]

    def _run(self, packed: Packed) -> tuple[mx.array, mx.array]:
        """States [≥ T, hidden] before the final norm, and pooled, projected vectors [S, embedding_dim]."""
        slots = packed.segments.shape[0]
        tables, kernels = self._rope(packed.reach), self.kernels.of(packed)
        if self.compiled:
            batch = packed.padded(*packing.bucket(packed.rows, slots))
            batch = (batch.gridded() if self.kernels.grids else batch).anonymous()
            grid = () if batch.grid is None else tuple(batch.grid)
            exact = kernels is self.kernels.exact
            arrays = (batch.tokens, batch.positions, batch.segments)
            states, pooled = self._compiled(*arrays, batch.span, grid, tables, exact)
        else:
            # Rows in eights for BLAS; at least eight, for a batch without a token.
            batch = packed.padded(max(-(-packed.rows // 8), 1) * 8, slots)
            states, pooled = self._forward(batch, tables, kernels)
        return states, pooled[:slots]

    def _forward(self, packed: Packed, tables: list[Rope], kernels: Kernels) -> tuple[mx.array, mx.array]:
        text, eps = self.language_model, self.config.text.rms_norm_eps
        tokens = packed.tokens
        for placeholder in self.config.placeholder_ids:  # where no medium came, the row of padding, as in the reference
            tokens = mx.where(tokens == placeholder, self.config.text.pad_token_id, tokens)
        states = text(text.embed(tokens), packed, tables, kernels)
        mean = kernels.pool(states, text.norm.weight, packed, eps=eps)
        return states, project(kernels, mean, text.embedding_projection)[0]

    def _traced(
        self,
        tokens: mx.array,
        positions: mx.array,
        segments: mx.array,
        span: int,
        grid: tuple[int, ...],
        tables: list[Rope],
        exact: bool,
    ) -> tuple[mx.array, mx.array]:
        """`_forward` on what a trace may depend on: arrays, the span and grid that fix sizes, and which kernels."""
        packed = Packed(tokens, positions, segments, None, False, span, 0, Grid(*grid) if grid else None)
        return self._forward(packed, tables, (self.kernels.exact or self.kernels) if exact else self.kernels)


def _compiles(kernels: Kernels) -> bool:
    """The simulator runs a kernel when it is called, so there is no graph to compile."""
    return not on_cpu() and kernels.name != "simulator"


def normalize(x: mx.array) -> mx.array:
    """x / max(‖x‖, 1e-12) over the last axis, float32, as torch.nn.functional.normalize; 0 stays 0."""
    return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


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
