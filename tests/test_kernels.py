"""Every kernel function against float64 numpy, by the formulas of the CPU and by those of a GPU.

`error` is relative to max(|expected|, 1) unless a test says otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from egemma_mlx import packing
from egemma_mlx.kernels import OPS, approx
from egemma_mlx.kernels.attention import attention, plan
from egemma_mlx.kernels.gelu import gelu_mul
from egemma_mlx.kernels.linear import linear
from egemma_mlx.kernels.norm import add_norm, rms_norm
from egemma_mlx.kernels.pool import pool
from egemma_mlx.kernels.qkv import qkv_prep, rope, rope_table
from egemma_mlx.packing import Packed

Floats = NDArray[np.float64]

EPS = 1e-6
ROWS = (1, 7, 8, 33)
WIDTHS = (4, 12, 64, 260)
EMPTY = np.zeros(0, np.int32)


@pytest.fixture(params=["cpu", "gpu"])
def formulas(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with each side of every `on_cpu` branch, whatever the device is."""
    kernels = [module for name, module in sys.modules.items() if name.startswith("egemma_mlx.kernels.")]
    for module in kernels:
        if hasattr(module, "on_cpu"):
            monkeypatch.setattr(module, "on_cpu", lambda: request.param == "cpu")
    return str(request.param)


def normal(seed: int, *shape: int, scale: float = 1.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def weight(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).uniform(0.5, 1.5, shape).astype(np.float32)


def error(got: mx.array, expected: Floats) -> float:
    assert got.dtype == mx.float32
    assert got.shape == expected.shape
    return float((np.abs(np.array(got).astype(np.float64) - expected) / np.maximum(np.abs(expected), 1)).max())


def rms(x: NDArray[Any], eps: float = EPS) -> Floats:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


# --- linear ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_linear_multiplies_by_each_transposed_weight(rows: int, dtype: mx.Dtype) -> None:
    x = normal(0, rows, 260)
    weights = [
        mx.array(normal(i, outputs, 260, scale=260**-0.5)).astype(dtype) for i, outputs in ((1, 4), (2, 12), (3, 8))
    ]
    for count in (1, 2, 3):
        outputs = linear(mx.array(x), *weights[:count])
        assert len(outputs) == count
        for output, w in zip(outputs, weights, strict=False):
            exact = np.array(w.astype(mx.float32)).astype(np.float64)
            assert error(output, x.astype(np.float64) @ exact.T) < 2e-6


# --- norms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("pre", [1.0, 64**-0.5, 3.0])
def test_rms_norm_is_x_over_its_root_mean_square(formulas: str, weighted: bool, pre: float) -> None:
    for rows in ROWS:
        for width in WIDTHS:
            w = weight(1, width) if weighted else None
            # From rows that drown in eps to rows of hundreds.
            x = normal(0, rows, width) * np.geomspace(1e-4, 300, rows, dtype=np.float32)[:, None]
            got = rms_norm(mx.array(x), None if w is None else mx.array(w), eps=EPS, pre=pre)
            assert error(got, rms(pre * x.astype(np.float64)) * (1 if w is None else w)) < 1e-6


def test_rms_norm_goes_over_the_last_axis_alone(formulas: str) -> None:
    x, w = normal(0, 3, 5, 12), weight(1, 12)
    assert error(rms_norm(mx.array(x), mx.array(w), eps=EPS), rms(x) * w) < 1e-6


def test_rms_norm_of_a_zero_row_is_zero(formulas: str) -> None:
    for w in (None, mx.ones((8,))):
        assert not np.array(rms_norm(mx.zeros((2, 8)), w, eps=EPS)).any()


@pytest.mark.parametrize("post", [None, 0.85])
@pytest.mark.parametrize("nexts", [True, False])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_add_norm_ends_a_block_and_starts_the_next(
    formulas: str, post: float | None, nexts: bool, dtype: mx.Dtype
) -> None:
    for rows in ROWS:
        for width in WIDTHS:
            h, y = normal(0, rows, width, scale=3), normal(1, rows, width, scale=0.1)
            w, next_w, scalar = (mx.array(weight(i, n)).astype(dtype) for i, n in ((2, width), (3, width), (4, 1)))
            wide, next_wide, by = (np.array(a.astype(mx.float32)).astype(np.float64) for a in (w, next_w, scalar))
            out, normed = add_norm(
                mx.array(h),
                mx.array(y),
                w,
                eps=EPS,
                post=None if post is None else scalar,
                next_w=next_w if nexts else None,
            )
            expected = (h + rms(y) * wide) * (1 if post is None else by)
            assert error(out, expected) < 2e-6
            assert (normed is not None) == nexts
            if normed is not None:
                assert error(normed, rms(expected) * next_wide) < 3e-6


# --- gelu ------------------------------------------------------------------------------------------------------------


def gelu(g: NDArray[Any]) -> Floats:
    g = g.astype(np.float64)
    return 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))


def gate_error(got: mx.array, g: NDArray[np.float32], u: Any) -> float:
    """Beside g·u, not beside the result: ½·g·u·(1 + tanh z) cancels where the gate is nearly closed."""
    open_gate = np.abs(g.astype(np.float64) * u)
    off = np.abs(np.array(got).astype(np.float64) - gelu(g) * u)
    return float((off / np.maximum(open_gate, 1e-30)).max())


@pytest.mark.parametrize("rows", ROWS)
def test_gelu_mul_is_gelu_tanh_times_u(formulas: str, rows: int) -> None:
    for width in WIDTHS:
        g, u = normal(0, rows, width, scale=2), normal(1, rows, width, scale=2)
        assert gate_error(gelu_mul(mx.array(g), mx.array(u)), g, u) < 5e-7


def test_gelu_mul_is_right_in_both_tails_and_zero_at_zero(formulas: str) -> None:
    g = np.concatenate([np.linspace(-30, 30, 40_001), [-1e-30, 1e-30, 0.0]]).astype(np.float32)
    for u in (1.0, -3.0, 1e3):
        got = gelu_mul(mx.array(g), mx.full(g.shape, u))
        assert gate_error(got, g, np.float32(u)) < 5e-7
        assert got[-1].item() == 0


# --- products that end in what follows them ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_products_end_in_what_follows_them(formulas: str, dtype: mx.Dtype) -> None:
    for rows in ROWS:
        for width in WIDTHS:
            x, p, h = normal(0, rows, 36), normal(1, rows, width), normal(2, rows, width, scale=3)
            w, up = (mx.array(normal(i, width, 36, scale=1 / 6)).astype(dtype) for i in (3, 4))
            first, second = (
                x.astype(np.float64) @ np.array(a.astype(mx.float32)).astype(np.float64).T for a in (w, up)
            )
            norm_w, next_w, post = weight(5, width), weight(6, width), weight(7, 1)
            arrays, norm = (mx.array(x), w), mx.array(norm_w)
            assert error(OPS.gated(*arrays, up), gelu(first) * second) < 3e-6
            assert error(OPS.linear_gelu_mul(*arrays, mx.array(p)), gelu(first) * p) < 3e-6
            normed = OPS.linear_rms_norm(*arrays, norm, eps=EPS, pre=0.25)
            assert error(normed, rms(0.25 * first) * norm_w) < 3e-6
            out, after = OPS.linear_add_norm(*arrays, mx.array(h), norm, eps=EPS)
            assert error(out, h + rms(first) * norm_w) < 3e-6
            assert after is None
            options = {"post": mx.array(post), "next_w": mx.array(next_w)}
            out, after = OPS.linear_add_norm(*arrays, mx.array(h), norm, eps=EPS, **options)
            expected = (h + rms(first) * norm_w) * post
            assert error(out, expected) < 3e-6
            assert error(after, rms(expected) * next_w) < 5e-6
            y, unit = OPS.linear_unit(*arrays)
            assert error(y, first) < 3e-6
            assert error(unit, first / np.linalg.norm(first, axis=1, keepdims=True)) < 3e-6


# --- the CPU's exp and tanh ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fuse", [lambda f: f, mx.compile], ids=["plain", "compiled"])
def test_exp2_keeps_its_relative_error(fuse: Callable[..., Any]) -> None:
    y = np.concatenate([np.linspace(-126.4, 127, 800_001), np.linspace(-1, 1, 200_001)]).astype(np.float32)
    got = np.array(fuse(approx.exp2)(mx.array(y))).astype(np.float64)
    assert np.abs(got / np.exp2(y.astype(np.float64)) - 1).max() < 3e-7


@pytest.mark.parametrize("fuse", [lambda f: f, mx.compile], ids=["plain", "compiled"])
def test_exp2_is_one_at_zero_and_nothing_far_below(fuse: Callable[..., Any]) -> None:
    got = np.array(fuse(approx.exp2)(mx.array([0.0, -0.0, -126.6, -200.0, -5e6, -1e9, -1e30, -3e38])))
    assert got.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


def test_tanh_is_within_four_ulps_of_one_everywhere() -> None:
    x = np.concatenate([np.linspace(-20, 20, 200_001), [1e4, -1e4, 1e-20]]).astype(np.float32)
    got = np.array(approx.tanh(approx.tanh_clamp(mx.array(x)))).astype(np.float64)
    expected = np.tanh(x.astype(np.float64))
    assert np.abs(got - expected).max() < 4.8e-7
    assert np.abs(got).max() <= 1
    assert got[-1] == pytest.approx(1e-20, rel=1e-6)


# --- RoPE ------------------------------------------------------------------------------------------------------------

KINDS = ((256, 1e4), (512, 1e6), (16, 1e4), (32, 1e6), (8, 100.0))


@pytest.mark.parametrize(("head_dim", "theta"), KINDS)
def test_rope_table_is_cos_and_sin_of_float32_frequencies_times_position(head_dim: int, theta: float) -> None:
    cos, sin = (np.array(a).astype(np.float64) for a in rope_table(8192, head_dim, theta))
    assert cos.shape == sin.shape == (8192, head_dim // 2)
    exponent = np.arange(0, head_dim, 2) / head_dim  # exact in float32
    frequency = (1 / (theta**exponent).astype(np.float32)).astype(np.float32)
    angle = (np.arange(8192, dtype=np.float32)[:, None] * frequency).astype(np.float64)
    assert np.abs(cos - np.cos(angle)).max() <= 2**-25
    assert np.abs(sin - np.sin(angle)).max() <= 2**-25


@pytest.mark.parametrize(("head_dim", "theta"), KINDS)
def test_rope_table_follows_torch_to_an_ulp_of_the_frequency(head_dim: int, theta: float) -> None:
    torch = pytest.importorskip("torch")
    frequency = (1 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)).numpy()
    positions = np.arange(8192, dtype=np.float32)[:, None]
    angle = (positions * frequency).astype(np.float64)
    # torch's float32 power is an ulp off here and there; on top come the roundings of the angle and of the result.
    bound = positions * frequency * 2**-22 + 2**-24
    for table, exact in zip(rope_table(8192, head_dim, theta), (np.cos(angle), np.sin(angle)), strict=True):
        assert (np.abs(np.array(table) - exact) <= bound).all()


def test_a_row_without_a_token_takes_the_angles_of_position_0() -> None:
    table = rope_table(16, 8, 1e4)
    for angles, first in zip(rope(table, mx.array([-1, 5])), rope(table, mx.array([0, 5])), strict=True):
        assert mx.array_equal(angles, first)


def rotated(x: NDArray[Any], w: NDArray[Any], table: Any, positions: NDArray[Any]) -> Floats:
    """rms, weight, then x·cos + rotate_half(x)·sin in each section by its column of positions: [T, heads, head_dim]."""
    heads = rms(x.reshape(len(x), -1, w.size)) * w
    parts = []
    for part, places in zip(np.split(heads, positions.shape[1], axis=-1), np.maximum(positions, 0).T, strict=True):
        cos, sin = (np.tile(np.array(t).astype(np.float64)[places], 2)[:, None] for t in table)
        low, high = np.split(part, 2, axis=-1)
        parts.append(part * cos + np.concatenate([-high, low], axis=-1) * sin)
    return np.concatenate(parts, axis=-1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (1, 1)])
@pytest.mark.parametrize(("head_dim", "sections"), [(8, 1), (20, 1), (64, 1), (16, 2), (64, 2), (96, 4)])
def test_qkv_prep_norms_heads_and_rotates_q_and_k(
    formulas: str, heads: int, kv_heads: int, head_dim: int, sections: int
) -> None:
    table = rope_table(2048, head_dim // sections, 1e4)
    for rows in ROWS:
        q, k, v = (normal(i, rows, n * head_dim, scale=2) for i, n in enumerate((heads, kv_heads, kv_heads)))
        q_w, k_w = weight(3, head_dim), weight(4, head_dim)
        positions = np.cumsum(np.random.default_rng(5).integers(1, 60, (rows, sections)), axis=0).astype(np.int32)
        positions[3::5] = -1
        angles = rope(table, mx.array(positions if sections > 1 else positions[:, 0]))
        got = qkv_prep(*map(mx.array, (q, k, v, q_w, k_w)), angles, head_dim=head_dim, eps=EPS)
        expected = (
            rotated(q, q_w, table, positions),
            rotated(k, k_w, table, positions),
            rms(v.reshape(rows, kv_heads, head_dim)),
        )
        for ours, exact in zip(got, expected, strict=True):
            assert error(ours, exact) < 2e-6


# --- attention -------------------------------------------------------------------------------------------------------


def dense_attention(
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], packed: Packed, window: int | None
) -> tuple[Floats, NDArray[np.bool_]]:
    """Masked softmax over all T×T scores, and which rows hold a token of a segment."""
    positions, segments = np.array(packed.positions).astype(np.int64), np.array(packed.segments)
    owner = np.full(len(positions), -1)
    for index, (start, length) in enumerate(segments):
        owner[start : start + length] = index
    owner[positions < 0] = -1
    allowed = (owner[:, None] == owner) & (owner >= 0)
    if window is not None:
        allowed &= np.abs(positions[:, None] - positions) <= window
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.astype(np.float64).transpose(1, 0, 2) for x in (q, k, v))
    scores = np.where(allowed, q @ np.repeat(k, group, axis=0).swapaxes(1, 2), -np.inf)
    token = owner >= 0
    weights = np.exp(scores[:, token] - scores[:, token].max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out = np.zeros((len(q), len(positions), q.shape[-1]))
    out[:, token] = weights @ np.repeat(v, group, axis=0)
    return out.transpose(1, 0, 2).reshape(len(positions), -1), token


def texts(*lengths: int) -> Packed:
    return packing.pack([np.zeros(n, np.int32) for n in lengths])


def masked(rows: int, columns: int, keep: float, seed: int) -> Packed:
    mask = np.random.default_rng(seed).random((rows, columns)) < keep
    return packing.from_masked_grid(mx.zeros((rows, columns), mx.int32), mask)[0]


def left_padded(columns: int, *lengths: int) -> Packed:
    mask = np.arange(columns) >= columns - np.array(lengths)[:, None]
    return packing.from_masked_grid(mx.zeros(mask.shape, mx.int32), mask)[0]


def traced(rows: int, columns: int, keep: float, seed: int) -> Packed:
    mask = np.random.default_rng(seed).random((rows, columns)) < keep
    return packing.from_traced_grid(mx.zeros(mask.shape, mx.int32), mx.array(mask))


def table(rows: int, segments: list[tuple[int, int]], positions: list[int] | None = None) -> Packed:
    places = None if positions is None else mx.array(positions)
    return packing.from_segments(mx.zeros(rows, mx.int32), np.array(segments, np.int32), places, 4096)


BATCHES: dict[str, Callable[[], Packed]] = {
    "one token": lambda: texts(1),
    "7": lambda: texts(7),
    "8": lambda: texts(8),
    "33": lambda: texts(33),
    "mixed, one empty": lambda: texts(5, 1, 33, 0, 12),
    "runs of equal lengths": lambda: texts(9, 9, 9, 4, 4, 9),
    "a block less one": lambda: texts(255),
    "a block": lambda: texts(256),
    "a block and one": lambda: texts(257),
    "two blocks and one": lambda: texts(513),
    "segments across block edges": lambda: texts(250, 1, 300, 20),
    "equal runs of several blocks": lambda: texts(257, 257, 3),
    "left padding": lambda: left_padded(40, 40, 7, 1, 22),
    "holes": lambda: masked(5, 40, 0.6, 0),
    "large holes over a block": lambda: masked(2, 900, 0.4, 1),
    "device mask": lambda: traced(4, 33, 0.7, 2),
    "device mask over a block": lambda: traced(2, 300, 0.5, 3),
    "rows of no segment behind": lambda: texts(5, 12).padded(40, 8),
    "rows of no segment between": lambda: table(50, [(3, 5), (10, 20), (41, 9)]),
    "positions given": lambda: table(12, [(0, 5), (5, 7)], [0, 1, 9, 10, 300, 4, 5, 6, 14, 15, 30, 31]),
}


@cache
def solved(batch: str) -> list[tuple[Any, ...]]:
    """(heads, kv_heads, window, q, k, v, expected, token) for each window and grouping."""
    packed, cases = BATCHES[batch](), []
    for heads, kv_heads, window in ((4, 2, None), (4, 2, 3), (4, 1, 1), (1, 1, 40), (2, 1, 255), (2, 2, 1000)):
        q, k, v = (normal(i, packed.rows, n, 16) for i, n in enumerate((heads, kv_heads, kv_heads)))
        cases.append((heads, kv_heads, window, q, k, v, *dense_attention(q, k, v, packed, window)))
    return cases


@pytest.mark.parametrize("known", [True, False], ids=["host lengths", "device lengths"])
@pytest.mark.parametrize("batch", BATCHES)
def test_attention_is_softmax_inside_segment_and_window(formulas: str, batch: str, known: bool) -> None:
    packed = BATCHES[batch]()
    for heads, kv_heads, window, q, k, v, expected, token in solved(batch):
        got = attention(*map(mx.array, (q, k, v)), plan(packed if known else packed.anonymous(), window))
        assert np.isfinite(np.array(got)).all()
        assert got.shape == expected.shape
        assert error(got[mx.array(np.flatnonzero(token))], expected[token]) < 1e-5, (heads, kv_heads, window)


@pytest.mark.parametrize("known", [True, False], ids=["host lengths", "device lengths"])
def test_attention_survives_large_scores(formulas: str, known: bool) -> None:
    packed = texts(33, 7) if known else texts(33, 7).anonymous()
    q, k, v = (normal(i, 40, 2, 16, scale=scale) for i, scale in enumerate((8, 8, 1)))
    expected, _ = dense_attention(q, k, v, packed, None)
    # Scores of 500: their own rounding in float32, 3e-5, is the error of a weight.
    assert error(attention(*map(mx.array, (q, k, v)), plan(packed, None)), expected) < 1e-4


@pytest.mark.parametrize("known", [True, False], ids=["host lengths", "device lengths"])
def test_a_row_beyond_everyones_window_attends_to_itself(formulas: str, known: bool) -> None:
    packed = table(9, [(0, 9)], [0, 10, 20, 30, 40, 50, 60, 70, 80])
    q, k, v = (normal(i, 9, 2, 8) for i in range(3))
    got = attention(*map(mx.array, (q, k, v)), plan(packed if known else packed.anonymous(), 9))
    assert error(got, v.reshape(9, -1).astype(np.float64)) < 1e-6


@pytest.mark.parametrize("known", [True, False], ids=["host lengths", "device lengths"])
def test_heads_that_take_turns_on_a_cpu_attend_as_heads_at_once(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, module = 700, sys.modules["egemma_mlx.kernels.attention"]
    monkeypatch.setattr(module, "on_cpu", lambda: True)
    monkeypatch.setattr(approx, "_WORTH", 1 << 60)  # or one of the two might be the first to be compiled
    q, k, v = (mx.array(normal(i, rows, n, 8)) for i, n in enumerate((6, 3, 3)))

    def attend(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        packed = texts(rows - 90, 90)
        return attention(q, k, v, plan(packed if known else packed.anonymous(), 20))

    at_once, scores = attend(q, k, v), largest_array(attend, q, k, v)
    monkeypatch.setattr(module, "_SCORES", 1)
    assert largest_array(attend, q, k, v) < scores
    # A BLAS may add up a product of other sizes in another order.
    assert error(attend(q, k, v), np.array(at_once).astype(np.float64)) < 1e-6


def largest_array(function: Callable[..., mx.array], *arrays: mx.array) -> int:
    """Elements of the largest array in the graph of `function`."""
    nodes: list[dict[str, Any]] = []
    mx.export_function(nodes.append, function, *arrays)
    shapes = [shape for node in nodes for _, shape, _ in [*node.get("outputs", []), *node.get("inputs", [])]]
    assert any(node["type"] == "primitive" for node in nodes)
    return max(int(np.prod(shape)) for shape in shapes)


@pytest.mark.parametrize("known", [True, False], ids=["host lengths", "device lengths"])
def test_a_sliding_layer_builds_nothing_as_large_as_length_squared(formulas: str, known: bool) -> None:
    length, heads = 2048, 2
    q, k, v = (mx.zeros((length, n, 4)) for n in (heads, 1, 1))

    def sliding(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        packed = texts(length) if known else texts(length).anonymous()
        return attention(q, k, v, plan(packed, 8))

    def naive(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return mx.softmax(q[:, 0] @ k[:, 0].T, axis=-1) @ v[:, 0]

    assert largest_array(naive, q, k, v) == length * length
    assert largest_array(sliding, q, k, v) < length * length / 2


# --- pool ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", BATCHES)
def test_pool_is_the_mean_of_normed_tokens_by_segment(formulas: str, batch: str) -> None:
    packed = BATCHES[batch]()
    h, w = normal(0, packed.rows, 12, scale=5), weight(1, 12)
    positions, normed = np.array(packed.positions), rms(h) * w
    expected = np.zeros((packed.segments.shape[0], 12))
    for index, (start, length) in enumerate(np.array(packed.segments)):
        held = [row for row in range(start, start + length) if positions[row] >= 0]
        if held:
            expected[index] = normed[held].mean(axis=0)
    for form in (packed, packed.anonymous()):
        assert error(pool(mx.array(h), mx.array(w), form, eps=EPS), expected) < 1e-6


def test_pool_gives_zeros_for_segments_without_tokens(formulas: str) -> None:
    mask = mx.array([[0, 0, 0], [1, 0, 1]])
    grid = packing.from_traced_grid(mx.zeros((2, 3), mx.int32), mask)  # three rows, no token
    empty = packing.pack([EMPTY, np.zeros(3, np.int32), EMPTY])  # no row
    for packed, zero in ((grid, [True, False]), (empty, [True, False, True])):
        out = np.array(pool(mx.array(normal(0, packed.rows, 8)), mx.ones((8,)), packed, eps=EPS))
        assert (~out.any(axis=1)).tolist() == zero


@pytest.mark.parametrize("most_traces", [2, 256])
def test_compiled_leaves_equal_their_plain_operations(monkeypatch: pytest.MonkeyPatch, most_traces: int) -> None:
    def results() -> list[np.ndarray]:
        random = np.random.default_rng(5)
        arrays = [mx.array(random.normal(size=(2, n)).astype(np.float32)) for n in (5, 8, 64, 5)]
        exps = [approx.exp2(9 * x - (9 * x).max(axis=-1, keepdims=True)) for x in arrays]
        return [np.array(x) for x in [*exps, *(gelu_mul(3 * x, x) for x in arrays)]]

    monkeypatch.setattr(approx, "_WORTH", 1 << 60)
    plain = results()
    monkeypatch.setattr(approx, "_WORTH", 0)
    monkeypatch.setattr(approx, "_MOST_TRACES", most_traces)
    for compiled, expected in zip(results(), plain, strict=True):
        np.testing.assert_allclose(compiled, expected, rtol=1e-6, atol=1e-7)
