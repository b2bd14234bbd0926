"""What this device reaches at best: a large product, a large sum, the shortest step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from egemma_mlx.kernels.approx import on_cpu

_ROUNDS = 5
_STEPS = 1000


@dataclass(frozen=True)
class Ceilings:
    """Best of five.

    Attributes:
        side: rows and columns of the square matrices.
        float32_tflops: a·b in float32.
        bfloat16_tflops: the same in bfloat16; None on the CPU, where MLX has no fast form of it.
        gbps: a + b in float32: bytes read and written.
        launch_us: microseconds of a sum of one element that waits for the one before.
    """

    side: int
    float32_tflops: float
    bfloat16_tflops: float | None
    gbps: float
    launch_us: float


def ceilings() -> Ceilings:
    """Measure them, in about a second; at most 0.8 GB of memory."""
    side, elements = (1024, 1 << 24) if on_cpu() else (4096, 1 << 26)
    x = mx.random.normal((side, side))
    a, b, one = mx.zeros(elements), mx.ones(elements), mx.ones(1)
    half = x.astype(mx.bfloat16)
    mx.eval(x, half, a, b, one)

    def steps() -> mx.array:
        total = one
        for _ in range(_STEPS):
            total = total + one
        return total

    work = 2 * side**3 / 1e12
    return Ceilings(
        side=side,
        float32_tflops=work / _best(lambda: x @ x),
        bfloat16_tflops=None if on_cpu() else work / _best(lambda: half @ half),
        gbps=3 * a.nbytes / 1e9 / _best(lambda: a + b),
        launch_us=_best(steps) / _STEPS * 1e6,
    )


def _best(function: Callable[[], mx.array]) -> float:
    """Seconds of the fastest round after one to warm up."""
    return min([seconds(function) for _ in range(1 + _ROUNDS)][1:])


def seconds(function: Callable[[], Any], repeats: int = 1) -> float:
    """Seconds that evaluating so many calls takes, each its share; building their graph is not counted."""
    outputs = [function() for _ in range(repeats)]
    start = time.perf_counter()
    mx.eval(outputs)
    return (time.perf_counter() - start) / repeats
