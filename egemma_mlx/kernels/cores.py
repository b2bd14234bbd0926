"""Layers of plain operations on all cores of a CPU, each of which has rows of its own.

MLX's row operations keep one core busy, and a BLAS gains nothing from more threads in products as small as those of a
head of 64 channels. So each core takes a part of the rows through all layers, its products on one thread, and the cores
meet once a layer: attention needs the keys and values of all rows.

(Streams of one thread would do, but MLX lets ten operations wait at most, of all streams together, and a core often has
none of them. For the same reason a part evaluates function by function.) A batch that has one core is one part.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx

from egemma_mlx import blas
from egemma_mlx.kernels import OPS, Kernels
from egemma_mlx.kernels import attention as plain
from egemma_mlx.kernels.approx import on_cpu
from egemma_mlx.packing import Packed
from egemma_mlx.workers import Workers

Layers = Callable[[mx.array, mx.array, Packed, Any, Kernels], mx.array]
"""What takes rows [T, D] through layers: (h, positions [T, ...], packed, table, kernels) → [T, D]. Its kernel functions
go row by row, but for attention, which is full in each segment. Weights are evaluated."""

_FEWEST = 128
"""Rows of a part at least: a product of fewer takes a core as long for each of its weights."""
_MOST = 10
"""Parts at most, since MLX runs as many operations at a time: 2,304 patches take 16 cores 2.1 s in 10 parts, 2.8 in 16,
3.8 together."""
# Query rows scored at once; of more, the scores of all cores and their weights crowd the cache that they share.
_TILE = 192

_workers = Workers("core")
_lock = threading.Lock()


def together(
    layers: Layers, h: mx.array, positions: mx.array, packed: Packed, table: Any, kernels: Kernels
) -> mx.array:
    """All rows at once: `layers` of the rest."""
    return layers(h, positions, packed, table, kernels)


def apart(layers: Layers, h: mx.array, positions: mx.array, packed: Packed, table: Any, kernels: Kernels) -> mx.array:
    """`together`; plain operations on a CPU on as many cores as no other batch has, and evaluated."""
    dense = packed.dense and sum(packed.lengths or ()) == packed.rows
    if not (on_cpu() and kernels.attention is OPS.attention and dense):
        return layers(h, positions, packed, table, kernels)
    mx.eval(h, positions, table)  # lazy arrays belong to the thread that made them
    with _claimed(min(os.cpu_count() or 1, _MOST, packed.rows // _FEWEST)) as count:
        meeting = _Meeting(count)

        def run(index: int) -> mx.array:
            here = slice(packed.rows * index // count, packed.rows * (index + 1) // count)
            with meeting:
                out = layers(h[here], positions[here], packed, table, _Part(index, here, meeting).kernels(kernels))
                mx.eval(out)
                return out

        return run(0) if count == 1 else mx.concatenate(_side_by_side(run, count))


@contextmanager
def _claimed(count: int) -> Iterator[int]:
    """The cores to be had: `count`, and products take one thread each meanwhile; 1 where others are at work."""
    if count < 2 or not _lock.acquire(blocking=False):
        yield 1
        return
    try:
        with blas.one_thread() as before:
            yield 1 if before == 1 else count  # one thread: this batch has others beside it
    finally:
        _lock.release()


def _side_by_side(run: Callable[[int], mx.array], count: int) -> list[mx.array]:
    _workers.start(count)
    parts = [_workers.submit(run, index) for index in range(count)]
    # Of a part that fails the others hear where they would wait for it.
    errors = [error for part in parts if (error := part.exception())]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [part.result() for part in parts]


class _Meeting:
    """Where parts wait for one another, to see what each has brought."""

    def __init__(self, count: int) -> None:
        self._brought: list[Any] = [None] * count
        self._seen: list[Any] = []
        # Nobody can bring the next thing before all have seen this one: they would have to meet first.
        self._barrier = threading.Barrier(count, lambda: setattr(self, "_seen", list(self._brought)))

    def exchange(self, index: int, brought: Any) -> list[Any]:
        self._brought[index] = brought
        self._barrier.wait()
        return self._seen

    def __enter__(self) -> None: ...

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed:
            self._barrier.abort()


class _Part:
    """Rows `here` of a batch."""

    def __init__(self, index: int, here: slice, meeting: _Meeting) -> None:
        self.index = index
        self.here = here
        self.meeting = meeting

    def kernels(self, base: Kernels) -> Kernels:
        functions = base.functions() | {"attention": self.attention}
        evaluated: dict[str, Any] = {name: _evaluated(function) for name, function in functions.items()}
        return replace(base, **evaluated | {"plan": self.plan})

    def plan(self, packed: Packed, window: int | None) -> list[plain.Tile]:
        """Rows here, counted from the first, against the rows of their segment."""
        assert window is None and packed.lengths is not None
        tiles = []
        for start, stop in pairwise(accumulate(packed.lengths, initial=0)):
            first, last = (min(max(row, self.here.start), self.here.stop) - self.here.start for row in (start, stop))
            tiles += [plain.Tile(here, slice(start, stop), None) for here in plain.blocks(first, last, _TILE)]
        return tiles

    def attention(self, q: mx.array, k: mx.array, v: mx.array, tiles: list[plain.Tile]) -> mx.array:
        """`attention.attention` of the queries here with the keys and values of all rows.

        It evaluates tile by tile: MLX orders what is lazy breadth first, the scores of all tiles before the first
        weight, and no cache keeps them until then.
        """
        q, k, v = (x.transpose(1, 0, 2) for x in (q, k, v))
        mx.eval(q, k, v)
        keys, values = zip(*self.meeting.exchange(self.index, (k, v)), strict=True)
        group, heads = len(q) // len(k), []
        for head in range(len(k)):
            queries = q[None, head * group : (head + 1) * group]
            key, value = (mx.concatenate([part[head] for part in parts])[None, None] for parts in (keys, values))
            bounded = bool(_longest(queries) * _longest(key) < plain.BOUND)  # |q·k| ≤ |q|·|k|
            outs = []
            for here, near, _ in tiles:
                outs.append(plain.attend(queries[..., here, :], key[..., near, :], value[..., near, :], None, bounded))
                mx.eval(outs[-1])
            heads.append(mx.concatenate(outs, axis=-2))
        return plain.rows_first(mx.concatenate(heads))


def _longest(x: mx.array) -> mx.array:
    """The greatest length of a row."""
    return mx.sqrt(mx.square(x).sum(axis=-1).max())


def _evaluated(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        mx.eval(result)
        return result

    return run
