"""Products with stored weights in bfloat16, everything else in float32: the fast tier of GPUs with matrix units.

    y = round(round(x)·round(w)ᵀ),  round to bfloat16, sums in float32

Residual stream, norms, RoPE, attention, gelu and pooling stay in float32. (float16 would overflow: the residual stream
goes beyond 65,504.) So do the products of batches with a text of fewer than 64 tokens, in whose mean the rounding of
single tokens would still show (1 − cos up to 1e-3), and of few rows, which wait for the weights, bfloat16 either way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx

from egemma_mlx.kernels import Kernels, check, fused
from egemma_mlx.kernels.approx import on_cpu

_APART = 64
"""Tokens of a text from which on the cosine with its float32 vector is 0.9999 or more."""


def bfloat16(base: Kernels) -> Kernels:
    """`base` with its products against weights in bfloat16, on MLX's own `mx.matmul`, where texts are long."""
    rounded: dict[str, Any] = {
        "linear": linear,
        **fused.composed(fused.Parts(linear, base.gelu_mul, base.rms_norm, base.add_norm)),
    }
    return replace(base, **rounded, exact=base, apart=_APART)


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
