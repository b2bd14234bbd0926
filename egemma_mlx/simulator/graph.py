"""Runs a whole traced graph: custom kernels under the simulator, every other node by MLX on the CPU.

The graph is MLX's own (`call.trace`), so what runs here is what MLX would run: the same kernels in the same order,
between the same plain operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from egemma_mlx.simulator.call import Graph, Node, Spec
from egemma_mlx.simulator.errors import SimulatorError
from egemma_mlx.simulator.launch import execute
from egemma_mlx.simulator.machine import Options

Arrays = list[mx.array]


def run(graph: Graph, arrays: Sequence[mx.array], options: Options | None = None) -> Arrays:
    """The outputs of a traced function for other inputs, evaluated.

    Args:
        arrays: of the shapes and dtypes that the function was traced with.
        options: for its kernels; default: those of the session.

    Raises:
        SimulatorError: inputs that do not fit, a primitive that is not known here, or a kernel's fault.
    """
    expected, got = list(graph.inputs.values()), [Spec.of(array) for array in arrays]
    if expected != got:
        raise SimulatorError(f"[simulator] expected inputs {expected} but got {got}")
    values = graph.constants | dict(zip(graph.inputs, arrays, strict=True))
    with mx.stream(mx.cpu):
        for node in graph.nodes:
            inputs = [values[name] for name in node.inputs]
            outputs = _plain(node, inputs) if node.call is None else execute(node.call, inputs, options)
            values.update(zip(node.outputs, outputs, strict=True))
        results = [values[name] for name in graph.outputs]
        mx.eval(results)
    return results


def _plain(node: Node, inputs: Arrays) -> Arrays:
    """A node by MLX's own operation, whose shapes and dtypes must be those of the trace."""
    name, expected = node.primitive, list(node.outputs.values())
    if name in _BY_INPUTS:
        result = _BY_INPUTS[name](*inputs)
    elif name in _BY_ARGUMENTS:
        result = _BY_ARGUMENTS[name](inputs, expected[0], *node.arguments)
    else:
        raise SimulatorError(f"[simulator] expected a primitive of simulator/graph.py but got {name} {node.arguments}")
    outputs = [result] if isinstance(result, mx.array) else list(result)
    got = [Spec.of(output) for output in outputs]
    if got != expected:
        raise SimulatorError(f"[simulator] {name} {node.arguments}: expected {expected} but got {got}")
    return outputs


def _slices(start: Sequence[int], stop: Sequence[int], step: Sequence[int]) -> tuple[slice, ...]:
    return tuple(map(slice, start, stop, step))


def _front(x: mx.array, axes: Sequence[int]) -> tuple[mx.array, list[int]]:
    """x with `axes` first, and the order that does it."""
    order = [*axes, *(axis for axis in range(x.ndim) if axis not in axes)]
    return x.transpose(order), order


def _gather(inputs: Arrays, out: Spec, axes: Sequence[int], sizes: Sequence[int]) -> mx.array:
    """Rows of x by indices on `axes`; the output is [indices…, slice sizes…]."""
    x, *indices = inputs
    _whole(x, axes, sizes)
    return _front(x, axes)[0][tuple(indices)].reshape(out.shape)


def _scatter(inputs: Arrays, out: Spec, mode: int, axes: Sequence[int]) -> mx.array:
    """`_gather` the other way round: updates are [indices…, slice sizes…]."""
    x, *indices, updates = inputs
    _whole(x, axes, updates.shape[indices[0].ndim :])
    front, order = _front(x, axes)
    rows = updates.reshape(*indices[0].shape, *front.shape[len(axes) :])
    written = _update(front, tuple(indices), rows, mode)
    return written.transpose([order.index(axis) for axis in range(x.ndim)])


def _whole(x: mx.array, axes: Sequence[int], sizes: Sequence[int]) -> None:
    """MLX's Python operations gather and scatter whole slices; other ones are not known here."""
    if list(sizes) != [1 if axis in axes else size for axis, size in enumerate(x.shape)]:
        raise SimulatorError(f"[simulator] expected whole slices of {x.shape} on axes {axes} but got {sizes}")


def _update(x: mx.array, where: Any, updates: mx.array, mode: int) -> mx.array:
    """x with `updates` put, or combined, at `where`."""
    if mode == len(_COMBINED):
        copy = mx.array(x)
        copy[where] = updates
        return copy
    updated: mx.array = getattr(x.at[where], _COMBINED[mode])(updates)
    return updated


# MLX's enums, by their values.
_COMBINED = ("maximum", "minimum", "add", "multiply")
_REDUCE = (mx.all, mx.any, mx.sum, mx.prod, mx.min, mx.max)
_SCAN = (mx.cummax, mx.cummin, mx.cumsum, mx.cumprod)
_ARG_REDUCE = (mx.argmin, mx.argmax)
_BITWISE = (mx.bitwise_and, mx.bitwise_or, mx.bitwise_xor, mx.left_shift, mx.right_shift)
_LOG = (mx.log2, mx.log10, mx.log)

# Primitives without arguments.
_BY_INPUTS: dict[str, Callable[..., Any]] = {
    "Abs": mx.abs,
    "Add": mx.add,
    "Ceil": mx.ceil,
    "Cos": mx.cos,
    "Divide": mx.divide,
    "DivMod": mx.divmod,
    "Erf": mx.erf,
    "Exp": mx.exp,
    "Floor": mx.floor,
    "FloorDivide": mx.floor_divide,
    "Full": lambda x: x,
    "Greater": mx.greater,
    "GreaterEqual": mx.greater_equal,
    "Less": mx.less,
    "LessEqual": mx.less_equal,
    "LogSumExp": lambda x: mx.logsumexp(x, axis=-1, keepdims=True),
    "LogicalAnd": mx.logical_and,
    "LogicalNot": mx.logical_not,
    "LogicalOr": mx.logical_or,
    "Matmul": mx.matmul,
    "Maximum": mx.maximum,
    "Minimum": mx.minimum,
    "Multiply": mx.multiply,
    "Negative": mx.negative,
    "NotEqual": mx.not_equal,
    "Power": mx.power,
    "Remainder": mx.remainder,
    "Round": mx.round,
    "Select": mx.where,
    "Sigmoid": mx.sigmoid,
    "Sign": mx.sign,
    "Sin": mx.sin,
    "Square": mx.square,
    "Subtract": mx.subtract,
    "Tanh": mx.tanh,
}

# Primitives with arguments: a function of the inputs, the (first) output's shape and dtype, and the arguments.
_BY_ARGUMENTS: dict[str, Callable[..., Any]] = {
    "AddMM": lambda x, out, alpha, beta: mx.addmm(x[2], x[0], x[1], alpha, beta),
    "Arange": lambda x, out, start, stop, step: mx.arange(start, stop, step, dtype=out.dtype),
    "ArgReduce": lambda x, out, kind, axis: _ARG_REDUCE[kind](x[0], axis=axis, keepdims=True),
    "ArgSort": lambda x, out, axis: mx.argsort(x[0], axis=axis),
    "AsType": lambda x, out, dtype: x[0].astype(dtype),
    "BitwiseBinary": lambda x, out, kind: _BITWISE[kind](*x),
    "Broadcast": lambda x, out, shape: mx.broadcast_to(x[0], out.shape),
    "Concatenate": lambda x, out, axis: mx.concatenate(x, axis=axis),
    "DynamicSlice": lambda x, out, axes, sizes: mx.slice(x[0], x[1], axes, sizes),
    "DynamicSliceUpdate": lambda x, out, axes: mx.slice_update(x[0], x[1], x[2], axes),
    "Equal": lambda x, out, nan: (x[0] == x[1]) | (mx.isnan(x[0]) & mx.isnan(x[1])) if nan else x[0] == x[1],
    "ExpandDims": lambda x, out, axes: x[0].reshape(out.shape),
    "Flatten": lambda x, out, first, last: x[0].reshape(out.shape),
    "Gather": _gather,
    "GatherAxis": lambda x, out, axis: mx.take_along_axis(x[0], x[1], axis=axis),
    "Log": lambda x, out, base: _LOG[base](x[0]),
    "Pad": lambda x, out, axes, low, high: mx.pad(x[0], _widths(x[0].ndim, axes, low, high), constant_values=x[1]),
    "Reduce": lambda x, out, kind, axes: _REDUCE[kind](x[0], axis=axes, keepdims=True),
    "Reshape": lambda x, out, shape: x[0].reshape(out.shape),
    "Scan": lambda x, out, kind, axis, back, own: _SCAN[kind](x[0], axis=axis, reverse=back, inclusive=own),
    "Scatter": _scatter,
    "Slice": lambda x, out, *bounds: x[0][_slices(*bounds)],
    "SliceUpdate": lambda x, out, mode, *bounds: _update(x[0], _slices(*bounds), x[1], mode),
    "Softmax": lambda x, out, precise: mx.softmax(x[0], axis=-1, precise=precise),
    "Sort": lambda x, out, axis: mx.sort(x[0], axis=axis),
    "Split": lambda x, out, at, axis: mx.split(x[0], at, axis=axis),
    "Sqrt": lambda x, out, reciprocal: mx.rsqrt(x[0]) if reciprocal else mx.sqrt(x[0]),
    "Squeeze": lambda x, out, axes: x[0].reshape(out.shape),
    "Transpose": lambda x, out, axes: x[0].transpose(axes),
    "Unflatten": lambda x, out, axis, shape: x[0].reshape(out.shape),
    "View": lambda x, out, dtype: x[0].view(dtype),
}


def _widths(ndim: int, axes: Sequence[int], low: Sequence[int], high: Sequence[int]) -> list[tuple[int, int]]:
    by_axis = dict(zip(axes, zip(low, high, strict=True), strict=True))
    return [by_axis.get(axis, (0, 0)) for axis in range(ndim)]
