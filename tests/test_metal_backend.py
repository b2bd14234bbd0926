"""Around the Metal kernels: which run, what they refuse, when they are rebuilt, and what replaces a wrong one."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from executors import COVERED, SIMULATOR, TOLERANCE, Executor, error, executors, simulated
from test_kernels import EPS, normal, texts, weight

from egemma_mlx.config import Config
from egemma_mlx.errors import EgemmaError
from egemma_mlx.kernels import OPS, Kernels, attention, backend, fused, linear, metal_kernels
from egemma_mlx.kernels.attention_metal import (
    Bounds,
    flash_attention,
    metal_plan,
    product_attention,
    split_attention,
    split_fragments,
)
from egemma_mlx.kernels.library import Library, source_folder
from egemma_mlx.kernels.probe import metal_fragment_probe
from egemma_mlx.kernels.qkv import Rope, rope_table
from egemma_mlx.kernels.selfcheck import PUBLISHED, Heads, Tower, Widths, verdicts, verified
from egemma_mlx.packing import Packed
from egemma_mlx.random_checkpoint import _config
from egemma_mlx.simulator import calls

KERNELS = {file.stem for file in source_folder().glob("*.metal")}


def test_every_kernel_meets_at_least_20_shapes() -> None:
    import test_metal_fused  # noqa: F401  all declare theirs as they are imported
    import test_metal_kernels  # noqa: F401
    import test_metal_segments  # noqa: F401

    assert {*COVERED, "fragment_probe"} == KERNELS  # a probe has no shape
    assert {kernel: len(shapes) for kernel, shapes in COVERED.items() if len(shapes) < 20} == {}


# --- pipelines -------------------------------------------------------------------------------------------------------


def in_both_forms(function: Callable[[], list[mx.array]]) -> list[mx.array]:
    """What it returns where products take the form for many rows, then where they take that for few."""
    outputs = []
    for rows in (0, 1 << 30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(linear, "SHORT", rows)
            patch.setattr(fused, "FEW_SEGMENTS", rows)
            outputs += function()
    return outputs


def forward(kernels: Kernels, packed: Packed, width: int = 64) -> list[mx.array]:
    """Every function of a set once, each on fixed inputs."""
    rows = packed.rows
    x, y = (mx.array(normal(i, rows, width)) for i in range(2))
    w, next_w = (mx.array(weight(i, width)) for i in (3, 4))
    weights = [mx.array(normal(5 + i, n, width, scale=width**-0.5)) for i, n in enumerate((2 * width, 4, 68, width))]
    square = weights[3]
    outputs = [
        kernels.rms_norm(x, w, eps=EPS),
        *kernels.add_norm(x, y, w, eps=EPS, next_w=next_w),
        kernels.add_norm(x, y, w, eps=EPS)[0],
        kernels.gelu_mul(x, y),
        kernels.matmul(x, weights[0].T),
        kernels.pool(x, w, packed, eps=EPS),
        kernels.gated(x, square, square[::-1]),
        kernels.linear_gelu_mul(x, square, y),
        kernels.linear_rms_norm(x, square, w, eps=EPS),
        *kernels.linear_add_norm(x, square, y, w, eps=EPS, next_w=next_w),
        kernels.linear_add_norm(x, square, y, w, eps=EPS)[0],
        *kernels.linear_unit(x, weights[2]),
    ]
    for count in (1, 2, 3):
        outputs += kernels.linear(x, *weights[:count])
    for head_dim, window in ((16, 5), (16, None), (136, 5)):
        heads = [mx.array(normal(8 + i, rows, n * head_dim)) for i, n in enumerate((2, 1, 1))]
        angles = kernels.rope(rope_table(packed.reach, head_dim, 1e4), packed.positions)
        norms = [mx.array(weight(i, head_dim) * np.float32(head_dim**-0.25)) for i in (11, 12)]
        q, k, v = kernels.qkv_prep(*heads, *norms, angles, head_dim=head_dim, eps=EPS)
        outputs += [q, k, v, kernels.attention(q, k, v, kernels.plan(packed, window))]
    return outputs


def pipelines(packed: Packed, width: int = 64) -> dict[str, set[str]]:
    """The texts that MLX would compile for each kernel, which it says without a GPU."""
    library, rows = Library(mx.fast.metal_kernel), packed.rows

    def launch() -> list[mx.array]:
        (q, k), (wide_q, wide_k) = ([mx.zeros((rows, n, dim)) for n in (2, 1)] for dim in (16, 256))
        plan = metal_plan(library, packed, 5)
        flash = [flash_attention(library, q, k, k, plan, staged=staged) for staged in (False, True)]
        split = [
            split_attention(library, wide_q, wide_k, wide_k, plan, fragments=fragments)
            for fragments in split_fragments(256)
        ]
        rounds = product_attention(library, q, k, k, plan, score_bytes=1)
        kernels = metal_kernels(library, "metal")
        whole = in_both_forms(lambda: forward(kernels, packed, width))
        return [*whole, *flash, *split, rounds, metal_fragment_probe(library)]

    found: dict[str, set[str]] = {}
    for call in calls(launch):
        (kernel,) = re.findall(r'#line 1 "(\w+)\.metal"', call.source)
        found.setdefault(kernel, set()).add(call.source)
    return found


def test_a_pipeline_serves_every_length() -> None:
    few = pipelines(texts(9, 0, 31, 5).padded(48, 8))
    assert set(few) == KERNELS
    for packed in (texts(300, 1, 2, 3), texts(*[1] * 600), texts(8, 8).padded(1024, 128)):
        assert pipelines(packed) == few


def test_products_for_few_rows_have_three_pipelines() -> None:
    """By 8, 16 or 32 rows a threadgroup; with two weights in each, 32 would not fit."""
    short = {"linear_short", "linear_short_3", "gated_short", "linear_gelu_mul_short"}
    eight, sixteen, more = (pipelines(texts(rows)) for rows in (8, 16, 17))
    assert {kernel for kernel in KERNELS if eight[kernel] != sixteen[kernel]} == short
    assert {kernel for kernel in KERNELS if sixteen[kernel] != more[kernel]} == short - {"gated_short"}
    assert pipelines(texts(9)) == sixteen


def test_a_pipeline_is_of_a_width() -> None:
    """So that the test above would notice a length in a text: these keep rows of their width in registers."""
    packed = texts(9, 0, 31, 5)
    narrow, wide = pipelines(packed, 64), pipelines(packed, 68)
    differ = {kernel for kernel in KERNELS if narrow[kernel] != wide[kernel]}
    assert differ == {"rms_norm", "add_norm", "add_norm_next", "pool", "linear_unit"}


# --- bad input -------------------------------------------------------------------------------------------------------


def launched(**_: Any) -> Any:
    raise AssertionError("a kernel was launched")


SETS = {"ops": OPS, "metal": metal_kernels(Library(launched), "metal")}
X, W = mx.zeros((6, 512)), mx.zeros((512,))
HALF, LONG = mx.float16, mx.int64
BATCH = texts(4, 2)
TABLE = rope_table(8, 16, 1e4)
Q, K = mx.zeros((6, 2, 16)), mx.zeros((6, 1, 16))
FLAT_Q, FLAT_K = Q.flatten(1), K.flatten(1)
PLANS: dict[str, Any] = {
    "ops": attention.plan(BATCH, 5),
    "metal": Bounds(mx.zeros((6, 2), mx.int32), BATCH.positions, 5, 4),
}


def batch(positions: mx.array = BATCH.positions, segments: mx.array = BATCH.segments) -> Packed:
    return Packed(BATCH.tokens, positions, segments, None, False, 4, 4)


def prepare(
    kernels: Kernels,
    q: mx.array = FLAT_Q,
    k: mx.array = FLAT_K,
    v: mx.array | None = None,
    q_w: mx.array = W[:16],
    k_w: mx.array = W[:16],
    *,
    table: Rope = TABLE,
    positions: mx.array = BATCH.positions,
) -> Any:
    angles = kernels.rope(table, positions)
    return kernels.qkv_prep(q, k, k if v is None else v, q_w, k_w, angles, head_dim=16, eps=EPS)


def attend(kernels: Kernels, q: mx.array = Q, k: mx.array = K, v: mx.array = K) -> Any:
    return kernels.attention(q, k, v, PLANS[kernels.name])


# What the message says of it, and the call.
BAD: dict[str, Callable[[Kernels], Any]] = {
    "[linear] expected x of shape (T, K) but got (512,)": lambda k: k.linear(W, mx.zeros((4, 512))),
    "[linear] expected x of dtype float32 but got float16": lambda k: k.linear(X.astype(HALF), mx.zeros((4, 512))),
    "[linear] expected w of shape (M, 512) but got (4, 3)": lambda k: k.linear(X, mx.zeros((4, 3))),
    "[linear] expected w of shape (M, 512) but got (512,)": lambda k: k.linear(X, mx.zeros((4, 512)), W),
    "[linear] expected w of dtype float32 or bfloat16 but got float16": lambda k: k.linear(X, X, X.astype(HALF)),
    "[matmul] expected p of shape (T, K) but got (512,)": lambda k: k.matmul(W, X),
    "[matmul] expected p of dtype float32 but got bfloat16": lambda k: k.matmul(X.astype(mx.bfloat16), X.T),
    "[matmul] expected v of shape (512, M) but got (6, 512)": lambda k: k.matmul(X, X),
    "[matmul] expected v of dtype float32 but got int32": lambda k: k.matmul(X, X.T.astype(mx.int32)),
    "[rms_norm] expected x of dtype float32 but got float16": lambda k: k.rms_norm(X.astype(HALF), W, eps=EPS),
    "[rms_norm] expected w of shape (512,) but got (64,)": lambda k: k.rms_norm(X, W[:64], eps=EPS),
    "[rms_norm] expected w of shape (512,) but got (1, 512)": lambda k: k.rms_norm(X, W[None], eps=EPS),
    "[rms_norm] expected w of dtype float32 or bfloat16 but got float16": lambda k: k.rms_norm(
        X, W.astype(HALF), eps=EPS
    ),
    "[add_norm] expected h of shape (T, D) but got (1, 6, 512)": lambda k: k.add_norm(X[None], X[None], W, eps=EPS),
    "[add_norm] expected h of dtype float32 but got float16": lambda k: k.add_norm(X.astype(HALF), X, W, eps=EPS),
    "[add_norm] expected y of shape (6, 512) but got (5, 512)": lambda k: k.add_norm(X, X[1:], W, eps=EPS),
    "[add_norm] expected y of dtype float32 but got bfloat16": lambda k: k.add_norm(
        X, X.astype(mx.bfloat16), W, eps=EPS
    ),
    "[add_norm] expected w of shape (512,) but got (511,)": lambda k: k.add_norm(X, X, W[1:], eps=EPS),
    "[add_norm] expected post of shape (1,) but got (2,)": lambda k: k.add_norm(X, X, W, eps=EPS, post=W[:2]),
    "[add_norm] expected post of dtype float32 or bfloat16 but got int32": lambda k: k.add_norm(
        X, X, W, eps=EPS, post=mx.array([1])
    ),
    "[add_norm] expected next_w of shape (512,) but got (6, 512)": lambda k: k.add_norm(X, X, W, eps=EPS, next_w=X),
    "[gelu_mul] expected g of dtype float32 but got float16": lambda k: k.gelu_mul(X.astype(HALF), X),
    "[gelu_mul] expected u of shape (6, 512) but got (6, 256)": lambda k: k.gelu_mul(X, X[:, :256]),
    "[gelu_mul] expected u of dtype float32 but got bfloat16": lambda k: k.gelu_mul(X, X.astype(mx.bfloat16)),
    "[rope] expected cos of shape (positions, section/2) but got (8,)": lambda k: k.rope(
        Rope(TABLE.cos[:, 0], TABLE.sin[:, 0]), BATCH.positions
    ),
    "[rope] expected sin of shape (8, 8) but got (7, 8)": lambda k: k.rope(
        Rope(TABLE.cos, TABLE.sin[1:]), BATCH.positions
    ),
    "[rope] expected positions of dtype int32 but got int64": lambda k: k.rope(TABLE, BATCH.positions.astype(LONG)),
    "[rope] expected positions of shape (T, sections) but got (6, 1, 1)": lambda k: k.rope(
        TABLE, BATCH.positions[:, None, None]
    ),
    "[qkv_prep] expected q of shape (T, heads·head_dim) but got (6, 2, 16)": lambda k: prepare(k, Q),
    "[qkv_prep] expected q of dtype float32 but got float16": lambda k: prepare(k, FLAT_Q.astype(HALF)),
    "[qkv_prep] expected k of shape (6, kv_heads·head_dim) but got (5, 16)": lambda k: prepare(k, k=FLAT_K[1:]),
    "[qkv_prep] expected v of shape (6, 16) but got (6, 32)": lambda k: prepare(k, v=FLAT_Q),
    "[qkv_prep] expected q_w of shape (16,) but got (8,)": lambda k: prepare(k, q_w=W[:8]),
    "[qkv_prep] expected k_w of dtype float32 or bfloat16 but got int32": lambda k: prepare(
        k, k_w=mx.ones((16,), mx.int32)
    ),
    "[qkv_prep] expected the width of q to be a multiple of 16 but got 24": lambda k: prepare(k, X[:, :24]),
    "[qkv_prep] expected the width of k to be a multiple of 16 but got 24": lambda k: prepare(k, k=X[:, :24]),
    "[attention] expected segments of shape (S, 2) but got (2, 3)": lambda k: k.plan(
        batch(segments=mx.zeros((2, 3), mx.int32)), None
    ),
    "[attention] expected segments of dtype int32 but got int64": lambda k: k.plan(
        batch(segments=BATCH.segments.astype(LONG)), 5
    ),
    "[attention] expected positions of shape (6,) but got (5,)": lambda k: k.plan(batch(BATCH.positions[1:]), 5),
    "[attention] expected positions of dtype int32 but got float32": lambda k: k.plan(batch(X[:, 0]), 5),
    "[attention] expected k of shape (6, kv_heads, 16) but got (6, 1, 8)": lambda k: attend(k, k=K[..., :8]),
    "[attention] expected k of dtype float32 but got float16": lambda k: attend(k, k=K.astype(HALF)),
    "[attention] expected v of shape (6, 1, 16) but got (6, 2, 16)": lambda k: attend(k, v=Q),
    "[attention] expected heads to be a multiple of 2 but got 1": lambda k: attend(k, K, Q, Q),
    "[pool] expected h of shape (6, D) but got (5, 512)": lambda k: k.pool(X[1:], W, BATCH, eps=EPS),
    "[pool] expected h of dtype float32 but got float16": lambda k: k.pool(X.astype(HALF), W, BATCH, eps=EPS),
    "[pool] expected w of shape (512,) but got (4,)": lambda k: k.pool(X, W[:4], BATCH, eps=EPS),
    "[pool] expected positions of shape (6,) but got (5,)": lambda k: k.pool(X, W, batch(BATCH.positions[1:]), eps=EPS),
    "[pool] expected segments of shape (S, 2) but got (4,)": lambda k: k.pool(
        X, W, batch(segments=BATCH.segments.flatten()), eps=EPS
    ),
    "[pool] expected segments of dtype int32 but got float32": lambda k: k.pool(
        X, W, batch(segments=mx.zeros((2, 2))), eps=EPS
    ),
}
N = mx.zeros((4, 512))
FUSED = ("gated", "linear_gelu_mul", "linear_rms_norm", "linear_add_norm", "linear_unit")


def end(kernels: Kernels, h: mx.array = X[:, :4], norm_w: mx.array = W[:4], **options: mx.array) -> Any:
    return kernels.linear_add_norm(X, N, h, norm_w, eps=EPS, **options)


def fuse(kernels: Kernels, name: str, x: mx.array, w: mx.array) -> Any:
    """x·wᵀ in one of the fused functions, whose other arrays fit."""
    rows, columns = x.shape[0], w.shape[0]
    others: dict[str, tuple[mx.array, ...]] = {
        "gated": (w,),
        "linear_gelu_mul": (mx.zeros((rows, columns)),),
        "linear_rms_norm": (W[:columns],),
        "linear_add_norm": (mx.zeros((rows, columns)), W[:columns]),
        "linear_unit": (),
    }
    return getattr(kernels, name)(x, w, *others[name], **({"eps": EPS} if "norm" in name else {}))


PRODUCTS: dict[str, Callable[[str, Kernels], Any]] = {
    "x of shape (T, K) but got (512,)": lambda name, k: fuse(k, name, W, N),
    "x of dtype float32 but got float16": lambda name, k: fuse(k, name, X.astype(HALF), N),
    "w of shape (M, 512) but got (4, 256)": lambda name, k: fuse(k, name, X, N[:, :256]),
    "w of dtype float32 or bfloat16 but got int32": lambda name, k: fuse(k, name, X, N.astype(mx.int32)),
}


def _named(problem: str, name: str) -> str:
    return problem.replace("w of", "gate of").replace("of w", "of gate") if name == "gated" else problem


# What the Metal form says, what the plain one's part says, and the call.
BAD_FUSED: dict[str, tuple[str, Callable[[Kernels], Any]]] = {
    **{
        f"[{name}] expected {_named(problem, name)}": (f"[linear] expected {problem}", partial(call, name))
        for name in FUSED
        for problem, call in PRODUCTS.items()
    },
    "[gated] expected up of shape (4, 512) but got (8, 512)": (
        "[gelu_mul] expected u of shape (6, 4) but got (6, 8)",
        lambda k: k.gated(X, N, mx.zeros((8, 512))),
    ),
    "[gated] expected up of shape (M, 512) but got (6, 256)": (
        "[linear] expected w of shape (M, 512) but got (6, 256)",
        lambda k: k.gated(X, N, X[:, :256]),
    ),
    "[linear_gelu_mul] expected p of shape (6, 4) but got (6, 512)": (
        "[gelu_mul] expected u of shape (6, 4) but got (6, 512)",
        lambda k: k.linear_gelu_mul(X, N, X),
    ),
    "[linear_gelu_mul] expected p of dtype float32 but got bfloat16": (
        "[gelu_mul] expected u of dtype float32 but got bfloat16",
        lambda k: k.linear_gelu_mul(X, N, X[:, :4].astype(mx.bfloat16)),
    ),
    "[linear_rms_norm] expected norm_w of shape (4,) but got (512,)": (
        "[rms_norm] expected w of shape (4,) but got (512,)",
        lambda k: k.linear_rms_norm(X, N, W, eps=EPS),
    ),
    "[linear_rms_norm] expected norm_w of dtype float32 or bfloat16 but got float16": (
        "[rms_norm] expected w of dtype float32 or bfloat16 but got float16",
        lambda k: k.linear_rms_norm(X, N, W[:4].astype(HALF), eps=EPS),
    ),
    "[linear_add_norm] expected h of shape (6, 4) but got (6, 512)": (
        "[add_norm] expected y of shape (6, 512) but got (6, 4)",
        lambda k: end(k, X),
    ),
    "[linear_add_norm] expected h of dtype float32 but got float16": (
        "[add_norm] expected h of dtype float32 but got float16",
        lambda k: end(k, X[:, :4].astype(HALF)),
    ),
    "[linear_add_norm] expected norm_w of shape (4,) but got (512,)": (
        "[add_norm] expected w of shape (4,) but got (512,)",
        lambda k: end(k, norm_w=W),
    ),
    "[linear_add_norm] expected post of shape (1,) but got (2,)": (
        "[add_norm] expected post of shape (1,) but got (2,)",
        lambda k: end(k, post=W[:2]),
    ),
    "[linear_add_norm] expected post of dtype float32 or bfloat16 but got int32": (
        "[add_norm] expected post of dtype float32 or bfloat16 but got int32",
        lambda k: end(k, post=mx.array([1])),
    ),
    "[linear_add_norm] expected next_w of shape (4,) but got (6, 512)": (
        "[add_norm] expected next_w of shape (4,) but got (6, 512)",
        lambda k: end(k, next_w=X),
    ),
}
# Tables of other rows or widths than q's: a kernel would read behind their ends.
BAD_TABLES: dict[str, Callable[[Kernels], Any]] = {
    "rows of the batch": lambda k: prepare(k, positions=BATCH.positions[1:]),
    "width of the angles": lambda k: prepare(k, table=rope_table(8, 8, 1e4)),
    "sections of the angles": lambda k: prepare(k, positions=mx.zeros((6, 2), mx.int32)),
    "rows of the plan": lambda k: attend(k, *(x[1:] for x in (Q, K, K))),
}
INDIVISIBLE: dict[str, Callable[[str, Kernels], Any]] = {
    "the width of x to be a multiple of 4 but got 6": lambda name, k: fuse(k, name, X[:, :6], N[:, :6]),
    "the rows of w to be a multiple of 4 but got 6": lambda name, k: fuse(k, name, X, X),
}
BAD_METAL: dict[str, Callable[[Kernels], Any]] = {
    "[linear] expected the width of x to be a multiple of 4 but got 6": lambda k: k.linear(X[:, :6], X[:4, :6]),
    "[linear] expected the rows of w to be a multiple of 4 but got 6": lambda k: k.linear(X, X[:4], X),
    "[matmul] expected the width of p to be a multiple of 4 but got 6": lambda k: k.matmul(X[:, :6], X),
    "[matmul] expected the width of v to be a multiple of 4 but got 6": lambda k: k.matmul(X, X.T),
    "[rms_norm] expected the width of x to be a multiple of 4 but got 510": lambda k: k.rms_norm(
        X[:, 2:], None, eps=EPS
    ),
    "[add_norm] expected the width of h to be a multiple of 4 but got 510": lambda k: k.add_norm(
        X[:, 2:], X[:, 2:], W[2:], eps=EPS
    ),
    "[gelu_mul] expected the size of g to be a multiple of 4 but got 6": lambda k: k.gelu_mul(X[:, 0], X[:, 0]),
    "[qkv_prep] expected a section to be a multiple of 8 but got 4": lambda k: prepare(
        k, table=rope_table(8, 4, 1e4), positions=mx.zeros((6, 4), mx.int32)
    ),
    "[attention] expected head_dim to be a multiple of 8 but got 12": lambda k: attend(
        k, *(x[..., :12] for x in (Q, K, K))
    ),
    "[pool] expected the width of h to be a multiple of 4 but got 510": lambda k: k.pool(
        X[:, 2:], W[2:], BATCH, eps=EPS
    ),
    **{
        f"[{name}] expected {_named(problem, name)}": partial(call, name)
        for name in FUSED
        for problem, call in INDIVISIBLE.items()
    },
}


@pytest.mark.parametrize("form", SETS)
@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_an_error_that_names_it(message: str, form: str) -> None:
    with pytest.raises(EgemmaError, match=f"^{re.escape(message)}$"):
        BAD[message](SETS[form])


@pytest.mark.parametrize("message", BAD_FUSED)
def test_bad_input_of_a_fused_product_is_an_error_of_it_or_of_its_part(message: str) -> None:
    of_a_part, call = BAD_FUSED[message]
    for form, expected in (("metal", message), ("ops", of_a_part)):
        with pytest.raises(EgemmaError, match=f"^{re.escape(expected)}$"):
            call(SETS[form])


@pytest.mark.parametrize("form", SETS)
@pytest.mark.parametrize("table", BAD_TABLES)
def test_tables_of_another_batch_are_an_error(table: str, form: str) -> None:
    with pytest.raises(EgemmaError, match=r"^\[(attention|qkv_prep)\] expected .* but got "):
        BAD_TABLES[table](SETS[form])


@pytest.mark.parametrize("message", BAD_METAL)
def test_widths_that_a_kernel_cannot_read_are_an_error(message: str) -> None:
    with pytest.raises(EgemmaError, match=f"^{re.escape(message)}$"):
        BAD_METAL[message](SETS["metal"])


# --- which set runs --------------------------------------------------------------------------------------------------

WIDTHS = Widths(64, 68, 32, 36, (Heads(2, 1, 16), Heads(2, 2, 136), Heads(2, 1, 256)))


@pytest.fixture
def config(tiny_text: Path) -> Config:
    return Config.from_file(tiny_text / "config.json")


def test_auto_is_metal_where_there_is_a_metal_gpu_and_else_ops(config: Config) -> None:
    assert backend.select("ops", config.text) is OPS
    assert backend.select("auto", config.text).name == ("metal" if mx.metal.is_available() else "ops")


@pytest.mark.skipif(mx.metal.is_available(), reason="there is a Metal GPU")
def test_metal_without_a_metal_gpu_is_an_error(config: Config) -> None:
    with pytest.raises(EgemmaError, match=r"^expected a Metal GPU for backend 'metal' but MLX runs on Device\("):
        backend.select("metal", config.text)


def test_an_unknown_backend_is_an_error(config: Config) -> None:
    known = "expected backend 'auto', 'metal', 'ops', 'simulator' but got 'cuda'"
    with pytest.raises(EgemmaError, match=f"^{known}$"):
        backend.select("cuda", config.text)  # type: ignore[arg-type]


@simulated
def test_the_simulator_runs_what_metal_would(config: Config) -> None:
    kernels = backend.select("simulator", config.text)
    assert kernels.name == "simulator"
    assert set_error(kernels, texts(9, 0, 21)) <= TOLERANCE


@simulated
def test_auto_and_metal_check_the_kernels_of_a_metal_gpu(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Metal GPU that is the simulator."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(backend, "on_cpu", lambda: False)
    monkeypatch.setattr(backend, "Library", lambda make: Library(SIMULATOR.make))
    for name in ("auto", "metal"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert backend.select(name, config.text).name == "metal"
    monkeypatch.setattr(backend, "on_cpu", lambda: True)  # mx.set_default_device(mx.cpu) on a Mac
    assert backend.select("auto", config.text) is OPS


def test_select_checks_the_widths_of_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Widths] = []
    monkeypatch.setattr(backend, "picked", lambda _: "metal")
    monkeypatch.setattr(backend, "verified", lambda kernels, _, widths: asked.append(widths) or kernels)
    config = Config.from_dict(_config("full", "bfloat16", {}))
    backend.select("metal", config.text)
    backend.select("metal", config.text, config.vision)
    assert asked == [replace(PUBLISHED, vision=None), PUBLISHED]


# --- wrong kernels ---------------------------------------------------------------------------------------------------


def set_error(kernels: Kernels, packed: Packed) -> float:
    """The greatest error of any function of a set against plain operations."""
    expected = [np.array(array).astype(np.float64) for array in forward(OPS, packed)]
    got = in_both_forms(lambda: forward(kernels, packed))
    return max(error(np.array(a), b) for a, b in zip(got, 2 * expected, strict=True))


def replaced(kernels: Kernels) -> set[str]:
    return {name for name, function in OPS.functions().items() if getattr(kernels, name) is function}


@pytest.fixture
def plant(tmp_path: Path) -> Callable[..., Path]:
    """A copy of `metal_src/` with one text replaced by another in some kernels."""

    def planted(**changes: tuple[str, str]) -> Path:
        folder = Path(shutil.copytree(source_folder(), tmp_path / "planted"))
        for name, (old, new) in changes.items():
            file = folder / f"{name}.metal"
            text = file.read_text()
            assert old in text
            file.write_text(text.replace(old, new))
        return folder

    return planted


@executors
def test_sound_kernels_are_used_without_a_word(executor: Executor) -> None:
    kernels = metal_kernels(executor.library, "metal")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verified(kernels, executor.library, WIDTHS) is kernels
    found = verdicts(executor.library, WIDTHS)
    assert all(v.problem is None and v.error is not None and v.error <= TOLERANCE for v in found)
    named = {name for verdict in found for name in re.findall(r"[a-z]\w+", verdict.kernel)}
    assert named | {"attention_bounds"} == KERNELS  # bounds are checked by what reads them


@executors
def test_a_wrong_kernel_and_one_that_does_not_compile_are_replaced(
    executor: Executor, plant: Callable[..., Path]
) -> None:
    folder = plant(
        rms_norm=("weighted<D>(row, scale, w, lane)", "weighted<D>(row, 1.0f, w, lane)"),
        gelu_mul=("load4(g + at)", "load4(nowhere + at)"),
    )
    library = Library(executor.make, folder)
    with pytest.warns(UserWarning) as caught:
        kernels = verified(metal_kernels(library, "metal"), library, WIDTHS)
    (warning,) = caught
    assert re.fullmatch(
        r"plain MLX operations replace Metal kernels that failed their check: "
        r"rms_norm \(is off by .*\); gelu_mul \(does not run: .*\)",
        str(warning.message),
    )
    assert replaced(kernels) == {"rms_norm", "linear_rms_norm", "linear_unit", "gelu_mul", "gated"}
    assert set_error(kernels, texts(9, 0, 21)) <= TOLERANCE


ATTENTION = {"attention", "plan"}
LINEAR = {"linear", *FUSED}
# A fault in each file, none of which leaves its buffers, and the functions that it makes wrong.
PLANTS: dict[str, tuple[str, str, set[str]]] = {
    "linear": ("x_shape[1], w, y", "x_shape[1] - 4, w, y", LINEAR),
    "linear_3": ("x_shape[1], w, y", "x_shape[1] - 4, w, y", LINEAR),
    "linear_short": ("x_shape[1]}", "x_shape[1] - 4}", LINEAR),
    "linear_short_3": ("x_shape[1]}", "x_shape[1] - 4}", LINEAR),
    "gated": ("gelu_tanh(g) * u", "gelu_tanh(u) * g", {"gated"}),
    "gated_short": ("gelu_tanh(g) * u", "gelu_tanh(u) * g", {"gated"}),
    "linear_gelu_mul": ("gelu_tanh(pair)", "pair", {"linear_gelu_mul"}),
    "linear_gelu_mul_short": (" * p[at]", "", {"linear_gelu_mul"}),
    "linear_rms_norm": ("float(columns), eps", "float(columns), 0.0f", {"linear_rms_norm"}),
    "linear_add_norm": ("float(post[0])", "1.0f", {"linear_add_norm"}),
    "linear_add_norm_next": ("next_w, next_inverse", "norm_w, next_inverse", {"linear_add_norm"}),
    "matmul": ("v_shape[1], p_shape[1], p", "v_shape[1], p_shape[1] - 4, p", {"matmul"}),
    "rms_norm": (
        "inverse_rms<D>(row, eps)",
        "inverse_rms<D>(row, 0.0f)",
        {"rms_norm", "linear_rms_norm", "linear_unit"},
    ),
    "add_norm": ("float(post[0])", "1.0f", {"add_norm", "linear_add_norm"}),
    "add_norm_next": ("next_w, lane", "w, lane", {"add_norm", "linear_add_norm"}),
    "gelu_mul": ("gelu_tanh(load4(g + at)) * load4(u", "gelu_tanh(load4(u + at)) * load4(g", {"gelu_mul", "gated"}),
    "qkv_prep": ("k_w, cos", "q_w, cos", {"qkv_prep", "rope"}),
    "attention_bounds": ("+ window + 1) : row", "+ window) : row", ATTENTION),
    "flash": ("stop_key = bounds[2 * last + 1]", "stop_key = bounds[2 * last + 1] - 8", ATTENTION),
    "flash_staged": ("self[r].lo - key", "self[r].lo", ATTENTION),
    "flash_split": ("stop_key = bounds[2 * last + 1]", "stop_key = bounds[2 * last + 1] - 8", ATTENTION),
    "attention_scores": ("hi - lo, depth, q", "hi - lo, depth - 4, q", ATTENTION),
    "softmax": ("* scale : 0.0f", ": 0.0f", ATTENTION),
    "attention_values": ("columns, hi - lo, span", "columns, hi - lo - 4, span", ATTENTION),
    "pool": ("float(max(tokens, 1u))", "8.0f", {"pool"}),
    "linear_unit": ("precise::rsqrt(total)", "total", {"linear_unit"}),
    # A GPU that holds fragments otherwise: no product of it is to be trusted.
    "fragment_probe": ("float(first)", "float(lane)", {*LINEAR, "matmul", *ATTENTION}),
}


@executors
def test_a_tower_that_runs_is_checked_at_its_widths(executor: Executor, plant: Callable[..., Path]) -> None:
    """A fault that shows where heads have two sections."""
    library = Library(executor.make, plant(qkv_prep=("ulong(row) * (D / SECTION)", "ulong(row)")))
    kernels, tower = metal_kernels(library, "metal"), Tower(72, 100, Heads(3, 3, 32, sections=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verified(kernels, library, WIDTHS) is kernels
    with pytest.warns(UserWarning, match=r"failed their check: qkv_prep 32 \(is off by [^)]*\)$"):
        found = verified(kernels, library, replace(WIDTHS, vision=tower))
    assert replaced(found) == {"qkv_prep", "rope"}


def test_every_kernel_has_a_planted_fault() -> None:
    assert set(PLANTS) == KERNELS


@executors
@pytest.mark.parametrize("kernel", PLANTS)
def test_a_wrong_kernel_takes_its_partners_along(executor: Executor, kernel: str, plant: Callable[..., Path]) -> None:
    old, new, functions = PLANTS[kernel]
    library = Library(executor.make, plant(**{kernel: (old, new)}))
    with pytest.warns(UserWarning, match="plain MLX operations replace") as caught:
        kernels = verified(metal_kernels(library, "metal"), library, WIDTHS)
    assert len(caught) == 1
    assert replaced(kernels) == functions
    assert set_error(kernels, texts(9, 0, 21)) <= TOLERANCE
