"""What runs the Metal kernels in tests: the GPU of a Mac, and the simulator on machines that have none.

@executors
@over(["gelu_mul"], "rows, width", [(1, 4), (7, 12)])
def test_gelu(executor, rows, width):
    (out,) = executor.run(metal_gelu_mul, g, u, launches=["gelu_mul"])
    assert error(out, expected) <= TOLERANCE
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from egemma_mlx import simulator
from egemma_mlx.kernels.library import Library, Make

Array = NDArray[Any]

TOLERANCE = 2e-5
"""Of max |got − float64| / max |float64|."""

COVERED: dict[str, set[Any]] = defaultdict(set)
"""The shapes that tests are parametrised with, by kernel: what `over` was told."""


class Executor:
    """A place where Metal kernels run.

    Attributes:
        make: `mx.fast.metal_kernel` or what stands in for it, to make other libraries.
        library: of the package's kernels there.
        launched: the kernels launched so far, in order, by their names in `metal_src/`.
    """

    def __init__(self, name: Literal["simulator", "metal"], make: Make) -> None:
        self.name = name
        self.make = make
        self.library = Library(partial(self._logged, make))
        self.launched: list[str] = []

    def run(self, function: Callable[..., Any], *arguments: Any, launches: Sequence[str], **options: Any) -> list[Any]:
        """The arrays of function(library, *arguments, **options) as numpy arrays; None is left out.

        The simulator runs it in both thread schedules, which must give the same bits. `launches`: the kernels that it
        must launch, and no others.
        """
        once = partial(self._once, partial(function, self.library, *arguments, **options), list(launches))
        if self.name == "metal":
            return once()
        with simulator.session(order="forward"):
            forward = once()
        with simulator.session(order="reversed"):
            backward = once()
        for first, second in zip(forward, backward, strict=True):
            assert first.tobytes() == second.tobytes(), "results depend on the order of threads"
        return forward

    def _once(self, function: Callable[[], Any], launches: list[str]) -> list[Array]:
        self.launched.clear()
        result = function()
        arrays = [result] if isinstance(result, mx.array) else [array for array in result if array is not None]
        mx.eval(arrays)
        assert self.launched == launches
        return [np.array(array) for array in arrays]

    def _logged(self, make: Make, **description: Any) -> Callable[..., list[mx.array]]:
        kernel = make(**description)

        def launch(**call: Any) -> Any:
            self.launched.append(description["name"].removeprefix("egemma_"))
            return kernel(**call)

        return launch


def over(kernels: Sequence[str], names: str, shapes: Iterable[Any]) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over shapes that these kernels meet."""
    shapes = list(shapes)
    for kernel in kernels:
        COVERED[kernel].update(shapes)
    return pytest.mark.parametrize(names, shapes, ids=_id)


def _id(value: Any) -> str | None:
    return "x".join(map(str, value)) if isinstance(value, tuple) else None


def error(got: Array, expected: NDArray[np.float64]) -> float:
    """max |got − expected| / max |expected|; NaN, which is within no tolerance, if anything is."""
    assert got.dtype == np.float32
    assert got.shape == expected.shape
    return float(np.abs(got.astype(np.float64) - expected).max() / np.abs(expected).max())


SIMULATOR = Executor("simulator", simulator.metal_kernel)
METAL = Executor("metal", mx.fast.metal_kernel)

simulated = pytest.mark.skipif(simulator.available() is not None, reason=f"simulator: {simulator.available()}")
executors = pytest.mark.parametrize(
    "executor",
    [
        pytest.param(SIMULATOR, id="simulator", marks=simulated),
        pytest.param(METAL, id="metal", marks=pytest.mark.skipif(not mx.metal.is_available(), reason="no Metal GPU")),
    ],
)
