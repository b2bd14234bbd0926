"""What one launch of each kernel does, in closed form: one function a file of `metal_src/`.

They count as the simulator does (`egemma_mlx.simulator.Counters`): bytes as the lanes ask for them, `constant` memory
left out, 8×8×8 multiply-accumulates once a simdgroup, barriers once a threadgroup. Tests hold every formula to the
counters. Sizes are those of the kernel's header comment; `item` is the bytes of a weight's element, 2 or 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

FLOPS = 1024
"""Of one 8×8×8 multiply-accumulate."""
FRAGMENT = 256
"""Bytes of an 8×8 float32 fragment."""
_FLOAT = 4
_SIMD = 32

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
        return _FLOAT * self.activations + self.weight_bytes + self.table_bytes


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


# --- products with weights: shared.h ---------------------------------------------------------------------------------


def linear(rows: int, depth: int, *widths: int, item: int = 2) -> Work:
    """linear.metal and linear_3.metal: 64 × 256 outputs a threadgroup."""
    works = [_shared(rows, depth, width, tiles(width, 256), 64, 256, item) for width in widths]
    stored = _FLOAT * rows * sum(widths)
    return _joined(works, "linear" if len(widths) == 1 else f"linear_{len(widths)}", rows * depth, stored)


def gated(rows: int, depth: int, width: int, *, item: int = 2) -> Work:
    """gated.metal: gate and up in the two bands of one tile, 64 × 128 outputs a threadgroup."""
    return _closed(_shared(rows, depth, width, tiles(width, 128), 64, 256, item, bands=2), "gated", rows * width)


def linear_gelu_mul(rows: int, depth: int, width: int, *, item: int = 2) -> Work:
    """linear_gelu_mul.metal: linear.metal with p read where y is stored."""
    work = _shared(rows, depth, width, tiles(width, 256), 64, 256, item)
    return _closed(work, "linear_gelu_mul", rows * width, rows * width)


def linear_rms_norm(rows: int, depth: int, width: int, *, item: int = 2) -> Work:
    """linear_rms_norm.metal: whole rows, one norm."""
    work = _whole(rows, depth, width, item, norms=1, weights=1)
    return _closed(work, "linear_rms_norm", rows * width)


def linear_add_norm(rows: int, depth: int, width: int, *, item: int = 2, next_norm: bool = False) -> Work:
    """linear_add_norm.metal and linear_add_norm_next.metal: whole rows, h read, h' and maybe its norm stored."""
    norms = 2 if next_norm else 1
    work = _whole(rows, depth, width, item, norms=norms, weights=norms)
    name = "linear_add_norm_next" if next_norm else "linear_add_norm"
    return _closed(work, name, norms * rows * width, rows * width)


def _shared(
    rows: int, depth: int, width: int, groups: int, group_rows: int, threads: int, item: int, bands: int = 1
) -> Work:
    """x·wᵀ by `shared_product`: `groups` threadgroups side by side, each `group_rows` high, which share slices of x.

    A simdgroup multiplies 32 rows by bands of 32 columns; `bands` weights of one width side by side.
    """
    high, slices = tiles(rows, group_rows), tiles(depth, 32)
    products = tiles(rows, 32) * tiles(width, 32) * bands * slices
    return Work(
        kernel="shared_product",
        threadgroups=high * groups,
        threads=threads,
        needed=2 * rows * depth * width * bands,
        multiply_accumulates=64 * products,
        load_bytes=groups * rows * depth * _FLOAT + tiles(rows, 32) * width * bands * depth * item,
        shared_load_bytes=16 * FRAGMENT * products,
        shared_store_bytes=high * groups * group_rows * 32 * slices * _FLOAT,
        barriers=high * groups * slices,
        threadgroup_memory=2 * group_rows * 36 * _FLOAT,
        read=rows * depth,
        weight_bytes=width * bands * depth * item,
    )


def _whole(rows: int, depth: int, width: int, item: int, norms: int, weights: int) -> Work:
    """`shared_product` on 32 whole rows a threadgroup, then `norms` row sums through threadgroup memory (whole.h)."""
    simdgroups = tiles(width, 64)
    work = _shared(rows, depth, width, 1, 32, 32 * simdgroups, item)
    high = work.threadgroups
    return replace(
        work,
        load_bytes=work.load_bytes + weights * rows * width * item,
        shared_load_bytes=work.shared_load_bytes + norms * high * simdgroups * 4 * simdgroups * _SIMD * _FLOAT,
        shared_store_bytes=work.shared_store_bytes + norms * high * simdgroups * 32 * _FLOAT,
        barriers=work.barriers + norms * high,
        threadgroup_memory=work.threadgroup_memory + norms * 8 * 32 * _FLOAT,
        weight_bytes=work.weight_bytes + weights * width * item,
    )


# --- products with weights for few rows: short.h ---------------------------------------------------------------------


def short_fragments(rows: int, most: int = 4) -> int:
    """The row fragments R of `short_tiles` (kernels/linear.py)."""
    return min(1 if rows <= 8 else 2 if rows <= 16 else 4, most)


def linear_short(rows: int, depth: int, *widths: int, item: int = 2) -> Work:
    """linear_short.metal and linear_short_3.metal: 8·R × 16 outputs a threadgroup."""
    works = [_short(rows, depth, width, item, 2) for width in widths]
    stored = _FLOAT * rows * sum(widths)
    name = "linear_short" if len(widths) == 1 else f"linear_short_{len(widths)}"
    return _joined(works, name, rows * depth, stored, narrow=stored)


def gated_short(rows: int, depth: int, width: int, *, item: int = 2) -> Work:
    """gated_short.metal: both weights in one tile."""
    return _closed(_short(rows, depth, width, item, 4, most=2), "gated_short", rows * width, narrow=True)


def linear_gelu_mul_short(rows: int, depth: int, width: int, *, item: int = 2) -> Work:
    """linear_gelu_mul_short.metal: linear_short.metal with p read where y is stored."""
    work = _short(rows, depth, width, item, 2)
    return _closed(work, "linear_gelu_mul_short", rows * width, rows * width, narrow=True)


def _short(rows: int, depth: int, width: int, item: int, fragments: int, most: int = 4) -> Work:
    """x·wᵀ by `short_product`: eight simdgroups share the depth, a tile is R × `fragments` fragments, 16 columns."""
    r = short_fragments(rows, most)
    wide, high, slices, weights = tiles(width, 16), tiles(rows, 8 * r), tiles(depth, 32), fragments // 2
    return Work(
        kernel="short_product",
        threadgroups=wide * high,
        threads=256,
        needed=2 * rows * depth * width * weights,
        multiply_accumulates=wide * high * slices * 4 * r * fragments,
        load_bytes=wide * rows * depth * _FLOAT + high * width * weights * depth * item,
        shared_load_bytes=rows * width * weights * 8 * _FLOAT,
        shared_store_bytes=wide * high * 8 * r * fragments * FRAGMENT,
        barriers=wide * high,
        threadgroup_memory=8 * r * fragments * FRAGMENT,
        read=rows * depth,
        weight_bytes=width * weights * depth * item,
    )


def _joined(works: list[Work], name: str, read: int, stored: int, narrow: int = 0) -> Work:
    """Products of one x in one launch."""
    return together(
        works,
        name,
        store_bytes=stored,
        narrow_bytes=narrow,
        read=read,
        written=stored // _FLOAT,
        weight_bytes=sum(work.weight_bytes for work in works),
    )


def _closed(work: Work, name: str, written: int, also_read: int = 0, *, narrow: bool = False) -> Work:
    """A product with its epilogue: elements that it stores, and those that it reads beside x."""
    moved = _FLOAT * (written + also_read)
    return replace(
        work,
        kernel=name,
        load_bytes=work.load_bytes + _FLOAT * also_read,
        store_bytes=work.store_bytes + _FLOAT * written,
        narrow_bytes=work.narrow_bytes + (moved if narrow else 0),
        read=work.read + also_read,
        written=work.written + written,
    )


# --- rows ------------------------------------------------------------------------------------------------------------


def rms_norm(rows: int, width: int, *, item: int = 2, weighted: bool = True) -> Work:
    """rms_norm.metal: a simdgroup a row."""
    return _rows("rms_norm", rows, width, read=1, written=1, weights=1 if weighted else 0, item=item)


def add_norm(rows: int, width: int, *, item: int = 2, next_norm: bool = False) -> Work:
    """add_norm.metal and add_norm_next.metal: a simdgroup a row."""
    count = 2 if next_norm else 1
    name = "add_norm_next" if next_norm else "add_norm"
    return _rows(name, rows, width, read=2, written=count, weights=count, item=item)


def _rows(name: str, rows: int, width: int, *, read: int, written: int, weights: int, item: int) -> Work:
    return Work(
        kernel=name,
        threadgroups=tiles(rows, 4),
        threads=128,
        load_bytes=rows * width * (_FLOAT * read + weights * item),
        store_bytes=rows * width * _FLOAT * written,
        read=rows * width * read,
        written=rows * width * written,
        weight_bytes=width * weights * item,
    )


def gelu_mul(size: int) -> Work:
    """gelu_mul.metal: a thread for four elements."""
    return Work(
        kernel="gelu_mul",
        threadgroups=tiles(size // 4, 256),
        threads=min(size // 4, 256),
        load_bytes=2 * _FLOAT * size,
        store_bytes=_FLOAT * size,
        read=2 * size,
        written=size,
    )


def qkv_prep(rows: int, heads: Heads, *, positions: int, item: int = 2) -> Work:
    """qkv_prep.metal: a simdgroup a head of a row; `positions` of the angle tables that the rows look up."""
    units, turned = heads.heads + 2 * heads.kv_heads, heads.heads + heads.kv_heads
    size, width = rows * units * heads.head_dim, heads.head_dim
    places = rows * units * _SIMD * _FLOAT
    return Work(
        kernel="qkv_prep",
        threadgroups=rows * tiles(units, min(units, 8)),
        threads=_SIMD * min(units, 8),
        load_bytes=_FLOAT * size + rows * turned * width * (item + _FLOAT) + places,
        store_bytes=_FLOAT * size,
        narrow_bytes=places,
        read=size,
        written=size,
        weight_bytes=2 * width * item,
        table_bytes=positions * width * _FLOAT + rows * _FLOAT,
    )


def pool(lengths: Sequence[int], slots: int, width: int, *, item: int = 2) -> Work:
    """pool.metal: a threadgroup a slot, of which `lengths` are segments."""
    rows, passes = sum(lengths), tiles(width, 128)
    places = rows * _SIMD * _FLOAT + slots * 256 * 2 * _FLOAT
    return Work(
        kernel="pool",
        threadgroups=slots,
        threads=256,
        load_bytes=rows * width * _FLOAT + slots * width * item + places,
        store_bytes=slots * width * _FLOAT,
        narrow_bytes=places,
        shared_load_bytes=slots * width // 4 * 8 * (16 + _FLOAT),
        shared_store_bytes=slots * (passes * 256 * 16 + 8 * _FLOAT),
        barriers=2 * passes * slots,
        threadgroup_memory=8 * 128 * _FLOAT + 8 * _FLOAT,
        read=rows * width,
        written=slots * width,
        weight_bytes=width * item,
        table_bytes=(rows + 2 * slots) * _FLOAT,
    )


# --- attention -------------------------------------------------------------------------------------------------------


def attention_bounds(rows: int, starts: Sequence[int]) -> Work:
    """attention_bounds.metal: a binary search a row among the slots' first rows, which are `starts`."""
    row, table = np.arange(rows), np.asarray(starts)
    first, count = np.zeros(rows, np.int64), np.full(rows, len(table))
    steps = 0
    while count.any():
        open_ = count > 0
        steps += int(open_.sum())
        middle = np.minimum(first + count // 2, len(table) - 1)
        before = open_ & (table[middle] <= row)
        first, count = np.where(before, middle + 1, first), np.where(before, count - count // 2 - 1, count // 2)
    loads = (steps + 2 * int((first > 0).sum())) * _FLOAT
    return Work(
        kernel="attention_bounds",
        threadgroups=tiles(rows, min(rows, 256)),
        threads=min(rows, 256),
        load_bytes=loads,
        store_bytes=2 * rows * _FLOAT,
        narrow_bytes=loads + 2 * rows * _FLOAT,
        table_bytes=(2 * len(table) + 2 * rows) * _FLOAT,
    )


def flash(heads: Heads, keys: Keys) -> Work:
    """flash.metal: a simdgroup for 8 rows of a head, keys and values from device memory as fragments."""
    d, h, rows = heads.head_dim, heads.heads, keys.rows
    _, first, stop = keys.blocks(8)
    fragments = int((-(-(stop - first) // 8)).sum()) * h
    blocks = len(first) * h
    whole = (blocks + fragments * 2) * 32 * d
    places = blocks * 2 * _SIMD * _FLOAT + h * (rows * 4 * 3 + keys.pairs) * _FLOAT
    return Work(
        kernel="flash",
        threadgroups=tiles(len(first), 4) * h,
        threads=128,
        multiply_accumulates=2 * fragments * d // 8,
        load_bytes=whole + places,
        narrow_bytes=whole + places,
        **_attended(heads, keys),
    )


def flash_staged(heads: Heads, keys: Keys) -> Work:
    """flash_staged.metal: a threadgroup for 64 rows of a head shares blocks of keys and values."""
    d, h, rows = heads.head_dim, heads.heads, keys.rows
    r, block = (2, 32) if d <= 64 else (1, 16)
    simdgroups = 64 // (8 * r)
    _, first, stop = keys.blocks(64)
    loaded, slices = int((stop - first).sum()) * h, int((-(-(stop - first) // block)).sum()) * h
    groups = len(first) * h
    # A simdgroup multiplies the blocks of its threadgroup that its own rows reach into.
    _, own_first, own_stop = keys.blocks(8 * r)
    origin = np.repeat(first, simdgroups)[: len(own_first)]
    visited = int((-(-(own_stop - origin) // block) - (own_first - origin) // block).sum()) * h
    queries = groups * simdgroups * r * 32 * d
    bounds = groups * simdgroups * _SIMD * 2 + len(own_first) * h * _SIMD * 2
    places = (bounds + h * rows * 4 * 3 + loaded) * _FLOAT
    return Work(
        kernel="flash_staged",
        threadgroups=groups,
        threads=_SIMD * simdgroups,
        multiply_accumulates=2 * r * (block // 8) * (d // 8) * visited,
        load_bytes=queries + 2 * loaded * d * _FLOAT + places,
        narrow_bytes=queries + places,
        shared_load_bytes=2 * (block // 8) * (d // 8) * FRAGMENT * visited + h * keys.pairs * _FLOAT,
        shared_store_bytes=slices * block * (2 * d + 1) * _FLOAT,
        barriers=2 * slices,
        threadgroup_memory=block * (2 * (d + 4) + 1) * _FLOAT,
        **_attended(heads, keys),
    )


def split_fragments(rows: int, heads: Heads) -> int:
    """The row fragments R that `split_attention` (kernels/attention_metal.py) picks."""
    choices = [r for r in (4, 2, 1) if r * heads.head_dim <= 1024]
    group = heads.heads // heads.kv_heads
    return next((r for r in choices if tiles(rows, 8 * r // group) * heads.kv_heads >= 32), choices[-1])


def flash_split(heads: Heads, keys: Keys, *, fragments: int | None = None) -> Work:
    """flash_split.metal: a threadgroup for 8·R query rows of all heads of a group, eight simdgroups that split D."""
    d, rows, group = heads.head_dim, keys.rows, heads.heads // heads.kv_heads
    r = split_fragments(rows, heads) if fragments is None else fragments
    _, first, stop = keys.blocks(8 * r // group)
    groups = len(first) * heads.kv_heads
    eights = int((-(-(stop - first) // 8)).sum()) * heads.kv_heads
    slices = int((-(-(stop - first) // (64 // r))).sum()) * heads.kv_heads
    queries = rows * heads.heads
    places = (groups * 256 * 2 + queries * (_SIMD // r) * 3 + keys.pairs * heads.heads) * _FLOAT
    return Work(
        kernel="flash_split",
        threadgroups=groups,
        threads=256,
        multiply_accumulates=eights * d * r // 4,
        load_bytes=groups * 8 * r * d * _FLOAT + 2 * eights * 8 * d * _FLOAT + places,
        narrow_bytes=places,
        shared_load_bytes=slices * (64 * FRAGMENT + 1024 * r) + eights * 8 * r * FRAGMENT + groups * 1024 * r,
        shared_store_bytes=slices * (72 * FRAGMENT + 8 * r * _FLOAT) + groups * 8 * r * _FLOAT,
        barriers=2 * slices + groups,
        threadgroup_memory=(8 * 512 + 512 + 2 * 8 * r) * _FLOAT,
        **_attended(heads, keys),
    )


def attention_scores(heads: Heads, keys: Keys, *, span: int) -> Work:
    """attention_scores.metal: 64 keys of a block of 64 queries a threadgroup; all blocks in one round."""
    count, first, stop = keys.blocks(64)
    met = stop - first
    work = _gemm(count, met, np.full_like(met, heads.head_dim), heads.heads)
    groups = tiles(span, 64) * heads.heads * len(first)
    places, even = groups * 128 * 2 * _FLOAT, int((count * (met + met % 2)).sum()) * heads.heads
    return replace(
        work,
        kernel="attention_scores",
        threadgroups=groups,
        needed=2 * keys.pairs * heads.q_width,
        load_bytes=work.load_bytes + places,
        store_bytes=_FLOAT * even,
        narrow_bytes=places,
        read=keys.rows * (heads.q_width + heads.kv_width),
        written=even,
        table_bytes=2 * keys.rows * _FLOAT,
    )


def softmax(heads: Heads, keys: Keys) -> Work:
    """softmax.metal: a simdgroup a row of scores, which it reads twice."""
    count, first, stop = keys.blocks(64)
    h, rows = heads.heads, keys.rows
    scores = keys.pairs * h
    written = int((count * (-(-(stop - first) // 4) * 4)).sum()) * h
    loads = 4 * scores + rows * h * 5 * _SIMD
    return Work(
        kernel="softmax",
        threadgroups=len(first) * h * 16,
        threads=128,
        load_bytes=loads * _FLOAT,
        store_bytes=written * _FLOAT,
        narrow_bytes=(loads + written) * _FLOAT,
        read=scores,
        written=written,
        table_bytes=3 * rows * _FLOAT,
    )


def attention_values(heads: Heads, keys: Keys) -> Work:
    """attention_values.metal: 64 channels of a block of 64 queries a threadgroup."""
    count, first, stop = keys.blocks(64)
    met, rows = stop - first, keys.rows
    work = _gemm(count, np.full_like(met, heads.head_dim), met, heads.heads, transposed=False)
    places = work.threadgroups * 128 * 2 * _FLOAT
    return replace(
        work,
        kernel="attention_values",
        needed=2 * keys.pairs * heads.q_width,
        load_bytes=work.load_bytes + places,
        store_bytes=rows * heads.q_width * _FLOAT,
        narrow_bytes=places,
        read=int((count * (-(-met // 4) * 4)).sum()) * heads.heads + rows * heads.kv_width,
        written=rows * heads.q_width,
        table_bytes=2 * rows * _FLOAT,
    )


def matmul(rows: int, depth: int, width: int) -> Work:
    """matmul.metal: y = p·v in tiles of 64 × 64."""
    first = np.arange(0, rows, 64)
    count = np.minimum(rows - first, 64)
    work = _gemm(count, np.full_like(first, width), np.full_like(first, depth), 1, transposed=False)
    return replace(
        work,
        kernel="matmul",
        needed=2 * rows * depth * width,
        store_bytes=rows * width * _FLOAT,
        read=rows * depth + depth * width,
        written=rows * width,
    )


def _gemm(rows: Ints, columns: Ints, depth: Ints, heads: int, *, transposed: bool = True) -> Work:
    """`gemm` (gemm.h) for blocks of at most 64 rows each, in every head: x [rows, depth] · w → [rows, columns]."""
    wide, slices = -(-columns // 64), -(-depth // 32)
    halves = -(-rows // 32) * -(-columns // 32) * slices
    # Four elements of depth, or of columns where w has them as rows, are read if the first is there.
    x_depth = -(-depth // 4) * 4
    elements = rows * x_depth * wide + (x_depth * columns if transposed else depth * columns)
    return Work(
        kernel="gemm",
        threadgroups=int(wide.sum()) * heads,
        threads=128,
        multiply_accumulates=64 * int(halves.sum()) * heads,
        load_bytes=int(elements.sum()) * heads * _FLOAT,
        shared_load_bytes=32 * FRAGMENT * int(halves.sum()) * heads,
        shared_store_bytes=2 * 64 * 32 * _FLOAT * int((wide * slices).sum()) * heads,
        barriers=2 * int((wide * slices).sum()) * heads,
        threadgroup_memory=2 * 64 * 32 * _FLOAT,
    )


def _attended(heads: Heads, keys: Keys) -> dict[str, int]:
    """What every flash form has in common: q, k, v in and out out, once."""
    rows = keys.rows
    return {
        "needed": 4 * keys.pairs * heads.q_width,
        "store_bytes": rows * heads.q_width * _FLOAT,
        "read": rows * (heads.q_width + 2 * heads.kv_width),
        "written": rows * heads.q_width,
        "table_bytes": 3 * rows * _FLOAT,
    }


def fragment_probe() -> Work:
    """fragment_probe.metal: one simdgroup, run when a model is loaded and in no forward."""
    return Work(
        kernel="fragment_probe",
        threadgroups=1,
        threads=32,
        store_bytes=512,
        narrow_bytes=512,
        shared_load_bytes=FRAGMENT,
        shared_store_bytes=FRAGMENT,
        barriers=1,
        threadgroup_memory=FRAGMENT,
        written=128,
    )


FORMULAS: dict[str, Callable[..., Work]] = {
    "add_norm": add_norm,
    "add_norm_next": add_norm,
    "attention_bounds": attention_bounds,
    "attention_scores": attention_scores,
    "attention_values": attention_values,
    "flash": flash,
    "flash_split": flash_split,
    "flash_staged": flash_staged,
    "fragment_probe": fragment_probe,
    "gated": gated,
    "gated_short": gated_short,
    "gelu_mul": gelu_mul,
    "linear": linear,
    "linear_3": linear,
    "linear_add_norm": linear_add_norm,
    "linear_add_norm_next": linear_add_norm,
    "linear_gelu_mul": linear_gelu_mul,
    "linear_gelu_mul_short": linear_gelu_mul_short,
    "linear_rms_norm": linear_rms_norm,
    "linear_short": linear_short,
    "linear_short_3": linear_short,
    "matmul": matmul,
    "pool": pool,
    "qkv_prep": qkv_prep,
    "rms_norm": rms_norm,
    "softmax": softmax,
}
"""The formula of every kernel in `metal_src/`."""
