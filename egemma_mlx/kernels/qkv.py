"""What happens to q, k and v between their projections and attention: per-head norms, and RoPE.

q' = rope(rms(q)·q_w),  k' = rope(rms(k)·k_w),  v' = rms(v)
rope(x)[i], rope(x)[i + n/2] = x[i]·cos − x[i + n/2]·sin,  x[i + n/2]·cos + x[i]·sin   ("rotate half")
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from egemma_mlx.kernels.norm import inverse_rms


class Rope(NamedTuple):
    """cos and sin of RoPE's angles by position, each [positions, head_dim/2] float32."""

    cos: mx.array
    sin: mx.array


class Angles(NamedTuple):
    """The angles of every packed row, for both halves of a head: (cos | cos) and (−sin | sin), [T, 2, head_dim/2]."""

    cos: mx.array
    sin: mx.array


def rope_table(length: int, head_dim: int, theta: float) -> Rope:
    """cos and sin for positions 0…length−1, evaluated.

    Frequencies θ^(−2i/head_dim) and their products with the position are float32, as the reference's are: at
    position 8,191 an angle from float64 frequencies would differ by 5e-4. (The power is rounded correctly; torch's is
    one unit in the last place off for 1 frequency in 100.)
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequency = np.float32(1) / np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)
    angle = (np.arange(length, dtype=np.float32)[:, None] * frequency).astype(np.float64)
    return Rope(*(mx.array(f(angle).astype(np.float32)) for f in (np.cos, np.sin)))


def rope(table: Rope, positions: mx.array) -> Angles:
    """The angles of packed rows at `positions` [T], once for all layers of one θ; a row without a token takes 0."""
    rows = mx.maximum(positions, 0)
    cos, sin = table.cos[rows], table.sin[rows]
    return Angles(mx.stack([cos, cos], axis=1), mx.stack([-sin, sin], axis=1))


def qkv_prep(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    q_w: mx.array,
    k_w: mx.array,
    angles: Angles,
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
        q' [T, heads, head_dim], k' and v' [T, kv_heads, head_dim] (here views of head-major arrays, which is how the
        products of attention want them).
    """

    def split(x: mx.array) -> tuple[mx.array, mx.array]:
        """[heads, T, 2, head_dim/2], and 1/rms [heads, T, 1, 1]."""
        heads = x.reshape(x.shape[0], -1, head_dim)
        inverse = inverse_rms(heads, eps).transpose(1, 0, 2)[..., None]
        return heads.reshape(*heads.shape[:2], 2, head_dim // 2).transpose(1, 0, 2, 3), inverse

    def rotated(x: mx.array, w: mx.array) -> mx.array:
        # Norm, weight and rotation are one linear map of (a | b) and (b | a): w folds into the angles.
        halves, inverse = split(x)
        w = w.reshape(2, -1)
        return (halves * (angles.cos * w) + halves[..., ::-1, :] * (angles.sin * w[::-1])) * inverse

    v_halves, v_inverse = split(v)
    heads = (rotated(q, q_w), rotated(k, k_w), v_halves * v_inverse)
    q, k, v = (x.reshape(*x.shape[:2], head_dim).transpose(1, 0, 2) for x in heads)
    return q, k, v
