"""One kernel call on the CPU: MLX arrays → buffers → `machine` → MLX arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from egemma_mlx.simulator import compiler, machine
from egemma_mlx.simulator.call import Binding, KernelCall, Spec
from egemma_mlx.simulator.errors import SimulatorError
from egemma_mlx.simulator.machine import Buffer, Counters, Options
from egemma_mlx.simulator.translate import translate

_Array = NDArray[Any]


@dataclass
class Session:
    """What ran, in order, and how."""

    options: Options = field(default_factory=Options)
    calls: list[tuple[KernelCall, Counters]] = field(default_factory=list)

    @property
    def total(self) -> Counters:
        """The counters of all calls together."""
        return sum((counters for _, counters in self.calls), Counters())


_session: ContextVar[Session | None] = ContextVar("session", default=None)


@contextmanager
def session(
    *,
    checked: bool = True,
    order: Literal["forward", "reversed"] = "forward",
    access_budget: int = Options.access_budget,
) -> Iterator[Session]:
    """Options for every kernel that runs inside, and a log of them. The innermost session counts.

    Args:
        checked, order, access_budget: see `Options`.
    """
    opened = Session(Options(checked=checked, order=order, access_budget=access_budget))
    token = _session.set(opened)
    try:
        yield opened
    finally:
        _session.reset(token)


def execute(call: KernelCall, arrays: Sequence[mx.array], options: Options | None = None) -> list[mx.array]:
    """Run `call` on its inputs.

    Args:
        arrays: of the call's shapes and dtypes.
        options: default: those of the session.

    Returns:
        The outputs, evaluated. What a kernel leaves unwritten is NaN (all bits set) without an `init_value`.

    Raises:
        SimulatorError: see `errors`.
    """
    current = _session.get()
    if options is None:
        options = Options() if current is None else current.options
    inputs = [_input(array, call.ensure_row_contiguous) for array in arrays]
    outputs = [_output(spec, call.init_value) for spec in call.outputs]
    buffers = [_buffer(binding, inputs, outputs, call.init_value is not None) for binding in call.bindings]
    counters = machine.run(
        _library(call.source, call.name, options.checked),
        translate(call.source, call.name).entry,
        buffers,
        call.grid,
        call.threadgroup,
        options,
    )
    if current is not None:
        current.calls.append((call, counters))
    return [_to_mlx(array, spec) for array, spec in zip(outputs, call.outputs, strict=True)]


@lru_cache(maxsize=256)
def _library(source: str, name: str, checked: bool) -> Path:
    return compiler.compile_kernel(translate(source, name).cpp, checked=checked)


def _input(array: mx.array, ensure_row_contiguous: bool) -> _Array:
    """The array's own memory, with its strides; a copy where MLX would make one."""
    bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array  # numpy has no bfloat16
    view = np.array(bits, copy=False)
    return np.ascontiguousarray(view).reshape(view.shape) if ensure_row_contiguous else view


def _output(spec: Spec, init_value: float | None) -> _Array:
    bits = mx.uint16 if spec.dtype == mx.bfloat16 else spec.dtype
    filled = mx.full(spec.shape, 0.0 if init_value is None else init_value).astype(spec.dtype)
    return np.array(filled.view(bits))


def _to_mlx(array: _Array, spec: Spec) -> mx.array:
    return mx.array(array).view(spec.dtype)


def _buffer(binding: Binding, inputs: list[_Array], outputs: list[_Array], initialised: bool) -> Buffer:
    writable = binding.role == "output"
    if writable:
        array = outputs[binding.place]
    elif binding.role == "input":
        array = _memory(inputs[binding.place], binding.name)
    else:
        array = _layout(inputs[binding.place], binding.role)
    return Buffer(
        name=binding.name,
        array=array,
        writable=writable,
        constant=binding.constant,
        initialised=initialised or not writable,
    )


def _layout(array: _Array, role: str) -> _Array:
    """What MLX passes of an input's layout: `x_shape` int32, `x_strides` int64 in elements, `x_ndim` int32."""
    if role == "shape":
        return np.array(array.shape, np.int32)
    if role == "strides":
        return np.array([stride // array.itemsize for stride in array.strides], np.int64)
    return np.array(array.ndim, np.int32)


def _memory(array: _Array, name: str) -> _Array:
    """The elements from the first of a strided array to the last, in the order of memory."""
    if array.flags.c_contiguous:
        return array
    if min(array.strides) < 0:
        raise SimulatorError(
            f"[simulator] expected {name} without negative strides but got {array.strides} bytes: its kernel would "
            "read in front of the buffer's start"
        )
    last = sum((size - 1) * stride // array.itemsize for size, stride in zip(array.shape, array.strides, strict=True))
    return np.ascontiguousarray(np.lib.stride_tricks.as_strided(array, (last + 1,), (array.itemsize,)))
