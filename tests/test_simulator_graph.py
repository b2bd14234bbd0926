"""Whole traced functions: MLX's CPU for plain nodes, the simulator for kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from egemma_mlx import load, simulator
from egemma_mlx.simulator import graph as module
from egemma_mlx.simulator.call import Graph, trace
from egemma_mlx.simulator.errors import DataRace, SimulatorError
from egemma_mlx.simulator.graph import run

runs = pytest.mark.skipif(simulator.available() is not None, reason=f"simulator: {simulator.available()}")

X = mx.array(np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32))
K = mx.array(np.random.default_rng(1).integers(0, 100, (4, 6)).astype(np.int32))
V = mx.array([1, 0, 3])
# Duplicates: in a scatter their updates add up.
W = mx.array([[2, 2], [0, 5]])


def put(x: mx.array, where: Any, value: Any) -> mx.array:
    copy = mx.array(x)
    copy[where] = value
    return copy


CASES: dict[str, Callable[..., Any]] = {
    "elementwise": lambda x, k: [mx.abs(x), mx.ceil(x), mx.floor(x), mx.round(x), mx.sign(x), -x, x + 1, x - 2, x * x],
    "transcendental": lambda x, k: [mx.exp(x), mx.cos(x), mx.sin(x), mx.tanh(x), mx.erf(x), mx.sigmoid(x)],
    "logarithms": lambda x, k: [mx.log(k + 1), mx.log2(k + 1), mx.log10(k + 1), mx.logsumexp(x, axis=-1)],
    "quotients": lambda x, k: [x / 3, k // 7, k % 7, *mx.divmod(k, 7), mx.abs(x) ** 1.5, mx.rsqrt(mx.square(x))],
    "square root": lambda x, k: mx.sqrt(mx.abs(x)),
    "comparisons": lambda x, k: [x > 0, x >= 0, x < 0, x <= 0, k == 3, k != 3, mx.array_equal(x, x, equal_nan=True)],
    "nan": lambda x, k: mx.array_equal(mx.log(x), mx.log(x), equal_nan=True),
    "logic": lambda x, k: [(x > 0) & (k > 9), mx.logical_or(x > 0, k > 9), mx.logical_not(x), mx.logical_and(x, k)],
    "bits": lambda x, k: [k & 6, k | 6, mx.bitwise_xor(k, 6), k << 2, k >> 2],
    "select": lambda x, k: [mx.where(x > 0, x, 0.0), mx.maximum(x, 0), mx.minimum(x, 0)],
    "dtypes": lambda x, k: [x.astype(mx.bfloat16), x.view(mx.int32), mx.view(k, mx.uint8), x.astype(mx.bool_)],
    "products": lambda x, k: [x @ x.T, mx.addmm(mx.ones((4, 4)), x, x.T, 0.5, 2.0)],
    "constants": lambda x, k: [x + mx.arange(6), mx.arange(0, 1, 0.25), mx.arange(9, 0, -2), mx.full((3, 2), 5)],
    "shapes": lambda x, k: [x.reshape(2, -1), x.flatten(), mx.unflatten(x, 1, (2, 3)), x[:, None], x[:1].squeeze(0)],
    "axes": lambda x, k: [x.T, mx.broadcast_to(x, (2, 4, 6)), mx.concatenate([x, x + 1], axis=1), mx.repeat(x, 2, 0)],
    "padding": lambda x, k: [mx.pad(x, ((1, 2), (0, 0))), mx.pad(x, ((0, 0), (0, 3)), constant_values=mx.array(-1.0))],
    "slices": lambda x, k: [x[1:3, ::2], x[::-1], x[3:0:-2, 4:1:-1], x[2]],
    "split": lambda x, k: mx.split(x, [1, 3], axis=1),
    "dynamic slices": lambda x, k: [
        mx.slice(x, V[:2], (0, 1), (2, 3)),
        mx.slice_update(x, mx.zeros((2, 3)), V[:2], (0, 1)),
    ],
    "slice updates": lambda x, k: [
        put(x, (slice(1, 3), slice(2, 4)), 1.0),
        x.at[1:3, ::2].add(5),
        x.at[1:3].multiply(2),
        x.at[0:2].maximum(0),
        x.at[0:2].minimum(0),
    ],
    "gathers": lambda x, k: [x[V], x[:, W], x[V, V], x.reshape(2, 2, 6)[:, mx.array([1, 0]), V[:2]], mx.take(x, W, 1)],
    "axis gathers": lambda x, k: mx.take_along_axis(x, mx.argsort(k, axis=1), axis=1),
    "scatters": lambda x, k: [
        put(x, V, 1.0),
        x.at[V].add(x[V]),
        x.at[:, W].add(1.0),
        x.at[V, V].multiply(mx.array([2.0, 3.0, 4.0])),
        x.reshape(4, 2, 3).at[:, :, V[:2]].maximum(0.5),
        x.at[V].minimum(0.25),
    ],
    "scans": lambda x, k: [
        mx.cumsum(x, axis=0, reverse=True, inclusive=False),
        mx.cumsum(k, axis=1),
        mx.cumprod(x, axis=1),
        mx.cummax(x, axis=1),
        mx.cummin(x, axis=0, reverse=True),
    ],
    "reductions": lambda x, k: [
        mx.sum(x, axis=(0, 1)),
        mx.sum(x > 0, axis=1),
        mx.mean(x, axis=0),
        mx.prod(x, axis=1),
        mx.min(x),
        mx.max(x, axis=1, keepdims=True),
        mx.all(x > -9, axis=1),
        mx.any(x > 1, axis=0),
    ],
    "order": lambda x, k: [mx.argmax(x, axis=1), mx.argmin(x, axis=0), mx.sort(x, axis=0), mx.argsort(x, axis=1)],
    "softmax": lambda x, k: [
        mx.softmax(x, axis=-1),
        mx.softmax(x.astype(mx.bfloat16), axis=-1, precise=True),
        mx.softmax(x, axis=0),
    ],
    "fast": lambda x, k: [
        mx.fast.rms_norm(x, mx.ones((6,)), 1e-6),
        mx.fast.scaled_dot_product_attention(*[x.reshape(1, 1, 4, 6)] * 3, scale=1.0),
    ],
}


def same(got: list[mx.array], expected: list[mx.array]) -> None:
    """Bit for bit: it is the same operation of the same library."""
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert mx.array_equal(a, b, equal_nan=mx.issubdtype(a.dtype, mx.floating))


@pytest.mark.parametrize("case", CASES)
def test_a_plain_graph_is_what_mlx_computes(case: str) -> None:
    function = CASES[case]
    traced = trace(function, mx.zeros((4, 6)), mx.zeros((4, 6), mx.int32))  # for any values of these shapes
    expected = function(X, K)
    same(run(traced, [X, K]), [expected] if isinstance(expected, mx.array) else list(expected))


def test_every_primitive_of_the_tables_is_in_a_case() -> None:
    seen = {node.primitive for function in CASES.values() for node in trace(function, X, K).nodes}
    assert {*module._BY_INPUTS, *module._BY_ARGUMENTS} == seen


def test_an_unknown_primitive_is_named() -> None:
    traced = trace(mx.hadamard_transform, mx.ones((4, 8)))
    with pytest.raises(SimulatorError, match=r"primitive .* but got Hadamard"):
        run(traced, [mx.ones((4, 8))])


def test_other_inputs_than_traced_are_refused() -> None:
    traced = trace(lambda x: x + 1, mx.ones((4, 8)))
    for inputs in ([], [mx.ones((4, 7))], [mx.ones((4, 8), mx.int32)]):
        with pytest.raises(SimulatorError, match=r"expected inputs .*\(4, 8\).* but got"):
            run(traced, inputs)


def test_a_result_of_another_form_than_traced_is_an_error() -> None:
    traced = trace(lambda x: x.astype(mx.float16), mx.ones((4, 8)))
    (node,) = traced.nodes
    wrong = replace(traced, nodes=(replace(node, arguments=(mx.bfloat16,)),))
    with pytest.raises(SimulatorError, match=r"AsType.*expected .*float16.* but got .*bfloat16"):
        run(wrong, [mx.ones((4, 8))])


@pytest.mark.parametrize("whole", [False, True], ids=["eager", "compiled"])
def test_the_tiny_models_forward_is_the_models_own(tiny_text: Path, whole: bool) -> None:
    """On the ops backend: no kernels, every plain primitive of the text forward."""
    model = load(tiny_text, compiled=whole)[0]
    rng = np.random.default_rng(0)
    ids = mx.array(rng.integers(300, 2000, (3, 40)).astype(np.int32))
    mask = mx.array((np.arange(40) < np.array([[40], [9], [17]])).astype(np.int32))
    traced = trace(lambda ids, mask: tuple(model(ids, mask)), mx.zeros_like(ids), mx.ones_like(mask))
    for got, expected in zip(run(traced, [ids, mask]), model(ids, mask), strict=True):
        assert mx.abs(got - expected).max().item() <= (2e-6 if got.ndim == 2 else 5e-5)

    row, segments = ids.flatten(), mx.array([[0, 50], [50, 70]])
    traced = trace(lambda ids, segments: tuple(model(ids, segments=segments)), row, segments)
    for got, expected in zip(run(traced, [row, segments]), model(row, segments=segments), strict=True):
        assert mx.abs(got - expected).max().item() <= (2e-6 if got.ndim == 2 else 5e-5)


# --- kernels ---------------------------------------------------------------------------------------------------------


def kernel(name: str, source: str) -> Callable[..., mx.array]:
    made = mx.fast.metal_kernel(name=name, input_names=["x"], output_names=["y"], source=source)

    def launch(x: mx.array) -> mx.array:
        (y,) = made(
            inputs=[x],
            grid=(x.size, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[x.shape],
            output_dtypes=[x.dtype],
        )
        return y

    return launch


TRIPLE = kernel("triple", "uint i = thread_position_in_grid.x;\ny[i] = 3 * x[i];\n")
# Each simdgroup turned round through threadgroup memory.
TURN = kernel(
    "turn",
    '#line 1 "turn.metal"\nthreadgroup float t[32];\nuint i = thread_position_in_grid.x, n = i % 32;\nt[n] = x[i];\n'
    "threadgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = t[31 - n];\n",
)
RACE = kernel(
    "race",
    '#line 1 "race.metal"\nthreadgroup float t[32];\nuint i = thread_position_in_grid.x, n = i % 32;\nt[n] = x[i];\n'
    "y[i] = t[31 - n];\n",
)


def forward(x: mx.array) -> tuple[mx.array, mx.array]:
    h = TRIPLE(x.T + 1)  # its input is not row-contiguous
    return TURN(mx.softmax(h, axis=-1)), h


def expected_forward() -> list[mx.array]:
    h = 3 * (X_LONG.T + 1)
    return [mx.softmax(h, axis=-1)[:, ::-1], h]


X_LONG = mx.array(np.random.default_rng(2).normal(size=(32, 8)).astype(np.float32))


@runs
@pytest.mark.parametrize("order", ["forward", "reversed"])
def test_kernels_run_between_plain_nodes(order: Any) -> None:
    traced = trace(mx.compile(forward), X_LONG)
    with simulator.session(order=order) as log:
        got = run(traced, [X_LONG])
    same(got, expected_forward())
    assert [call.name for call, _ in log.calls] == [call.name for call in traced.calls]
    assert [counters.threadgroup_barriers > 0 for _, counters in log.calls] == [False, True]


@runs
def test_a_kernels_fault_is_reported_from_the_graph() -> None:
    with pytest.raises(DataRace, match=r"^race\.metal:[34]: "):
        run(trace(lambda x: RACE(x + 1), X_LONG), [X_LONG])
    unchecked: Graph = trace(lambda x: TRIPLE(x + 1), X_LONG)
    same(run(unchecked, [X_LONG], simulator.Options(checked=False)), [3 * (X_LONG + 1)])
