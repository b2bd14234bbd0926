"""Threads that belong to the process and never end.

MLX's compile cache is thread-local and takes the GIL when its thread ends, which aborts the process if the interpreter
is shutting down by then (MLX 0.32); and a cache that lives on serves the next call. Callers' own threads never come to
have one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import mlx.core as mx

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Workers:
    """Threads that take jobs in order."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()

    def start(self, width: int) -> int:
        """Start what is missing of so many threads, and say how many there are."""
        with self._starting:
            while len(self._threads) < width:
                name = f"egemma_mlx {self._name} {len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
            return len(self._threads)

    def submit(self, function: Callable[[_Item], _Result], item: _Item) -> Future[_Result]:
        """`function` of `item` on the device of the caller.

        What `function` returns must not be a lazy `mx.array`: those belong to the thread that made them.
        """
        future: Future[_Result] = Future()
        device = mx.default_device()

        def job() -> _Result:
            with mx.stream(device):  # the caller's choice, which a new thread does not know
                return function(item)

        self._jobs.put((future, job))
        return future

    def _work(self) -> None:
        while True:
            future, job = self._jobs.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            del future, job
