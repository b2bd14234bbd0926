"""The mean over each segment of the normed rows.

out[s] = (1/n_s) Σ_t rms(h[t])·w,  t over the n_s tokens of segment s; 0 where it has none
"""

from __future__ import annotations

import mlx.core as mx

from egemma_mlx.kernels import check
from egemma_mlx.kernels.library import Library, Source, launch
from egemma_mlx.kernels.norm import rms_norm
from egemma_mlx.packing import Packed, membership

_POOL = Source("pool", ("h", "w", "positions", "segments", "eps"), ("out",), ("load", "rows"))


def pool(h: mx.array, w: mx.array, packed: Packed, *, eps: float) -> mx.array:
    """Mean-pool normed rows by segment.

    Args:
        h: [T, D] float32.
        w: [D] float32.

    Returns:
        [S, D] float32.
    """
    _check(h, w, packed)
    if packed.grid is not None:
        segments = packed.grid.segments
        means = rms_norm(h, w, eps=eps).reshape(*packed.grid, -1).mean(axis=1)
        return mx.pad(means, [(0, packed.segments.shape[0] - segments), (0, 0)])
    member = membership(packed.rows, packed.segments) & (packed.positions >= 0)[:, None]
    count = mx.maximum(member.sum(axis=0), 1)[:, None]
    return (member.T.astype(mx.float32) @ rms_norm(h, w, eps=eps)) / count


def metal_pool(library: Library, h: mx.array, w: mx.array, packed: Packed, *, eps: float) -> mx.array:
    """`pool` for D a multiple of 4; w may be bfloat16."""
    _check(h, w, packed)
    segments, width = packed.segments.shape[0], h.shape[1]
    check.multiple("pool", "the width of h", width, 4)
    return launch(
        library(_POOL),
        h,
        w,
        packed.positions,
        packed.segments,
        eps,
        grid=(32, 8, segments),
        threadgroup=(32, 8, 1),
        outputs=[(segments, width)],
        D=width,
    )[0]


def _check(h: mx.array, w: mx.array, packed: Packed) -> None:
    check.rows("pool", "h", h, packed.rows, "D")
    check.weight("pool", "w", w, h.shape[1])
    check.indices("pool", "positions", packed.positions, packed.rows)
    check.indices("pool", "segments", packed.segments, "S", 2)
