"""RMS norms over rows, the residual add that lies between two of them, and unit vectors.

    rms(x) = x · (mean(x²) + eps)^−½

Weights multiply as they are (w, not 1 + w).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from egemma_mlx.kernels import check
from egemma_mlx.kernels.approx import on_cpu
from egemma_mlx.kernels.library import Library, Source, launch

_RMS_NORM = Source("rms_norm", ("x", "w", "eps", "groups"), ("y",), ("load", "rows"))
_ADD_NORM = Source("add_norm", ("h", "y", "w", "post", "eps"), ("h_out",), ("load", "rows", "residual"))
_ADD_NORM_NEXT = Source(
    "add_norm_next", ("h", "y", "w", "post", "next_w", "eps"), ("h_out", "a"), ("load", "rows", "residual")
)


def rms_norm(x: mx.array, w: mx.array | None, *, eps: float, pre: float = 1.0) -> mx.array:
    """rms(pre·x)·w over the last axis.

    Args:
        x: [..., D] float32.
        w: [D] float32, or None for no weight.
        pre: a scale that x would carry; folded into eps, since rms(pre·x) under eps is rms(x) under eps/pre².
    """
    _check_rms_norm(x, w)
    eps = eps / (pre * pre)
    if w is None or not on_cpu():
        return mx.fast.rms_norm(x, w, eps)
    return x * inverse_rms(x, eps) * w


def metal_rms_norm(
    library: Library, x: mx.array, w: mx.array | None, *, eps: float, pre: float = 1.0, groups: int = 1
) -> mx.array:
    """`rms_norm` for D a multiple of 4; w may be bfloat16.

    Args:
        groups: x [T, groups·D] is normed in pieces of D, which come out as [groups, T, D].
    """
    shape = x.shape if groups == 1 else (groups, x.shape[0], x.shape[1] // groups)
    x = x.reshape(-1, shape[-1])
    _check_rms_norm(x, w)
    width = shape[-1]
    check.multiple("rms_norm", "the width of x", width, 4)
    return launch(
        library(_RMS_NORM),
        x,
        x if w is None else w,
        eps / (pre * pre),
        groups,
        **_rows_grid(x.shape[0]),
        outputs=[shape],
        D=width,
        WEIGHTED=w is not None,
    )[0]


def add_norm(
    h: mx.array,
    y: mx.array,
    w: mx.array,
    *,
    eps: float,
    post: mx.array | None = None,
    next_w: mx.array | None = None,
) -> tuple[mx.array, mx.array | None]:
    """The end of a residual block and the start of the next: h' = (h + rms(y)·w)·post and a = rms(h')·next_w.

    Args:
        h: [T, D] float32, the residual stream.
        y: [T, D] float32, the block's output.
        w: [D] float32, the block's post-norm.
        post: [1] float32, the layer scalar, or None for 1.
        next_w: [D] float32, the next block's pre-norm, or None where nothing is normed.

    Returns:
        (h', a), both [T, D] float32; a is None without `next_w`.
    """
    post = one() if post is None else post
    _check_add_norm(h, y, w, post, next_w)
    post = post.astype(mx.float32)
    h = (h + rms_norm(y, w, eps=eps)) * post
    return h, None if next_w is None else rms_norm(h, next_w, eps=eps)


def metal_add_norm(
    library: Library,
    h: mx.array,
    y: mx.array,
    w: mx.array,
    *,
    eps: float,
    post: mx.array | None = None,
    next_w: mx.array | None = None,
) -> tuple[mx.array, mx.array | None]:
    """`add_norm` for D a multiple of 4; weights may be bfloat16."""
    post = one() if post is None else post
    _check_add_norm(h, y, w, post, next_w)
    rows, width = h.shape
    check.multiple("add_norm", "the width of h", width, 4)
    if next_w is None:
        h, *_ = launch(library(_ADD_NORM), h, y, w, post, eps, **_rows_grid(rows), outputs=[h.shape], D=width)
        return h, None
    kernel = library(_ADD_NORM_NEXT)
    h, a = launch(kernel, h, y, w, post, next_w, eps, **_rows_grid(rows), outputs=[h.shape] * 2, D=width)
    return h, a


def normalize(x: mx.array) -> mx.array:
    """x / max(‖x‖, 1e-12) over the last axis, float32, as torch.nn.functional.normalize; 0 stays 0."""
    return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def inverse_rms(x: mx.array, eps: float) -> mx.array:
    """(mean(x²) + eps)^−½ over the last axis, [..., 1]; the mean as a matrix product, a third of MLX's CPU time."""
    return mx.rsqrt((x * x) @ _mean_column(x.shape[-1]) + eps)


@cache
def _mean_column(width: int) -> mx.array:
    column = mx.full((width, 1), 1 / width)
    mx.eval(column)
    return column


@cache
def one() -> mx.array:
    """[1], for no layer scalar."""
    array = mx.ones((1,))
    mx.eval(array)
    return array


def _rows_grid(rows: int) -> dict[str, Any]:
    """One simdgroup a row, four rows a threadgroup."""
    return {"grid": (32, rows, 1), "threadgroup": (32, 4, 1)}


def _check_rms_norm(x: mx.array, w: mx.array | None) -> None:
    check.dtype("rms_norm", "x", x, mx.float32)
    if w is not None:
        check.weight("rms_norm", "w", w, x.shape[-1])


def _check_add_norm(h: mx.array, y: mx.array, w: mx.array, post: mx.array, next_w: mx.array | None) -> None:
    check.rows("add_norm", "h", h, "T", "D")
    check.rows("add_norm", "y", y, *h.shape)
    check.weight("add_norm", "w", w, h.shape[1])
    check.weight("add_norm", "post", post, 1)
    if next_w is not None:
        check.weight("add_norm", "next_w", next_w, h.shape[1])
