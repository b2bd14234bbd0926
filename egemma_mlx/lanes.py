"""Threads that run forwards, one a core on the CPU and one on a GPU.

A row operation of MLX keeps one core busy and a matrix product all of them, so batches with a core each finish sooner
than batches in turn with all cores.

The threads belong to the process and never end. MLX's compile cache is thread-local and takes the GIL when its thread
ends, which aborts the process if the interpreter is shutting down by then (MLX 0.32); and a cache that lives on serves
the next call. Callers' own threads never come to have one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, as_completed
from queue import SimpleQueue
from typing import Any, TypeVar

import mlx.core as mx

from egemma_mlx import blas
from egemma_mlx.kernels.approx import on_cpu

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
_threads: list[threading.Thread] = []
_lock = threading.Lock()


def run(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """`function` of every item, in the order they finish. Calls from several threads take turns.

    What `function` returns must not be a lazy `mx.array`: those belong to the thread that made them.
    """
    with _lock:
        width = _start()
        queue = list(items)
        shares = min(width, len(queue))
        # A matrix product splits over the cores that no other lane uses.
        before = blas.set_threads(max(width // shares, 1)) if width > 1 and shares else None
        futures = [_submit(function, item) for item in queue]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()
            if before is not None:
                blas.set_threads(before)


def _start() -> int:
    """Start what is missing of the threads, and say how many there are."""
    width = (os.cpu_count() or 1) if on_cpu() else 1
    while len(_threads) < width:
        _threads.append(threading.Thread(target=_work, name=f"egemma_mlx lane {len(_threads)}", daemon=True))
        _threads[-1].start()
    return len(_threads)


def _submit(function: Callable[[_Item], _Result], item: _Item) -> Future[_Result]:
    future: Future[_Result] = Future()
    device = mx.default_device()

    def job() -> _Result:
        with mx.stream(device):  # the caller's choice, which a new thread does not know
            return function(item)

    _jobs.put((future, job))
    return future


def _work() -> None:
    while True:
        future, job = _jobs.get()
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)
        del future, job
