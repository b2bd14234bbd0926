"""Variable-length batches laid end to end: pack, bucket, unpack.

A batch is one row of T tokens without padding between texts. Three arrays say what the row means, and travel as
data, so that a compiled forward depends on their sizes alone:

    tokens     [T]     int32   token ids
    positions  [T]     int32   the index in the caller's padded row, which RoPE and the window go by; −1: no token
    segments   [S, 2]  int32   (start, length) of each text in the row; length 0: an empty slot

Sizes come in buckets (`bucket`), because every new shape is a new trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx
import numpy as np

# A `constant` address space begins below 8 elements (MLX custom kernels); segments stay above it.
MIN_SEGMENTS = 8


class Grid(NamedTuple):
    """Texts of one length that fill a batch end to end: its row is [segments, length]."""

    segments: int
    length: int


@dataclass(frozen=True)
class Packed:
    """One packed batch.

    Attributes:
        tokens: [T] int32.
        positions: [T] int32, −1 where a row holds no token.
        segments: [S, 2] int32 (start, length), starts ascending, rows of no segment last.
        lengths: host copy of the lengths of the leading segments, or None when only the device knows them. They lie
            end to end from row 0.
        dense: positions are 0…n−1 in every segment of `lengths` (so a window reaches exactly so many rows).
        span: host bound on the length of a segment.
        reach: host bound on position + 1.
        grid: what an anonymous batch may still know of its segments.
    """

    tokens: mx.array
    positions: mx.array
    segments: mx.array
    lengths: tuple[int, ...] | None
    dense: bool
    span: int
    reach: int
    grid: Grid | None = None

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def shortest(self) -> int:
        """Tokens of the shortest text; where only the device knows, of the longest that there may be."""
        return self.span if self.lengths is None else min(filter(None, self.lengths), default=0)

    def anonymous(self) -> Packed:
        """The same batch without what a trace must not know: host lengths; the span in powers of eight."""
        return replace(self, lengths=None, dense=False, span=_at_least(self.span, 64, 8))

    def gridded(self) -> Packed:
        """The same batch with a grid if texts of one length fill it: so few sizes that a trace each does no harm."""
        count, lengths = len(self.lengths or ()), set(self.lengths or ())
        (length,) = lengths if len(lengths) == 1 else (0,)
        fills = self.dense and count > 1 and length % 16 == 0 and 0 < count * length == self.rows
        return replace(self, grid=Grid(count, length) if fills else None)

    def padded(self, rows: int, slots: int) -> Packed:
        """The same batch with T and S grown to `rows` and `slots`, by rows that hold no token and empty slots."""
        empty = np.tile(np.array([[self.rows, 0]], np.int32), (slots - self.segments.shape[0], 1))
        return replace(
            self,
            tokens=_grow(self.tokens, rows, 0),
            positions=_grow(self.positions, rows, -1),
            segments=mx.concatenate([self.segments, mx.array(empty)]),
        )


def bucket(rows: int, segments: int) -> tuple[int, int]:
    """(T, S) of the bucket that holds `rows` tokens in `segments` texts.

    T is a power of two up to 256, then two and from 1,024 four sizes an octave: over a mixed corpus, whose rows
    lie in long batches, about 8% of all rows are padding. S follows from T where texts have 8 tokens or more, so that
    it adds no sizes of its own: a slot without a text costs nothing.
    """
    steps = 1 if rows <= 256 else 2 if rows <= 1024 else 4
    octave = 1 << max((rows - 1).bit_length() - 1, 4)
    size = octave + octave // steps * -(-max(rows - octave, 0) // (octave // steps))
    slots = max(size // 8, MIN_SEGMENTS)
    return size, slots if segments <= slots else max(size, _at_least(segments, MIN_SEGMENTS, 4))


def pack(texts: Sequence[np.ndarray]) -> Packed:
    """Lay token id arrays end to end.

    Args:
        texts: int32 arrays [n_i]; an empty one becomes a segment of length 0.
    """
    lengths = [len(ids) for ids in texts]
    tokens = np.concatenate([*texts, np.zeros(0, np.int32)]).astype(np.int32)
    positions = np.concatenate([*(np.arange(n) for n in lengths), np.zeros(0)]).astype(np.int32)
    return _packed(mx.array(tokens), positions, lengths, dense=True)


def from_grid(tokens: mx.array) -> Packed:
    """A [B, L] batch without a mask: B segments of L tokens, nothing read on the host."""
    batch, length = tokens.shape
    positions = np.tile(np.arange(length, dtype=np.int32), batch)
    return _packed(tokens.reshape(-1).astype(mx.int32), positions, [length] * batch, dense=True)


def from_masked_grid(tokens: mx.array, mask: np.ndarray) -> tuple[Packed, np.ndarray]:
    """A [B, L] batch under a host mask, its unmasked tokens packed.

    Positions are the columns of the grid, since the reference takes RoPE and the window from there: a hole in a row
    keeps its distance.

    Returns:
        The batch, and `rows` [B, L] int32: the packed row of each grid cell, −1 where it is masked.
    """
    keep = mask != 0
    flat = np.flatnonzero(keep)
    rows = np.full(mask.shape, -1, np.int32)
    rows[keep] = np.arange(len(flat), dtype=np.int32)
    columns = (flat % mask.shape[1]).astype(np.int32)
    lengths = keep.sum(axis=1).tolist()
    # Left padding shifts a row's positions, which changes no distance: such a row is as dense as a full one.
    dense = all(row[np.argmax(row) :][:n].all() for row, n in zip(keep, lengths, strict=True))
    packed = _packed(tokens.reshape(-1)[mx.array(flat)].astype(mx.int32), columns, lengths, dense=dense)
    return replace(packed, reach=mask.shape[1]), rows


def from_traced_grid(tokens: mx.array, mask: mx.array) -> Packed:
    """A [B, L] batch whose mask only the device knows: every cell keeps its row, masked ones hold no token."""
    packed = from_grid(tokens)
    return replace(packed, positions=mx.where(mask.reshape(-1) != 0, packed.positions, -1), dense=False)


def from_segments(
    tokens: mx.array, segments: mx.array | np.ndarray, positions: mx.array | None, max_position: int
) -> Packed:
    """An already packed row [T] with its segment table [S, 2], and positions below `max_position`, or 0…n−1 in each.

    A numpy table is known on the host; an `mx.array` is not read. Rows outside every segment hold no token.
    """
    rows = tokens.shape[0]
    table = segments if isinstance(segments, mx.array) else mx.array(segments.astype(np.int32))
    table = table.astype(mx.int32)
    inside = membership(rows, table)
    start = (inside * table[:, 0]).sum(axis=1)
    places = mx.arange(rows, dtype=mx.int32) - start if positions is None else positions.astype(mx.int32)
    packed = Packed(
        tokens=tokens.astype(mx.int32),
        positions=mx.where(inside.any(axis=1), places, -1),
        segments=table,
        lengths=None,
        dense=False,
        span=rows,
        reach=rows if positions is None else max_position,
    )
    if isinstance(segments, np.ndarray) and _end_to_end(segments):
        lengths = tuple(segments[:, 1].tolist())
        return replace(packed, lengths=lengths, dense=positions is None, span=max(lengths, default=0))
    return packed


def membership(rows: int, segments: mx.array) -> mx.array:
    """[T, S] bool: packed row t lies in segment s."""
    index = mx.arange(rows, dtype=mx.int32)[:, None]
    start, length = segments[:, 0], segments[:, 1]
    return (index >= start) & (index < start + length)


def unpack(rows: mx.array, index: np.ndarray) -> mx.array:
    """Packed rows [T, D] → grid [B, L, D] by `from_masked_grid`'s index, zeros where it is −1."""
    safe = mx.array(np.maximum(index, 0))
    return mx.where(mx.array(index >= 0)[..., None], rows[safe], mx.zeros((), rows.dtype))


def token_batches(
    lengths: Sequence[int], batch_tokens: int, batch_size: int | None = None, *, apart: int = 0
) -> Iterator[list[int]]:
    """Cut texts into batches of at most `batch_tokens` tokens (and `batch_size` texts), longest first.

    Texts in one batch have similar lengths, and the caller puts results back by index. A text longer than the budget
    is a batch of its own, and those shorter than `apart` are in no batch with longer ones.

    Yields:
        Lists of indices into `lengths`.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batch: list[int] = []
    total = 0
    for index in order:
        full = total + lengths[index] > batch_tokens or (batch_size is not None and len(batch) == batch_size)
        if batch and (full or lengths[index] < apart <= lengths[batch[-1]]):
            yield batch
            batch, total = [], 0
        batch.append(index)
        total += lengths[index]
    if batch:
        yield batch


def _packed(tokens: mx.array, positions: np.ndarray, lengths: list[int], *, dense: bool) -> Packed:
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if lengths else np.zeros(0)
    segments = np.stack([starts, np.asarray(lengths)], axis=1).astype(np.int32)
    return Packed(
        tokens=tokens,
        positions=mx.array(positions),
        segments=mx.array(segments),
        lengths=tuple(lengths),
        dense=dense,
        span=max(lengths, default=0),
        reach=max(lengths, default=0),
    )


def _end_to_end(segments: np.ndarray) -> bool:
    ends = np.cumsum(segments[:, 1])
    return bool(np.array_equal(segments[1:, 0], ends[:-1]) and (len(segments) == 0 or segments[0, 0] == 0))


def _at_least(value: int, first: int, factor: int) -> int:
    size = first
    while size < value:
        size *= factor
    return size


def _grow(rows: mx.array, size: int, value: int) -> mx.array:
    return mx.pad(rows, (0, size - rows.shape[0]), constant_values=mx.array(value, rows.dtype))
