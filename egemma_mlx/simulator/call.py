"""What MLX would launch, read from MLX itself.

`mx.export_function` walks the graph of a traced function and hands out every node. A custom kernel's node holds the
complete text that MLX would give to Metal's compiler, the grid and the flags, on any machine: nothing of MLX's
signature rules is imitated here. (One thing is not in it: `init_value`, which MLX 0.32 leaves out.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal, NamedTuple

import mlx.core as mx

from egemma_mlx.simulator import translate
from egemma_mlx.simulator.errors import SimulatorError

Size = tuple[int, int, int]
Role = Literal["input", "shape", "strides", "ndim", "output"]
_LAYOUT: tuple[Role, ...] = ("shape", "strides", "ndim")
MATH_MODES = ("safe", "relaxed", "fast")

# What MLX writes into a custom kernel's node: name, source, 3 × grid, 3 × threadgroup, shape infos,
# ensure_row_contiguous, scalar arguments, precompiled, shared memory (these three are CUDA's), compile options.
_ARGUMENTS = 14


class Spec(NamedTuple):
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: Any

    @classmethod
    def of(cls, array: mx.array) -> Spec:
        return cls(tuple(array.shape), array.dtype)


class Binding(NamedTuple):
    """What one `[[buffer(n)]]` argument is: an input or output, or an input's shape, strides or ndim.

    `place` is that of the input or the output among its like.
    """

    name: str
    constant: bool
    role: Role
    place: int


@dataclass(frozen=True)
class KernelCall:
    """One launch of one kernel.

    Attributes:
        name: of the function in `source`, with types and template arguments.
        source: the whole MSL text that MLX compiles (after its own `metal::utils()`).
        grid: in threads.
        threadgroup: clipped to the grid, as MLX does.
        bindings: in the order of the buffers.
        atomic_outputs: outputs are `atomic<T>`.
        init_value: what outputs hold before the launch; None for nothing, and in every call that was traced.
    """

    name: str
    source: str
    grid: Size
    threadgroup: Size
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    bindings: tuple[Binding, ...]
    ensure_row_contiguous: bool
    atomic_outputs: bool
    math_mode: str
    init_value: float | None = None


VIEWS = frozenset({
    "AsStrided", "Broadcast", "BroadcastAxes", "ExpandDims", "Flatten", "NumberOfElements", "Reshape", "Slice", "Split",
    "Squeeze", "StopGradient", "Transpose", "Unflatten", "View",
})  # fmt: skip
"""Primitives that make a new view of their first input, or nothing at all, and no launch."""


@dataclass(frozen=True)
class Node:
    """One primitive of a graph; arrays go by name."""

    primitive: str
    arguments: tuple[Any, ...]
    inputs: tuple[str, ...]
    outputs: dict[str, Spec]
    call: KernelCall | None

    @classmethod
    def of(cls, event: dict[str, Any]) -> Node:
        primitive, arguments = event["name"], tuple(event["arguments"])
        # One array may come in twice; none goes out twice.
        inputs, outputs = _named(event["inputs"]), dict(_named(event["outputs"]))
        call = None
        if primitive == "CustomKernel":
            call = _kernel_call(arguments, tuple(spec for _, spec in inputs), tuple(outputs.values()))
        return cls(primitive, arguments, tuple(name for name, _ in inputs), outputs, call)


@dataclass(frozen=True)
class Graph:
    """A traced function: `nodes` in an order in which they can run.

    `inputs` and `outputs` name arrays; `constants` are what the function closed over, weights for example.
    """

    inputs: dict[str, Spec]
    outputs: tuple[str, ...]
    constants: dict[str, mx.array]
    nodes: tuple[Node, ...]

    @property
    def calls(self) -> list[KernelCall]:
        """The custom kernels, in order."""
        return [node.call for node in self.nodes if node.call is not None]


def trace(function: Callable[..., Any], *arrays: mx.array) -> Graph:
    """The graph of `function(*arrays)`, which is not evaluated.

    Args:
        function: from arrays to an array, or to a list, tuple or dict of arrays; `mx.compile`-d or not.

    Raises:
        SimulatorError: MLX's trace is not of the form known here.
        CompileError: a kernel's signature is not one that Metal takes.
    """
    events: list[dict[str, Any]] = []
    mx.export_function(events.append, function, *arrays)
    by_type = {event["type"]: event for event in events if event["type"] != "primitive"}
    return Graph(
        inputs=dict(_named(by_type["inputs"]["inputs"])),
        outputs=tuple(name for name, _ in _named(by_type["outputs"]["outputs"])),
        constants=dict(by_type["constants"]["constants"]),
        nodes=tuple(Node.of(event) for event in events if event["type"] == "primitive"),
    )


def calls(function: Callable[..., Any], *arrays: mx.array) -> list[KernelCall]:
    """The custom kernels that `function(*arrays)` would launch, in order; nothing is evaluated."""
    return trace(function, *arrays).calls


def _named(arrays: list[tuple[str, tuple[int, ...], Any]]) -> list[tuple[str, Spec]]:
    return [(name, Spec(tuple(shape), dtype)) for name, shape, dtype in arrays]


def _kernel_call(arguments: tuple[Any, ...], inputs: tuple[Spec, ...], outputs: tuple[Spec, ...]) -> KernelCall:
    if len(arguments) != _ARGUMENTS:
        raise SimulatorError(
            f"[simulator] expected MLX to trace a custom kernel with {_ARGUMENTS} arguments but got "
            f"{len(arguments)}: mlx {version('mlx')} is not known here"
        )
    name, source, *sizes, infos, contiguous, _scalars, _precompiled, _shared, options = arguments
    grid, threadgroup = tuple(sizes[:3]), tuple(sizes[3:])
    parameters = [p for p in translate.signature(source, name) if p.buffer is not None]
    return KernelCall(
        name=name,
        source=source,
        grid=grid,
        threadgroup=tuple(map(min, threadgroup, grid)),
        inputs=inputs,
        outputs=outputs,
        bindings=tuple(
            Binding(parameter.name, parameter.constant, role, place)
            for parameter, (role, place) in zip(parameters, _roles(inputs, infos, len(outputs)), strict=True)
        ),
        ensure_row_contiguous=contiguous,
        atomic_outputs=parameters[-1].type.startswith("device atomic<"),
        math_mode=MATH_MODES[options],
    )


def _roles(inputs: tuple[Spec, ...], infos: list[tuple[bool, bool, bool]], outputs: int) -> Iterator[tuple[Role, int]]:
    """The order in which MLX binds buffers: each input, then what the body asks of its layout; the outputs."""
    for place, (spec, info) in enumerate(zip(inputs, infos, strict=True)):
        yield "input", place
        if spec.shape:
            yield from ((role, place) for role, wanted in zip(_LAYOUT, info, strict=True) if wanted)
    yield from (("output", place) for place in range(outputs))
