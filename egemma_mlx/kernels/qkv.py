"""What happens to q, k and v between their projections and attention: per-head norms, and RoPE.

q' = rope(rms(q)·q_w),  k' = rope(rms(k)·k_w),  v' = rms(v)
rope(x)[i], rope(x)[i + n/2] = x[i]·cos − x[i + n/2]·sin,  x[i + n/2]·cos + x[i]·sin   ("rotate half")

A head may have several sections of n channels, each rotated by a position of its own (a patch's x and y, say) through
the angles of one table.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from egemma_mlx.kernels import check
from egemma_mlx.kernels.approx import on_cpu
from egemma_mlx.kernels.library import Library, Source, launch
from egemma_mlx.kernels.norm import inverse_rms

_QKV_PREP = Source(
    "qkv_prep",
    ("q", "k", "v", "q_w", "k_w", "cos", "sin", "positions", "eps"),
    ("q_out", "k_out", "v_out"),
    ("load", "rope"),
)


class Rope(NamedTuple):
    """cos and sin of RoPE's angles by position, each [positions, section/2] float32."""

    cos: mx.array
    sin: mx.array


class Angles(NamedTuple):
    """The angles of every packed row, [T, sections, 2, section/2] for both halves of each section: (cos | cos) and
    (−sin | sin)."""

    cos: mx.array
    sin: mx.array


class TableAngles(NamedTuple):
    """Where a kernel finds the angles of every packed row itself.

    Attributes:
        table: by position.
        positions: [T] or [T, sections] int32; −1 takes 0.
    """

    table: Rope
    positions: mx.array


def rope_table(length: int, section: int, theta: float) -> Rope:
    """cos and sin for positions 0…length−1 and a section of so many channels (one section: a whole head), evaluated.

    Frequencies θ^(−2i/section) and their products with the position are float32, as the reference's are: at
    position 8,191 an angle from float64 frequencies would differ by 5e-4. (The power is rounded correctly; torch's is
    one unit in the last place off for 1 frequency in 100.)
    """
    exponent = np.arange(0, section, 2, dtype=np.float32) / np.float32(section)
    frequency = np.float32(1) / np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)
    angle = (np.arange(length, dtype=np.float32)[:, None] * frequency).astype(np.float64)
    return Rope(*(mx.array(f(angle).astype(np.float32)) for f in (np.cos, np.sin)))


def rope(table: Rope, positions: mx.array) -> Angles:
    """The angles of packed rows, once for all layers of one θ; a row without a token takes those of position 0.

    Args:
        positions: [T] int32, or [T, sections]: section s of every head rotates by column s.
    """
    _check_rope(table, positions)
    rows = mx.maximum(positions, 0).reshape(positions.shape[0], -1)
    cos, sin = (x[rows] for x in table)
    return Angles(mx.stack([cos, cos], axis=2), mx.stack([-sin, sin], axis=2))


def metal_rope(library: Library, table: Rope, positions: mx.array) -> TableAngles:
    """`rope` for `metal_qkv_prep`, which looks angles up itself."""
    _check_rope(table, positions)
    return TableAngles(table, positions)


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
        q_w, k_w: [head_dim] float32 or bfloat16.
        angles: from `rope`, of these rows.

    Returns:
        q' [T, heads, head_dim], k' and v' [T, kv_heads, head_dim] (here views of head-major arrays, which is how the
        products of attention want them).
    """
    _check_qkv(q, k, v, q_w, k_w, head_dim)
    check.rows("qkv_prep", "angles", angles.cos, q.shape[0], "sections", 2, head_dim // (2 * angles.cos.shape[1]))
    if not on_cpu():
        return (
            _prepared(q, q_w, angles, head_dim, eps),
            _prepared(k, k_w, angles, head_dim, eps),
            _normed(v, head_dim, eps),
        )
    halves = (-1, 2, angles.cos.shape[-1])

    def split(x: mx.array) -> tuple[mx.array, mx.array]:
        """[heads, T, sections, 2, section/2], and 1/rms [heads, T, 1, 1, 1]."""
        heads = x.reshape(x.shape[0], -1, head_dim)
        inverse = inverse_rms(heads, eps).transpose(1, 0, 2)[..., None, None]
        return heads.reshape(*heads.shape[:2], *halves).transpose(1, 0, 2, 3, 4), inverse

    def rotated(x: mx.array, w: mx.array) -> mx.array:
        # Norm, weight and rotation are one linear map of (a | b) and (b | a): w folds into the angles.
        pairs, inverse = split(x)
        w = w.reshape(halves)
        return (pairs * (angles.cos * w) + pairs[..., ::-1, :] * (angles.sin * w[:, ::-1])) * inverse

    v_pairs, v_inverse = split(v)
    heads = (rotated(q, q_w), rotated(k, k_w), v_pairs * v_inverse)
    q, k, v = (x.reshape(*x.shape[:2], head_dim).transpose(1, 0, 2) for x in heads)
    return q, k, v


def _prepared(x: mx.array, w: mx.array, angles: Angles, head_dim: int, eps: float) -> mx.array:
    """rope(rms(x)·w) in few operations, for a GPU; the rotation writes heads first."""
    heads = mx.fast.rms_norm(x.reshape(x.shape[0], -1, head_dim), w, eps)
    pairs = heads.reshape(*heads.shape[:2], -1, 2, angles.cos.shape[-1]).transpose(1, 0, 2, 3, 4)
    rotated = pairs * angles.cos + pairs[..., ::-1, :] * angles.sin
    return rotated.reshape(-1, x.shape[0], head_dim).transpose(1, 0, 2)


def _normed(x: mx.array, head_dim: int, eps: float) -> mx.array:
    return mx.fast.rms_norm(x.reshape(x.shape[0], -1, head_dim), None, eps)


def metal_qkv_prep(
    library: Library,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    q_w: mx.array,
    k_w: mx.array,
    angles: TableAngles,
    *,
    head_dim: int,
    eps: float,
) -> tuple[mx.array, mx.array, mx.array]:
    """`qkv_prep` in one launch, with `metal_rope`'s angles; sections are multiples of 8 channels."""
    _check_qkv(q, k, v, q_w, k_w, head_dim)
    sections = angles.positions.shape[1:]
    section = head_dim // math.prod(sections)
    check.indices("qkv_prep", "positions", angles.positions, q.shape[0], *sections)
    check.rows("qkv_prep", "cos", angles.table.cos, "positions", section // 2)
    check.multiple("qkv_prep", "a section", section, 8)
    rows, heads, kv_heads = q.shape[0], q.shape[1] // head_dim, k.shape[1] // head_dim
    units = heads + 2 * kv_heads
    q, k, v = launch(
        library(_QKV_PREP),
        *(q, k, v, q_w, k_w, *angles.table, angles.positions, eps),
        grid=(32, units, rows),
        threadgroup=(32, min(units, 8), 1),
        outputs=[(rows, heads, head_dim), (rows, kv_heads, head_dim), (rows, kv_heads, head_dim)],
        D=head_dim,
        SECTION=section,
    )
    return q, k, v


def _check_rope(table: Rope, positions: mx.array) -> None:
    check.rows("rope", "cos", table.cos, "positions", "section/2")
    check.rows("rope", "sin", table.sin, *table.cos.shape)
    check.indices("rope", "positions", positions, *("T", "sections")[: 1 if positions.ndim == 1 else 2])


def _check_qkv(q: mx.array, k: mx.array, v: mx.array, q_w: mx.array, k_w: mx.array, head_dim: int) -> None:
    check.rows("qkv_prep", "q", q, "T", "heads·head_dim")
    check.rows("qkv_prep", "k", k, q.shape[0], "kv_heads·head_dim")
    check.rows("qkv_prep", "v", v, *k.shape)
    check.weight("qkv_prep", "q_w", q_w, head_dim)
    check.weight("qkv_prep", "k_w", k_w, head_dim)
    check.multiple("qkv_prep", "the width of q", q.shape[1], head_dim)
    check.multiple("qkv_prep", "the width of k", k.shape[1], head_dim)
