"""Attention of plain operations on all cores of a CPU, for one large batch that runs alone.

MLX's row operations keep one core busy, and a BLAS gains nothing from more threads in products as small as those of a
head of 64 channels. So heads go to as many streams as there are cores, each with a thread of its own, and a product to
one thread.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import mlx.core as mx

from egemma_mlx import blas
from egemma_mlx.kernels import OPS, Kernels
from egemma_mlx.kernels import attention as plain
from egemma_mlx.kernels.approx import on_cpu


def on_all_cores(kernels: Kernels) -> Kernels:
    """`kernels` with its attention on all cores, where that is of plain operations on a CPU. It evaluates."""
    return replace(kernels, attention=attention) if on_cpu() and kernels.attention is OPS.attention else kernels


def attention(q: mx.array, k: mx.array, v: mx.array, plan: plain.Plan) -> mx.array:
    """`attention.attention`, evaluated."""
    mx.eval(q, k, v)  # products before attention have all threads of the BLAS
    before = blas.set_threads(1)
    if before == 1:  # as in a batch beside others, which have the other cores
        return plain.attention(q, k, v, plan)
    try:
        group, streams, outs = q.shape[1] // k.shape[1], _streams(), []
        for head in range(k.shape[1]):
            with mx.stream(streams[head % len(streams)]):
                heads = q[:, head * group : (head + 1) * group], k[:, head : head + 1], v[:, head : head + 1]
                outs.append(plain.attention(*heads, plan))
        mx.eval(outs)
    finally:
        if before is not None:
            blas.set_threads(before)
    return mx.concatenate(outs, axis=1)


_local = threading.local()


def _streams() -> list[mx.Stream]:
    """One a core. MLX knows a stream in the thread alone that made it."""
    if not hasattr(_local, "streams"):
        _local.streams = [mx.new_stream(mx.Device(mx.cpu)) for _ in range(os.cpu_count() or 1)]
    streams: list[mx.Stream] = _local.streams
    return streams
