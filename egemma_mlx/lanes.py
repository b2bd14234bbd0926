"""Forwards side by side, one a core on the CPU and one on a GPU.

A row operation of MLX keeps one core busy and a matrix product all of them, so batches with a core each finish sooner
than batches in turn with all cores.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import as_completed
from typing import TypeVar

from egemma_mlx import blas
from egemma_mlx.kernels.approx import on_cpu
from egemma_mlx.workers import Workers

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_workers = Workers("lane")
_lock = threading.Lock()


def run(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """`function` of every item, in the order they finish. Calls from several threads take turns.

    What `function` returns must not be a lazy `mx.array`: those belong to the thread that made them.
    """
    with _lock:
        width = _workers.start((os.cpu_count() or 1) if on_cpu() else 1)
        queue = list(items)
        shares = min(width, len(queue))
        # A matrix product splits over the cores that no other lane uses.
        before = blas.set_threads(max(width // shares, 1)) if width > 1 and shares else None
        futures = [_workers.submit(function, item) for item in queue]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()
            if before is not None:
                blas.set_threads(before)
