"""Attention of plain operations on all cores of a CPU, for one large batch that runs alone.

MLX's row operations keep one core busy, and a BLAS gains nothing from more threads in products as small as those of a
head of 64 channels. So each core takes a head at a time, and a product one thread. (Streams of one thread would do, but
MLX lets ten operations wait at most, of all streams together, and a core often has none of them.)
"""

from __future__ import annotations

import os
from dataclasses import replace

import mlx.core as mx

from egemma_mlx import blas
from egemma_mlx.kernels import OPS, Kernels
from egemma_mlx.kernels import attention as plain
from egemma_mlx.kernels.approx import on_cpu
from egemma_mlx.workers import Workers

_workers = Workers("core")


def on_all_cores(kernels: Kernels) -> Kernels:
    """`kernels` with its attention on all cores, where that is of plain operations on a CPU. It evaluates."""
    return replace(kernels, attention=attention) if on_cpu() and kernels.attention is OPS.attention else kernels


def attention(q: mx.array, k: mx.array, v: mx.array, plan: plain.Plan) -> mx.array:
    """`attention.attention`, evaluated."""
    mx.eval(q, k, v, plan)  # products before attention have all threads of the BLAS
    before = blas.set_threads(1)
    if before == 1:  # as in a batch beside others, which have the other cores
        return plain.attention(q, k, v, plan)
    group = q.shape[1] // k.shape[1]

    def head(at: int) -> mx.array:
        here, shared = slice(at * group, (at + 1) * group), slice(at, at + 1)
        out = plain.attention(q[:, here], k[:, shared], v[:, shared], plan, eager=True)
        mx.eval(out)
        return out

    try:
        _workers.start(os.cpu_count() or 1)
        outs = [future.result() for future in [_workers.submit(head, at) for at in range(k.shape[1])]]
    finally:
        if before is not None:
            blas.set_threads(before)
    return mx.concatenate(outs, axis=1)
