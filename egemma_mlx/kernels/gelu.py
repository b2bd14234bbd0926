"""The gate of a gated linear unit: gelu_tanh(g)·u.

gelu_tanh(g) = ½·g·(1 + tanh z),  z = √(2/π)·(g + 0.044715·g³)
"""

from __future__ import annotations

import math

import mlx.core as mx

from egemma_mlx.kernels.approx import fused, on_cpu, tanh

_SCALE = math.sqrt(2 / math.pi)


def gelu_mul(g: mx.array, u: mx.array) -> mx.array:
    """gelu_tanh(g)·u, elementwise over two float32 arrays of one shape."""
    return _gelu_mul_cpu(g, u) if on_cpu() else _gelu_mul(g, u)


@fused
def _gelu_mul(g: mx.array, u: mx.array) -> mx.array:
    # ½·g·(1 + tanh z) = g / (1 + exp(−2z)): one exp, and right in both tails.
    z = _SCALE * (g + 0.044715 * g * g * g)
    return g / (1 + mx.exp(-2 * z)) * u


@fused
def _gelu_mul_cpu(g: mx.array, u: mx.array) -> mx.array:
    half = 0.5 * g
    return (half + half * tanh(g * (_SCALE + (0.044715 * _SCALE) * (g * g)))) * u
