"""The least time of a launch: overhead + the slowest of DRAM, the cores' load paths and the cores' matrix units.

Threadgroups go to cores in waves: a core holds as many as its threads and threadgroup memory allow, and the core with
the most of them decides. Latencies, caches that hold a previous launch's output, and arithmetic outside 8×8 products
(exp, norms) are left out: the first makes real launches slower, the second faster, the third adds a few per cent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from egemma_mlx.cost.devices import DEFAULT_OVERHEAD, Core, Device
from egemma_mlx.cost.work import FLOPS, Work


@dataclass(frozen=True)
class Time:
    """Seconds of one launch beyond its overhead, by what limits it."""

    dram: float
    load: float
    compute: float

    @property
    def seconds(self) -> float:
        return max(self.dram, self.load, self.compute)

    @property
    def limit(self) -> str:
        return max(("dram", "load", "compute"), key=lambda name: float(getattr(self, name)))


def time(work: Work, device: Device) -> Time:
    """The roofline of one launch."""
    core = device.core
    waves, rest = busiest(work, device)
    groups = waves * resident(work, core) + rest
    load = load_clocks(work, core) / work.threadgroups * groups
    flops = FLOPS * work.multiply_accumulates / work.threadgroups
    compute = flops / (2 * core.alus * core.matrix_ceiling)
    compute *= waves * _wave(resident(work, core), work, core) + _wave(rest, work, core)
    return Time(work.unique_bytes / device.bandwidth, load / device.clock, compute / device.clock)


def resident(work: Work, core: Core) -> int:
    """Threadgroups of this launch that fit a core at a time."""
    threads = core.matrix_threads if work.multiply_accumulates else core.most_threads
    by_memory = core.shared_memory // max(work.threadgroup_memory, 1)
    return max(min(threads // work.threads, by_memory), 1)


def busiest(work: Work, device: Device) -> tuple[int, int]:
    """Of the core with the most work: its full waves, and the threadgroups of its last one."""
    return divmod(-(-work.threadgroups // device.cores), resident(work, device.core))


def load_clocks(work: Work, core: Core) -> float:
    """Clocks that all loads and stores of a launch take on one core."""
    device_bytes = work.device_bytes + work.narrow_bytes * (core.request_bytes / 4 - 1)
    return device_bytes / core.load_bytes + work.threadgroup_bytes / core.shared_bytes


def _wave(groups: int, work: Work, core: Core) -> float:
    """How long so many threadgroups take together, in times of one that has all of the core's matrix units."""
    return max(groups, core.simdgroups * 32 / work.threads) if groups else 0.0


def total(launches: Iterable[Work], device: Device, overhead: float = DEFAULT_OVERHEAD) -> float:
    """Seconds of a sequence of launches, each of which waits for the one before."""
    return sum(overhead + time(work, device).seconds for work in launches)
