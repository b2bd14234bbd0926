"""Matrix products: against stored weights (x·wᵀ), and of attention's weights with its values (p·v)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from egemma_mlx.kernels import check
from egemma_mlx.kernels.library import Library, Source, launch

COLUMNS = ("fragment", "load", "columns")
"""Headers of the products whose weights go straight into fragments."""
_LINEAR = Source("linear", ("x", "w"), ("y",), (*COLUMNS, "shared", "linear"))
_LINEAR_3 = Source("linear_3", ("x", "w0", "w1", "w2"), ("y0", "y1", "y2"), (*COLUMNS, "shared", "linear"))
_SHORT = Source("linear_short", ("x", "w"), ("y",), (*COLUMNS, "short"))
_SHORT_3 = Source("linear_short_3", ("x", "w0", "w1", "w2"), ("y0", "y1", "y2"), (*COLUMNS, "short"))
_MATMUL = Source("matmul", ("p", "v"), ("y",), ("fragment", "load", "gemm"))

TILE = 64
"""Rows and columns of the tile that one threadgroup of `matmul` computes (`gemm_tile` in gemm.h)."""

SHORT = 256
"""Below as many rows the weights' way from memory is what a product waits for: it is spread over all cores, sixteen
columns a threadgroup, and norms of whole rows are kernels of their own."""


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


def metal_linear(library: Library, x: mx.array, *weights: mx.array, short: bool | None = None) -> tuple[mx.array, ...]:
    """`linear`, one weight or three of one dtype in a launch; K and M_i are multiples of 4.

    Args:
        short: the form for few rows; None: below `SHORT`.
    """
    _check_linear(x, weights)
    check.multiple("linear", "the width of x", x.shape[1], 4)
    for w in weights:
        check.multiple("linear", "the rows of w", w.shape[0], 4)
    if len(weights) not in (1, 3) or len({w.dtype for w in weights}) > 1:
        return tuple(y for w in weights for y in metal_linear(library, x, w, short=short))
    short = is_short(x) if short is None else short
    source = (_SHORT if short else _LINEAR) if len(weights) == 1 else (_SHORT_3 if short else _LINEAR_3)
    outputs = [(x.shape[0], w.shape[0]) for w in weights]
    widths = [w.shape[0] for w in weights]
    tiles = short_tiles(x.shape[0], *widths) if short else wide_tiles(x.shape[0], *widths)
    return tuple(launch(library(source), x, *weights, outputs=outputs, **tiles))


def is_short(x: mx.array) -> bool:
    """Whether the rows of x are few."""
    return x.shape[0] < SHORT


def wide_tiles(rows: int, *widths: int, columns: int = 256) -> dict[str, Any]:
    """Launch of 64 rows × `columns` a threadgroup (shared.h)."""
    tiles = sum(-(-width // columns) for width in widths)
    return {"grid": (256 * tiles, -(-rows // 64), 1), "threadgroup": (256, 1, 1)}


def short_tiles(rows: int, *widths: int, most: int = 4) -> dict[str, Any]:
    """Launch of 8, 16 or 32 rows (8·`most` at most) × 16 columns a threadgroup (short.h)."""
    fragments = min(1 if rows <= 8 else 2 if rows <= 16 else 4, most)
    tiles = sum(-(-width // 16) for width in widths)
    return {"grid": (256 * tiles, -(-rows // (8 * fragments)), 1), "threadgroup": (256, 1, 1), "R": fragments}


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
