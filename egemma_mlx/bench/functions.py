"""The kernel functions of one forward, each timed alone on the arrays that the forward hands it.

FLOPs are those that the result needs (attention: the pairs within the window), bytes those of the arrays that go in and
come out, each once: achieved figures that no kernel can push up by working more.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from egemma_mlx.bench.ceilings import seconds
from egemma_mlx.bench.workloads import Ids
from egemma_mlx.models.encoder import EmbeddingGemma2
from egemma_mlx.packing import pack

# Where the weights of a product are among its arguments; x comes first.
_WEIGHTS = {
    "linear": slice(1, None),
    "gated": slice(1, 3),
    "linear_gelu_mul": slice(1, 2),
    "linear_rms_norm": slice(1, 2),
    "linear_add_norm": slice(1, 2),
    "linear_unit": slice(1, 2),
}
_ROUNDS = 5
# A round evaluates as many calls as take so long together, within this memory.
_ROUND_SECONDS, _MOST_CALLS, _MOST_BYTES = 0.02, 64, 1 << 30


@dataclass(frozen=True)
class FunctionTime:
    """One kernel function on one set of shapes.

    Attributes:
        shapes: of its arrays.
        calls: in the forward.
        ms: median milliseconds of one call.
        share: of the time of all calls of all functions.
        tflops: needed FLOPs by that time; None for functions without products.
        gbps: bytes of arguments and results by that time.
    """

    function: str
    shapes: str
    calls: int
    ms: float
    share: float
    tflops: float | None
    gbps: float


@dataclass
class _Call:
    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    pairs: int = 0
    count: int = 0

    def __call__(self) -> list[mx.array]:
        return _arrays(self.function(*self.arguments, **self.options))

    @property
    def inputs(self) -> list[mx.array]:
        """Its arrays, without the tables of a batch or plan."""
        return [x for x in (*self.arguments, *self.options.values()) if isinstance(x, mx.array)]

    @property
    def shapes(self) -> str:
        return " ".join("×".join(map(str, array.shape)) for array in self.inputs)

    @property
    def flops(self) -> int | None:
        if self.name == "attention":
            _, heads, head_dim = self.arguments[0].shape
            return 4 * heads * head_dim * self.pairs
        if self.name in _WEIGHTS:
            return 2 * self.arguments[0].shape[0] * sum(w.size for w in self.arguments[_WEIGHTS[self.name]])
        return None


def function_times(model: EmbeddingGemma2, texts: Sequence[Ids]) -> list[FunctionTime]:
    """Every kernel function of one forward of these texts, longest first."""
    measured = [(call, *_measured(call)) for call in _calls(model, texts)]
    total = sum(call.count * spent for call, spent, _ in measured)
    return [
        FunctionTime(
            function=call.name,
            shapes=call.shapes,
            calls=call.count,
            ms=spent * 1e3,
            share=call.count * spent / total,
            tflops=None if call.flops is None else call.flops / spent / 1e12,
            gbps=moved / spent / 1e9,
        )
        for call, spent, moved in sorted(measured, key=lambda entry: -entry[0].count * entry[1])
    ]


def pairs(lengths: Sequence[int], window: int | None) -> int:
    """Pairs of tokens that attend to each other: all of each text, or those at most `window` apart."""
    reaches = [length - 1 if window is None else min(window, length - 1) for length in lengths]
    return sum(
        length + 2 * reach * length - reach * (reach + 1) for length, reach in zip(lengths, reaches, strict=True)
    )


def _calls(model: EmbeddingGemma2, texts: Sequence[Ids]) -> list[_Call]:
    """The distinct calls of a forward, in the order of their first."""
    found: dict[tuple[str, str], _Call] = {}
    windows: dict[int, int | None] = {}
    lengths = [len(text) for text in texts]

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            mx.eval(_arrays([arguments, options]))
            call = _Call(name, function, arguments, options)
            result = function(*arguments, **options)
            if name == "plan":
                windows[id(result)] = arguments[1]
            if name == "attention":
                call.pairs = pairs(lengths, windows[id(arguments[3])])
            found.setdefault((name, call.shapes + f" {call.pairs}"), call).count += 1
            return result

        return run

    packed = pack(texts)
    kernels = model.kernels.of(packed)
    spies: dict[str, Any] = {name: recorded(name, function) for name, function in kernels.functions().items()}
    twin = EmbeddingGemma2(model.config, replace(kernels, **spies, exact=None), model.compiled)
    twin.update(model.parameters())
    twin._compiled = twin._traced  # the batch as the compiled forward takes it, yet of arrays that can be kept
    mx.eval(twin.pooled(packed))
    return [call for call in found.values() if call()]  # a plan that the host makes is no array


def _measured(call: _Call) -> tuple[float, int]:
    """Median seconds of a call, and the bytes of its arrays."""
    outputs = call()
    mx.eval(outputs)
    results = sum(array.nbytes for array in outputs)
    moved = results + sum(array.nbytes for array in call.inputs)
    del outputs
    repeats = max(min(int(_ROUND_SECONDS / seconds(call)), _MOST_CALLS, _MOST_BYTES // max(results, 1)), 1)
    return statistics.median(seconds(call, repeats) for _ in range(_ROUNDS)), moved


def _arrays(tree: Any) -> list[mx.array]:
    return [leaf for _, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)]
