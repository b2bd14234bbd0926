"""Matrix products against stored weights."""

from __future__ import annotations

import mlx.core as mx


def linear(x: mx.array, *weights: mx.array) -> tuple[mx.array, ...]:
    """x·wᵀ for each weight, in float32.

    Args:
        x: [T, K] float32.
        weights: [M_i, K] float32 or bfloat16, widened exactly.

    Returns:
        One [T, M_i] float32 array a weight.
    """
    return tuple(x @ w.astype(mx.float32).T for w in weights)
