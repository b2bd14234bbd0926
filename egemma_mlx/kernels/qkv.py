"""What happens to q, k and v between their projections and attention: per-head norms, and RoPE.

q' = rope(rms(q)·q_w),  k' = rope(rms(k)·k_w),  v' = rms(v)
rope(x)[i], rope(x)[i + n/2] = x[i]·cos − x[i + n/2]·sin,  x[i + n/2]·cos + x[i]·sin   ("rotate half")
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from egemma_mlx.kernels.approx import fused


class Rope(NamedTuple):
    """cos and sin of RoPE's angles, each [rows, head_dim/2] float32: one row a position, or one a packed row."""

    cos: mx.array
    sin: mx.array


def rope_table(length: int, head_dim: int, theta: float) -> Rope:
    """cos and sin for positions 0…length−1, each [length, head_dim/2] float32, evaluated.

    Frequencies θ^(−2i/head_dim) and their products with the position are float32, as the reference's are: at
    position 8,191 an angle from float64 frequencies would differ by 5e-4.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequency = np.float32(1) / np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)
    angle = (np.arange(length, dtype=np.float32)[:, None] * frequency).astype(np.float64)
    return Rope(*(mx.array(f(angle).astype(np.float32)) for f in (np.cos, np.sin)))


def rope(table: Rope, positions: mx.array) -> Rope:
    """The angles of every packed row, once for all layers of one θ; rows without a token take position 0."""
    rows = mx.maximum(positions, 0)
    return Rope(table.cos[rows], table.sin[rows])


def qkv_prep(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    q_w: mx.array,
    k_w: mx.array,
    angles: Rope,
    *,
    head_dim: int,
    eps: float,
) -> tuple[mx.array, mx.array, mx.array]:
    """Norm the heads of q, k and v, and rotate q and k.

    Args:
        q: [T, heads·head_dim] float32; k, v: [T, kv_heads·head_dim].
        q_w, k_w: [head_dim] float32.
        angles: from `rope`, of these rows.

    Returns:
        q', k', v' in the shapes of q, k, v.
    """

    def heads(x: mx.array) -> mx.array:
        return x.reshape(x.shape[0], -1, head_dim)

    def rotated(x: mx.array, w: mx.array) -> mx.array:
        x = mx.fast.rms_norm(heads(x), w, eps)
        half = head_dim // 2
        left, right = _rotate(x[..., :half], x[..., half:], angles.cos[:, None], angles.sin[:, None])
        return mx.concatenate([left, right], axis=-1)

    return (
        rotated(q, q_w).reshape(q.shape),
        rotated(k, k_w).reshape(k.shape),
        mx.fast.rms_norm(heads(v), None, eps).reshape(v.shape),
    )


@fused
def _rotate(left: mx.array, right: mx.array, cos: mx.array, sin: mx.array) -> tuple[mx.array, mx.array]:
    return left * cos - right * sin, right * cos + left * sin
