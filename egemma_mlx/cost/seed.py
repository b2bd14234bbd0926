"""What one launch of the kernels that this project started from does (`egemma2_msl.metal`, cortiq), as in `work`.

Everything is float32, weights too. Rows and columns past the end are computed on copies of the last and thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from egemma_mlx.cost.work import FRAGMENT, Heads, Work, tiles, together

_FLOAT = 4
_SIMD = 32
QUERIES = 512
"""Query rows of an attention item: one head of one sequence."""
SCORE_BYTES = 128 << 20
"""Scores of one round of attention."""


def product(name: str, rows: int, depth: int, *widths: int, weights: bool = True) -> Work:
    """eg_mm_nt, eg_mm_nn: 64 × 64 outputs a threadgroup of four simdgroups, one item a width."""
    groups = tiles(rows, 64) * sum(tiles(width, 64) for width in widths)
    slices, elements = groups * tiles(depth, 32), sum(widths) * depth
    return Work(
        kernel=name,
        threadgroups=groups,
        threads=128,
        needed=2 * rows * elements,
        multiply_accumulates=256 * slices,
        load_bytes=2 * 64 * 32 * _FLOAT * slices,
        store_bytes=rows * sum(widths) * _FLOAT,
        narrow_bytes=rows * sum(widths) * _FLOAT,
        shared_load_bytes=4 * 4 * 8 * FRAGMENT * slices,
        shared_store_bytes=2 * 64 * 32 * _FLOAT * slices,
        barriers=2 * slices,
        threadgroup_memory=2 * 64 * 32 * _FLOAT,
        read=rows * depth,
        written=rows * sum(widths),
        weight_bytes=_FLOAT * elements if weights else 0,
    )


def rms(rows: int, width: int) -> Work:
    """eg_rms: a simdgroup a row, which it reads twice."""
    return _rows("rms", rows, width, loads=3, stores=1, read=1, written=1, weights=1)


def add_norm(rows: int, width: int, *, next_norm: bool = False) -> Work:
    """eg_add_norm: y is read twice; for a next norm h' once more."""
    if next_norm:
        return _rows("add_norm_next", rows, width, loads=6, stores=2, read=2, written=2, weights=2)
    return _rows("add_norm", rows, width, loads=4, stores=1, read=2, written=1, weights=1)


def gelu_mul(rows: int, width: int) -> Work:
    """eg_gelu_mul: a thread for four elements."""
    return replace(
        _rows("gelu_mul", rows, width, loads=2, stores=1, read=2, written=1, weights=0),
        threadgroups=tiles(rows * width, 512),
    )


def row_inverse(rows: int, width: int) -> Work:
    """eg_row_inv: 1/rms of each row."""
    return replace(
        _rows("row_inv", rows, width, loads=1, stores=0, read=1, written=0, weights=0),
        store_bytes=rows * _FLOAT,
        written=rows,
    )


def pool(lengths: Sequence[int], width: int) -> Work:
    """eg_pool: a thread for a column of a sequence, over its rows."""
    rows = sum(lengths)
    moved = (3 * rows * width * _FLOAT, len(lengths) * width * _FLOAT)
    return Work(
        kernel="pool",
        threadgroups=len(lengths) * tiles(width, 128),
        threads=128,
        load_bytes=moved[0],
        store_bytes=moved[1],
        narrow_bytes=sum(moved),
        read=rows * width + rows,
        written=len(lengths) * width,
        weight_bytes=width * _FLOAT,
    )


def qkv_prep(rows: int, heads: Heads, *, positions: int) -> Work:
    """eg_qkv_prep: a threadgroup a row; heads are read twice and written in place."""
    size, turned = rows * (heads.q_width + 2 * heads.kv_width), rows * (heads.q_width + heads.kv_width)
    return Work(
        kernel="qkv_prep",
        threadgroups=rows,
        threads=_SIMD * min(heads.heads + 2 * heads.kv_heads, 8),
        load_bytes=(2 * size + 2 * turned) * _FLOAT,
        store_bytes=size * _FLOAT,
        read=size,
        written=size,
        weight_bytes=2 * heads.head_dim * _FLOAT,
        table_bytes=(positions * heads.head_dim + rows) * _FLOAT,
    )


# --- attention in rounds ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """Attention of `rows` queries of one head, over `keys` keys of which `pairs` (query, key) pairs meet."""

    rows: int
    keys: int
    pairs: int

    @property
    def stride(self) -> int:
        return tiles(self.keys, 32) * 32

    @property
    def scores(self) -> int:
        return self.rows * self.stride


def items(lengths: Sequence[int], window: int | None) -> Iterator[Item]:
    """The items of one head."""
    for length in lengths:
        reach = length if window is None else window
        for first in range(0, length, QUERIES):
            stop = min(first + QUERIES, length)
            lo, hi = max(first - reach, 0), min(stop + reach, length)
            pairs = sum(min(i + reach + 1, length) - max(i - reach, 0) for i in range(first, stop))
            yield Item(stop - first, hi - lo, pairs)


def attention(lengths: Sequence[int], heads: Heads, window: int | None) -> Iterator[Work]:
    """Three launches a round: scores of as many items as the buffer holds, their softmax, the product with v."""
    pending: list[Item] = []
    size = 0
    for item in [item for _ in range(heads.heads) for item in items(lengths, window)]:
        if pending and size + item.scores * _FLOAT > SCORE_BYTES:
            yield from _round(pending, heads)
            pending, size = [], 0
        pending.append(item)
        size += item.scores * _FLOAT
    yield from _round(pending, heads)


def _round(batch: list[Item], heads: Heads) -> Iterator[Work]:
    d, share = heads.head_dim, heads.heads // heads.kv_heads
    queries = sum(item.rows for item in batch) * d
    keys = sum(item.keys for item in batch) * d // share  # shared by the q heads of a group: counted once
    scores = sum(item.scores for item in batch)
    pairs = sum(item.pairs for item in batch)

    scored = [product("", item.rows, d, item.keys, weights=False) for item in batch]
    valued = [product("", item.rows, item.stride, d, weights=False) for item in batch]
    yield together(scored, "scores", needed=2 * pairs * d, read=queries + keys, written=scores)
    yield Work(
        kernel="softmax",
        threadgroups=sum(tiles(item.rows, 4) for item in batch),
        threads=128,
        load_bytes=3 * pairs * _FLOAT,
        store_bytes=(pairs + scores) * _FLOAT,
        narrow_bytes=(4 * pairs + scores) * _FLOAT,
        read=scores,
        written=scores,
    )
    yield together(valued, "values", needed=2 * pairs * d, read=scores + keys, written=queries)


# --- flash attention of the towers, which no text forward uses; its published figure is what the model is held to -----


def flash(length: int, heads: Heads) -> Work:
    """eg_flash64: four simdgroups of 8 queries, keys and values from device memory as fragments, 32 keys at a time."""
    d = heads.head_dim
    simdgroups = tiles(length, 8) * heads.heads
    blocks = simdgroups * tiles(length, 32)
    fragments = simdgroups * (d // 8) + blocks * 2 * 4 * (d // 8)
    return replace(
        _flash("flash64", length, heads, 32),
        multiply_accumulates=blocks * 2 * 4 * (d // 8) + simdgroups * (d // 8),
        load_bytes=fragments * FRAGMENT,
        narrow_bytes=(fragments + simdgroups * (d // 8)) * FRAGMENT,
    )


def flash_staged(length: int, heads: Heads) -> Work:
    """eg_flash64s: eight simdgroups of 8 queries share 32 keys and values at a time in threadgroup memory."""
    d = heads.head_dim
    groups = tiles(length, 64) * heads.heads
    blocks = groups * tiles(length, 32)
    work = _flash("flash64s", length, heads, 64)
    queries = groups * 8 * (d // 8) * FRAGMENT
    return replace(
        work,
        multiply_accumulates=8 * (blocks * 2 * 4 * (d // 8) + groups * (d // 8)),
        load_bytes=queries + blocks * 2 * 32 * d * _FLOAT,
        narrow_bytes=queries + work.narrow_bytes,
        shared_load_bytes=work.shared_load_bytes + 8 * blocks * 2 * 4 * (d // 8) * FRAGMENT,
        shared_store_bytes=work.shared_store_bytes + blocks * 2 * 32 * d * _FLOAT,
        barriers=2 * blocks,
        threadgroup_memory=work.threadgroup_memory + 2 * 32 * d * _FLOAT,
    )


def _flash(name: str, length: int, heads: Heads, tile: int) -> Work:
    """What both have in common: scores of 8 × 32 go through threadgroup memory for their softmax."""
    simdgroups = tiles(length, tile) * (tile // 8) * heads.heads
    blocks = simdgroups * tiles(length, 32)
    out = length * heads.q_width
    return Work(
        kernel=name,
        threadgroups=tiles(length, tile) * heads.heads,
        threads=4 * tile,
        needed=4 * length * length * heads.q_width,
        store_bytes=out * _FLOAT,
        narrow_bytes=out * _FLOAT,
        # The greatest score, its exponentials, the fragments of the second product; 2 × 32 lanes read m and l.
        shared_load_bytes=blocks * (3 * 4 * FRAGMENT + 2 * _SIMD * _FLOAT) + simdgroups * FRAGMENT,
        shared_store_bytes=blocks * (2 * 4 * FRAGMENT + 2 * 8 * _FLOAT) + simdgroups * FRAGMENT,
        threadgroup_memory=tile // 8 * (8 * 32 + 64 + 2 * 8) * _FLOAT,
        read=length * (heads.q_width + 2 * heads.kv_width),
        written=out,
    )


def _rows(name: str, rows: int, width: int, *, loads: int, stores: int, read: int, written: int, weights: int) -> Work:
    """A simdgroup a row; `loads` and `stores` count rows of `width` as the lanes ask for them, weights included."""
    return Work(
        kernel=name,
        threadgroups=tiles(rows, 4),
        threads=128,
        load_bytes=loads * rows * width * _FLOAT,
        store_bytes=stores * rows * width * _FLOAT,
        read=read * rows * width,
        written=written * rows * width,
        weight_bytes=weights * width * _FLOAT,
    )
