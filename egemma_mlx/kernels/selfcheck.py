"""Each Metal kernel against float64 numpy on small inputs, before a model relies on it.

MLX builds a Metal library when a kernel is evaluated, so what does not compile would surface far from any fallback;
and no compiler but Apple's has the last word. `verified` evaluates every kernel there and then, at the widths of the
model, and puts the plain-MLX form where one fails.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from egemma_mlx.config import TextConfig
from egemma_mlx.kernels import OPS, Kernels, attention_metal, fused, gelu, linear, norm, pool, probe, qkv
from egemma_mlx.kernels.library import Library
from egemma_mlx.packing import Packed, pack

Floats = NDArray[np.float64]

TOLERANCE = 2e-5
"""Of the greatest expected magnitude."""

_EPS = 1e-6
_LENGTHS = (1, 0, 70, 4)
_ROWS = sum(_LENGTHS)
_WINDOW = 5
_FEW = (8, 16, _ROWS)


@dataclass(frozen=True)
class Heads:
    """One shape of attention."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Widths:
    """The widths that a model's pipelines are built for."""

    hidden: int
    inner: int
    ple: int
    attention: tuple[Heads, ...]

    @classmethod
    def of(cls, config: TextConfig) -> Widths:
        shapes = {Heads(layer.heads, layer.kv_heads, layer.head_dim) for layer in config.layers}
        ordered = tuple(sorted(shapes, key=lambda shape: shape.head_dim))
        return cls(config.hidden_size, config.intermediate_size, config.hidden_size_per_layer_input, ordered)


PUBLISHED = Widths(512, 2048, 512, (Heads(12, 12, 64), Heads(4, 2, 256), Heads(4, 1, 512)))
"""google/embeddinggemma-2: the vision tower's heads, and the sliding and full layers of the text model."""


@dataclass(frozen=True)
class Verdict:
    """What one kernel did.

    Attributes:
        kernel: its name in `metal_src/`, and the head_dim that it ran at where there are several.
        function: of `Kernels`, which it serves.
        error: max |got − float64| / max |float64|, or None when it did not run.
        problem: why it is not to be used, in one line, or None.
    """

    kernel: str
    function: str
    error: float | None
    problem: str | None


@dataclass(frozen=True)
class _Check:
    kernel: str
    function: str
    run: Callable[[], Sequence[mx.array | None]]
    expected: Sequence[Floats]


_Forms = dict[str, list[Callable[..., mx.array]]]
"""Of attention, by kernel: a function for each pipeline, of which lengths choose one."""

# Three kernels, checked as one.
_PRODUCTS: _Forms = {"attention_scores, softmax, attention_values": [attention_metal.product_attention]}

_FUSED = ("gated", "linear_gelu_mul", "linear_rms_norm", "linear_add_norm")

# A function's partner hands it what only the same form understands; fragments carry every matrix product; and what a
# fused product cannot do, it leaves to the simple ones.
_TOGETHER = {
    "qkv_prep": ("qkv_prep", "rope"),
    "attention": ("attention", "plan"),
    "fragment_probe": ("linear", "matmul", "attention", "plan", *_FUSED),
    "linear": ("linear", *_FUSED),
    "gelu_mul": ("gelu_mul", "gated"),
    "rms_norm": ("rms_norm", "linear_rms_norm"),
    "add_norm": ("add_norm", "linear_add_norm"),
}


def verified(kernels: Kernels, library: Library, widths: Widths) -> Kernels:
    """`kernels` with the plain-MLX form in place of each function whose kernel fails, and one warning that says so."""
    failed = [verdict for verdict in map(_verdict, _checks(library, widths)) if verdict.problem]
    if not failed:
        return kernels
    lines = "; ".join(f"{verdict.kernel} ({verdict.problem})" for verdict in failed)
    warnings.warn(f"plain MLX operations replace Metal kernels that failed their check: {lines}", stacklevel=3)
    names = {name for verdict in failed for name in _TOGETHER.get(verdict.function, (verdict.function,))}
    fallbacks: dict[str, Any] = {name: getattr(OPS, name) for name in names}
    return replace(kernels, **fallbacks)


def verdicts(library: Library, widths: Widths = PUBLISHED) -> list[Verdict]:
    """Run every kernel once on `library`, at these widths."""
    return [_verdict(check) for check in _every_check(library, widths)]


def launches(library: Library, widths: Widths = PUBLISHED) -> list[mx.array]:
    """What `verdicts` would evaluate, lazy: to be traced, which needs no GPU."""
    return [array for check in _every_check(library, widths) for array in check.run() if array is not None]


def _verdict(check: _Check) -> Verdict:
    try:
        got = list(check.run())
        mx.eval(got)
    except Exception as failure:  # whatever a driver or a compiler raises, the answer is the plain form
        line = (str(failure).strip() or type(failure).__name__).splitlines()[0]
        return Verdict(check.kernel, check.function, None, f"does not run: {line}")
    errors = [_error(np.array(array), expected) for array, expected in zip(got, check.expected, strict=True)]
    error = float(np.max(errors))  # NaN if one is
    problem = None if error <= TOLERANCE else f"is off by {error:.1e}"
    return Verdict(check.kernel, check.function, error, problem)


def _alone(function: Callable[..., mx.array], *arguments: Any, **options: Any) -> list[mx.array]:
    return [function(*arguments, **options)]


def _error(got: NDArray[Any], expected: Floats) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def _every_check(library: Library, widths: Widths) -> Iterator[_Check]:
    """Those of a model, and of the form of attention that no published shape takes."""
    yield from _checks(library, widths)
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal((_ROWS, heads, 72)).astype(np.float32) for heads in (2, 1, 1))
    yield from _attention_forms(library, 72, [mx.array(part) for part in (q / np.float32(8), k, v)], _PRODUCTS)


def _checks(library: Library, widths: Widths) -> Iterator[_Check]:
    random = np.random.default_rng(0)

    def rows(*shape: int) -> NDArray[np.float32]:
        return random.standard_normal(shape).astype(np.float32)

    def stored(*shape: int) -> mx.array:
        """A bfloat16 weight."""
        return mx.array(rows(*shape) * shape[-1] ** -0.5).astype(mx.bfloat16)

    yield _Check(
        "fragment_probe",
        "fragment_probe",
        lambda: [probe.metal_fragment_probe(library)],
        [_wide(probe.fragment_probe())],
    )
    yield from _products(library, widths, rows, stored)
    yield from _fused(library, widths, rows, stored)
    yield from _row_kernels(library, widths, rows, stored)
    for shape in widths.attention:
        yield from _attention(library, shape, rows, stored)


def _products(
    library: Library, widths: Widths, rows: Callable[..., Any], stored: Callable[..., Any]
) -> Iterator[_Check]:
    x = rows(_ROWS, widths.hidden)
    narrow = widths.attention[-1].kv_heads * widths.attention[-1].head_dim
    for suffix, sizes in (("", [narrow]), ("_3", [widths.hidden, narrow, 4])):
        weights = [stored(size, widths.hidden) for size in sizes]
        expected = [x.astype(np.float64) @ _wide(w).T for w in weights]
        run = partial(linear.metal_linear, library, mx.array(x), *weights)
        yield _Check(f"linear{suffix}", "linear", partial(run, short=False), expected)
        for few in _FEW:  # pipelines of their own
            run = partial(linear.metal_linear, library, mx.array(x[:few]), *weights, short=True)
            yield _Check(f"linear_short{suffix}", "linear", run, [y[:few] for y in expected])
    p, v = rows(_ROWS, 100), rows(100, widths.hidden)
    expected = [p.astype(np.float64) @ v.astype(np.float64)]
    yield _Check("matmul", "matmul", lambda: [linear.metal_matmul(library, mx.array(p), mx.array(v))], expected)


def _fused(library: Library, widths: Widths, rows: Callable[..., Any], stored: Callable[..., Any]) -> Iterator[_Check]:
    x, p, h = rows(_ROWS, widths.hidden), rows(_ROWS, widths.ple), rows(_ROWS, widths.hidden)
    x[0], h[0] = 1e-3 * x[0], 1e-3 * h[0]  # rows that eps matters to
    inputs = mx.array(x)
    gate, up, ple = (stored(width, widths.hidden) for width in (widths.inner, widths.inner, widths.ple))
    inner = _gelu(_wide(x) @ _wide(gate).T) * (_wide(x) @ _wide(up).T)
    gelu_p = _gelu(_wide(x) @ _wide(ple).T) * _wide(p)
    for suffix, few in (("", _ROWS), *(("_short", few) for few in _FEW)):
        part, short = inputs[:few], bool(suffix)
        run = partial(_alone, fused.metal_gated, library, part, gate, up, short=short)
        yield _Check(f"gated{suffix}", "gated", run, [inner[:few]])
        run = partial(_alone, fused.metal_linear_gelu_mul, library, part, ple, mx.array(p[:few]), short=short)
        yield _Check(f"linear_gelu_mul{suffix}", "linear_gelu_mul", run, [gelu_p[:few]])
    norm_w, next_w, post = stored(widths.hidden), stored(widths.hidden), stored(1)
    square = stored(widths.hidden, widths.hidden)
    normed = _rms(_wide(x) @ _wide(square).T) * _wide(norm_w)
    arrays = (library, inputs, square)
    run = partial(_alone, fused.metal_linear_rms_norm, *arrays, norm_w, eps=_EPS, short=False)
    yield _Check("linear_rms_norm", "linear_rms_norm", run, [normed])
    ended = (_wide(h) + normed) * _wide(post)
    end = partial(fused.metal_linear_add_norm, *arrays, mx.array(h), norm_w, eps=_EPS, post=post, short=False)
    yield _Check("linear_add_norm", "linear_add_norm", lambda: [end()[0]], [ended])
    expected = [ended, _rms(ended) * _wide(next_w)]
    yield _Check("linear_add_norm_next", "linear_add_norm", partial(end, next_w=next_w), expected)


def _row_kernels(
    library: Library, widths: Widths, rows: Callable[..., Any], stored: Callable[..., Any]
) -> Iterator[_Check]:
    x, y, g, u = (rows(_ROWS, width) for width in (widths.hidden, widths.hidden, widths.inner, widths.inner))
    x[0], y[0] = 1e-3 * x[0], 1e-3 * y[0]  # rows that eps matters to
    w, next_w, post = stored(widths.hidden), stored(widths.hidden), stored(1)
    yield _Check(
        "rms_norm",
        "rms_norm",
        lambda: [norm.metal_rms_norm(library, mx.array(x), w, eps=_EPS, pre=0.5)],
        [_rms(0.5 * _wide(x)) * _wide(w)],
    )
    h = (_wide(x) + _rms(_wide(y)) * _wide(w)) * _wide(post)
    arrays = (mx.array(x), mx.array(y), w)
    yield _Check("add_norm", "add_norm", lambda: [norm.metal_add_norm(library, *arrays, eps=_EPS, post=post)[0]], [h])
    yield _Check(
        "add_norm_next",
        "add_norm",
        partial(norm.metal_add_norm, library, *arrays, eps=_EPS, post=post, next_w=next_w),
        [h, _rms(h) * _wide(next_w)],
    )
    yield _Check(
        "gelu_mul",
        "gelu_mul",
        lambda: [gelu.metal_gelu_mul(library, mx.array(g), mx.array(u))],
        [_gelu(_wide(g)) * u],
    )
    packed = _packed()
    bounds = np.cumsum((0, *_LENGTHS))
    means = [_rms(_wide(x))[a:b].sum(axis=0) / max(b - a, 1) for a, b in pairwise(bounds)]
    yield _Check(
        "pool",
        "pool",
        lambda: [pool.metal_pool(library, mx.array(x), w, packed, eps=_EPS)],
        [np.stack(means) * _wide(w)],
    )


def _attention(
    library: Library, shape: Heads, rows: Callable[..., Any], stored: Callable[..., Any]
) -> Iterator[_Check]:
    packed, dim = _packed(), shape.head_dim
    x = [rows(_ROWS, heads * dim) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    raw_q, raw_k, raw_v = (mx.array(part) for part in x)
    q_w, k_w = stored(dim), stored(dim)
    table = qkv.rope_table(max(_LENGTHS), dim, 10000.0)
    angles = qkv.metal_rope(library, table, packed.positions)
    q, k, v = (_rms(_wide(part).reshape(_ROWS, -1, dim)) for part in x)
    prepared = [_rotated(q * _wide(q_w), table, packed), _rotated(k * _wide(k_w), table, packed), v]
    yield _Check(
        f"qkv_prep {dim}",
        "qkv_prep",
        partial(qkv.metal_qkv_prep, library, raw_q, raw_k, raw_v, q_w, k_w, angles, head_dim=dim, eps=_EPS),
        prepared,
    )
    inputs = [mx.array(part.astype(np.float32)) for part in prepared]
    yield from _attention_forms(library, dim, inputs, _forms(shape))


def _attention_forms(library: Library, dim: int, inputs: Sequence[mx.array], forms: _Forms) -> Iterator[_Check]:
    expected = _attended(*map(_wide, inputs), window=_WINDOW)
    for name, pipelines in forms.items():
        run = partial(_run_attention, pipelines, library, inputs)
        yield _Check(f"{name} {dim}", "attention", run, [expected] * len(pipelines))


def _run_attention(
    pipelines: Sequence[Callable[..., mx.array]], library: Library, inputs: Sequence[mx.array]
) -> list[mx.array]:
    plan = attention_metal.metal_plan(library, _packed(), _WINDOW)
    return [attend(library, *inputs, plan) for attend in pipelines]


def _forms(shape: Heads) -> _Forms:
    """The forms of attention that serve this shape."""
    if shape.head_dim <= attention_metal.FLASH_HEAD_DIM:
        return {
            name: [partial(attention_metal.flash_attention, staged=staged)]
            for name, staged in (("flash", False), ("flash_staged", True))
        }
    if attention_metal.splits(shape.heads, shape.kv_heads, shape.head_dim):
        choices = attention_metal.split_fragments(shape.head_dim)
        return {"flash_split": [partial(attention_metal.split_attention, fragments=n) for n in choices]}
    return _PRODUCTS


def _packed() -> Packed:
    return pack([np.zeros(length, np.int32) for length in _LENGTHS])


def _wide(array: Any) -> Floats:
    return np.array(array.astype(mx.float32) if isinstance(array, mx.array) else array).astype(np.float64)


def _rms(x: Floats) -> Floats:
    normed: Floats = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + _EPS)
    return normed


def _gelu(x: Floats) -> Floats:
    z = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    gelu: Floats = 0.5 * x * (1 + np.tanh(z))
    return gelu


def _rotated(x: Floats, table: qkv.Rope, packed: Packed) -> Floats:
    cos, sin = (_wide(angles)[np.array(packed.positions)][:, None] for angles in table)
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _attended(q: Floats, k: Floats, v: Floats, *, window: int) -> Floats:
    segment = np.repeat(np.arange(len(_LENGTHS)), _LENGTHS)
    row = np.arange(_ROWS)
    allowed = (segment[:, None] == segment) & (np.abs(row[:, None] - row) <= window)
    outputs = []
    for head in range(q.shape[1]):
        kv_head = head // (q.shape[1] // k.shape[1])
        scores = np.where(allowed, q[:, head] @ k[:, kv_head].T, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        outputs.append(weights / weights.sum(axis=-1, keepdims=True) @ v[:, kv_head])
    return np.concatenate(outputs, axis=-1)
