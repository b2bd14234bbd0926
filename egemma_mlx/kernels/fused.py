"""Matrix products that end in what follows them, so that their result is never stored.

    gated             gelu(x·gateᵀ)·(x·upᵀ)
    linear_gelu_mul   gelu(x·wᵀ)·p
    linear_rms_norm   rms(pre·x·wᵀ)·norm_w
    linear_add_norm   h' = (h + rms(x·wᵀ)·norm_w)·post and a = rms(h')·next_w
    linear_unit       y = x·wᵀ and y/‖y‖

The plain forms are compositions of other kernel functions (`composed`). On Metal, rows of up to 512 columns stay in
one threadgroup, which so can norm them; for few rows (`linear.SHORT`), and for wider ones, the norm is a kernel of its
own. Unit vectors of few segments are too: one threadgroup would read the weights that all cores can share.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import mlx.core as mx

from egemma_mlx.kernels import check
from egemma_mlx.kernels.gelu import metal_gelu_mul
from egemma_mlx.kernels.library import Library, Source, launch
from egemma_mlx.kernels.linear import COLUMNS, is_short, metal_linear, short_tiles, wide_tiles
from egemma_mlx.kernels.norm import metal_add_norm, metal_rms_norm, normalize, one

_GATED = Source("gated", ("x", "gate", "up"), ("y",), (*COLUMNS, "shared", "gelu"))
_GATED_SHORT = Source("gated_short", ("x", "gate", "up"), ("y",), (*COLUMNS, "short", "gelu"))
_GELU_MUL = Source("linear_gelu_mul", ("x", "w", "p"), ("y",), (*COLUMNS, "shared", "gelu"))
_GELU_MUL_SHORT = Source("linear_gelu_mul_short", ("x", "w", "p"), ("y",), (*COLUMNS, "short", "gelu"))
_RMS_NORM = Source("linear_rms_norm", ("x", "w", "norm_w", "eps"), ("y",), (*COLUMNS, "shared", "whole"))
_ADD_NORM = Source(
    "linear_add_norm", ("x", "w", "h", "norm_w", "post", "eps"), ("h_out",), (*COLUMNS, "shared", "whole")
)
_ADD_NORM_NEXT = Source(
    "linear_add_norm_next",
    ("x", "w", "h", "norm_w", "post", "next_w", "eps"),
    ("h_out", "a"),
    (*COLUMNS, "shared", "whole"),
)
_UNIT = Source("linear_unit", ("x", "w"), ("y", "unit"), ("load", "rows"))

_WHOLE = 512
"""The most columns of which a threadgroup holds whole rows: 64 in each of eight simdgroups (whole.h)."""

_UNIT_ROWS, _UNIT_COLUMNS = 4, 2040
"""Of `linear_unit`: rows a threadgroup, and the most columns of which they fit its 32 KB of memory."""

FEW_SEGMENTS = 32
"""Below as many, which are those of `SHORT` packed rows, a product ahead of unit vectors is spread over all cores."""


class Parts(NamedTuple):
    """What the plain forms are composed of."""

    linear: Callable[..., Any]
    gelu_mul: Callable[..., Any]
    rms_norm: Callable[..., Any]
    add_norm: Callable[..., Any]


def composed(parts: Parts) -> dict[str, Any]:
    """The plain forms over these functions, by name."""
    functions = (gated, linear_gelu_mul, linear_rms_norm, linear_add_norm, linear_unit)
    return {function.__name__: partial(function, parts) for function in functions}


def gated(parts: Parts, x: mx.array, gate: mx.array, up: mx.array) -> mx.array:
    """gelu(x·gateᵀ)·(x·upᵀ).

    Args:
        x: [T, K] float32.
        gate, up: [M, K] float32 or bfloat16.

    Returns:
        [T, M] float32.
    """
    gate, up = parts.linear(x, gate, up)
    return parts.gelu_mul(gate, up)


def linear_gelu_mul(parts: Parts, x: mx.array, w: mx.array, p: mx.array) -> mx.array:
    """gelu(x·wᵀ)·p, for p [T, M] float32; else as `gated`."""
    return parts.gelu_mul(parts.linear(x, w)[0], p)


def linear_rms_norm(
    parts: Parts, x: mx.array, w: mx.array, norm_w: mx.array, *, eps: float, pre: float = 1.0, groups: int = 1
) -> mx.array:
    """rms(pre·x·wᵀ)·norm_w: [T, K] and [M, K] → [T, M] float32.

    Args:
        groups: the columns are normed in as many pieces, norm_w [M/groups] each, and come out [groups, T, M/groups].
    """
    (y,) = parts.linear(x, w)
    if groups == 1:
        return parts.rms_norm(y, norm_w, eps=eps, pre=pre)
    pieces = y.reshape(x.shape[0], groups, -1)
    return parts.rms_norm(pieces, norm_w, eps=eps, pre=pre).transpose(1, 0, 2)


def linear_add_norm(
    parts: Parts,
    x: mx.array,
    w: mx.array,
    h: mx.array,
    norm_w: mx.array,
    *,
    eps: float,
    post: mx.array | None = None,
    next_w: mx.array | None = None,
) -> tuple[mx.array, mx.array | None]:
    """`add_norm` of h and x·wᵀ: (h', a), both [T, M] float32; a is None without `next_w`."""
    return parts.add_norm(h, parts.linear(x, w)[0], norm_w, eps=eps, post=post, next_w=next_w)


def linear_unit(parts: Parts, x: mx.array, w: mx.array) -> tuple[mx.array, mx.array]:
    """y = x·wᵀ and y/max(‖y‖, 1e-12): [S, K] and [M, K] → two of [S, M] float32; 0 stays 0."""
    (y,) = parts.linear(x, w)
    return y, normalize(y)


def metal_gated(library: Library, x: mx.array, gate: mx.array, up: mx.array, *, short: bool | None = None) -> mx.array:
    """`gated` in one launch; K and M are multiples of 4, `short` as in `metal_linear`."""
    _check_product("gated", x, gate, "gate")
    _check_product("gated", x, up, "up")
    check.shape("gated", "up", up, *gate.shape)
    if gate.dtype != up.dtype:
        return metal_gelu_mul(library, *metal_linear(library, x, gate, up, short=short))
    rows, width = x.shape[0], gate.shape[0]
    short = is_short(x) if short is None else short
    tiles = short_tiles(rows, width, most=2) if short else wide_tiles(rows, width, columns=128)
    return launch(library(_GATED_SHORT if short else _GATED), x, gate, up, outputs=[(rows, width)], **tiles)[0]


def metal_linear_gelu_mul(
    library: Library, x: mx.array, w: mx.array, p: mx.array, *, short: bool | None = None
) -> mx.array:
    """`linear_gelu_mul` in one launch; K and M are multiples of 4, `short` as in `metal_linear`."""
    _check_product("linear_gelu_mul", x, w)
    rows, width = x.shape[0], w.shape[0]
    check.rows("linear_gelu_mul", "p", p, rows, width)
    short = is_short(x) if short is None else short
    tiles = short_tiles(rows, width) if short else wide_tiles(rows, width)
    return launch(library(_GELU_MUL_SHORT if short else _GELU_MUL), x, w, p, outputs=[(rows, width)], **tiles)[0]


def metal_linear_rms_norm(
    library: Library,
    x: mx.array,
    w: mx.array,
    norm_w: mx.array,
    *,
    eps: float,
    pre: float = 1.0,
    groups: int = 1,
    short: bool | None = None,
) -> mx.array:
    """`linear_rms_norm`, in one launch where it pays; K and M are multiples of 4, `short` as in `metal_linear`."""
    _check_product("linear_rms_norm", x, w)
    rows, width = x.shape[0], w.shape[0]
    check.weight("linear_rms_norm", "norm_w", norm_w, width // groups)
    if groups > 1 or not _whole(x, width, short):
        (y,) = metal_linear(library, x, w, short=short)
        return metal_rms_norm(library, y, norm_w, eps=eps, pre=pre, groups=groups)
    kernel = library(_RMS_NORM)
    return launch(kernel, x, w, norm_w, eps / (pre * pre), outputs=[(rows, width)], **_whole_tiles(rows, width))[0]


def metal_linear_add_norm(
    library: Library,
    x: mx.array,
    w: mx.array,
    h: mx.array,
    norm_w: mx.array,
    *,
    eps: float,
    post: mx.array | None = None,
    next_w: mx.array | None = None,
    short: bool | None = None,
) -> tuple[mx.array, mx.array | None]:
    """`linear_add_norm`, in one launch where it pays; K and M are multiples of 4, `short` as in `metal_linear`."""
    _check_product("linear_add_norm", x, w)
    rows, width = x.shape[0], w.shape[0]
    post = one() if post is None else post
    check.rows("linear_add_norm", "h", h, rows, width)
    check.weight("linear_add_norm", "norm_w", norm_w, width)
    check.weight("linear_add_norm", "post", post, 1)
    if next_w is not None:
        check.weight("linear_add_norm", "next_w", next_w, width)
    if not _whole(x, width, short):
        (y,) = metal_linear(library, x, w, short=short)
        return metal_add_norm(library, h, y, norm_w, eps=eps, post=post, next_w=next_w)
    tiles = _whole_tiles(rows, width)
    if next_w is None:
        (h,) = launch(library(_ADD_NORM), x, w, h, norm_w, post, eps, outputs=[h.shape], **tiles)
        return h, None
    h, a = launch(library(_ADD_NORM_NEXT), x, w, h, norm_w, post, next_w, eps, outputs=[h.shape] * 2, **tiles)
    return h, a


def metal_linear_unit(
    library: Library, x: mx.array, w: mx.array, *, short: bool | None = None
) -> tuple[mx.array, mx.array]:
    """`linear_unit`, in one launch where it pays; K and M are multiples of 4.

    Args:
        short: the form for few rows; None: below `FEW_SEGMENTS`. It divides by √(‖y‖² + 1e-24).
    """
    _check_product("linear_unit", x, w)
    rows, width = x.shape[0], w.shape[0]
    short = rows < FEW_SEGMENTS if short is None else short
    if short or width > _UNIT_COLUMNS:
        (y,) = metal_linear(library, x, w, short=short)
        return y, metal_rms_norm(library, y, _even(width), eps=1e-24 / width)  # rms(y)/√M = y/‖y‖
    y, unit = launch(
        library(_UNIT),
        x,
        w,
        grid=(256, -(-rows // _UNIT_ROWS), 1),
        threadgroup=(256, 1, 1),
        outputs=[(rows, width)] * 2,
        K=x.shape[1],
        M=width,
    )
    return y, unit


@cache
def _even(width: int) -> mx.array:
    """[width], a unit vector of equal elements."""
    array = mx.full((width,), width**-0.5)
    mx.eval(array)
    return array


def _whole(x: mx.array, width: int, short: bool | None) -> bool:
    return width <= _WHOLE and not (is_short(x) if short is None else short)


def _whole_tiles(rows: int, width: int) -> dict[str, Any]:
    """32 rows a threadgroup, a simdgroup for every 64 columns."""
    threads = 32 * -(-width // 64)
    return {"grid": (threads, -(-rows // 32), 1), "threadgroup": (threads, 1, 1)}


def _check_product(op: str, x: mx.array, w: mx.array, name: str = "w") -> None:
    check.rows(op, "x", x, "T", "K")
    check.weight(op, name, w, "M", x.shape[1])
    check.multiple(op, "the width of x", x.shape[1], 4)
    check.multiple(op, f"the rows of {name}", w.shape[0], 4)
