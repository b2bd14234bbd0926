"""What MLX would launch, and `simulator.metal_kernel` in place of `mx.fast.metal_kernel`."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from egemma_mlx import simulator
from egemma_mlx.simulator.call import Binding, Node, Spec, calls, trace
from egemma_mlx.simulator.errors import CompileError, SimulatorError, UninitialisedRead

runs = pytest.mark.skipif(simulator.available() is not None, reason=f"simulator: {simulator.available()}")

INDEX = "uint i = thread_position_in_grid.x;\n"


def kernel(source: str, inputs: list[str], outputs: list[str] | None = None, **options: Any) -> Callable[..., Any]:
    """A real MLX kernel over 64 threads with outputs of 64 float32."""
    made = mx.fast.metal_kernel(
        name="probe", input_names=inputs, output_names=outputs or ["y"], source=source, **options
    )

    def launch(*arrays: Any, **overrides: Any) -> Any:
        count = len(outputs or ["y"])
        return made(
            inputs=list(arrays),
            **{
                "grid": (64, 1, 1),
                "threadgroup": (32, 1, 1),
                "output_shapes": [(64,)] * count,
                "output_dtypes": [mx.float32] * count,
                **overrides,
            },
        )

    return launch


# --- tracing ---------------------------------------------------------------------------------------------------------


def test_a_call_has_the_text_the_launch_and_every_buffer_in_order() -> None:
    body = INDEX + "y[i] = x[i] + w_shape[0] + w_strides[1] + w_ndim + few[0] + n; z[i] = N;\n"
    probe = kernel(body, ["x", "w", "few", "n"], ["y", "z"], header="// of the header\n")
    arrays = mx.zeros((64,)), mx.zeros((4, 16), mx.bfloat16), mx.zeros((3, 2), mx.int32)
    (call,) = calls(lambda x, w, few: probe(x, w, few, 3, template=[("T", mx.float16), ("N", 4)]), *arrays)
    assert call.source.startswith("// of the header\ntemplate <typename T, int N>\n")
    assert body in call.source
    assert call.name in call.source
    assert (call.grid, call.threadgroup) == ((64, 1, 1), (32, 1, 1))
    assert call.inputs == (*map(Spec.of, arrays), Spec((), mx.int32))
    assert call.outputs == (Spec((64,), mx.float32),) * 2
    assert call.bindings == (
        Binding("x", False, "input", 0),
        Binding("w", False, "input", 1),
        Binding("w_shape", True, "shape", 1),
        Binding("w_strides", True, "strides", 1),
        Binding("w_ndim", True, "ndim", 1),
        Binding("few", True, "input", 2),  # fewer than 8 elements: MLX puts it in constant memory
        Binding("n", True, "input", 3),
        Binding("y", False, "output", 0),
        Binding("z", False, "output", 1),
    )
    assert (call.ensure_row_contiguous, call.atomic_outputs, call.math_mode) == (True, False, "safe")


def test_flags_are_read_too() -> None:
    options = {"atomic_outputs": True, "ensure_row_contiguous": False, "compile_options": {"math_mode": "fast"}}
    (call,) = calls(kernel(INDEX, ["x"], **options), mx.zeros((8,)))
    assert (call.ensure_row_contiguous, call.atomic_outputs, call.math_mode) == (False, True, "fast")


def test_a_threadgroup_is_clipped_to_the_grid() -> None:
    (call,) = calls(lambda x: kernel(INDEX, ["x"])(x, grid=(5, 2, 1), threadgroup=(32, 1, 8)), mx.zeros((8,)))
    assert call.threadgroup == (5, 1, 1)


def test_calls_come_in_order_between_plain_nodes_and_from_compiled_functions() -> None:
    first, second = kernel("// first\n" + INDEX, ["x"]), kernel("// second\n" + INDEX, ["x"])
    graph = trace(mx.compile(lambda x: second(first(x + 1)[0] * 2)[0] - 1), mx.zeros((64,)))
    assert [call.source.count("// first") for call in graph.calls] == [1, 0]
    names = [node.primitive for node in graph.nodes if node.primitive != "Broadcast"]
    assert names == ["Add", "CustomKernel", "Multiply", "CustomKernel", "Subtract"]
    assert graph.inputs == {graph.nodes[1].inputs[0]: Spec((64,), mx.float32)}


def test_one_array_may_be_two_inputs() -> None:
    graph = trace(lambda x: kernel(INDEX, ["a", "b"])(x, x), mx.zeros((64,)))
    assert graph.nodes[0].inputs == (*graph.inputs, *graph.inputs)
    assert [binding.place for binding in graph.calls[0].bindings] == [0, 1, 0]


def test_nothing_is_evaluated() -> None:
    def fails() -> mx.array:
        return kernel(INDEX, ["x"])(mx.array(1.0) / 0)[0]

    assert len(calls(fails)) == 1


def test_an_unknown_form_of_trace_is_an_error() -> None:
    events: list[dict[str, Any]] = []
    mx.export_function(events.append, kernel(INDEX, ["x"]), mx.zeros((8,)))
    event = events[-1]
    assert Node.of(event).call is not None
    with pytest.raises(SimulatorError, match=f"14 arguments but got 15: mlx {version('mlx')} "):
        Node.of({**event, "arguments": [*event["arguments"], 0.0]})


# --- metal_kernel ----------------------------------------------------------------------------------------------------


def simulated(source: str, inputs: list[str], **options: Any) -> simulator.Kernel:
    return simulator.metal_kernel("probe", inputs, ["y"], source, **options)


def one(made: simulator.Kernel, *inputs: Any, size: int = 64, dtype: Any = mx.float32, **overrides: Any) -> mx.array:
    launch = {"grid": (size, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(size,)], "output_dtypes": [dtype]}
    (result,) = made(inputs=list(inputs), **{**launch, **overrides})
    return result


@runs
def test_the_docstring_is_true() -> None:
    assert doctest.testmod(simulator).attempted >= 5
    assert doctest.testmod(simulator).failed == 0


@runs
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.int32, mx.uint8, mx.int64])
def test_every_dtype_goes_in_and_comes_out(dtype: Any) -> None:
    x = (mx.arange(64) * 3).astype(dtype)
    result = one(simulated(INDEX + "y[i] = x[i];\n", ["x"]), x, dtype=dtype)
    assert result.dtype == dtype
    assert mx.array_equal(result, x)


@runs
def test_bool_goes_in_and_comes_out() -> None:
    x = mx.arange(64) % 3 == 0
    assert mx.array_equal(one(simulated(INDEX + "y[i] = !x[i];\n", ["x"]), x, dtype=mx.bool_), mx.logical_not(x))


@runs
def test_lazy_inputs_scalars_and_template_arguments() -> None:
    made = simulated(INDEX + "y[i] = T(x[i] * a) + N + n;\n", ["x", "a", "n"])
    for a, n, count in ((0.5, 3, 7), (0.25, -2, -9), (0.25, True, -9)):
        result = one(made, mx.arange(64.0) + 1, a, n, template=[("T", mx.int32), ("N", count)])
        assert np.array_equal(np.array(result), ((np.arange(64) + 1) * a).astype(int) + count + int(n))


@runs
def test_inputs_are_copied_to_rows_unless_told_not_to() -> None:
    x = mx.arange(64.0).reshape(8, 8).T
    assert mx.array_equal(one(simulated(INDEX + "y[i] = x[i];\n", ["x"]), x), x.flatten())
    raw = simulated(INDEX + "y[i] = x[i];\n", ["x"], ensure_row_contiguous=False)
    assert mx.array_equal(one(raw, x), mx.arange(64.0))
    strided = INDEX + "y[i] = x[i / x_shape[1] * x_strides[0] + i % x_shape[1] * x_strides[1]] * x_ndim;\n"
    for view in (x, mx.broadcast_to(mx.arange(8.0), (8, 8)), mx.arange(128.0).reshape(8, 16)[:, ::2]):
        mx.eval(view)
        for options in ({}, {"ensure_row_contiguous": False}):
            assert mx.array_equal(one(simulated(strided, ["x"], **options), view), 2 * view.flatten())
    for dtype in (mx.bfloat16, mx.float16):
        narrow = simulated(strided, ["x"], ensure_row_contiguous=False)
        assert mx.array_equal(one(narrow, x.astype(dtype).T.astype(dtype).T), 2 * x.flatten())


@runs
def test_negative_strides_are_refused_by_name() -> None:
    x = mx.arange(64.0)[::-1]
    mx.eval(x)
    assert one(simulated(INDEX + "y[i] = x[i];\n", ["x"]), x)[0].item() == 63
    with pytest.raises(SimulatorError, match="expected x without negative strides"):
        one(simulated(INDEX + "y[i] = x[i];\n", ["x"], ensure_row_contiguous=False), x)


@runs
def test_outputs_start_unwritten_or_with_the_init_value() -> None:
    made = simulated(INDEX + "if (i % 2) y[i] = 1;\n", ["x"])
    assert np.array_equal(np.isnan(np.array(one(made, mx.zeros((8,))))), np.arange(64) % 2 == 0)
    for dtype in (mx.float32, mx.bfloat16, mx.int32):
        assert one(made, mx.zeros((8,)), init_value=3.0, dtype=dtype).tolist() == [3, 1] * 32
    counts = simulated(INDEX + "y[i] += 1;\n", ["x"])
    assert one(counts, mx.zeros((8,)), init_value=2).tolist() == [3.0] * 64
    with pytest.raises(UninitialisedRead, match=r"^probe\.metal:2: "):
        one(counts, mx.zeros((8,)))


@runs
def test_atomic_outputs_sum_over_threads() -> None:
    add = "atomic_fetch_add_explicit(&y[thread_position_in_grid.x % 4], 1, memory_order_relaxed);\n"
    made = simulated(add, ["x"], atomic_outputs=True)
    result = one(made, mx.zeros((8,)), output_shapes=[(4,)], dtype=mx.int32, init_value=0)
    assert result.tolist() == [16] * 4


@runs
def test_lines_are_those_of_the_body_or_of_its_line_directive() -> None:
    for source, line in ((INDEX + "y[i] = missing;\n", "probe.metal:2"), ('#line 7 "b.h"\ny[0] = missing;\n', "b.h:7")):
        with pytest.raises(CompileError, match=rf"{line}\b"):
            one(simulated(source, ["x"]), mx.zeros((8,)))
    with pytest.raises(CompileError, match=r"probe\.h:1\b"):
        one(simulated(INDEX, ["x"], header="float f() { return missing; }\n"), mx.zeros((8,)))


@runs
def test_mlx_says_what_is_wrong_with_arguments() -> None:
    with pytest.raises(ValueError, match="inputs"):
        one(simulated(INDEX, ["x"]))
    with pytest.raises(ValueError, match="math_mode"):
        simulated(INDEX, ["x"], compile_options={"math_mode": "wrong"})


@runs
def test_repeated_calls_are_traced_once_for_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[Any] = []
    export = mx.export_function
    monkeypatch.setattr(mx, "export_function", lambda *arguments: (traces.append(1), export(*arguments)))
    made = simulated(INDEX + "y[i] = x[i] + n;\n", ["x", "n"])
    for n in range(3):
        assert one(made, mx.ones((64,)) * n, n)[0].item() == 2 * n
    assert len(traces) == 1
    one(made, mx.ones((64,), mx.bfloat16), 1)
    one(made, mx.ones((64,)), 1.0)
    one(made, mx.ones((64,)), 1, grid=(32, 1, 1))
    assert len(traces) == 4


@runs
def test_verbose_prints_the_source_every_time(capfd: pytest.CaptureFixture[str]) -> None:
    made = simulated(INDEX + "y[i] = x[i];\n", ["x"])
    for _ in range(2):
        one(made, mx.ones((64,)), verbose=True)
        assert "Generated source code" in capfd.readouterr().out


@runs
def test_a_session_logs_its_calls_and_fixes_the_order() -> None:
    source = "threadgroup uint turn[1];\n" + INDEX + "y[i] = x[i];\n"
    made = simulated(source, ["x"])
    with simulator.session() as outer:
        one(made, mx.ones((64,)))
        with simulator.session(order="reversed", checked=False) as inner:
            one(made, mx.ones((64,)))
        one(made, mx.ones((64,)))
    assert (len(outer.calls), len(inner.calls)) == (2, 1)
    assert inner.options == simulator.Options(checked=False, order="reversed")
    assert [call.grid for call, _ in outer.calls] == [(64, 1, 1)] * 2
    assert outer.total.device_load_bytes == 2 * 64 * 4
    assert outer.total.threads == 128
    one(made, mx.ones((64,)))
    assert len(outer.calls) == 2
