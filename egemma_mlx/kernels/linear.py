"""Matrix products: against stored weights (x·wᵀ), and of attention's weights with its values (p·v)."""

from __future__ import annotations

import mlx.core as mx

from egemma_mlx.kernels import check
from egemma_mlx.kernels.library import Library, Source, launch

_HEADERS = ("fragment", "load", "gemm")
_LINEAR = {
    1: Source("linear", ("x", "w"), ("y",), _HEADERS),
    2: Source("linear_2", ("x", "w0", "w1"), ("y0", "y1"), _HEADERS),
    3: Source("linear_3", ("x", "w0", "w1", "w2"), ("y0", "y1", "y2"), _HEADERS),
}
_MATMUL = Source("matmul", ("p", "v"), ("y",), _HEADERS)

TILE = 64
"""Rows and columns of the tile that one threadgroup of a GEMM computes (`gemm_tile` in gemm.h)."""


def linear(x: mx.array, *weights: mx.array) -> tuple[mx.array, ...]:
    """x·wᵀ for each weight, in float32.

    Args:
        x: [T, K] float32.
        weights: [M_i, K] float32 or bfloat16, widened exactly.

    Returns:
        One [T, M_i] float32 array a weight.
    """
    _check_linear(x, weights)
    return tuple(x @ w.astype(mx.float32).T for w in weights)


def metal_linear(library: Library, x: mx.array, *weights: mx.array) -> tuple[mx.array, ...]:
    """`linear` in one launch for up to three weights of one dtype; K and M_i are multiples of 4."""
    _check_linear(x, weights)
    check.multiple("linear", "the width of x", x.shape[1], 4)
    for w in weights:
        check.multiple("linear", "the rows of w", w.shape[0], 4)
    if len(weights) not in _LINEAR or len({w.dtype for w in weights}) > 1:
        return tuple(y for w in weights for y in metal_linear(library, x, w))
    tiles = sum(-(-w.shape[0] // TILE) for w in weights)
    outputs = launch(
        library(_LINEAR[len(weights)]),
        x,
        *weights,
        grid=(tiles * 128, -(-x.shape[0] // TILE), 1),
        threadgroup=(128, 1, 1),
        outputs=[(x.shape[0], w.shape[0]) for w in weights],
    )
    return tuple(outputs)


def matmul(p: mx.array, v: mx.array) -> mx.array:
    """p·v: [T, K] and [K, M] float32 → [T, M] float32."""
    _check_matmul(p, v)
    return p @ v


def metal_matmul(library: Library, p: mx.array, v: mx.array) -> mx.array:
    """`matmul` for K and M that are multiples of 4."""
    _check_matmul(p, v)
    check.multiple("matmul", "the width of p", p.shape[1], 4)
    check.multiple("matmul", "the width of v", v.shape[1], 4)
    return launch(
        library(_MATMUL),
        p,
        v,
        grid=(-(-v.shape[1] // TILE) * 128, -(-p.shape[0] // TILE), 1),
        threadgroup=(128, 1, 1),
        outputs=[(p.shape[0], v.shape[1])],
    )[0]


def _check_linear(x: mx.array, weights: tuple[mx.array, ...]) -> None:
    check.rows("linear", "x", x, "T", "K")
    for w in weights:
        check.weight("linear", "w", w, "M", x.shape[1])


def _check_matmul(p: mx.array, v: mx.array) -> None:
    check.rows("matmul", "p", p, "T", "K")
    check.rows("matmul", "v", v, p.shape[1], "M")
