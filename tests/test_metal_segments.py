"""The Metal kernels that go by segments, against float64 numpy: attention in its forms, and the pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from executors import SIMULATOR, TOLERANCE, Array, Executor, error, executors, over, simulated
from test_kernels import EPS, Floats, left_padded, masked, normal, rms, table, texts, traced, weight

from egemma_mlx import simulator
from egemma_mlx.kernels.attention_metal import (
    flash_attention,
    metal_attention,
    metal_plan,
    product_attention,
    split_attention,
    split_fragments,
)
from egemma_mlx.kernels.library import Library
from egemma_mlx.kernels.pool import metal_pool
from egemma_mlx.packing import Packed

# Fewer than 8 elements of a table (MLX binds them as constants), blocks of 8 and 64 rows and 32 keys and their edges,
# and every way in which rows can lie in segments or in none.
BATCHES: dict[str, Callable[[], Packed]] = {
    **{f"{rows} rows": partial(texts, rows) for rows in (1, 3, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129)},
    "several": lambda: texts(5, 1, 3),
    "empty ones": lambda: texts(0, 5, 0, 0, 33, 1, 0, 12, 0),
    "across blocks": lambda: texts(60, 1, 28, 64, 1, 20),
    "equal lengths": lambda: texts(*[9] * 30),
    "2,000 single rows": lambda: texts(*[1] * 2000),
    "thousands, some empty": lambda: texts(*[0, 1, 2] * 700),
    "padding": lambda: texts(5, 12).padded(40, 8),
    "blocks of padding": lambda: texts(3, 9).padded(200, 3),
    "gaps": lambda: table(130, [(3, 5), (10, 60), (70, 0), (100, 9)]),
    "gap over blocks": lambda: table(210, [(0, 2), (190, 20)]),
    "jumps": lambda: table(12, [(0, 5), (5, 7)], [0, 1, 9, 10, 300, 4, 5, 6, 14, 15, 30, 31]),
    "left padding": lambda: left_padded(40, 40, 7, 1, 22),
    "holes packed": lambda: masked(3, 70, 0.6, 0),
    "holes kept": lambda: traced(4, 33, 0.7, 2),
    "long holes kept": lambda: traced(2, 100, 0.2, 3),
}
# Themselves alone, less than a block, more than one, more than any segment.
WINDOWS = (None, 0, 3, 40, 1000)


class Heads(NamedTuple):
    """Groups of 1, 2 and 4 query heads, and of 3 and 8 where a threadgroup holds a group."""

    heads: int
    kv_heads: int
    head_dim: int


FLASH = (Heads(1, 1, 8), Heads(2, 1, 16), Heads(4, 2, 64), Heads(4, 1, 72), Heads(2, 2, 128))
SPLIT = (
    *(Heads(4, 2, 256), Heads(4, 1, 512), Heads(1, 1, 256), Heads(3, 1, 256), Heads(8, 1, 256)),
    *(Heads(2, 2, 768), Heads(1, 1, 1024)),
)
WIDE = (Heads(1, 1, 8), Heads(4, 1, 136), Heads(2, 1, 256), Heads(4, 2, 24), Heads(1, 1, 512))


def turns(shapes: tuple[Heads, ...]) -> list[tuple[str, int | None, Heads]]:
    """Every batch with every window and with every shape, but not with every pair of them."""
    return [(name, w, shapes[(i + j) % len(shapes)]) for i, name in enumerate(BATCHES) for j, w in enumerate(WINDOWS)]


def owners(packed: Packed) -> Array:
    """The segment of each row, −1 for none."""
    owner = np.full(packed.rows, -1)
    for index, (start, length) in enumerate(np.array(packed.segments)):
        owner[start : start + length] = index
    return owner


def tokens(packed: Packed) -> Array:
    """Which rows hold a token of a segment."""
    held: Array = (np.array(packed.positions) >= 0) & (owners(packed) >= 0)
    return held


def attended(q: Array, k: Array, v: Array, packed: Packed, window: int | None) -> Floats:
    """Attention segment by segment, [rows, heads·head_dim]; zeros at rows without a token."""
    positions, token, group = np.array(packed.positions).astype(np.int64), tokens(packed), q.shape[1] // k.shape[1]
    out = np.zeros(q.shape)
    for start, length in np.array(packed.segments):
        rows = np.arange(start, start + length)[token[start : start + length]]
        far = np.abs(positions[rows, None] - positions[rows]) > (np.inf if window is None else window)
        wide_q, wide_k, wide_v = (x[rows].astype(np.float64).transpose(1, 0, 2) for x in (q, k, v))
        scores = wide_q @ np.repeat(wide_k, group, axis=0).swapaxes(1, 2)
        scores[:, far] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-np.inf))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[rows] = (weights @ np.repeat(wide_v, group, axis=0)).transpose(1, 0, 2)
    return out.reshape(len(q), -1)


@cache
def problem(batch: str, window: int | None, shape: Heads) -> tuple[Packed, list[mx.array], Floats]:
    """A batch, random q, k and v, and what comes out."""
    packed, (heads, kv_heads, head_dim) = BATCHES[batch](), shape
    scale = head_dim**-0.25  # scores of about 1
    q, k, v = (
        normal(i, packed.rows, n, head_dim, scale=by)
        for i, n, by in ((0, heads, scale), (1, kv_heads, scale), (2, kv_heads, 1.0))
    )
    return packed, [mx.array(x) for x in (q, k, v)], attended(q, k, v, packed, window)


def planned(
    library: Library,
    form: Callable[..., mx.array],
    arrays: list[mx.array],
    packed: Packed,
    window: int | None,
    **how: Any,
) -> mx.array:
    """Attention of one form from the batch on."""
    return form(library, *arrays, metal_plan(library, packed, window), **how)


def agrees(got: Array, expected: Floats, packed: Packed) -> bool:
    """Within tolerance at tokens, finite at all other rows."""
    token = tokens(packed)
    return bool(np.isfinite(got).all()) and error(got[token], expected[token]) <= TOLERANCE


# --- which rows may meet ---------------------------------------------------------------------------------------------


@executors
@over(["attention_bounds"], "batch, window", [(batch, window) for batch in BATCHES for window in WINDOWS])
def test_bounds_are_the_rows_of_the_segment_within_the_window(
    executor: Executor, batch: str, window: int | None
) -> None:
    packed = BATCHES[batch]()
    owner, row = owners(packed), np.arange(packed.rows)
    radius = packed.rows if window is None else window
    expected = np.stack([row, row], axis=1)
    for start, length in np.array(packed.segments):
        inside = row[start : start + length]
        expected[inside, 0] = np.maximum(inside - radius, start)
        expected[inside, 1] = np.minimum(inside + radius + 1, start + length)
    (bounds,) = executor.run(lambda library: metal_plan(library, packed, window).rows, launches=["attention_bounds"])
    assert np.array_equal(bounds, expected)
    assert (np.diff(bounds, axis=0) >= 0).all()  # what blocks of rows rely on
    assert (bounds[owner < 0, 0] == bounds[owner < 0, 1]).all()


@executors
@pytest.mark.parametrize(
    ("segment", "rows"), [((15, 900), (15, 20)), ((-3, 9), (0, 9)), ((4, -2), (0, 0)), ((90, 5), (0, 0))]
)
def test_a_segment_that_overruns_the_batch_is_cut(
    executor: Executor, segment: tuple[int, int], rows: tuple[int, int]
) -> None:
    packed = replace(texts(20), segments=mx.array([segment], mx.int32))
    (bounds,) = executor.run(lambda library: metal_plan(library, packed, None).rows, launches=["attention_bounds"])
    expected = np.repeat(np.arange(20)[:, None], 2, axis=1)
    expected[slice(*rows)] = rows
    assert np.array_equal(bounds, expected)


# --- flash attention -------------------------------------------------------------------------------------------------


@executors
@over(["flash"], "batch, window, shape", turns(FLASH))
def test_direct_flash_is_softmax_inside_segment_and_window(
    executor: Executor, batch: str, window: int | None, shape: Heads
) -> None:
    packed, arrays, expected = problem(batch, window, shape)
    launches = ["attention_bounds", "flash"]
    (got,) = executor.run(planned, flash_attention, arrays, packed, window, staged=False, launches=launches)
    assert agrees(got, expected, packed)


@executors
@over(["flash_staged"], "batch, window, shape", turns(FLASH))
def test_staged_flash_is_softmax_inside_segment_and_window(
    executor: Executor, batch: str, window: int | None, shape: Heads
) -> None:
    packed, arrays, expected = problem(batch, window, shape)
    launches = ["attention_bounds", "flash_staged"]
    (got,) = executor.run(planned, flash_attention, arrays, packed, window, staged=True, launches=launches)
    assert agrees(got, expected, packed)


# --- flash attention of wide heads -----------------------------------------------------------------------------------

# In turn with the most rows a threadgroup, and with fewer.
SPLIT_TURNS = [
    (*turn, choices[i % len(choices)])
    for i, turn in enumerate(turns(SPLIT))
    for choices in [split_fragments(turn[2].head_dim)]
]


@executors
@over(["flash_split"], "batch, window, shape, fragments", SPLIT_TURNS)
def test_split_flash_is_softmax_inside_segment_and_window(
    executor: Executor, batch: str, window: int | None, shape: Heads, fragments: int
) -> None:
    packed, arrays, expected = problem(batch, window, shape)
    launches = ["attention_bounds", "flash_split"]
    (got,) = executor.run(planned, split_attention, arrays, packed, window, fragments=fragments, launches=launches)
    assert agrees(got, expected, packed)


def split_products(rows: int, window: int | None, heads: Heads, fragments: int) -> int:
    """The 8×8×8 products of one text: blocks of 8·fragments // group rows, all keys that one of them meets in eights.

    A key costs each of a block's 8·fragments query rows head_dim multiply-accumulates for its score and as many for
    its value.
    """
    radius = rows if window is None else window
    size = 8 * fragments // (heads.heads // heads.kv_heads)
    keys = 0
    for first in range(0, rows, size):
        last = min(first + size, rows) - 1
        keys += -(-(min(last + radius + 1, rows) - max(first - radius, 0)) // 8)
    return heads.kv_heads * keys * 2 * fragments * heads.head_dim // 8


def exact_products(rows: int, window: int, heads: Heads) -> float:
    """The same if every row met its own keys alone, in parts of a product."""
    row = np.arange(rows)
    keys = np.minimum(row + window + 1, rows) - np.maximum(row - window, 0)
    return float(keys.sum()) * heads.heads * 2 * heads.head_dim / 512


@simulated
@pytest.mark.parametrize("fragments", split_fragments(256))
@pytest.mark.parametrize(("rows", "window"), [(260, None), (301, 40)])
def test_split_flash_multiplies_what_the_band_touches(rows: int, window: int | None, fragments: int) -> None:
    sliding, packed = Heads(4, 2, 256), texts(rows)
    q, k, v = (mx.array(normal(i, rows, n, 256)) for i, n in enumerate((4, 2, 2)))
    with simulator.session() as log:
        planned(SIMULATOR.library, split_attention, [q, k, v], packed, window, fragments=fragments)
    (_, counters) = log.calls[-1]
    assert counters.multiply_accumulates == split_products(rows, window, sliding, fragments)
    assert counters.fragment_floats <= 96
    assert counters.threadgroup_memory <= 32768
    assert split_products(8192, 512, sliding, fragments) <= 1.15 * exact_products(8192, 512, sliding)


# --- attention by products -------------------------------------------------------------------------------------------

ROUND = ["attention_scores", "softmax", "attention_values"]


@executors
@over(ROUND, "batch, window, shape", turns(WIDE))
def test_products_are_softmax_inside_segment_and_window(
    executor: Executor, batch: str, window: int | None, shape: Heads
) -> None:
    packed, arrays, expected = problem(batch, window, shape)
    (got,) = executor.run(planned, product_attention, arrays, packed, window, launches=["attention_bounds", *ROUND])
    assert agrees(got, expected, packed)


@executors
@pytest.mark.parametrize(
    ("batch", "window", "score_bytes", "rounds"),
    [
        ("129 rows", None, 1, 3),
        ("across blocks", 3, 1, 3),
        ("gap over blocks", 40, 1, 4),
        # 5 blocks of 4 heads · 64 rows · 96 keys, two a round
        ("equal lengths", None, 200_000, 3),
    ],
)
def test_rounds_of_products_give_the_bits_of_one_round(
    executor: Executor, batch: str, window: int | None, score_bytes: int, rounds: int
) -> None:
    packed, arrays, _ = problem(batch, window, Heads(4, 2, 24))
    attend = partial(executor.run, planned, product_attention, arrays, packed, window)
    (whole,) = attend(launches=["attention_bounds", *ROUND])
    (parts,) = attend(score_bytes=score_bytes, launches=["attention_bounds", *ROUND * rounds])
    assert np.array_equal(parts, whole)


# --- every form ------------------------------------------------------------------------------------------------------

FORMS: dict[str, tuple[Callable[..., mx.array], list[str]]] = {
    "direct": (partial(flash_attention, staged=False), ["flash"]),
    "staged": (partial(flash_attention, staged=True), ["flash_staged"]),
    "products": (product_attention, ROUND),
    "split": (split_attention, ["flash_split"]),
}
# Which take the widths of the tests below, but for this one.
DIMS = {"split": 256}


@executors
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("form", FORMS)
def test_scores_may_be_as_large_as_they_like(executor: Executor, form: str, sign: int) -> None:
    """Whole numbers of thousands, exact in float32; exp of one is ∞, or 0 for every key of a row."""
    packed, random = texts(40, 7), np.random.default_rng(0)
    head_dim, (function, launches) = DIMS.get(form, 64), FORMS[form]
    q, k = (random.integers(1, 16, (47, heads, head_dim)).astype(np.float32) for heads in (4, 2))
    k *= sign
    v = normal(2, 47, 2, head_dim)
    (got,) = executor.run(
        planned, function, list(map(mx.array, (q, k, v))), packed, None, launches=["attention_bounds", *launches]
    )
    assert agrees(got, attended(q, k, v, packed, None), packed)


@executors
@pytest.mark.parametrize("form", FORMS)
def test_views_of_heads_are_read_as_what_they_show(executor: Executor, form: str) -> None:
    packed = texts(20, 13)
    head_dim, (function, launches) = DIMS.get(form, 16), FORMS[form]
    q, k, v = (normal(i, heads, 33, head_dim, scale=head_dim**-0.25) for i, heads in enumerate((2, 1, 1)))
    views = [mx.array(x).transpose(1, 0, 2) for x in (q, k, v)]
    (got,) = executor.run(planned, function, views, packed, 5, launches=["attention_bounds", *launches])
    q, k, v = (x.transpose(1, 0, 2) for x in (q, k, v))
    assert agrees(got, attended(q, k, v, packed, 5), packed)


@executors
def test_a_row_beyond_everyones_window_attends_to_itself(executor: Executor) -> None:
    packed = table(9, [(0, 9)], [0, 10, 20, 30, 40, 50, 60, 70, 80])
    for form, (function, launches) in FORMS.items():
        q, k, v = (normal(i, 9, 2, DIMS.get(form, 8)) for i in range(3))
        (got,) = executor.run(
            planned, function, list(map(mx.array, (q, k, v))), packed, 9, launches=["attention_bounds", *launches]
        )
        assert error(got, v.reshape(9, -1).astype(np.float64)) <= TOLERANCE


@executors
def test_attention_takes_the_form_that_fits(executor: Executor) -> None:
    for length, window, head_dim, launches in (
        (127, None, 64, ["flash"]),
        (128, None, 64, ["flash_staged"]),
        (200, 63, 64, ["flash"]),
        (200, 64, 64, ["flash_staged"]),
        (128, None, 128, ["flash_staged"]),
        (20, None, 128, ["flash"]),
        (20, None, 136, ROUND),
        (20, None, 256, ["flash_split"]),
        (20, None, 384, ROUND),
        (20, None, 512, ["flash_split"]),
    ):
        packed = texts(length)
        q, k, v = (normal(i, length, 1, head_dim, scale=head_dim**-0.25) for i in range(3))
        arrays = [mx.array(x) for x in (q, k, v)]
        (got,) = executor.run(
            planned, metal_attention, arrays, packed, window, launches=["attention_bounds", *launches]
        )
        assert agrees(got, attended(q, k, v, packed, window), packed)


# --- pool ------------------------------------------------------------------------------------------------------------


@executors
@over(["pool"], "batch, width", [(batch, (4, 12, 132, 516)[i % 4]) for i, batch in enumerate(BATCHES)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_pool_is_the_mean_of_normed_tokens_by_segment(
    executor: Executor, batch: str, width: int, dtype: mx.Dtype
) -> None:
    packed = BATCHES[batch]()
    h = normal(0, packed.rows, width) * np.geomspace(1e-3, 100, packed.rows, dtype=np.float32)[:, None]
    w = mx.array(weight(1, width)).astype(dtype)
    normed, token, owner = rms(h) * np.array(w.astype(mx.float32)), tokens(packed), owners(packed)
    held = [(owner == index) & token for index in range(len(packed.segments))]
    expected = np.stack([normed[rows].mean(axis=0) if rows.any() else np.zeros(width) for rows in held])
    (means,) = executor.run(metal_pool, mx.array(h), w, packed, eps=EPS, launches=["pool"])
    assert error(means, expected) <= TOLERANCE
    assert not means[[not rows.any() for rows in held]].any()


@executors
def test_pool_of_no_tokens_is_zero(executor: Executor) -> None:
    packed = traced(3, 5, 0.0, 0)
    (means,) = executor.run(metal_pool, mx.ones((15, 8)), mx.ones((8,)), packed, eps=EPS, launches=["pool"])
    assert means.shape == (3, 8)
    assert not means.any()
