"""The vision tower: patches of images, packed end to end, to soft tokens of the text model.

    h₀ = 2·(pixels − ½)·Wᵀ + X[x] + Y[y]            16 layers of attention inside each image, and gated MLP
    soft = mean of h over k × k patches · √hidden    rms, and the projection to the text model's width

Read from the bottom: `VisionTower.__call__` is the forward. Parameters have the checkpoint's names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx import nn

from egemma_mlx.config import VisionConfig
from egemma_mlx.errors import EgemmaError
from egemma_mlx.kernels import Kernels, cores
from egemma_mlx.kernels.qkv import Rope, rope_table
from egemma_mlx.models.text import project, project_add_norm
from egemma_mlx.packing import Packed, pack

if TYPE_CHECKING:
    from egemma_mlx.media.image import Patches

_CHUNK = 2560
"""Patches of one pass: an image of 280 soft tokens, or several smaller ones. It takes 0.24 GB beside its weights."""


# --- packed images ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedImages:
    """Images end to end, without padding between them.

    Attributes:
        pixels: [P, 3·patch²] float32 in 0…1.
        positions: [P, 2] int32, (x, y) of each patch in its image.
        rows: the batch as attention sees it, an image a segment (its tokens mean nothing).
        pool: [N, k²] int32, the patches of each soft token.
    """

    pixels: mx.array
    positions: mx.array
    rows: Packed
    pool: mx.array


def pack_images(images: Sequence[Patches], pooling: int) -> PackedImages:
    """Lay images end to end.

    Args:
        pooling: k, whose k × k patches are a soft token: (x // k, y // k), row by row.

    Raises:
        EgemmaError: patches of an image that do not fill k × k squares.
    """
    counts = [len(image.pixels) for image in images]
    starts = np.cumsum([0, *counts])
    pools = [start + _pool(image.positions, pooling) for start, image in zip(starts, images, strict=False)]
    return PackedImages(
        pixels=mx.array(np.concatenate([image.pixels for image in images])),
        positions=mx.array(np.concatenate([image.positions for image in images])),
        rows=pack([np.zeros(count, np.int32) for count in counts]),
        pool=mx.array(np.concatenate(pools).astype(np.int32)),
    )


def chunks(counts: Sequence[int]) -> Iterator[slice]:
    """Cut images of so many patches each, in order, into passes of bounded memory; a larger image is a pass of its
    own."""
    start = total = 0
    for index, count in enumerate(counts):
        if total and total + count > _CHUNK:
            yield slice(start, index)
            start, total = index, 0
        total += count
    if total:
        yield slice(start, len(counts))


def _pool(positions: np.ndarray, pooling: int) -> np.ndarray:
    """[N, k²]: the patches of each soft token of one image, wherever in the image's rows they are."""
    squares = positions // pooling
    token = squares[:, 0] + (squares[:, 0].max() + 1) * squares[:, 1]
    sizes = np.bincount(token)
    if (sizes != pooling**2).any():
        raise EgemmaError(
            f"[vision] expected each soft token to have {pooling}×{pooling} patches but got {sizes.min()}…{sizes.max()}"
        )
    return np.argsort(token, kind="stable").reshape(-1, pooling**2)


# --- layers ----------------------------------------------------------------------------------------------------------


class ClippableLinear(nn.Module):
    """x·wᵀ, or clip(clip(x)·wᵀ) where the checkpoint has limits; an infinite one clips nothing."""

    def __init__(self, inputs: int, outputs: int, clipped: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.clipped = clipped
        if clipped:
            self.input_min = self.output_min = mx.array(-math.inf)
            self.input_max = self.output_max = mx.array(math.inf)

    def __call__(self, x: mx.array, kernels: Kernels) -> mx.array:
        if not self.clipped:
            return project(kernels, x, self.linear)[0]
        (y,) = project(kernels, mx.clip(x, self.input_min, self.input_max), self.linear)
        return mx.clip(y, self.output_min, self.output_max)


class Attention(nn.Module):
    """Attention up to its output projection, which ends the residual block."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        hidden, clipped = config.hidden_size, config.use_clipped_linears
        q_width, kv_width = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = ClippableLinear(hidden, q_width, clipped)
        self.k_proj = ClippableLinear(hidden, kv_width, clipped)
        self.v_proj = ClippableLinear(hidden, kv_width, clipped)
        self.o_proj = ClippableLinear(q_width, hidden, clipped)
        self.q_norm = nn.RMSNorm(config.head_dim)
        self.k_norm = nn.RMSNorm(config.head_dim)

    def __call__(self, x: mx.array, kernels: Kernels, angles: Any, plan: Any) -> mx.array:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        if self.q_proj.clipped:
            q, k, v = (layer(x, kernels) for layer in layers)
        else:
            q, k, v = project(kernels, x, *(layer.linear for layer in layers))
        q, k, v = kernels.qkv_prep(
            q, k, v, self.q_norm.weight, self.k_norm.weight, angles, head_dim=self.head_dim, eps=self.eps
        )
        return kernels.attention(q, k, v, plan)


class MLP(nn.Module):
    """gelu(gate(x))·up(x), which the down projection of the residual block's end takes."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        hidden, inner, clipped = config.hidden_size, config.intermediate_size, config.use_clipped_linears
        self.gate_proj = ClippableLinear(hidden, inner, clipped)
        self.up_proj = ClippableLinear(hidden, inner, clipped)
        self.down_proj = ClippableLinear(inner, hidden, clipped)

    def __call__(self, x: mx.array, kernels: Kernels) -> mx.array:
        gate, up = self.gate_proj, self.up_proj
        if not gate.clipped and type(gate.linear) is type(up.linear) is nn.Linear:
            return kernels.gated(x, gate.linear.weight, up.linear.weight)
        return kernels.gelu_mul(gate(x, kernels), up(x, kernels))


class Layer(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size)
        self.pre_feedforward_layernorm = nn.RMSNorm(config.hidden_size)
        self.post_feedforward_layernorm = nn.RMSNorm(config.hidden_size)

    def __call__(
        self, h: mx.array, x: mx.array, next_w: mx.array | None, kernels: Kernels, angles: Any, plan: Any
    ) -> tuple[mx.array, Any]:
        """The residual stream h and its norm x → the same after this layer, x normed by `next_w`."""
        attended = self.self_attn(x, kernels, angles, plan)
        next_norm = self.pre_feedforward_layernorm.weight
        h, x = self._end(kernels, attended, self.self_attn.o_proj, h, self.post_attention_layernorm, next_norm)
        inner = self.mlp(x, kernels)
        return self._end(kernels, inner, self.mlp.down_proj, h, self.post_feedforward_layernorm, next_w)

    def _end(
        self,
        kernels: Kernels,
        x: mx.array,
        layer: ClippableLinear,
        h: mx.array,
        norm: nn.RMSNorm,
        next_w: mx.array | None,
    ) -> tuple[mx.array, Any]:
        """A residual block's last product and its end, `kernels.add_norm` of h and layer(x)."""
        if layer.clipped:
            return kernels.add_norm(h, layer(x, kernels), norm.weight, eps=self.eps, next_w=next_w)
        return project_add_norm(kernels, x, layer.linear, h, norm, self.eps, next_w=next_w)


class PatchEmbedder(nn.Module):
    """2·(pixels − ½)·Wᵀ + X[x] + Y[y], whose two tables are looked up, not multiplied."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.input_proj = nn.Linear(3 * config.patch_size**2, config.hidden_size, bias=False)
        self.position_embedding_table = mx.ones((2, config.position_embedding_size, config.hidden_size))

    def __call__(self, pixels: mx.array, positions: mx.array, kernels: Kernels) -> mx.array:
        (patches,) = project(kernels, 2 * (pixels - 0.5), self.input_proj)
        # Only the gathered rows are widened.
        x, y = (self.position_embedding_table[axis][positions[:, axis]].astype(mx.float32) for axis in (0, 1))
        return patches + (x + y)


class Encoder(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.layers = [Layer(config) for _ in range(config.num_hidden_layers)]

    def __call__(self, h: mx.array, positions: mx.array, rows: Packed, table: Rope, kernels: Kernels) -> mx.array:
        angles, plan = kernels.rope(table, positions), kernels.plan(rows, None)
        norms = [layer.input_layernorm.weight for layer in self.layers]
        x = kernels.rms_norm(h, norms[0], eps=self.eps)
        for layer, next_w in zip(self.layers, [*norms[1:], None], strict=True):
            h, x = layer(h, x, next_w, kernels, angles, plan)
        return h


class VisionTower(nn.Module):
    """Packed images → pooled states; `VisionEmbedder` makes soft tokens of them."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embedder = PatchEmbedder(config)
        self.encoder = Encoder(config)
        if config.standardize:
            self.std_bias = mx.zeros((config.hidden_size,))
            self.std_scale = mx.ones((config.hidden_size,))

    def rope_table(self) -> Rope:
        """RoPE's angles for every position that the tower has an embedding for, evaluated: x turns the first half of
        a head's channels, y the second."""
        config = self.config
        return rope_table(config.position_embedding_size, config.head_dim // 2, config.rope_theta)

    def __call__(
        self, images: PackedImages, table: Rope, kernels: Kernels, run: Callable[..., mx.array] = cores.together
    ) -> mx.array:
        """[N, hidden] float32. A function of arrays alone, so that it can be traced: nothing is read on the host.

        Positions must lie in the table.

        Args:
            table: from `rope_table`.
            run: what takes the rows through the layers; `cores.apart` evaluates.
        """
        h = self.patch_embedder(images.pixels, images.positions, kernels)
        h = run(self.encoder, h, images.positions, images.rows, table, kernels)
        pooled = h[images.pool].mean(axis=1) * math.sqrt(self.config.hidden_size)
        if self.config.standardize:
            return (pooled - self.std_bias.astype(mx.float32)) * self.std_scale.astype(mx.float32)
        return pooled


class VisionEmbedder(nn.Module):
    """rms(x)·wᵀ: the tower's states as rows of the text model's input."""

    def __init__(self, config: VisionConfig, text_hidden: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.embedding_projection = nn.Linear(config.hidden_size, text_hidden, bias=False)

    def __call__(self, x: mx.array, kernels: Kernels) -> mx.array:
        """[N, hidden] → [N, text_hidden] float32."""
        return project(kernels, kernels.rms_norm(x, None, eps=self.eps), self.embedding_projection)[0]
