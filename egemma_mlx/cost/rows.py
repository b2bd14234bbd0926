"""Work of the kernels that go by rows: norms, the gate, RoPE, the pool."""

from __future__ import annotations

from collections.abc import Sequence

from egemma_mlx.cost.work import FLOAT, SIMD, Heads, Work, tiles


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
        load_bytes=rows * width * (FLOAT * read + weights * item),
        store_bytes=rows * width * FLOAT * written,
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
        load_bytes=2 * FLOAT * size,
        store_bytes=FLOAT * size,
        read=2 * size,
        written=size,
    )


def qkv_prep(rows: int, heads: Heads, *, positions: int, item: int = 2) -> Work:
    """qkv_prep.metal: a simdgroup a head of a row; `positions` of the angle tables that the rows look up."""
    units, turned = heads.heads + 2 * heads.kv_heads, heads.heads + heads.kv_heads
    size, width = rows * units * heads.head_dim, heads.head_dim
    places = rows * turned * width // 8 * FLOAT  # of four pairs
    return Work(
        kernel="qkv_prep",
        threadgroups=rows * tiles(units, min(units, 8)),
        threads=SIMD * min(units, 8),
        load_bytes=FLOAT * size + rows * turned * width * (item + FLOAT) + places,
        store_bytes=FLOAT * size,
        narrow_bytes=places,
        read=size,
        written=size,
        weight_bytes=2 * width * item,
        table_bytes=positions * width * FLOAT + rows * FLOAT,
    )


def pool(lengths: Sequence[int], slots: int, width: int, *, item: int = 2) -> Work:
    """pool.metal: a threadgroup a slot, of which `lengths` are segments."""
    rows, passes = sum(lengths), tiles(width, 128)
    places = rows * SIMD * FLOAT + slots * 256 * 2 * FLOAT
    return Work(
        kernel="pool",
        threadgroups=slots,
        threads=256,
        load_bytes=rows * width * FLOAT + slots * width * item + places,
        store_bytes=slots * width * FLOAT,
        narrow_bytes=places,
        shared_load_bytes=slots * width // 4 * 8 * (16 + FLOAT),
        shared_store_bytes=slots * (passes * 256 * 16 + 8 * FLOAT),
        barriers=2 * passes * slots,
        threadgroup_memory=8 * 128 * FLOAT + 8 * FLOAT,
        read=rows * width,
        written=slots * width,
        weight_bytes=width * item,
        table_bytes=(rows + 2 * slots) * FLOAT,
    )
