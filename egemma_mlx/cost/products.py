"""Work of the matrix products: columns.h, shared.h, whole.h, short.h and gemm.h."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from egemma_mlx.cost.work import FLOAT, FRAGMENT, SIMD, Ints, Work, tiles, together

# --- products with weights: shared.h ---------------------------------------------------------------------------------


def linear(rows: int, depth: int, *widths: int, item: int = 2) -> Work:
    """linear.metal and linear_3.metal: 64 × 256 outputs a threadgroup."""
    works = [_shared(rows, depth, width, tiles(width, 256), 64, 256, item) for width in widths]
    stored = FLOAT * rows * sum(widths)
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
        load_bytes=groups * rows * depth * FLOAT + tiles(rows, 32) * width * bands * depth * item,
        shared_load_bytes=16 * FRAGMENT * products,
        shared_store_bytes=high * groups * group_rows * 32 * slices * FLOAT,
        barriers=high * groups * slices,
        threadgroup_memory=2 * group_rows * 36 * FLOAT,
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
        shared_load_bytes=work.shared_load_bytes + norms * high * simdgroups * 4 * simdgroups * SIMD * FLOAT,
        shared_store_bytes=work.shared_store_bytes + norms * high * simdgroups * 32 * FLOAT,
        barriers=work.barriers + norms * high,
        threadgroup_memory=work.threadgroup_memory + norms * 8 * 32 * FLOAT,
        weight_bytes=work.weight_bytes + weights * width * item,
    )


# --- products with weights for few rows: short.h ---------------------------------------------------------------------


def short_fragments(rows: int, most: int = 4) -> int:
    """The row fragments R of `short_tiles` (kernels/linear.py)."""
    return min(1 if rows <= 8 else 2 if rows <= 16 else 4, most)


def linear_short(rows: int, depth: int, *widths: int, item: int = 2) -> Work:
    """linear_short.metal and linear_short_3.metal: 8·R × 16 outputs a threadgroup."""
    works = [_short(rows, depth, width, item, 2) for width in widths]
    stored = FLOAT * rows * sum(widths)
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
        load_bytes=wide * rows * depth * FLOAT + high * width * weights * depth * item,
        shared_load_bytes=rows * width * weights * 8 * FLOAT,
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
        written=stored // FLOAT,
        weight_bytes=sum(work.weight_bytes for work in works),
    )


def _closed(work: Work, name: str, written: int, also_read: int = 0, *, narrow: bool = False) -> Work:
    """A product with its epilogue: elements that it stores, and those that it reads beside x."""
    moved = FLOAT * (written + also_read)
    return replace(
        work,
        kernel=name,
        load_bytes=work.load_bytes + FLOAT * also_read,
        store_bytes=work.store_bytes + FLOAT * written,
        narrow_bytes=work.narrow_bytes + (moved if narrow else 0),
        read=work.read + also_read,
        written=work.written + written,
    )


# --- the vectors -----------------------------------------------------------------------------------------------------


def linear_unit(filled: int, slots: int, depth: int, width: int, *, item: int = 2) -> Work:
    """linear_unit.metal: four slots a threadgroup, of which the first `filled` are segments with tokens."""
    groups, busy = tiles(slots, 4), tiles(filled, 4)
    stored = min(4 * busy, slots) * width
    return Work(
        kernel="linear_unit",
        threadgroups=groups,
        threads=256,
        needed=2 * filled * depth * width,
        load_bytes=8 * slots * depth * FLOAT + busy * width * depth * item,
        store_bytes=2 * slots * width * FLOAT,
        shared_load_bytes=stored * FLOAT + slots * width // 4 * 8 * FLOAT,
        shared_store_bytes=busy * 4 * width * FLOAT + groups * 32 * FLOAT,
        barriers=groups,
        threadgroup_memory=4 * width * FLOAT + 32 * FLOAT,
        read=slots * depth,
        written=2 * slots * width,
        weight_bytes=width * depth * item,
    )


# --- products of attention: gemm.h --------------------------------------------------------------------------------


def matmul(rows: int, depth: int, width: int) -> Work:
    """matmul.metal: y = p·v in tiles of 64 × 64."""
    first = np.arange(0, rows, 64)
    count = np.minimum(rows - first, 64)
    work = gemm(count, np.full_like(first, width), np.full_like(first, depth), 1, transposed=False)
    return replace(
        work,
        kernel="matmul",
        needed=2 * rows * depth * width,
        store_bytes=rows * width * FLOAT,
        read=rows * depth + depth * width,
        written=rows * width,
    )


def gemm(rows: Ints, columns: Ints, depth: Ints, heads: int, *, transposed: bool = True) -> Work:
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
        load_bytes=int(elements.sum()) * heads * FLOAT,
        shared_load_bytes=32 * FRAGMENT * int(halves.sum()) * heads,
        shared_store_bytes=2 * 64 * 32 * FLOAT * int((wide * slices).sum()) * heads,
        barriers=2 * int((wide * slices).sum()) * heads,
        threadgroup_memory=2 * 64 * 32 * FLOAT,
    )
