"""exp and tanh in plain multiply-adds, for the CPU.

MLX's own exp and tanh take 25–35 ns an element on a Linux CPU; in multiply-adds the compiler vectorises the fused
loop and a whole gelu takes 4.5 ns, at the same error against float64 (tanh 2e-7 absolute, exp 1e-7 relative).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import mlx.core as mx

# tanh x ≈ x·P(x²)/Q(x²), degree 13 over 6; beyond the clamp tanh is ±1 in float32. The minimax coefficients are
# Eigen's (MathFunctionsImpl.h, ptanh_float).
_TANH_CLAMP = 7.90531110763549805
_TANH_P = (
    -2.76076847742355e-16,
    2.00018790482477e-13,
    -8.60467152213735e-11,
    5.12229709037114e-08,
    1.48572235717979e-05,
    6.37261928875436e-04,
    4.89352455891786e-03,
)
_TANH_Q = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)

# exp x = 2ⁿ·eʳ, n = round(x/ln 2), r = x − n·ln 2 in two parts, eʳ by the minimax polynomial of Cephes' expf.
_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP_P = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
# 1.5·2²³: adding it leaves round(x) in the low mantissa bits, which is faster than a call to round.
_ROUND, _ROUND_BITS = 12582912.0, 0x4B400000

_Leaf = TypeVar("_Leaf", bound=Callable[..., object])


def on_cpu() -> bool:
    return mx.default_device() == mx.Device(mx.cpu)


def fused(function: _Leaf) -> _Leaf:
    """`mx.compile` for an elementwise leaf. Not shapeless: that keeps every broadcast and splits the loop in two."""
    return cast(_Leaf, mx.compile(function))


def tanh(x: mx.array) -> mx.array:
    """tanh x, float32."""
    x = mx.minimum(mx.maximum(x, -_TANH_CLAMP), _TANH_CLAMP)
    square = x * x
    return x * _horner(square, _TANH_P) / _horner(square, _TANH_Q)


def exp(x: mx.array) -> mx.array:
    """exp x, float32, for x ≤ 0; at and below −87 it is 1.6e-38, which vanishes beside a softmax's 1."""
    x = mx.maximum(x, -87.0)
    shifted = x * _LOG2_E + _ROUND
    n = shifted - _ROUND
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    power = mx.view(mx.left_shift(mx.view(shifted, mx.int32) - (_ROUND_BITS - 127), 23), mx.float32)
    return (_horner(r, _EXP_P) * (r * r) + r + 1.0) * power


def _horner(x: mx.array, coefficients: tuple[float, ...]) -> mx.array:
    value: mx.array | float = coefficients[0]
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    assert isinstance(value, mx.array)
    return value
