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
    group, kv_heads = q.shape[1] // k.shape[1], k.shape[1]

    def head(at: int) -> mx.array:
        queries, keys, values = q[:, at * group : (at + 1) * group], k[:, at : at + 1], v[:, at : at + 1]
        bounded = bool(_longest(queries) * _longest(keys) < plain.BOUND)  # |q·k| ≤ |q|·|k|
        out = plain.attention(queries, keys, values, plan, bounded=bounded, eager=True)
        mx.eval(out)
        return out

    before = blas.set_threads(1)
    if before == 1:  # as in a batch beside others, which have the other cores
        return mx.concatenate([head(at) for at in range(kv_heads)], axis=1)
    try:
        _workers.start(os.cpu_count() or 1)
        outs = [future.result() for future in [_workers.submit(head, at) for at in range(kv_heads)]]
    finally:
        if before is not None:
            blas.set_threads(before)
    return mx.concatenate(outs, axis=1)


def _longest(x: mx.array) -> mx.array:
    """The greatest length of a row."""
    return mx.sqrt(mx.square(x).sum(axis=-1).max())
