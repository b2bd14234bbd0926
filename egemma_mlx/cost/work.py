"""What one launch of a kernel does, and the shapes that attention's formulas are of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

FLOPS = 1024
"""Of one 8×8×8 multiply-accumulate."""
FRAGMENT = 256
"""Bytes of an 8×8 float32 fragment."""
FLOAT = 4
"""Bytes of a float32."""
SIMD = 32
"""Lanes of a simdgroup."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Work:
    """One launch.

    Attributes:
        kernel: its name in `metal_src/`, or what it computes.
        threadgroups, threads: of the launch, of one threadgroup.
        needed: FLOPs of the products that the result is made of (no padding, no masked keys).
        multiply_accumulates: 8×8×8, those executed.
        load_bytes, store_bytes: of device memory, as the lanes ask for them.
        narrow_bytes: of these, by requests of four bytes a lane.
        shared_load_bytes, shared_store_bytes: of threadgroup memory.
        barriers: of threadgroups.
        threadgroup_memory: bytes of one threadgroup.
        read, written: elements of float32 activations, each array once.
        weight_bytes, table_bytes: of weights, and of positions, bounds, angles and the like, each array once.
    """

    kernel: str
    threadgroups: int
    threads: int
    needed: int = 0
    multiply_accumulates: int = 0
    load_bytes: int = 0
    store_bytes: int = 0
    narrow_bytes: int = 0
    shared_load_bytes: int = 0
    shared_store_bytes: int = 0
    barriers: int = 0
    threadgroup_memory: int = 0
    read: int = 0
    written: int = 0
    weight_bytes: int = 0
    table_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        return self.load_bytes + self.store_bytes

    @property
    def threadgroup_bytes(self) -> int:
        return self.shared_load_bytes + self.shared_store_bytes

    @property
    def executed(self) -> int:
        """FLOPs of matrix products."""
        return FLOPS * self.multiply_accumulates

    @property
    def activations(self) -> int:
        """Elements read plus written."""
        return self.read + self.written

    @property
    def unique_bytes(self) -> int:
        """Bytes that must come from or go to DRAM if a launch finds nothing in caches and reads nothing twice."""
        return FLOAT * self.activations + self.weight_bytes + self.table_bytes


@dataclass(frozen=True)
class Keys:
    """The packed rows lo…hi − 1 that each row meets (`attention_bounds`), where every one of them is met."""

    lo: Ints
    hi: Ints

    @classmethod
    def of(cls, lengths: Sequence[int], window: int | None, rows: int | None = None) -> Keys:
        """Of segments laid end to end with a token at every row, in a batch of `rows` rows (default: no more)."""
        stop = np.repeat(np.cumsum(lengths), lengths)
        start = stop - np.repeat(lengths, lengths)
        row = np.arange(len(stop))
        reach = len(stop) if window is None else window
        padding = np.arange(len(stop), len(stop) if rows is None else rows)
        lo, hi = np.maximum(start, row - reach), np.minimum(stop, row + reach + 1)
        return cls(np.concatenate([lo, padding]), np.concatenate([hi, padding]))

    @property
    def rows(self) -> int:
        return len(self.lo)

    @property
    def pairs(self) -> int:
        """(row, key) pairs that meet."""
        return int((self.hi - self.lo).sum())

    def blocks(self, size: int) -> tuple[Ints, Ints, Ints]:
        """Of every block of `size` rows: how many it has, and the first key and the end of those that it visits."""
        first = np.arange(0, self.rows, size)
        last = np.minimum(first + size, self.rows) - 1
        return last - first + 1, self.lo[first], np.maximum(self.hi[last], self.lo[first])


@dataclass(frozen=True)
class Heads:
    """q [T, heads·head_dim] over k, v [T, kv_heads·head_dim]."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


_COUNTS = (
    "threadgroups",
    "needed",
    "multiply_accumulates",
    "load_bytes",
    "store_bytes",
    "narrow_bytes",
    "shared_load_bytes",
    "shared_store_bytes",
    "barriers",
)


def together(works: Sequence[Work], kernel: str, **changes: int) -> Work:
    """Several in one launch: what they do is added up, the rest is the first's unless `changes` says it."""
    sums = {name: sum(int(getattr(work, name)) for work in works) for name in _COUNTS}
    return replace(works[0], kernel=kernel, **{**sums, **changes})


def tiles(size: int, tile: int) -> int:
    """⌈size / tile⌉"""
    return -(-size // tile)
