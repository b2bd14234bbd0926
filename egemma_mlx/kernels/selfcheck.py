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
from egemma_mlx.kernels import OPS, Kernels, attention_metal, gelu, linear, norm, pool, probe, qkv
from egemma_mlx.kernels.library import Library
from egemma_mlx.packing import Packed, pack

Floats = NDArray[np.float64]

TOLERANCE = 2e-5
"""Of the greatest expected magnitude."""

_EPS = 1e-6
_LENGTHS = (1, 0, 70, 4)
_ROWS = sum(_LENGTHS)
_WINDOW = 5


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


# A function's partner hands it what only the same form understands; fragments carry every matrix product.
_TOGETHER = {
    "qkv_prep": ("qkv_prep", "rope"),
    "attention": ("attention", "plan"),
    "fragment_probe": ("linear", "matmul", "attention", "plan"),
}


def verified(kernels: Kernels, library: Library, widths: Widths) -> Kernels:
    """`kernels` with the plain-MLX form in place of each function whose kernel fails, and one warning that says so."""
    failed = [verdict for verdict in verdicts(library, widths) if verdict.problem]
    if not failed:
        return kernels
    lines = "; ".join(f"{verdict.kernel} ({verdict.problem})" for verdict in failed)
    warnings.warn(f"plain MLX operations replace Metal kernels that failed their check: {lines}", stacklevel=3)
    names = {name for verdict in failed for name in _TOGETHER.get(verdict.function, (verdict.function,))}
    fallbacks: dict[str, Any] = {name: getattr(OPS, name) for name in names}
    return replace(kernels, **fallbacks)


def verdicts(library: Library, widths: Widths = PUBLISHED) -> list[Verdict]:
    """Run every kernel once on `library`, at these widths."""
    return [_verdict(check) for check in _checks(library, widths)]


def launches(library: Library, widths: Widths = PUBLISHED) -> list[mx.array]:
    """What `verdicts` would evaluate, lazy: to be traced, which needs no GPU."""
    return [array for check in _checks(library, widths) for array in check.run() if array is not None]


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


def _error(got: NDArray[Any], expected: Floats) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


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
    yield from _row_kernels(library, widths, rows, stored)
    for shape in widths.attention:
        yield from _attention(library, shape, rows, stored)


def _products(
    library: Library, widths: Widths, rows: Callable[..., Any], stored: Callable[..., Any]
) -> Iterator[_Check]:
    x = rows(_ROWS, widths.hidden)
    narrow = widths.attention[-1].kv_heads * widths.attention[-1].head_dim
    for name, sizes in (
        ("linear", [narrow]),
        ("linear_2", [widths.inner] * 2),
        ("linear_3", [widths.hidden, narrow, 4]),
    ):
        weights = [stored(size, widths.hidden) for size in sizes]
        expected = [x.astype(np.float64) @ _wide(w).T for w in weights]
        yield _Check(name, "linear", partial(linear.metal_linear, library, mx.array(x), *weights), expected)
    p, v = rows(_ROWS, 100), rows(100, widths.hidden)
    expected = [p.astype(np.float64) @ v.astype(np.float64)]
    yield _Check("matmul", "matmul", lambda: [linear.metal_matmul(library, mx.array(p), mx.array(v))], expected)


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
    wide = _wide(g)
    z = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
    yield _Check(
        "gelu_mul",
        "gelu_mul",
        lambda: [gelu.metal_gelu_mul(library, mx.array(g), mx.array(u))],
        [0.5 * wide * (1 + np.tanh(z)) * u],
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
    expected = [_attended(*map(_wide, inputs), window=_WINDOW)]
    for name, form in _forms(dim):
        yield _Check(
            f"{name} {dim}",
            "attention",
            partial(_run_attention, form, library, inputs, packed),
            expected,
        )


def _run_attention(
    form: Callable[..., mx.array], library: Library, inputs: Sequence[mx.array], packed: Packed
) -> list[mx.array]:
    return [form(library, *inputs, attention_metal.metal_plan(library, packed, _WINDOW))]


def _forms(head_dim: int) -> list[tuple[str, Callable[..., mx.array]]]:
    """The forms of attention that serve this width; the three kernels of the products are checked as one."""
    if head_dim > attention_metal.FLASH_HEAD_DIM:
        return [("attention_scores, softmax, attention_values", attention_metal.product_attention)]
    return [
        ("flash", partial(attention_metal.flash_attention, staged=False)),
        ("flash_staged", partial(attention_metal.flash_attention, staged=True)),
    ]


def _packed() -> Packed:
    return pack([np.zeros(length, np.int32) for length in _LENGTHS])


def _wide(array: Any) -> Floats:
    return np.array(array.astype(mx.float32) if isinstance(array, mx.array) else array).astype(np.float64)


def _rms(x: Floats) -> Floats:
    normed: Floats = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + _EPS)
    return normed


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
