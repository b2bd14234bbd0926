"""The Metal kernels that go by rows alone, against float64 numpy: products, norms, gate, RoPE."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from executors import TOLERANCE, Array, Executor, error, executors, over
from test_kernels import EPS, Floats, gate_error, gelu, normal, rms, rotated, weight

from egemma_mlx.kernels.gelu import metal_gelu_mul
from egemma_mlx.kernels.linear import SHORT, metal_linear, metal_matmul
from egemma_mlx.kernels.norm import metal_add_norm, metal_rms_norm
from egemma_mlx.kernels.probe import fragment_probe, metal_fragment_probe
from egemma_mlx.kernels.qkv import metal_qkv_prep, metal_rope, rope_table

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


def stored(array: Array, dtype: str) -> tuple[mx.array, Floats]:
    """A weight as a checkpoint has it, and what it is exactly."""
    kept = mx.array(array).astype(DTYPES[dtype])
    return kept, np.array(kept.astype(mx.float32)).astype(np.float64)


# --- products --------------------------------------------------------------------------------------------------------

# Rows, depth and columns: on, below and above 8 × 8 fragments, tiles of 16, 32 and 64 rows and of 16, 64 and 256
# columns, slices of 32 and the 256 that eight simdgroups take at once.
PRODUCTS = (
    (1, 4, 4),
    (1, 12, 68),
    (1, 516, 516),
    (2, 4, 132),
    (3, 1028, 4),
    (5, 516, 8),
    (7, 28, 12),
    (8, 32, 64),
    (9, 36, 60),
    (15, 252, 16),
    (16, 96, 192),
    (17, 260, 20),
    (24, 256, 252),
    (31, 60, 4),
    (32, 64, 32),
    (33, 68, 68),
    (40, 288, 256),
    (63, 132, 132),
    (64, 32, 128),
    (64, 64, 64),
    (65, 4, 64),
    (65, 100, 36),
    (70, 516, 28),
    (96, 28, 260),
    (127, 12, 12),
    (128, 64, 132),
    (129, 36, 68),
    (193, 8, 4),
    (257, 20, 100),
)
FORMS = {"wide": False, "short": True}
LINEAR = {("wide", 1): "linear", ("wide", 3): "linear_3", ("short", 1): "linear_short", ("short", 3): "linear_short_3"}


@executors
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@over(list(LINEAR.values()), "rows, depth, columns", PRODUCTS)
def test_linear_multiplies_by_each_transposed_weight(
    executor: Executor, rows: int, depth: int, columns: int, form: str, dtype: str
) -> None:
    x = normal(0, rows, depth)
    # A tile holds columns of one output alone, wherever in the launch its weight stands.
    for sizes in ((columns,), (columns, 72, 4), (4, 20, columns)):
        kept, exact = zip(*(stored(normal(i + 1, n, depth), dtype) for i, n in enumerate(sizes)), strict=True)
        launches = [LINEAR[form, len(sizes)]]
        got = executor.run(metal_linear, mx.array(x), *kept, short=FORMS[form], launches=launches)
        for y, w in zip(got, exact, strict=True):
            assert error(y, x.astype(np.float64) @ w.T) <= TOLERANCE, sizes


@executors
@pytest.mark.parametrize(("rows", "form"), [(1, "short"), (SHORT - 1, "short"), (SHORT, "wide"), (SHORT + 1, "wide")])
def test_linear_takes_the_form_for_as_many_rows(executor: Executor, rows: int, form: str) -> None:
    x, w = normal(0, rows, 8), normal(1, 12, 8)
    for count in (1, 3):
        got = executor.run(metal_linear, mx.array(x), *[mx.array(w)] * count, launches=[LINEAR[form, count]])
        assert all(error(y, x.astype(np.float64) @ w.astype(np.float64).T) <= TOLERANCE for y in got)


@executors
@pytest.mark.parametrize("form", FORMS)
def test_linear_takes_any_number_of_weights_and_mixed_dtypes(executor: Executor, form: str) -> None:
    x, w = normal(0, 9, 36), [normal(i, 4 * i, 36) for i in (1, 2, 3, 4)]
    plain = [mx.array(a) for a in w]
    narrow, exact = stored(w[0], "bfloat16")
    cases: list[tuple[list[mx.array], list[Array]]] = [
        (plain, w),
        (plain[:2], w[:2]),
        ([narrow, plain[1]], [exact, w[1]]),
        ([plain[2], narrow, plain[1]], [w[2], exact, w[1]]),
    ]
    for weights, expected in cases:
        launches = [LINEAR[form, 1]] * len(weights)
        got = executor.run(metal_linear, mx.array(x), *weights, short=FORMS[form], launches=launches)
        for y, a in zip(got, expected, strict=True):
            assert error(y, x.astype(np.float64) @ a.astype(np.float64).T) <= TOLERANCE


@executors
@over(["matmul"], "rows, depth, columns", PRODUCTS)
def test_matmul_is_the_product_of_two_matrices(executor: Executor, rows: int, depth: int, columns: int) -> None:
    p, v = normal(0, rows, depth), normal(1, depth, columns)
    (y,) = executor.run(metal_matmul, mx.array(p), mx.array(v), launches=["matmul"])
    assert error(y, p.astype(np.float64) @ v.astype(np.float64)) <= TOLERANCE


@executors
def test_products_of_views_are_products_of_what_they_show(executor: Executor) -> None:
    x, w = normal(0, 36, 66), normal(1, 36, 20)
    views = mx.array(x).T[1::2], mx.array(w).T
    expected = x.astype(np.float64).T[1::2] @ w.astype(np.float64)
    for form, short in FORMS.items():
        (y,) = executor.run(metal_linear, *views, short=short, launches=[LINEAR[form, 1]])
        assert error(y, expected) <= TOLERANCE
    assert error(executor.run(metal_matmul, views[0], views[1].T, launches=["matmul"])[0], expected) <= TOLERANCE


@executors
def test_lanes_hold_fragments_as_the_kernels_assume(executor: Executor) -> None:
    (lanes,) = executor.run(metal_fragment_probe, launches=["fragment_probe"])
    assert np.array_equal(lanes, np.array(fragment_probe()))


# --- rows ------------------------------------------------------------------------------------------------------------

# Widths below, on and above the 128 columns that 32 lanes hold at once; rows around the four of a threadgroup.
WIDTHS = (4, 12, 68, 132, 516)
ROWS = [(rows, width) for width in WIDTHS for rows in (1, 3, 4, 9, 65)]


def rising(seed: int, rows: int, width: int) -> Array:
    """From rows that drown in eps to rows of hundreds."""
    return normal(seed, rows, width) * np.geomspace(1e-4, 300, rows, dtype=np.float32)[:, None]


@executors
@pytest.mark.parametrize(("dtype", "pre"), [(None, 1.0), ("float32", 3.0), ("bfloat16", 64**-0.5)])
@over(["rms_norm"], "rows, width", ROWS)
def test_rms_norm_is_x_over_its_root_mean_square(
    executor: Executor, rows: int, width: int, dtype: str | None, pre: float
) -> None:
    x = rising(0, rows, width)
    w, exact = (None, np.ones(width)) if dtype is None else stored(weight(1, width), dtype)
    (y,) = executor.run(metal_rms_norm, mx.array(x), w, eps=EPS, pre=pre, launches=["rms_norm"])
    assert error(y, rms(pre * x.astype(np.float64)) * exact) <= TOLERANCE


@executors
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_rms_norm_lays_groups_one_after_another(executor: Executor, rows: int) -> None:
    x, w = rising(0, rows, 3 * 68), weight(1, 68)
    (y,) = executor.run(metal_rms_norm, mx.array(x), mx.array(w), eps=EPS, groups=3, launches=["rms_norm"])
    assert error(y, rms(x.reshape(rows, 3, 68)).transpose(1, 0, 2) * w) <= TOLERANCE


@executors
def test_rms_norm_goes_over_the_last_axis_alone(executor: Executor) -> None:
    x, w = normal(0, 3, 5, 12), weight(1, 12)
    (y,) = executor.run(metal_rms_norm, mx.array(x), mx.array(w), eps=EPS, launches=["rms_norm"])
    assert error(y, rms(x) * w) <= TOLERANCE
    (zeros,) = executor.run(metal_rms_norm, mx.zeros((2, 12)), None, eps=EPS, launches=["rms_norm"])
    assert not zeros.any()


@executors
@pytest.mark.parametrize(("dtype", "scaled"), [("float32", False), ("bfloat16", True)])
@over(["add_norm", "add_norm_next"], "rows, width", ROWS)
def test_add_norm_ends_a_block_and_starts_the_next(
    executor: Executor, rows: int, width: int, dtype: str, scaled: bool
) -> None:
    h, y = normal(0, rows, width, scale=3), rising(1, rows, width)
    (w, exact_w), (next_w, exact_next) = (stored(weight(i, width), dtype) for i in (2, 3))
    post, exact_post = stored(weight(4, 1), dtype) if scaled else (None, np.ones(1))
    expected = (h + rms(y) * exact_w) * exact_post
    arrays = (mx.array(h), mx.array(y), w)
    (out,) = executor.run(metal_add_norm, *arrays, eps=EPS, post=post, launches=["add_norm"])
    assert error(out, expected) <= TOLERANCE
    out, a = executor.run(metal_add_norm, *arrays, eps=EPS, post=post, next_w=next_w, launches=["add_norm_next"])
    assert error(out, expected) <= TOLERANCE
    assert error(a, rms(expected) * exact_next) <= TOLERANCE


@executors
@over(["gelu_mul"], "rows, width", ROWS)
def test_gelu_mul_is_gelu_tanh_times_u(executor: Executor, rows: int, width: int) -> None:
    g, u = normal(0, rows, width, scale=2), normal(1, rows, width, scale=2)
    (out,) = executor.run(metal_gelu_mul, mx.array(g), mx.array(u), launches=["gelu_mul"])
    assert error(out, gelu(g) * u) <= TOLERANCE


@executors
def test_gelu_mul_is_right_in_both_tails_and_zero_at_zero(executor: Executor) -> None:
    g = np.concatenate([np.linspace(-30, 30, 4001), [-1e30, -1e4, 1e4, 1e30, -1e-30, 1e-30, 0.0]]).astype(np.float32)
    for u in (1.0, -3.0, 1e3):
        (out,) = executor.run(metal_gelu_mul, mx.array(g), mx.full(g.shape, u), launches=["gelu_mul"])
        assert np.isfinite(out).all()
        # Beside g·u even where the gate is nearly closed, and finer than beside the greatest.
        assert gate_error(mx.array(out), g, np.float32(u)) <= 1e-6
        assert out[-1] == 0


# --- q, k and v ------------------------------------------------------------------------------------------------------

# heads, kv_heads, head_dim, sections: whole heads and up to four sections; groups of 1, 2 and 4; one lane to four
# rounds of all lanes in a head.
HEADS = (
    (1, 1, 8, 1),
    (2, 1, 16, 2),
    (4, 1, 40, 1),
    (4, 2, 64, 2),
    (3, 3, 256, 1),
    (4, 1, 512, 1),
    (2, 2, 96, 4),
    (2, 1, 512, 2),
)


@executors
@pytest.mark.parametrize("dtype", DTYPES)
@over(
    ["qkv_prep"], "rows, heads, kv_heads, head_dim, sections", [(t, *heads) for heads in HEADS for t in (1, 7, 9, 33)]
)
def test_qkv_prep_norms_heads_and_rotates_q_and_k(
    executor: Executor, rows: int, heads: int, kv_heads: int, head_dim: int, sections: int, dtype: str
) -> None:
    q, k, v = (rising(i, rows, n * head_dim) for i, n in enumerate((heads, kv_heads, kv_heads)))
    (q_w, exact_q), (k_w, exact_k) = (stored(weight(i, head_dim), dtype) for i in (3, 4))
    positions = np.cumsum(np.random.default_rng(5).integers(1, 60, (rows, sections)), axis=0).astype(np.int32)
    positions[3::5] = -1
    table = rope_table(positions.max() + 1, head_dim // sections, 1e4)
    places = mx.array(positions if sections > 1 else positions[:, 0])
    (q_out, k_out, v_out) = executor.run(
        prepared, *map(mx.array, (q, k, v)), q_w, k_w, table, places, launches=["qkv_prep"]
    )
    assert error(q_out, rotated(q, exact_q, table, positions)) <= TOLERANCE
    assert error(k_out, rotated(k, exact_k, table, positions)) <= TOLERANCE
    assert error(v_out, rms(v.reshape(rows, kv_heads, head_dim))) <= TOLERANCE


@executors
def test_qkv_prep_reads_a_table_of_one_position(executor: Executor) -> None:
    q, w, table = normal(0, 3, 8), weight(1, 8), rope_table(1, 8, 1e4)
    arrays = [mx.array(q)] * 3 + [mx.array(w)] * 2
    got = executor.run(prepared, *arrays, table, mx.array([0, -1, 0]), launches=["qkv_prep"])
    weighted = (rms(q) * w)[:, None]
    for out, expected in zip(got, (weighted, weighted, rms(q)[:, None]), strict=True):
        assert error(out, expected) <= TOLERANCE


@executors
def test_one_column_of_positions_is_positions(executor: Executor) -> None:
    q, w, table, positions = normal(0, 9, 32), weight(1, 16), rope_table(9, 16, 1e4), mx.arange(9)
    arrays = [mx.array(q)] * 3 + [mx.array(w)] * 2
    flat, column = (
        executor.run(prepared, *arrays, table, places, launches=["qkv_prep"])
        for places in (positions.astype(mx.int32), positions.astype(mx.int32)[:, None])
    )
    assert all(np.array_equal(a, b) for a, b in zip(flat, column, strict=True))


def prepared(
    library: Any, q: mx.array, k: mx.array, v: mx.array, q_w: mx.array, k_w: mx.array, table: Any, positions: mx.array
) -> Any:
    angles = metal_rope(library, table, positions)
    return metal_qkv_prep(library, q, k, v, q_w, k_w, angles, head_dim=q_w.size, eps=EPS)
