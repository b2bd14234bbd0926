"""Packing: what a batch means, bucket sizes, token-budget batches."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from egemma_mlx import packing
from egemma_mlx.packing import MIN_SEGMENTS, Packed, bucket, token_batches

SEEDS = range(20)


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def random_texts(seed: int) -> list[NDArray[np.int32]]:
    """Up to a dozen texts of up to 40 tokens, some of them empty; no id twice."""
    lengths = rng(seed).integers(0, 40, rng(seed).integers(1, 13))
    ids = np.arange(100, 100 + lengths.sum(), dtype=np.int32)
    return np.split(ids, np.cumsum(lengths)[:-1])


def random_mask(seed: int) -> NDArray[np.int32]:
    """Rows with holes, a left-padded, a right-padded, a full and an empty one, in random order."""
    draw = rng(seed)
    width = int(draw.integers(3, 20))
    column = np.arange(width)
    rows = [draw.random(width) < 0.6, column >= width // 2, column < width // 2, column >= 0, column < 0]
    return np.stack([rows[i] for i in draw.permutation(len(rows))]).astype(np.int32)


def mixed_batches(seed: int, count: int) -> list[list[int]]:
    """Lengths of `count` batches of a mixed corpus: queries and documents, batched as `Encoder` batches."""
    draw = rng(seed)
    batches: list[list[int]] = []
    while len(batches) < count:
        texts = int(draw.choice([1, 8, 64, 300]))
        lengths = np.clip(draw.lognormal(4.4, 1.2, texts), 3, 2048).astype(int).tolist()
        budget = int(draw.choice([512, 4096, 16_384]))
        batches += [[lengths[i] for i in batch] for batch in token_batches(lengths, budget)]
    return batches[:count]


def segments_of(packed: Packed) -> list[tuple[list[int], list[int]]]:
    """(tokens, positions) of each segment, rows without a token left out."""
    tokens, positions = np.array(packed.tokens), np.array(packed.positions)
    found = []
    for start, length in np.array(packed.segments):
        rows = [row for row in range(start, start + length) if positions[row] >= 0]
        found.append((tokens[rows].tolist(), positions[rows].tolist()))
    return found


def check_bounds(packed: Packed) -> None:
    """Host bounds hold, arrays are int32 and rows of no segment hold no token."""
    tokens, positions, segments = (np.array(a) for a in (packed.tokens, packed.positions, packed.segments))
    assert tokens.dtype == positions.dtype == segments.dtype == np.int32
    assert tokens.shape == positions.shape == (packed.rows,) and segments.shape[1:] == (2,)
    assert segments[:, 1].max(initial=0) <= packed.span
    assert positions.max(initial=-1) < packed.reach
    outside = np.ones(packed.rows, bool)
    for start, length in segments:
        outside[start : start + length] = False
    assert (positions[outside] == -1).all()
    if packed.lengths is not None:
        assert segments[: len(packed.lengths), 1].tolist() == list(packed.lengths)
        assert np.array_equal(segments[: len(packed.lengths), 0], np.cumsum([0, *packed.lengths])[:-1])
        assert not segments[len(packed.lengths) :, 1].any()


def is_dense(packed: Packed) -> bool:
    """A step of one row is a step of one position, inside every segment."""
    return all((np.diff(positions) == 1).all() for _, positions in segments_of(packed) if positions)


# --- pack and the grids ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_pack_lays_texts_end_to_end(seed: int) -> None:
    texts = random_texts(seed)
    packed = packing.pack(texts)
    check_bounds(packed)
    assert segments_of(packed) == [(text.tolist(), list(range(len(text)))) for text in texts]
    assert packed.lengths == tuple(map(len, texts)) and packed.dense
    assert packed.rows == sum(map(len, texts))


def test_pack_of_no_text_or_of_empty_ones_has_no_rows() -> None:
    for texts in ([], [np.zeros(0, np.int32)] * 3):
        packed = packing.pack(texts)
        check_bounds(packed)
        assert (packed.rows, packed.segments.shape, packed.span) == (0, (len(texts), 2), 0)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (4, 1), (0, 5), (5, 0)])
def test_from_grid_takes_every_cell(shape: tuple[int, int]) -> None:
    grid = np.arange(shape[0] * shape[1]).reshape(shape)
    packed = packing.from_grid(mx.array(grid.astype(np.uint8)))
    check_bounds(packed)
    assert segments_of(packed) == [(row.tolist(), list(range(shape[1]))) for row in grid]
    assert packed.dense


@pytest.mark.parametrize("seed", SEEDS)
def test_from_masked_grid_keeps_columns_as_positions(seed: int) -> None:
    mask = random_mask(seed)
    grid = np.arange(mask.size, dtype=np.int32).reshape(mask.shape)
    packed, rows = packing.from_masked_grid(mx.array(grid), mask)
    check_bounds(packed)
    columns = [np.flatnonzero(row) for row in mask]
    assert segments_of(packed) == [(ids[at].tolist(), at.tolist()) for ids, at in zip(grid, columns, strict=True)]
    assert packed.rows == mask.sum()
    assert packed.dense == is_dense(packed)
    assert np.array_equal(rows >= 0, mask != 0)
    assert np.array_equal(np.array(packed.tokens)[rows[mask != 0]], grid[mask != 0])


def test_padding_on_either_side_is_dense_and_a_hole_is_not() -> None:
    for row, dense in (([0, 0, 1, 1], True), ([1, 1, 0, 0], True), ([0, 1, 1, 0], True), ([1, 0, 1, 0], False)):
        mask = np.array([row, [1, 1, 1, 1], [0, 0, 0, 0]])
        assert packing.from_masked_grid(mx.zeros((3, 4), mx.int32), mask)[0].dense is dense


def test_every_nonzero_mask_value_is_a_token() -> None:
    grid = mx.array([[5, 6, 7]])
    for mask in ([[True, False, True]], [[0.5, 0.0, -1.0]], [[2, 0, 255]]):
        assert segments_of(packing.from_masked_grid(grid, np.array(mask))[0]) == [([5, 7], [0, 2])]
        assert segments_of(packing.from_traced_grid(grid, mx.array(mask))) == [([5, 7], [0, 2])]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mask_that_only_the_device_knows_means_the_same(seed: int) -> None:
    mask = random_mask(seed)
    grid = mx.array(np.arange(mask.size, dtype=np.int32).reshape(mask.shape))
    device = packing.from_traced_grid(grid, mx.array(mask))
    check_bounds(device)
    assert segments_of(device) == segments_of(packing.from_masked_grid(grid, mask)[0])
    assert not device.dense


@pytest.mark.parametrize("seed", SEEDS)
def test_unpack_puts_rows_back_and_zeros_between(seed: int) -> None:
    mask = random_mask(seed)
    grid = np.arange(1, mask.size + 1, dtype=np.int32).reshape(mask.shape)
    packed, index = packing.from_masked_grid(mx.array(grid), mask)
    states = mx.stack([packed.tokens, -packed.tokens], axis=1).astype(mx.float32)
    more = mx.concatenate([states, mx.full((5, 2), float("nan"))])  # padded rows behind, whatever they hold
    expected = (grid * mask)[..., None] * np.array([1.0, -1.0])
    assert np.array_equal(np.array(packing.unpack(more, index)), expected)


# --- padded and anonymous --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_padded_and_anonymous_batches_mean_the_same(seed: int) -> None:
    packed = packing.pack(random_texts(seed))
    meaning, slots = segments_of(packed), packed.segments.shape[0]
    size = bucket(packed.rows, slots)
    padded = packed.padded(*size)
    check_bounds(padded)
    assert (padded.rows, padded.segments.shape[0]) == size
    assert segments_of(padded) == meaning + [([], [])] * (size[1] - slots)
    assert padded.lengths == packed.lengths
    anonymous = padded.anonymous()
    check_bounds(anonymous)
    assert segments_of(anonymous) == segments_of(padded)
    assert anonymous.lengths is None and not anonymous.dense
    assert packed.padded(packed.rows, slots).rows == packed.rows


def test_anonymous_spans_are_few_and_hold_theirs() -> None:
    spans = {n: packing.pack([np.zeros(n, np.int32)]).anonymous().span for n in (*range(1, 1200), 4096, 4097, 8192)}
    assert all(span >= n for n, span in spans.items())
    assert len(set(spans.values())) <= 5


# --- segments given --------------------------------------------------------------------------------------------------

TABLES = {
    "end to end": ([(0, 3), (3, 5), (8, 4)], 12),
    "empty slots behind": ([(0, 3), (3, 5), (8, 0), (8, 0)], 8),
    "an empty text between": ([(0, 3), (3, 0), (3, 5)], 8),
    "rows behind": ([(0, 3), (3, 5)], 20),
    "gaps": ([(2, 3), (9, 5)], 20),
    "none": ([], 6),
}


@pytest.mark.parametrize("placed", [False, True], ids=["counted", "positions given"])
@pytest.mark.parametrize("name", TABLES)
def test_a_segment_table_means_the_same_on_host_and_device(name: str, placed: bool) -> None:
    table, rows = TABLES[name]
    segments = np.array(table, np.int64).reshape(-1, 2)
    ids, positions = mx.arange(100, 100 + rows), np.arange(rows) * 3 + 7
    for given in (segments, mx.array(segments)):
        packed = packing.from_segments(ids, given, mx.array(positions) if placed else None, 4096)
        check_bounds(packed)
        assert segments_of(packed) == [
            (
                list(range(100 + start, 100 + start + length)),
                (positions[start : start + length] if placed else np.arange(length)).tolist(),
            )
            for start, length in table
        ]
        known = isinstance(given, np.ndarray) and name != "gaps"
        assert packed.lengths == (tuple(segments[:, 1].tolist()) if known else None)
        assert not packed.dense or is_dense(packed)


def test_positions_given_are_not_taken_for_dense_ones() -> None:
    segments, ids = np.array([[0, 3], [3, 3]]), mx.zeros(6, mx.int32)
    assert packing.from_segments(ids, segments, None, 4096).dense
    assert not packing.from_segments(ids, segments, mx.array([0, 1, 9, 0, 1, 2]), 4096).dense


def test_membership_is_the_rows_of_each_segment() -> None:
    got = np.array(packing.membership(6, mx.array([[1, 2], [3, 0], [3, 3]])))
    assert got.T.astype(int).tolist() == [[0, 1, 1, 0, 0, 0], [0] * 6, [0, 0, 0, 1, 1, 1]]


# --- buckets ---------------------------------------------------------------------------------------------------------


def test_a_bucket_holds_its_rows_and_segments() -> None:
    for rows in [*range(2000), 4095, 4096, 4097, 16_384, 100_003]:
        for segments in (0, 1, 7, 8, 9, 33, rows // 2, rows):
            size, slots = bucket(rows, segments)
            assert size >= max(rows, 1) and slots >= max(segments, MIN_SEGMENTS)


def test_buckets_grow_with_what_they_hold_and_hold_themselves() -> None:
    sizes = [bucket(rows, 1) for rows in range(20_000)]
    assert sizes == sorted(sizes)
    for size, slots in set(sizes):
        assert bucket(size, slots) == (size, slots)
    for rows in (1, 100, 5000):
        slots = [bucket(rows, segments)[1] for segments in range(3000)]
        assert slots == sorted(slots)


def test_bucket_sizes_come_in_at_most_four_an_octave() -> None:
    for octave in range(5, 17):
        sizes = {bucket(rows, 1)[0] for rows in range(2**octave + 1, 2 ** (octave + 1) + 1)}
        assert max(sizes) == 2 ** (octave + 1)
        assert len(sizes) <= (1 if octave < 8 else 2 if octave < 10 else 4)


@pytest.mark.parametrize("seed", range(3))
def test_two_hundred_mixed_batches_fall_into_few_buckets_with_little_padding(seed: int) -> None:
    batches = mixed_batches(seed, 200)
    sizes = [bucket(sum(lengths), len(lengths)) for lengths in batches]
    rows = sum(map(sum, batches))
    assert sum(size for size, _ in sizes) - rows <= 0.15 * sum(size for size, _ in sizes)
    assert len(set(sizes)) <= 30


# --- token batches ---------------------------------------------------------------------------------------------------


def cuts() -> list[tuple[list[int], int, int | None]]:
    cases = []
    for seed in SEEDS:
        draw = rng(seed)
        lengths = draw.integers(0, 900, draw.integers(0, 60)).tolist()
        cases.append((lengths, int(draw.integers(1, 2000)), None if seed % 2 else int(draw.integers(1, 9))))
    return cases


@pytest.mark.parametrize(("lengths", "budget", "most"), cuts())
def test_token_batches_hold_every_text_once_within_both_limits(
    lengths: list[int], budget: int, most: int | None
) -> None:
    batches = list(token_batches(lengths, budget, most))
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert sum(lengths[index] for index in batch) <= budget or len(batch) == 1
        assert 1 <= len(batch) <= (most or len(lengths))
    in_order = [lengths[index] for batch in batches for index in batch]
    assert in_order == sorted(lengths, reverse=True)


@pytest.mark.parametrize(("lengths", "budget", "most"), cuts())
def test_token_batches_are_cut_only_where_the_next_text_does_not_fit(
    lengths: list[int], budget: int, most: int | None
) -> None:
    batches = list(token_batches(lengths, budget, most))
    for batch, after in pairwise(batches):
        assert len(batch) == most or sum(lengths[i] for i in [*batch, after[0]]) > budget


def test_a_text_longer_than_the_budget_is_a_batch_of_its_own() -> None:
    assert list(token_batches([3, 50, 4, 60], 10)) == [[3], [1], [2, 0]]
    assert list(token_batches([10, 10], 10)) == [[0], [1]]
    assert list(token_batches([5, 5], 10)) == [[0, 1]]
    assert list(token_batches([], 10)) == []


def test_results_put_back_by_index_are_in_the_callers_order() -> None:
    texts = random_texts(3)
    out: list[list[int]] = [[]] * len(texts)
    for batch in token_batches([len(text) for text in texts], 50):
        meaning = segments_of(packing.pack([texts[i] for i in batch]))
        for index, (ids, _) in zip(batch, meaning, strict=True):
            out[index] = ids
    assert out == [text.tolist() for text in texts]
