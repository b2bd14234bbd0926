"""The processes of one job, as `mlx.launch` starts them. Alone, a process opens no socket."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from egemma_mlx.errors import EgemmaError

if TYPE_CHECKING:
    import mlx.core as mx


@dataclass(frozen=True)
class Ranks:
    """This process's place among `size` of them."""

    rank: int = 0
    size: int = 1
    group: mx.distributed.Group | None = None

    def share(self, count: int) -> range:
        """Which of `count` shards are this rank's."""
        return range(self.rank, count, self.size)

    def wait_for_all(self) -> None:
        """Return once every rank has called this.

        Raises:
            EgemmaError: one of them ended without.
        """
        if self.group is None:
            return
        import mlx.core as mx

        try:
            with _killable():
                mx.eval(mx.distributed.all_sum(mx.array(1.0), group=self.group))
        except RuntimeError as error:
            raise EgemmaError(
                f"rank {self.rank} of {self.size}: another rank ended before its work was done ({error}). Finished "
                "shards stay; the same command completes the job, with any number of ranks"
            ) from None


def join() -> Ranks:
    """Meet the other ranks, if `mlx.launch` started this process; it waits until all of them are there.

    Raises:
        EgemmaError: they cannot be reached.
    """
    hosts = os.environ.get("MLX_HOSTFILE")
    # For one rank `mlx.launch` writes an empty file of hosts, which MLX then cannot read (0.32).
    if "MLX_RANK" not in os.environ or (hosts and not Path(hosts).read_text().strip()):
        return Ranks()
    import mlx.core as mx

    try:
        with _killable():
            group = mx.distributed.init(strict=True)
    except RuntimeError as error:
        raise EgemmaError(f"rank {os.environ['MLX_RANK']}: the other ranks cannot be reached ({error})") from None
    return Ranks(group.rank(), group.size(), group)


@contextmanager
def _killable() -> Iterator[None]:
    """Signals act at once: a handler in Python would wait for MLX's call, which waits for the other ranks, and
    `mlx.launch`, which ends them by a signal when one fails, would wait for that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_DFL) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
