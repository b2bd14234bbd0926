"""Runs Metal kernels on the CPU, without an Apple GPU, and finds their faults.

`metal_kernel` stands in for `mx.fast.metal_kernel`. MLX writes the kernel's text, clang compiles it, and every thread
of every threadgroup runs:

>>> import mlx.core as mx
>>> from egemma_mlx import simulator
>>> scale = simulator.metal_kernel(
...     name="scale", input_names=["x", "factor"], output_names=["y"],
...     source="uint i = thread_position_in_grid.x;\\ny[i] = x[i] * factor;\\n")
>>> with simulator.session(order="reversed") as log:
...     (y,) = scale(inputs=[mx.arange(8.0), 0.5], grid=(8, 1, 1), threadgroup=(4, 1, 1),
...                  output_shapes=[(8,)], output_dtypes=[mx.float32])
>>> y.tolist()
[0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
>>> log.total.device_load_bytes, log.total.device_store_bytes
(32, 32)

An access outside a buffer, a race, a barrier that not every thread reaches (`errors` lists them all) raises with the
file and line of the source:

>>> scale(inputs=[mx.arange(8.0), 0.5], grid=(9, 1, 1), threadgroup=(3, 1, 1),
...       output_shapes=[(8,)], output_dtypes=[mx.float32])  # doctest: +ELLIPSIS
Traceback (most recent call last):
egemma_mlx.simulator.errors.OutOfBounds: scale.metal:2: ...

Lines are counted from the first of `source`; a `#line` directive there names another file. `trace` and `run` do the
same for a whole function that launches kernels, and `calls` lists what it would launch. `available()` says why a
machine cannot do any of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from egemma_mlx.simulator.call import Graph, KernelCall, Spec, calls, trace
from egemma_mlx.simulator.compiler import available
from egemma_mlx.simulator.errors import SimulatorError
from egemma_mlx.simulator.graph import run
from egemma_mlx.simulator.launch import Session, execute, session
from egemma_mlx.simulator.machine import Counters, Options

__all__ = [
    "Counters",
    "Graph",
    "Kernel",
    "KernelCall",
    "Options",
    "Session",
    "SimulatorError",
    "available",
    "calls",
    "execute",
    "metal_kernel",
    "run",
    "session",
    "trace",
]


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: dict[str, Any] | None = None,
) -> Kernel:
    """`mx.fast.metal_kernel` under the simulator, with its arguments and its errors."""
    kernel: Any = mx.fast.metal_kernel(
        name=name,
        input_names=input_names,
        output_names=output_names,
        source=_numbered(source, f"{name}.metal"),
        header=header and _numbered(header, f"{name}.h"),
        ensure_row_contiguous=ensure_row_contiguous,
        atomic_outputs=atomic_outputs,
        **({} if compile_options is None else {"compile_options": compile_options}),
    )
    return Kernel(kernel)


class Kernel:
    """What `metal_kernel` returns. A call runs as the current `session` says, and returns evaluated arrays."""

    def __init__(self, kernel: Callable[..., list[mx.array]]) -> None:
        self._kernel = kernel
        self._calls: dict[tuple[Any, ...], KernelCall] = {}

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[Any],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        arrays = [value if isinstance(value, mx.array) else mx.array(value) for value in inputs]
        described = (
            tuple(map(Spec.of, arrays)),
            tuple(map(tuple, output_shapes)),
            tuple(output_dtypes),
            tuple(grid),
            tuple(threadgroup),
            tuple((name, type(value), value) for name, value in template or ()),
        )
        if verbose or described not in self._calls:
            (self._calls[described],) = calls(
                lambda *traced: self._kernel(
                    inputs=traced,
                    output_shapes=output_shapes,
                    output_dtypes=output_dtypes,
                    grid=grid,
                    threadgroup=threadgroup,
                    template=template,
                    verbose=verbose,
                ),
                *arrays,
            )
        return execute(replace(self._calls[described], init_value=init_value), arrays)


def _numbered(text: str, file: str) -> str:
    """Text whose lines clang counts from its first."""
    return text if text.lstrip().startswith("#line") else f'#line 1 "{file}"\n{text}'
