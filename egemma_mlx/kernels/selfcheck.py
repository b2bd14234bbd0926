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

from egemma_mlx.config import TextConfig, VisionConfig
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
    """One shape of attention, whose heads RoPE turns in so many sections."""

    heads: int
    kv_heads: int
    head_dim: int
    sections: int = 1


@dataclass(frozen=True)
class Tower:
    """The widths of layers without a per-layer embedding."""

    hidden: int
    inner: int
    attention: Heads


@dataclass(frozen=True)
class Widths:
    """The widths that a model's pipelines are built for: its text model's, and those of its vision tower if it runs."""

    hidden: int
    inner: int
    ple: int
    embedding: int
    attention: tuple[Heads, ...]
    vision: Tower | None = None

    @classmethod
    def of(cls, config: TextConfig, vision: VisionConfig | None = None) -> Widths:
        shapes = {Heads(layer.heads, layer.kv_heads, layer.head_dim) for layer in config.layers}
        ordered = tuple(sorted(shapes, key=lambda shape: shape.head_dim))
        tower = None if vision is None else _tower(vision)
        hidden, inner, ple = config.hidden_size, config.intermediate_size, config.hidden_size_per_layer_input
        return cls(hidden, inner, ple, config.embedding_dim, ordered, tower)


def _tower(config: VisionConfig) -> Tower:
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim, sections=2)
    return Tower(config.hidden_size, config.intermediate_size, heads)


PUBLISHED = Widths(
    512, 2048, 512, 768, (Heads(4, 2, 256), Heads(4, 1, 512)), Tower(768, 3072, Heads(12, 12, 64, sections=2))
)
"""google/embeddinggemma-2: the sliding and full layers of its text model, and its vision tower."""


@dataclass(frozen=True)
class Verdict:
    """What one kernel did.

    Attributes:
        kernel: its name in `metal_src/`, and the width of rows or heads that it ran at where there are several.
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

_FUSED = ("gated", "linear_gelu_mul", "linear_rms_norm", "linear_add_norm", "linear_unit")

# A function's partner hands it what only the same form understands; fragments carry every matrix product; and what a
# fused product cannot do, it leaves to the simple ones.
_TOGETHER = {
    "qkv_prep": ("qkv_prep", "rope"),
    "attention": ("attention", "plan"),
    "fragment_probe": ("linear", "matmul", "attention", "plan", *_FUSED),
    "linear": ("linear", *_FUSED),
    "gelu_mul": ("gelu_mul", "gated"),
    "rms_norm": ("rms_norm", "linear_rms_norm", "linear_unit"),
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


def _first(function: Callable[..., Any], **options: Any) -> list[mx.array]:
    return [function(**options)[0]]


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
    narrow = widths.attention[-1].kv_heads * widths.attention[-1].head_dim
    yield from _products(library, widths.hidden, narrow, rows, stored)
    yield from _gated(library, widths.hidden, widths.inner, rows, stored)
    yield from _ple(library, widths, rows, stored)
    yield from _ends(library, widths.hidden, stored(1), rows, stored)
    yield from _row_kernels(library, widths, rows, stored)
    for shape in widths.attention:
        yield from _attention(library, shape, rows, stored)
    if widths.vision is not None:
        yield from _vision(library, widths.vision, rows, stored)


def _vision(library: Library, tower: Tower, rows: Callable[..., Any], stored: Callable[..., Any]) -> Iterator[_Check]:
    """What a tower runs, at its widths."""
    hidden, x = tower.hidden, rows(_ROWS, tower.hidden)
    unweighted = partial(_alone, norm.metal_rms_norm, library, mx.array(x), None, eps=_EPS)
    by_row = (
        *_products(library, hidden, hidden, rows, stored),
        *_products(library, tower.inner, hidden, rows, stored),
        *_gated(library, hidden, tower.inner, rows, stored),
        *_ends(library, hidden, None, rows, stored),
        _Check("rms_norm", "rms_norm", unweighted, [_rms(_wide(x))]),
    )
    for check in by_row:
        yield replace(check, kernel=f"{check.kernel} {hidden}")
    yield from _attention(library, tower.attention, rows, stored)


def _products(
    library: Library, width: int, narrow: int, rows: Callable[..., Any], stored: Callable[..., Any]
) -> Iterator[_Check]:
    x = rows(_ROWS, width)
    for suffix, sizes in (("", [narrow]), ("_3", [width, narrow, 4])):
        weights = [stored(size, width) for size in sizes]
        expected = [x.astype(np.float64) @ _wide(w).T for w in weights]
        run = partial(linear.metal_linear, library, mx.array(x), *weights)
        yield _Check(f"linear{suffix}", "linear", partial(run, short=False), expected)
        for few in _FEW:  # pipelines of their own
            run = partial(linear.metal_linear, library, mx.array(x[:few]), *weights, short=True)
            yield _Check(f"linear_short{suffix}", "linear", run, [y[:few] for y in expected])


def _gated(
    library: Library, hidden: int, width: int, rows: Callable[..., Any], stored: Callable[..., Any]
) -> Iterator[_Check]:
    x = rows(_ROWS, hidden)
    gate, up = stored(width, hidden), stored(width, hidden)
    inner = _gelu(_wide(x) @ _wide(gate).T) * (_wide(x) @ _wide(up).T)
    for suffix, few in (("", _ROWS), *(("_short", few) for few in _FEW)):
        run = partial(_alone, fused.metal_gated, library, mx.array(x[:few]), gate, up, short=bool(suffix))
        yield _Check(f"gated{suffix}", "gated", run, [inner[:few]])


def _ple(library: Library, widths: Widths, rows: Callable[..., Any], stored: Callable[..., Any]) -> Iterator[_Check]:
    x, p = rows(_ROWS, widths.hidden), rows(_ROWS, widths.ple)
    x[0] *= 1e-3  # a row that eps matters to
    inputs, ple = mx.array(x), stored(widths.ple, widths.hidden)
    gelu_p = _gelu(_wide(x) @ _wide(ple).T) * _wide(p)
    for suffix, few in (("", _ROWS), *(("_short", few) for few in _FEW)):
        part, short = inputs[:few], bool(suffix)
        run = partial(_alone, fused.metal_linear_gelu_mul, library, part, ple, mx.array(p[:few]), short=short)
        yield _Check(f"linear_gelu_mul{suffix}", "linear_gelu_mul", run, [gelu_p[:few]])
    square, norm_w = stored(widths.hidden, widths.hidden), stored(widths.hidden)
    run = partial(_alone, fused.metal_linear_rms_norm, library, inputs, square, norm_w, eps=_EPS, short=False)
    yield _Check("linear_rms_norm", "linear_rms_norm", run, [_rms(_wide(x) @ _wide(square).T) * _wide(norm_w)])


def _ends(
    library: Library,
    width: int,
    post: mx.array | None,
    rows: Callable[..., Any],
    stored: Callable[..., Any],
) -> Iterator[_Check]:
    """Residual blocks end, in a product or after it, and a norm begins the next; `post` as the layers have it."""
    x, h = rows(_ROWS, width), rows(_ROWS, width)
    x[0], h[0] = 1e-3 * x[0], 1e-3 * h[0]  # rows that eps matters to
    square, w, next_w = stored(width, width), stored(width), stored(width)
    inputs, residual, scale = mx.array(x), mx.array(h), 1 if post is None else _wide(post)
    run = partial(_alone, norm.metal_rms_norm, library, inputs, w, eps=_EPS, pre=0.5)
    yield _Check("rms_norm", "rms_norm", run, [_rms(0.5 * _wide(x)) * _wide(w)])
    product = partial(fused.metal_linear_add_norm, library, inputs, square, residual, w, short=False)
    ends = {"linear_add_norm": (product, _wide(x) @ _wide(square).T)}
    ends["add_norm"] = (partial(norm.metal_add_norm, library, residual, inputs, w), _wide(x))
    for name, (end, y) in ends.items():
        ended = (_wide(h) + _rms(y) * _wide(w)) * scale
        yield _Check(name, name, partial(_first, end, eps=_EPS, post=post), [ended])
        both = partial(end, eps=_EPS, post=post, next_w=next_w)
        yield _Check(f"{name}_next", name, both, [ended, _rms(ended) * _wide(next_w)])


def _row_kernels(
    library: Library, widths: Widths, rows: Callable[..., Any], stored: Callable[..., Any]
) -> Iterator[_Check]:
    p, v = rows(_ROWS, 100), rows(100, widths.hidden)
    expected = [p.astype(np.float64) @ v.astype(np.float64)]
    yield _Check("matmul", "matmul", lambda: [linear.metal_matmul(library, mx.array(p), mx.array(v))], expected)
    x, g, u = (rows(_ROWS, width) for width in (widths.hidden, widths.inner, widths.inner))
    yield _Check(
        "gelu_mul",
        "gelu_mul",
        lambda: [gelu.metal_gelu_mul(library, mx.array(g), mx.array(u))],
        [_gelu(_wide(g)) * u],
    )
    w, packed = stored(widths.hidden), _packed()
    bounds = np.cumsum((0, *_LENGTHS))
    means = [_rms(_wide(x))[a:b].sum(axis=0) / max(b - a, 1) for a, b in pairwise(bounds)]
    yield _Check(
        "pool",
        "pool",
        lambda: [pool.metal_pool(library, mx.array(x), w, packed, eps=_EPS)],
        [np.stack(means) * _wide(w)],
    )
    x[1] = 0  # as a segment without a token
    projection = stored(widths.embedding, widths.hidden)
    y = _wide(x) @ _wide(projection).T
    vectors = [y, y / np.maximum(np.linalg.norm(y, axis=-1, keepdims=True), 1e-12)]
    for name, short in (("linear_unit", False), (f"rms_norm {widths.embedding}", True)):
        run = partial(fused.metal_linear_unit, library, mx.array(x), projection, short=short)
        yield _Check(name, "linear_unit", run, vectors)


def _attention(
    library: Library, shape: Heads, rows: Callable[..., Any], stored: Callable[..., Any]
) -> Iterator[_Check]:
    packed, dim = _packed(), shape.head_dim
    x = [rows(_ROWS, heads * dim) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    raw_q, raw_k, raw_v = (mx.array(part) for part in x)
    q_w, k_w = stored(dim), stored(dim)
    section = dim // shape.sections
    table = qkv.rope_table(max(_LENGTHS), section, 10000.0)
    # Columns that differ, so that a section by the wrong one shows.
    places = np.stack([np.array(packed.positions) // (column + 1) for column in range(shape.sections)], axis=1)
    angles = qkv.metal_rope(library, table, mx.array(places))
    q, k, v = (_rms(_wide(part).reshape(_ROWS, -1, dim)) for part in x)
    prepared = [_rotated(q * _wide(q_w), table, places), _rotated(k * _wide(k_w), table, places), v]
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


def _rotated(x: Floats, table: qkv.Rope, positions: NDArray[np.int32]) -> Floats:
    parts = []
    for part, places in zip(np.split(x, positions.shape[1], axis=-1), positions.T, strict=True):
        cos, sin = (_wide(angles)[places][:, None] for angles in table)
        low, high = np.split(part, 2, axis=-1)
        parts += [low * cos - high * sin, high * cos + low * sin]
    return np.concatenate(parts, axis=-1)


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
