"""Work of attention in all its forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from egemma_mlx.cost.products import gemm
from egemma_mlx.cost.work import FLOAT, FRAGMENT, SIMD, Heads, Keys, Work, tiles


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
    loads = (steps + 2 * int((first > 0).sum())) * FLOAT
    return Work(
        kernel="attention_bounds",
        threadgroups=tiles(rows, min(rows, 256)),
        threads=min(rows, 256),
        load_bytes=loads,
        store_bytes=2 * rows * FLOAT,
        narrow_bytes=loads + 2 * rows * FLOAT,
        table_bytes=(2 * len(table) + 2 * rows) * FLOAT,
    )


def flash(heads: Heads, keys: Keys) -> Work:
    """flash.metal: a simdgroup for 8 rows of a head, keys and values from device memory as fragments."""
    d, h, rows = heads.head_dim, heads.heads, keys.rows
    _, first, stop = keys.blocks(8)
    fragments = int((-(-(stop - first) // 8)).sum()) * h
    blocks = len(first) * h
    whole = (blocks + fragments * 2) * 32 * d
    places = blocks * 2 * SIMD * FLOAT + h * (rows * 4 * 3 + keys.pairs) * FLOAT
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
    bounds = groups * simdgroups * SIMD * 2 + len(own_first) * h * SIMD * 2
    places = (bounds + h * rows * 4 * 3 + loaded) * FLOAT
    return Work(
        kernel="flash_staged",
        threadgroups=groups,
        threads=SIMD * simdgroups,
        multiply_accumulates=2 * r * (block // 8) * (d // 8) * visited,
        load_bytes=queries + 2 * loaded * d * FLOAT + places,
        narrow_bytes=queries + places,
        shared_load_bytes=2 * (block // 8) * (d // 8) * FRAGMENT * visited + h * keys.pairs * FLOAT,
        shared_store_bytes=slices * block * (2 * d + 1) * FLOAT,
        barriers=2 * slices,
        threadgroup_memory=block * (2 * (d + 4) + 1) * FLOAT,
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
    places = (groups * 256 * 2 + queries * (SIMD // r) * 3 + keys.pairs * heads.heads) * FLOAT
    return Work(
        kernel="flash_split",
        threadgroups=groups,
        threads=256,
        multiply_accumulates=eights * d * r // 4,
        load_bytes=groups * 8 * r * d * FLOAT + 2 * eights * 8 * d * FLOAT + places,
        narrow_bytes=places,
        shared_load_bytes=slices * (64 * FRAGMENT + 1024 * r) + eights * 8 * r * FRAGMENT + groups * 1024 * r,
        shared_store_bytes=slices * (72 * FRAGMENT + 8 * r * FLOAT) + groups * 8 * r * FLOAT,
        barriers=2 * slices + groups,
        threadgroup_memory=(8 * 512 + 512 + 2 * 8 * r) * FLOAT,
        **_attended(heads, keys),
    )


def attention_scores(heads: Heads, keys: Keys, *, span: int) -> Work:
    """attention_scores.metal: 64 keys of a block of 64 queries a threadgroup; all blocks in one round."""
    count, first, stop = keys.blocks(64)
    met = stop - first
    work = gemm(count, met, np.full_like(met, heads.head_dim), heads.heads)
    groups = tiles(span, 64) * heads.heads * len(first)
    places, even = groups * 128 * 2 * FLOAT, int((count * (met + met % 2)).sum()) * heads.heads
    return replace(
        work,
        kernel="attention_scores",
        threadgroups=groups,
        needed=2 * keys.pairs * heads.q_width,
        load_bytes=work.load_bytes + places,
        store_bytes=FLOAT * even,
        narrow_bytes=places,
        read=keys.rows * (heads.q_width + heads.kv_width),
        written=even,
        table_bytes=2 * keys.rows * FLOAT,
    )


def softmax(heads: Heads, keys: Keys) -> Work:
    """softmax.metal: a simdgroup a row of scores, which it reads twice."""
    count, first, stop = keys.blocks(64)
    h, rows = heads.heads, keys.rows
    scores = keys.pairs * h
    written = int((count * (-(-(stop - first) // 4) * 4)).sum()) * h
    loads = 4 * scores + rows * h * 5 * SIMD
    return Work(
        kernel="softmax",
        threadgroups=len(first) * h * 16,
        threads=128,
        load_bytes=loads * FLOAT,
        store_bytes=written * FLOAT,
        narrow_bytes=(loads + written) * FLOAT,
        read=scores,
        written=written,
        table_bytes=3 * rows * FLOAT,
    )


def attention_values(heads: Heads, keys: Keys) -> Work:
    """attention_values.metal: 64 channels of a block of 64 queries a threadgroup."""
    count, first, stop = keys.blocks(64)
    met, rows = stop - first, keys.rows
    work = gemm(count, np.full_like(met, heads.head_dim), met, heads.heads, transposed=False)
    places = work.threadgroups * 128 * 2 * FLOAT
    return replace(
        work,
        kernel="attention_values",
        needed=2 * keys.pairs * heads.q_width,
        load_bytes=work.load_bytes + places,
        store_bytes=rows * heads.q_width * FLOAT,
        narrow_bytes=places,
        read=int((count * (-(-met // 4) * 4)).sum()) * heads.heads + rows * heads.kv_width,
        written=rows * heads.q_width,
        table_bytes=2 * rows * FLOAT,
    )


def _attended(heads: Heads, keys: Keys) -> dict[str, int]:
    """What every flash form has in common: q, k, v in and out out, once."""
    rows = keys.rows
    return {
        "needed": 4 * keys.pairs * heads.q_width,
        "store_bytes": rows * heads.q_width * FLOAT,
        "read": rows * (heads.q_width + 2 * heads.kv_width),
        "written": rows * heads.q_width,
        "table_bytes": 3 * rows * FLOAT,
    }
