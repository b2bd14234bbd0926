"""exp and tanh in plain multiply-adds, for the CPU.

MLX's own exp and tanh take 25 to 35 ns an element on a Linux CPU. In multiply-adds the compiler vectorises the fused
loop: 2 ns for a softmax's exp and 2.3 ns for a whole gelu, and no less exact.

`mx.compile` ends a fused loop after eleven dependent operations; polynomials are therefore evaluated as trees
(Estrin's scheme), and what is too deep for one loop comes in two functions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import mlx.core as mx

# tanh x ≈ x·P(x²)/Q(x²) for |x| up to the clamp, beyond which tanh is ±1 in float32. The minimax coefficients are
# Eigen's (MathFunctionsImpl.h, ptanh_float).
_TANH_CLAMP = 7.90531110763549805
_TANH_P = (
    4.89352455891786e-03,
    6.37261928875436e-04,
    1.48572235717979e-05,
    5.12229709037114e-08,
    -8.60467152213735e-11,
    2.00018790482477e-13,
    -2.76076847742355e-16,
)
_TANH_Q = (4.89352518554385e-03, 2.26843463243900e-03, 1.18534705686654e-04, 1.19825839466702e-06)

# 2ᶠ for |f| ≤ ½, to 3e-9: the interpolant in the Chebyshev points of degree 6.
_EXP2_P = (
    1.00000000059976,
    0.693147207153966,
    0.240226511914577,
    0.0555032720790265,
    0.00961802560245757,
    0.00134004321868977,
    0.000154697319967014,
)
# 1.5·2²³: adding it and taking it off again rounds, which is faster than a call to round.
_ROUND = 12582912.0

_MOST_TRACES = 256
_WORTH = 1 << 26
_Leaf = TypeVar("_Leaf", bound=Callable[..., object])


def on_cpu() -> bool:
    return mx.default_device() == mx.Device(mx.cpu)


def fused(function: _Leaf) -> _Leaf:
    """`mx.compile` for an elementwise leaf of many operations, once it pays, and forgetting traces when they are many.

    On the CPU MLX calls g++ for a second or two, which is what the plain operations lose over the first `_WORTH`
    elements: a first search does not wait for it, and whoever has much to embed soon has it back. Every shape is a
    trace, and MLX keeps and searches them all: texts of all lengths would make thousands. (Shapeless compilation keeps
    every broadcast and splits the loop: three times slower.)
    """
    traces, seen = _Traces(), 0

    def run(*arrays: mx.array) -> Any:
        nonlocal seen
        if seen < _WORTH:
            seen += arrays[0].size
            return function(*arrays)
        shapes = tuple([array.shape for array in arrays])
        if shapes not in traces.shapes:
            if len(traces.shapes) in (0, _MOST_TRACES):
                traces.shapes.clear()
                traces.compiled = mx.compile(function)
            traces.shapes.add(shapes)
        return traces.compiled(*arrays)

    return cast(_Leaf, run)


class _Traces(threading.local):
    """What `mx.compile` keeps for this thread."""

    def __init__(self) -> None:
        self.shapes: set[tuple[tuple[int, ...], ...]] = set()
        self.compiled: Callable[..., Any]


def tanh_clamp(x: mx.array) -> mx.array:
    """x as far as tanh needs it."""
    return mx.where(x < _TANH_CLAMP, mx.where(x > -_TANH_CLAMP, x, -_TANH_CLAMP), _TANH_CLAMP)


def tanh(x: mx.array) -> mx.array:
    """tanh x for a clamped x."""
    square = x * x
    return x * _polynomial(square, _TANH_P) / _polynomial(square, _TANH_Q)


def exp2(y: mx.array) -> mx.array:
    """2ʸ for y ≤ 127, relative error below 3e-7; 0 from −126.5 down.

    2ʸ = 2ⁿ·2ᶠ, n = round(y), f = y − n. Two loops: `mx.compile` fuses no view of bits as another type.
    """
    return _times_exp2_fraction(y, mx.view(_exp2_round(y), mx.float32))


@fused
def _exp2_round(y: mx.array) -> mx.array:
    """The bits of 2ⁿ."""
    return mx.left_shift(mx.maximum((y + _ROUND) - (_ROUND - 127), 0.0).astype(mx.int32), 23)


@fused
def _times_exp2_fraction(y: mx.array, power: mx.array) -> mx.array:
    """power·2ᶠ; f is 0 for a y that has no fraction, however low."""
    return _polynomial(y - ((y + _ROUND) - _ROUND), _EXP2_P) * power


def _polynomial(x: mx.array, coefficients: Sequence[float]) -> mx.array:
    """Σ c_i·xⁱ as a tree: pairs, then pairs of pairs."""
    terms: list[Any] = list(coefficients)
    while len(terms) > 1:
        even, odd = terms[::2], terms[1::2]
        terms = [a + b * x for a, b in zip(even, odd, strict=False)] + even[len(odd) :]
        x = x * x
    return cast(mx.array, terms[0])
