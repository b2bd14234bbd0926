"""The gate of a gated linear unit: gelu_tanh(g)·u.

gelu_tanh(g) = ½·g·(1 + tanh z),  z = √(2/π)·(g + 0.044715·g³)
"""

from __future__ import annotations

import math

import mlx.core as mx

from egemma_mlx.kernels import check
from egemma_mlx.kernels.approx import fused, on_cpu, tanh, tanh_clamp
from egemma_mlx.kernels.library import Library, Source, launch

_GELU_MUL = Source("gelu_mul", ("g", "u"), ("out",), ("load", "gelu"))
_Z1 = math.sqrt(2 / math.pi)
_Z3 = 0.044715 * _Z1


def gelu_mul(g: mx.array, u: mx.array) -> mx.array:
    """gelu_tanh(g)·u, elementwise over two float32 arrays of one shape."""
    _check(g, u)
    return _gate_cpu(_argument_cpu(g), g, u) if on_cpu() else _gate(g, u)


def metal_gelu_mul(library: Library, g: mx.array, u: mx.array) -> mx.array:
    """`gelu_mul` for arrays whose size is a multiple of 4."""
    _check(g, u)
    check.multiple("gelu_mul", "the size of g", g.size, 4)
    threads = g.size // 4
    return launch(
        library(_GELU_MUL), g, u, grid=(threads, 1, 1), threadgroup=(min(threads, 256), 1, 1), outputs=[g.shape]
    )[0]


def _check(g: mx.array, u: mx.array) -> None:
    check.dtype("gelu_mul", "g", g, mx.float32)
    check.rows("gelu_mul", "u", u, *g.shape)


@fused
def _gate(g: mx.array, u: mx.array) -> mx.array:
    # ½·g·(1 + tanh z) = g / (1 + exp(−2z)): one exp, and right in both tails.
    return g / (1 + mx.exp(-2 * (g * (_Z1 + _Z3 * (g * g))))) * u


@fused
def _argument_cpu(g: mx.array) -> mx.array:
    return tanh_clamp(g * (_Z1 + _Z3 * (g * g)))


@fused
def _gate_cpu(z: mx.array, g: mx.array, u: mx.array) -> mx.array:
    half = 0.5 * g * u
    return half + half * tanh(z)
