"""The mean over each segment of the normed rows.

out[s] = (1/n_s) Σ_t rms(h[t])·w,  t over the n_s tokens of segment s; 0 where it has none
"""

from __future__ import annotations

import mlx.core as mx

from egemma_mlx.kernels.norm import rms_norm
from egemma_mlx.packing import Packed, membership


def pool(h: mx.array, w: mx.array, packed: Packed, *, eps: float) -> mx.array:
    """Mean-pool normed rows by segment.

    Args:
        h: [T, D] float32.
        w: [D] float32.

    Returns:
        [S, D] float32.
    """
    member = membership(packed.rows, packed.segments) & (packed.positions >= 0)[:, None]
    count = mx.maximum(member.sum(axis=0), 1)[:, None]
    return (member.T.astype(mx.float32) @ rms_norm(h, w, eps=eps)) / count
