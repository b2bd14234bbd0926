"""Products with stored weights in bfloat16, everything else in float32: the fast tier of GPUs with matrix units.

    y = round(round(x)·round(w)ᵀ),  round to bfloat16, sums in float32

Residual stream, norms, RoPE, attention, gelu and pooling stay in float32. (float16 would overflow: the residual stream
goes beyond 65,504.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx

from egemma_mlx.kernels import OPS, Kernels, check, fused
from egemma_mlx.kernels.approx import on_cpu
from egemma_mlx.kernels.linear import is_short

_Product = Callable[..., Any]


def bfloat16(base: Kernels) -> Kernels:
    """`base` with its products against weights in bfloat16, on MLX's own `mx.matmul`.

    The Metal kernels keep short inputs: few rows are bound by the read of the weights, which are bfloat16 either way,
    and by launches, of which theirs are fewer. So a query's vector is as exact as in float32.
    """
    rounded: dict[str, Any] = {
        "linear": linear,
        **fused.composed(fused.Parts(linear, base.gelu_mul, base.rms_norm, base.add_norm)),
    }
    if base.linear is OPS.linear:
        return replace(base, **rounded)
    by_rows: dict[str, Any] = {name: _by_rows(getattr(base, name), product) for name, product in rounded.items()}
    return replace(base, **by_rows)


def _by_rows(short: _Product, long: _Product) -> _Product:
    def product(x: mx.array, *others: Any, **options: Any) -> Any:
        return (short if is_short(x) else long)(x, *others, **options)

    return product


def linear(x: mx.array, *weights: mx.array) -> tuple[mx.array, ...]:
    """x·wᵀ for each weight, operands and result rounded to bfloat16.

    On the CPU the rounded operands are multiplied in float32, with the same result up to the order of sums: there MLX's
    own bfloat16 products do not go through a BLAS, and take 20 times as long. It saves memory, then, not time.

    Args:
        x: [T, K] float32.
        weights: [M_i, K] bfloat16, or float32, which is rounded.

    Returns:
        One [T, M_i] float32 array a weight.
    """
    check.rows("linear", "x", x, "T", "K")
    for w in weights:
        check.weight("linear", "w", w, "M", x.shape[1])
    product = _product_cpu if on_cpu() else mx.matmul
    rounded = x.astype(mx.bfloat16)
    return tuple(product(rounded, w.astype(mx.bfloat16).T).astype(mx.float32) for w in weights)


def _product_cpu(a: mx.array, b: mx.array) -> mx.array:
    return (a.astype(mx.float32) @ b.astype(mx.float32)).astype(mx.bfloat16)
