"""Bidirectional attention inside the segments of a packed batch, full or within a window.

    out[i] = Σ_j softmax_j(q[i]·k[j]) · v[j],  j in the segment of i, |position_i − position_j| ≤ window

The scale is 1. Rows at position −1 hold no token and are no keys; what comes out at them is finite and means nothing.

Positions grow by at least 1 from row to row of a segment, so a window of positions never reaches further than as many
packed rows: keys are chosen by row (a superset) and masked by position.
"""

from __future__ import annotations

import math
from itertools import groupby, pairwise
from typing import NamedTuple

import mlx.core as mx

from egemma_mlx.kernels import check
from egemma_mlx.kernels.approx import exp2, on_cpu
from egemma_mlx.packing import Grid, Packed, membership

# Query rows scored at once: a smaller block reads less beyond its window, a larger one makes fewer, larger products.
_BLOCK = 256
# Scores at once on the CPU, where heads then take turns: 4 MB, which caches keep from one pass over them to the next.
_SCORES = 1 << 20
BOUND = 60.0
"""Scores within which exp, and its sum over as many keys as there may be, is a normal number: e⁶⁰ is 2⁸⁷."""
# Finite, so that a row without keys averages to something finite.
_MASKED = -1e30


class Tile(NamedTuple):
    """Query rows against key rows of one segment; `allowed` broadcasts over their scores, None allows all."""

    here: slice
    near: slice
    allowed: mx.array | None


class Run(NamedTuple):
    """Neighbouring `segments` of `length` rows each, attended together tile by tile."""

    start: int
    segments: int
    length: int
    tiles: list[Tile]


class Runs(NamedTuple):
    """The segments of a batch of `rows` rows, as the host knows them."""

    rows: int
    runs: list[Run]


class Blocks(NamedTuple):
    """All rows in blocks against the rows within `reach`, for segments that only the device knows.

    Attributes:
        rows: of the batch.
        allowed: [blocks, block, block + 2·reach].
    """

    rows: int
    block: int
    reach: int
    allowed: mx.array


class Gridded(NamedTuple):
    """A batch that is a grid of segments, or one square of all rows with what may not meet masked.

    Attributes:
        grid: whose rows are those of the batch.
        allowed: broadcasts over [segments, length, length]; None allows all.
    """

    grid: Grid
    allowed: mx.array | None

    @property
    def rows(self) -> int:
        return self.grid.segments * self.grid.length


Plan = Runs | Blocks | Gridded


def plan(packed: Packed, window: int | None) -> Plan:
    """Which rows meet which, once for all layers of one window.

    Args:
        window: inclusive radius, or None for full attention.
    """
    check_tables(packed)
    if packed.lengths is not None:
        return Runs(packed.rows, _runs(packed, window))
    if packed.grid is not None and (window is None or packed.grid.length <= 2 * window + _BLOCK):
        return Gridded(packed.grid, _band(packed.grid.length, window))
    if packed.rows <= _BLOCK or (window is None and packed.span >= packed.rows):
        return Gridded(Grid(1, packed.rows), _allowed(packed, window))
    return _blocks(packed, window)


def attention(q: mx.array, k: mx.array, v: mx.array, plan: Plan) -> mx.array:
    """Attention over a packed batch; query heads share kv heads in order.

    Args:
        q: [T, heads, head_dim] float32; k, v: [T, kv_heads, head_dim].
        plan: from `plan`, of the same batch.

    Returns:
        [T, heads·head_dim] float32.
    """
    check_heads(q, k, v, plan.rows)
    rows, kv_heads, head_dim = k.shape
    q, k, v = (x.transpose(1, 0, 2).reshape(kv_heads, -1, rows, head_dim) for x in (q, k, v))
    if isinstance(plan, Gridded):
        return _over_grid(q, k, v, plan)
    return _over_blocks(q, k, v, plan) if isinstance(plan, Blocks) else _over_runs(q, k, v, plan.runs)


def check_tables(packed: Packed) -> None:
    check.indices("attention", "segments", packed.segments, "S", 2)
    check.indices("attention", "positions", packed.positions, packed.rows)


def check_heads(q: mx.array, k: mx.array, v: mx.array, rows: int) -> None:
    """Raise EgemmaError unless q, k and v fit each other and a plan of `rows` rows."""
    check.rows("attention", "q", q, rows, "heads", "head_dim")
    check.rows("attention", "k", k, rows, "kv_heads", q.shape[2])
    check.rows("attention", "v", v, *k.shape)
    check.multiple("attention", "heads", q.shape[1], k.shape[1])


def rows_first(out: mx.array) -> mx.array:
    """[kv_heads, group, rows, head_dim] → [rows, heads·head_dim]."""
    return out.transpose(2, 0, 1, 3).reshape(out.shape[2], -1)


def _runs(packed: Packed, window: int | None) -> list[Run]:
    assert packed.lengths is not None
    runs, start = [], 0
    for length, group in groupby(packed.lengths):
        count = sum(1 for _ in group)
        if length:
            positions = packed.positions[start : start + count * length].reshape(count, length)
            runs.append(Run(start, count, length, _tiles(positions, packed.dense, window)))
        start += count * length
    return runs


def _tiles(positions: mx.array, dense: bool, window: int | None) -> list[Tile]:
    length = positions.shape[1]
    reach = length if window is None else window
    tiles = []
    for here in blocks(0, length):
        near = slice(max(here.start - reach, 0), min(here.stop + reach, length))
        allowed = None
        # Row distances in this tile go up to max(near) − min(here) or max(here) − min(near).
        if not dense or max(near.stop - here.start, here.stop - near.start) - 1 > reach:
            there = positions[:, None, near]
            allowed = there >= 0
            if window is not None:
                allowed = allowed & (mx.abs(positions[:, here, None] - there) <= window)
        tiles.append(Tile(here, near, allowed))
    return tiles


def blocks(start: int, stop: int, size: int = _BLOCK) -> list[slice]:
    """Rows in as many pieces as blocks of `size` round to, all alike: a tile of a few rows costs a product as slow as a
    whole one's."""
    rows = stop - start
    count = max(round(rows / size), 1)
    bounds = [start + rows * piece // count for piece in range(count + 1)]
    return [slice(*ends) for ends in pairwise(bounds) if rows]


def _over_runs(q: mx.array, k: mx.array, v: mx.array, runs: list[Run]) -> mx.array:
    """[kv_heads, group, T, head_dim] → [T, heads·head_dim]."""
    outs, stop = [], 0
    for run in runs:
        stop = run.start + run.segments * run.length
        shape = (run.segments, run.length, q.shape[-1])
        qs, ks, vs = (x[:, :, run.start : stop].reshape(*x.shape[:2], *shape) for x in (q, k, v))
        tiles = [
            attend(qs[..., here, :], ks[..., near, :], vs[..., near, :], allowed) for here, near, allowed in run.tiles
        ]
        out = tiles[0] if len(tiles) == 1 else mx.concatenate(tiles, axis=-2)
        outs.append(rows_first(out.reshape(*q.shape[:2], -1, q.shape[-1])))
    if stop < q.shape[2]:
        outs.append(mx.zeros((q.shape[2] - stop, q.shape[0] * q.shape[1] * q.shape[3])))
    return outs[0] if len(outs) == 1 else mx.concatenate(outs)


def _band(length: int, window: int | None) -> mx.array | None:
    """[1, length, length]: which of positions 0…length−1 meet; None where all do."""
    if window is None or length <= window + 1:
        return None
    at = mx.arange(length)
    return (mx.abs(at[:, None] - at) <= window)[None]


def _allowed(packed: Packed, window: int | None) -> mx.array:
    """[1, T, T]: which rows of a batch meet."""
    owner, positions = _owners(packed), packed.positions
    allowed = (owner[:, None] == owner) & (positions >= 0)
    if window is not None:
        allowed = allowed & (mx.abs(positions[:, None] - positions) <= window)
    return allowed[None]


def _owners(packed: Packed) -> mx.array:
    """[T] int32: the segment of each row."""
    return mx.argmax(membership(packed.rows, packed.segments), axis=1).astype(mx.int32)


def _over_grid(q: mx.array, k: mx.array, v: mx.array, plan: Gridded) -> mx.array:
    """[kv_heads, group, T, head_dim] → [T, heads·head_dim]."""
    shape = (*plan.grid, q.shape[-1])
    qs, ks, vs = (x.reshape(*x.shape[:2], *shape) for x in (q, k, v))
    return rows_first(attend(qs, ks, vs, plan.allowed).reshape(q.shape))


def _blocks(packed: Packed, window: int | None) -> Blocks:
    rows = packed.rows
    reach = min(packed.span if window is None else min(window, packed.span), rows)
    block = min(_BLOCK, rows)

    def pairs(x: mx.array) -> tuple[mx.array, mx.array]:
        here, there = _blocked(x[:, None], block, reach, -1)
        return here, there.swapaxes(-1, -2)

    owner_here, owner_there = pairs(mx.where(packed.positions >= 0, _owners(packed), -1))
    allowed = (owner_here == owner_there) & (owner_there >= 0)
    if window is not None:
        here, there = pairs(packed.positions)
        allowed = allowed & (mx.abs(here - there) <= window)
    return Blocks(rows, block, reach, allowed)


def _over_blocks(q: mx.array, k: mx.array, v: mx.array, plan: Blocks) -> mx.array:
    """[kv_heads, group, T, head_dim] → [T, heads·head_dim]."""
    here, _ = _blocked(q, plan.block, 0)
    (_, ks), (_, vs) = (_blocked(x, plan.block, plan.reach) for x in (k, v))
    out = attend(here, ks, vs, plan.allowed)
    return rows_first(out.reshape(*q.shape[:2], -1, q.shape[-1])[:, :, : q.shape[2]])


def _blocked(x: mx.array, block: int, reach: int, outside: int = 0) -> tuple[mx.array, mx.array]:
    """Rows [..., T, D] in blocks, [..., blocks, block, D], and with what lies within `reach` of each,
    [..., blocks, block + 2·reach, D], views of one array; rows beyond the first and the last are `outside`."""
    *batch, rows, width = x.shape
    count = -(-rows // block)
    before, after = (mx.full((*batch, n, width), outside, x.dtype) for n in (reach, count * block - rows + reach))
    padded = mx.concatenate([before, x, after], axis=-2)  # mx.pad fills all of it first
    size = padded.shape[-2]
    strides = [math.prod(batch[axis + 1 :]) * size * width for axis in range(len(batch))]

    def windows(length: int, first: int) -> mx.array:
        shape = (*batch, count, length, width)
        return mx.as_strided(padded, shape, (*strides, block * width, width, 1), first * width)

    return windows(block, reach), windows(block + 2 * reach, 0)


def attend(q: mx.array, k: mx.array, v: mx.array, allowed: mx.array | None, bounded: bool = False) -> mx.array:
    """softmax(q·kᵀ)·v over the last two axes; the first is that of kv heads.

    Args:
        allowed: broadcasts over the scores; None allows all.
        bounded: no score is beyond ±`BOUND`, so that no exponential of one needs a shift.
    """
    heads = max(_SCORES // (math.prod(q.shape[1:-1]) * k.shape[-2]), 1)
    if on_cpu() and heads < len(q):
        turns = [slice(first, first + heads) for first in range(0, len(q), heads)]
        return mx.concatenate([attend(q[turn], k[turn], v[turn], allowed, bounded) for turn in turns])
    # exp(x) = 2^(x·log₂e) in multiply-adds on the CPU, where q takes the factor: it is smaller than the scores.
    scores = (q * math.log2(math.e) if on_cpu() else q) @ k.swapaxes(-1, -2)
    if allowed is not None:
        scores = mx.where(allowed, scores, _MASKED)
    if not on_cpu():
        return mx.softmax(scores, axis=-1) @ v
    # A row whose keys are all masked has weights only if it is shifted.
    weights = exp2(scores if bounded and allowed is None else scores - _row_max(scores))
    # The sum as a product with ones, which BLAS adds up in blocks and so more exactly.
    return (weights @ v) / (weights @ mx.ones((weights.shape[-1], 1)))


def _row_max(scores: mx.array) -> mx.array:
    """The greatest of each row, [..., 1]: first of columns, which take the CPU a third of the time."""
    length = scores.shape[-1]
    width = next((n for n in range(64, 15, -1) if length % n == 0), length)
    if width < length:
        scores = scores.reshape(*scores.shape[:-1], -1, width).max(axis=-2)
    return scores.max(axis=-1, keepdims=True)
