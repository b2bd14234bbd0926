"""From `metal_src/` to kernels: one `mx.fast.metal_kernel` a file, made when it is first called.

Lengths are data; template arguments are tile constants, widths and dtypes. So a pipeline serves every batch, and a
new one comes only with a new layer shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

Kernel = Callable[..., list[mx.array]]
Make = Callable[..., Any]
"""`mx.fast.metal_kernel` and what can stand in for it: (name, input_names, output_names, source, header) → Kernel."""


@dataclass(frozen=True)
class Source:
    """A kernel body `metal_src/<name>.metal`, its buffers in order, and the headers it stands on, in order."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    headers: tuple[str, ...] = ()


class Library:
    """The kernels by source.

    Args:
        make: `mx.fast.metal_kernel`, or the simulator's `metal_kernel`.
        folder: where the sources are, instead of the package's own.
    """

    def __init__(self, make: Make, folder: Path | None = None) -> None:
        self._make = make
        self._folder = folder or source_folder()
        self._kernels: dict[str, Kernel] = {}

    def __call__(self, source: Source) -> Kernel:
        kernel = self._kernels.get(source.name)
        if kernel is None:
            kernel = self._kernels[source.name] = self._make(
                name=f"egemma_{source.name}",
                input_names=list(source.inputs),
                output_names=list(source.outputs),
                header="".join(self._text(f"{header}.h") for header in source.headers),
                source=self._text(f"{source.name}.metal"),
            )
        return kernel

    def _text(self, file: str) -> str:
        """The file, under a line directive by which compilers and the simulator name it."""
        return f'#line 1 "{file}"\n{(self._folder / file).read_text(encoding="utf-8")}'


def source_folder() -> Path:
    """`metal_src/`: in a wheel inside the package, in a checkout beside it."""
    package = Path(__file__).parents[1]
    packaged = package / "metal_src"
    return packaged if packaged.is_dir() else package.parent / "metal_src"


def launch(
    kernel: Kernel,
    *inputs: Any,
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    outputs: Sequence[tuple[int, ...]],
    **template: Any,
) -> list[mx.array]:
    """One launch with float32 outputs of these shapes. `grid` counts threads, `template` names template arguments."""
    return kernel(
        inputs=list(inputs),
        template=list(template.items()),
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=list(outputs),
        output_dtypes=[mx.float32] * len(outputs),
    )
