"""The Metal kernels of products that end in what follows them, against float64 numpy; and what a short query costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from executors import SIMULATOR, TOLERANCE, Array, Executor, error, executors, over, simulated
from test_kernels import EPS, Floats, gelu, normal, rms, weight
from test_metal_kernels import DTYPES, FORMS, rising, stored

from egemma_mlx import simulator
from egemma_mlx.kernels import OPS
from egemma_mlx.kernels.fused import (
    FEW_SEGMENTS,
    metal_gated,
    metal_linear_add_norm,
    metal_linear_gelu_mul,
    metal_linear_rms_norm,
    metal_linear_unit,
)
from egemma_mlx.kernels.linear import SHORT, metal_linear


def product(x: Array, w: Floats) -> Floats:
    return x.astype(np.float64) @ w.T


def projection(seed: int, columns: int, depth: int, dtype: str) -> tuple[mx.array, Floats]:
    """A weight whose products are as large as x, so that a gate and an eps see x's own range."""
    return stored(normal(seed, columns, depth, scale=depth**-0.5), dtype)


# --- gates -----------------------------------------------------------------------------------------------------------

# Rows, depth and columns: on, below and above tiles of 8, 16, 32 and 64 rows and of 16, 32, 64, 128 and 256 columns,
# slices of 32 and the 256 that eight simdgroups take at once.
GATES = (
    (1, 4, 4),
    (1, 516, 260),
    (2, 1028, 8),
    (3, 28, 132),
    (7, 256, 16),
    (8, 32, 128),
    (9, 36, 12),
    (15, 252, 20),
    (16, 64, 256),
    (17, 260, 36),
    (24, 4, 64),
    (31, 60, 28),
    (32, 96, 32),
    (33, 68, 124),
    (63, 132, 68),
    (64, 32, 252),
    (64, 128, 128),
    (65, 100, 4),
    (70, 288, 100),
    (96, 12, 268),
    (128, 64, 60),
    (129, 36, 136),
    (257, 20, 40),
)
GATED = {"wide": "gated", "short": "gated_short"}
GELU_MUL = {"wide": "linear_gelu_mul", "short": "linear_gelu_mul_short"}


@executors
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@over(list(GATED.values()), "rows, depth, columns", GATES)
def test_gated_is_the_gelu_of_one_product_times_another(
    executor: Executor, rows: int, depth: int, columns: int, form: str, dtype: str
) -> None:
    x = normal(0, rows, depth, scale=2)
    (gate, exact_gate), (up, exact_up) = (projection(i, columns, depth, dtype) for i in (1, 2))
    (y,) = executor.run(metal_gated, mx.array(x), gate, up, short=FORMS[form], launches=[GATED[form]])
    assert error(y, gelu(product(x, exact_gate)) * product(x, exact_up)) <= TOLERANCE


@executors
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@over(list(GELU_MUL.values()), "rows, depth, columns", GATES)
def test_linear_gelu_mul_is_the_gelu_of_a_product_times_p(
    executor: Executor, rows: int, depth: int, columns: int, form: str, dtype: str
) -> None:
    x, p = normal(0, rows, depth, scale=2), normal(1, rows, columns)
    w, exact = projection(2, columns, depth, dtype)
    arrays = (mx.array(x), w, mx.array(p))
    (y,) = executor.run(metal_linear_gelu_mul, *arrays, short=FORMS[form], launches=[GELU_MUL[form]])
    assert error(y, gelu(product(x, exact)) * p) <= TOLERANCE


@executors
@pytest.mark.parametrize("form", FORMS)
def test_gates_are_right_in_both_tails(executor: Executor, form: str) -> None:
    """x·wᵀ is x, from where the gate is shut to where exp overflows."""
    g = np.array([[-1e30, -1e4, -100, -30], [-10, -5, -1, -1e-30], [0, 1e-30, 1, 5], [10, 100, 1e4, 1e30]], np.float32)
    x, one = mx.array(g), mx.eye(4)
    expected = gelu(np.clip(g, -100, None))
    short = FORMS[form]
    (y,) = executor.run(metal_linear_gelu_mul, x, one, mx.ones((4, 4)), short=short, launches=[GELU_MUL[form]])
    (squared,) = executor.run(metal_gated, x / 1e15, one, one, short=short, launches=[GATED[form]])
    assert np.isfinite(y).all() and np.isfinite(squared).all()
    open_gate = np.maximum(np.abs(g.astype(np.float64)), 1e-30)
    assert (np.abs(y - expected) / open_gate).max() <= 1e-6
    assert error(squared, gelu(g / 1e15) * (g / 1e15)) <= TOLERANCE


@executors
@pytest.mark.parametrize("form", FORMS)
def test_gated_takes_mixed_dtypes_as_its_parts(executor: Executor, form: str) -> None:
    x = normal(0, 9, 36)
    (gate, exact_gate), (up, exact_up) = (projection(i, 20, 36, dtype) for i, dtype in enumerate(DTYPES))
    expected = gelu(product(x, exact_gate)) * product(x, exact_up)
    launches = [{"wide": "linear", "short": "linear_short"}[form]] * 2 + ["gelu_mul"]
    (y,) = executor.run(metal_gated, mx.array(x), gate, up, short=FORMS[form], launches=launches)
    assert error(y, expected) <= TOLERANCE


# --- norms of whole rows ---------------------------------------------------------------------------------------------

# Rows, depth and columns: on, below and above tiles of 32 rows, 64 columns a simdgroup in up to eight, slices of 32.
WHOLE = (
    (1, 4, 4),
    (1, 1028, 512),
    (2, 28, 8),
    (3, 260, 60),
    (7, 32, 64),
    (8, 36, 68),
    (9, 64, 124),
    (16, 96, 128),
    (17, 60, 132),
    (24, 4, 188),
    (31, 68, 192),
    (32, 32, 256),
    (32, 100, 260),
    (33, 12, 316),
    (40, 64, 320),
    (63, 256, 36),
    (64, 132, 100),
    (65, 36, 384),
    (65, 288, 28),
    (70, 20, 444),
    (96, 64, 12),
    (97, 8, 448),
    (128, 28, 16),
    (257, 4, 32),
    (33, 36, 508),
    (5, 516, 512),
)
BEYOND = ((1, 4, 516), (33, 36, 576), (65, 8, 1024))


@executors
@pytest.mark.parametrize(("dtype", "pre"), [("float32", 3.0), ("bfloat16", 64**-0.5)])
@over(["linear_rms_norm"], "rows, depth, columns", WHOLE)
def test_linear_rms_norm_norms_a_product(
    executor: Executor, rows: int, depth: int, columns: int, dtype: str, pre: float
) -> None:
    x = rising(0, rows, depth)
    w, exact = projection(1, columns, depth, dtype)
    norm_w, exact_norm = stored(weight(2, columns), dtype)
    options: dict[str, Any] = {"eps": EPS, "pre": pre, "short": False}
    (y,) = executor.run(metal_linear_rms_norm, mx.array(x), w, norm_w, **options, launches=["linear_rms_norm"])
    assert error(y, rms(pre * product(x, exact)) * exact_norm) <= TOLERANCE


@executors
@pytest.mark.parametrize("few", [True, False])
def test_linear_rms_norm_norms_pieces_of_a_product(executor: Executor, few: bool) -> None:
    x, w, norm_w = rising(0, 9, 36), normal(1, 3 * 20, 36), weight(2, 20)
    launches = ["linear_short" if few else "linear", "rms_norm"]
    arrays = map(mx.array, (x, w, norm_w))
    (y,) = executor.run(metal_linear_rms_norm, *arrays, eps=EPS, groups=3, short=few, launches=launches)
    expected = rms(product(x, w.astype(np.float64)).reshape(9, 3, 20)).transpose(1, 0, 2) * norm_w
    assert error(y, expected) <= TOLERANCE
    plain = OPS.linear_rms_norm(*map(mx.array, (x, w, norm_w)), eps=EPS, groups=3)
    assert error(np.array(plain), expected) <= TOLERANCE


@executors
@pytest.mark.parametrize(("dtype", "scaled"), [("float32", False), ("bfloat16", True)])
@over(["linear_add_norm", "linear_add_norm_next"], "rows, depth, columns", WHOLE)
def test_linear_add_norm_ends_a_block_and_starts_the_next(
    executor: Executor, rows: int, depth: int, columns: int, dtype: str, scaled: bool
) -> None:
    case = Block(rows, depth, columns, (dtype,) * 4, scaled=scaled)
    case.check(executor, ["linear_add_norm"], nexts=False, short=False)
    case.check(executor, ["linear_add_norm_next"], nexts=True, short=False)


class Block:
    """x·wᵀ behind a residual stream, and what `linear_add_norm` makes of it."""

    def __init__(self, rows: int, depth: int, columns: int, dtypes: tuple[str, ...], *, scaled: bool) -> None:
        w_dtype, norm_dtype, post_dtype, next_dtype = dtypes
        x, h = rising(0, rows, depth), normal(1, rows, columns, scale=3)
        w, exact = projection(2, columns, depth, w_dtype)
        norm_w, exact_norm = stored(weight(3, columns), norm_dtype)
        self.next_w, exact_next = stored(weight(4, columns), next_dtype)
        # So small a layer scalar that eps counts in the next norm.
        self.post, exact_post = stored(2e-3 * weight(5, 1), post_dtype) if scaled else (None, np.ones(1))
        self.arrays = (mx.array(x), w, mx.array(h), norm_w)
        self.h = (h + rms(product(x, exact)) * exact_norm) * exact_post
        self.a = rms(self.h) * exact_next

    def check(self, executor: Executor, launches: list[str], *, nexts: bool, short: bool | None) -> None:
        next_w = self.next_w if nexts else None
        options: dict[str, Any] = {"eps": EPS, "post": self.post, "next_w": next_w, "short": short}
        got = executor.run(metal_linear_add_norm, *self.arrays, **options, launches=launches)
        for y, expected in zip(got, (self.h, self.a) if nexts else (self.h,), strict=True):
            assert error(y, expected) <= TOLERANCE


@executors
@pytest.mark.parametrize("nexts", [False, True])
@pytest.mark.parametrize("odd", range(4))
def test_linear_add_norm_takes_every_mix_of_dtypes(executor: Executor, odd: int, nexts: bool) -> None:
    """One array of bfloat16 among float32, and one of float32 among bfloat16."""
    launches = ["linear_add_norm_next" if nexts else "linear_add_norm"]
    for one, others in (("bfloat16", "float32"), ("float32", "bfloat16")):
        dtypes = tuple(one if i == odd else others for i in range(4))
        Block(33, 36, 68, dtypes, scaled=True).check(executor, launches, nexts=nexts, short=False)


@executors
@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_linear_rms_norm_takes_mixed_dtypes(executor: Executor, dtypes: tuple[str, str]) -> None:
    x = rising(0, 33, 36)
    w, exact = projection(1, 68, 36, dtypes[0])
    norm_w, exact_norm = stored(weight(2, 68), dtypes[1])
    arrays = (mx.array(x), w, norm_w)
    (y,) = executor.run(metal_linear_rms_norm, *arrays, eps=EPS, short=False, launches=["linear_rms_norm"])
    assert error(y, rms(product(x, exact)) * exact_norm) <= TOLERANCE


@executors
def test_norms_of_products_of_zero_are_zero(executor: Executor) -> None:
    x, w, ones = mx.zeros((3, 8)), mx.ones((12, 8)), mx.ones((12,))
    (y,) = executor.run(metal_linear_rms_norm, x, w, ones, eps=EPS, short=False, launches=["linear_rms_norm"])
    assert not y.any()
    h, launches = mx.zeros((3, 12)), ["linear_add_norm_next"]
    options: dict[str, Any] = {"eps": EPS, "next_w": ones, "short": False}
    for out in executor.run(metal_linear_add_norm, x, w, h, ones, **options, launches=launches):
        assert not out.any()


# --- unit vectors ----------------------------------------------------------------------------------------------------

# Rows, depth and columns: on, below and above the four rows of a threadgroup, the 128 numbers of depth that 32 lanes
# hold at once, the columns of eight simdgroups and the 1,024 numbers that 256 threads store at once.
UNITS = (
    (1, 4, 4),
    (1, 516, 260),
    (1, 128, 1028),
    (2, 28, 8),
    (3, 124, 12),
    (3, 1028, 4),
    (4, 4, 256),
    (4, 132, 252),
    (5, 12, 36),
    (5, 512, 28),
    (6, 260, 68),
    (7, 256, 60),
    (7, 4, 516),
    (8, 36, 260),
    (8, 128, 128),
    (9, 68, 4),
    (11, 100, 132),
    (12, 20, 40),
    (13, 252, 20),
    (15, 132, 124),
    (16, 64, 64),
    (17, 60, 100),
    (31, 8, 32),
    (33, 36, 12),
)
UNIT = {"wide": ["linear_unit"], "short": ["linear_short", "rms_norm"]}


def unit(y: Floats) -> Floats:
    return y / np.maximum(np.linalg.norm(y, axis=-1, keepdims=True), 1e-12)


@executors
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@over(["linear_unit"], "rows, depth, columns", UNITS)
def test_linear_unit_is_a_product_and_its_unit_vectors(
    executor: Executor, rows: int, depth: int, columns: int, form: str, dtype: str
) -> None:
    x = normal(0, rows, depth) * np.geomspace(1e-4, 300, rows, dtype=np.float32)[:, None]
    x[2::5] = 0  # segments without a token
    w, exact = projection(1, columns, depth, dtype)
    y, vectors = executor.run(metal_linear_unit, mx.array(x), w, short=FORMS[form], launches=UNIT[form])
    expected = product(x, exact)
    assert error(y, expected) <= TOLERANCE
    assert error(vectors, unit(expected)) <= TOLERANCE
    assert not y[2::5].any() and not vectors[2::5].any()


@executors
@pytest.mark.parametrize("form", FORMS)
def test_unit_vectors_of_nothing_are_zero_and_of_nan_are_nan(executor: Executor, form: str) -> None:
    x, w, options = np.zeros((9, 12), np.float32), mx.ones((8, 12)), {"short": FORMS[form], "launches": UNIT[form]}
    for y in executor.run(metal_linear_unit, mx.array(x), w, **options):
        assert not y.any()
    x[5], x[6] = 1e-20, np.nan
    y, vectors = executor.run(metal_linear_unit, mx.array(x), w, **options)
    assert np.allclose(y[5], 1.2e-19) and np.allclose(vectors[5], 1.2e-7)  # over 1e-12
    assert np.isnan(y[6]).all() and np.isnan(vectors[6]).all()
    assert np.isfinite(np.delete(vectors, 6, axis=0)).all()


# --- which form ------------------------------------------------------------------------------------------------------


@executors
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "depth", "columns"), [*BEYOND, (9, 36, 512)])
def test_rows_wider_than_a_threadgroup_and_few_rows_are_normed_apart(
    executor: Executor, rows: int, depth: int, columns: int, form: str
) -> None:
    apart = columns > 512 or form == "short"
    linear = {"wide": "linear", "short": "linear_short"}[form]
    case, short = Block(rows, depth, columns, ("bfloat16", "float32", "bfloat16", "float32"), scaled=True), FORMS[form]
    for nexts, norm in ((False, "add_norm"), (True, "add_norm_next")):
        case.check(executor, [linear, norm] if apart else [f"linear_{norm}"], nexts=nexts, short=short)
    x = rising(0, rows, depth)
    w, exact = projection(1, columns, depth, "bfloat16")
    norm_w, launches = weight(2, columns), [linear, "rms_norm"] if apart else ["linear_rms_norm"]
    options: dict[str, Any] = {"eps": EPS, "pre": 0.25, "short": short}
    (y,) = executor.run(metal_linear_rms_norm, mx.array(x), w, mx.array(norm_w), **options, launches=launches)
    assert error(y, rms(0.25 * product(x, exact)) * norm_w) <= TOLERANCE


@executors
@pytest.mark.parametrize(("rows", "form"), [(1, "short"), (SHORT - 1, "short"), (SHORT, "wide")])
def test_the_form_is_that_for_as_many_rows(executor: Executor, rows: int, form: str) -> None:
    few = form == "short"
    x, p, w, norm_w = normal(0, rows, 8), normal(1, rows, 12), normal(2, 12, 8), weight(3, 12)
    exact, arrays = product(x, w.astype(np.float64)), (mx.array(x), mx.array(w))
    (y,) = executor.run(metal_gated, *arrays, arrays[1], launches=[GATED[form]])
    assert error(y, gelu(exact) * exact) <= TOLERANCE
    (y,) = executor.run(metal_linear_gelu_mul, *arrays, mx.array(p), launches=[GELU_MUL[form]])
    assert error(y, gelu(exact) * p) <= TOLERANCE
    launches = ["linear_short", "rms_norm"] if few else ["linear_rms_norm"]
    (y,) = executor.run(metal_linear_rms_norm, *arrays, mx.array(norm_w), eps=EPS, launches=launches)
    assert error(y, rms(exact) * norm_w) <= TOLERANCE
    case = Block(rows, 8, 12, ("float32",) * 4, scaled=False)
    for nexts, norm in ((False, "add_norm"), (True, "add_norm_next")):
        launches = ["linear_short", norm] if few else [f"linear_{norm}"]
        case.check(executor, launches, nexts=nexts, short=None)


@executors
def test_unit_vectors_take_the_form_for_as_many_segments(executor: Executor) -> None:
    w, wide = normal(0, 12, 8), normal(1, 2044, 8)
    for rows, form in ((1, "short"), (FEW_SEGMENTS - 1, "short"), (FEW_SEGMENTS, "wide")):
        x = normal(2, rows, 8)
        _, vectors = executor.run(metal_linear_unit, mx.array(x), mx.array(w), launches=UNIT[form])
        assert error(vectors, unit(product(x, w.astype(np.float64)))) <= TOLERANCE
    for columns, launches in ((2040, UNIT["wide"]), (2044, ["linear", "rms_norm"])):  # 32 KB of threadgroup memory
        weights = wide[:columns]
        _, vectors = executor.run(metal_linear_unit, mx.array(x[:5]), mx.array(weights), short=False, launches=launches)
        assert error(vectors, unit(product(x[:5], weights.astype(np.float64)))) <= TOLERANCE


@executors
@pytest.mark.parametrize("form", FORMS)
def test_fused_products_of_views_are_those_of_what_they_show(executor: Executor, form: str) -> None:
    x, w, p = normal(0, 36, 66), normal(1, 36, 20), normal(2, 20, 33)
    rows, weights, p_view = mx.array(x).T[1::2], mx.array(w).T, mx.array(p).T
    exact, short = x.astype(np.float64).T[1::2] @ w.astype(np.float64), FORMS[form]
    (y,) = executor.run(metal_gated, rows, weights, weights, short=short, launches=[GATED[form]])
    assert error(y, gelu(exact) * exact) <= TOLERANCE
    (y,) = executor.run(metal_linear_gelu_mul, rows, weights, p_view, short=short, launches=[GELU_MUL[form]])
    assert error(y, gelu(exact) * p.T) <= TOLERANCE
    y, _ = executor.run(metal_linear_unit, rows, weights, short=short, launches=UNIT[form])
    assert error(y, exact) <= TOLERANCE
    if not short:
        ones = mx.ones((40,))[::2]
        options: dict[str, Any] = {"eps": EPS, "short": False, "launches": ["linear_add_norm"]}
        (y,) = executor.run(metal_linear_add_norm, rows, weights, p_view, ones, **options)
        assert error(y, p.T + rms(exact)) <= TOLERANCE


# --- what a short query costs ----------------------------------------------------------------------------------------

QUERY = 16
"""Rows of a query, about."""
# The products of a full-size layer: depth and columns, the kernel, its weights.
PROJECTIONS = ((512, 1024), (512, 512), (1024, 512), (2048, 512), (512, 2048), (512, 768))
COSTS: list[tuple[int, int, Callable[..., Any], tuple[str, ...]]] = [
    *((depth, columns, metal_linear, ("w",)) for depth, columns in PROJECTIONS),
    (512, 1024, metal_linear, ("w0", "w1", "w2")),
    (512, 2048, metal_gated, ("gate", "up")),
    (512, 512, metal_linear_gelu_mul, ("w",)),
]


@simulated
@pytest.mark.parametrize(("depth", "columns", "function", "weights"), COSTS)
def test_a_query_reads_each_weight_once_and_keeps_the_cores_busy(
    depth: int, columns: int, function: Callable[..., Any], weights: tuple[str, ...]
) -> None:
    x, w = mx.zeros((QUERY, depth)), mx.zeros((columns, depth), mx.bfloat16)
    others = [mx.zeros((QUERY, columns))] if function is metal_linear_gelu_mul else []
    with simulator.session() as log:
        function(SIMULATOR.library, x, *[w] * len(weights), *others)
    ((_, counters),) = log.calls
    assert counters.threadgroups >= 20
    assert {name: counters.per_buffer[name] for name in weights} == dict.fromkeys(weights, (2 * columns * depth, 0))
    needed = len(weights) * QUERY * columns * depth // 8**3
    assert needed <= counters.multiply_accumulates <= 1.1 * needed
