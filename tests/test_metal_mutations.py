"""Broken copies of `metal_src/`, one change each: the simulator, or the result, must tell each from the original.

Every barrier is taken out once for every kernel that it stands in. One that can go unnoticed is not needed, and says
why on its line: `// redundant: …`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from test_kernels import EPS, normal, texts, weight

from egemma_mlx import simulator
from egemma_mlx.kernels import attention_metal, gelu, linear, norm, pool, probe, qkv
from egemma_mlx.kernels.library import Kernel, Library, Source, source_folder
from egemma_mlx.simulator.errors import CompileError, DataRace, OutOfBounds, SimulatorError, UninitialisedRead

pytestmark = pytest.mark.skipif(simulator.available() is not None, reason=f"simulator: {simulator.available()}")

MODULES = (attention_metal, gelu, linear, norm, pool, probe, qkv)
FOLDER = source_folder()
FILES = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.iterdir())}

# --- the kernels, each on inputs that reach every barrier more than once ---------------------------------------------

Sources = Callable[[Source], Kernel]


def sources() -> Iterator[Source]:
    for module in MODULES:
        for value in vars(module).values():
            yield from (s for s in (value.values() if isinstance(value, dict) else [value]) if isinstance(s, Source))


def array(seed: int, *shape: int) -> mx.array:
    return mx.array(normal(seed, *shape))


def attention(form: Callable[..., mx.array], head_dim: int, **options: Any) -> Callable[[Any], mx.array]:
    """Two heads on one of keys, over 70 rows of three segments, of which rows meet up to 61."""
    q, k, v = (array(i, 70, heads, head_dim) for i, heads in enumerate((2, 1, 1)))

    def run(library: Any) -> mx.array:
        plan = attention_metal.metal_plan(library, texts(7, 61, 2), None)
        return form(library, q, k, v, plan, **options)

    return run


def qkv_prep(library: Any) -> Any:
    q, k, v = (array(i, 5, heads * 24) for i, heads in enumerate((2, 1, 1)))
    angles = qkv.metal_rope(library, qkv.rope_table(5, 24, 100.0), mx.arange(5, dtype=mx.int32))
    w = mx.array(weight(3, 24))
    return qkv.metal_qkv_prep(library, q, k, v, w, w, angles, head_dim=24, eps=EPS)


X, W, ROW = array(0, 70, 68), mx.array(weight(1, 132)), array(2, 9, 132)
products = attention(attention_metal.product_attention, 72)

CASES: dict[str, Callable[[Any], Any]] = {
    "add_norm": lambda library: norm.metal_add_norm(library, ROW, 2 * ROW, W, eps=EPS),
    "add_norm_next": lambda library: norm.metal_add_norm(library, ROW, 2 * ROW, W, eps=EPS, next_w=W),
    "attention_bounds": lambda library: attention_metal.metal_plan(library, texts(7, 61, 2), 5).rows,
    "attention_scores": products,
    "attention_values": products,
    "flash": attention(attention_metal.flash_attention, 16, staged=False),
    "flash_staged": attention(attention_metal.flash_attention, 16, staged=True),
    "fragment_probe": probe.metal_fragment_probe,
    "gelu_mul": lambda library: gelu.metal_gelu_mul(library, ROW, 2 * ROW),
    "linear": lambda library: linear.metal_linear(library, X, array(3, 36, 68)),
    "linear_2": lambda library: linear.metal_linear(library, X, array(3, 36, 68), array(4, 36, 68)),
    "linear_3": lambda library: linear.metal_linear(library, X, *(array(n, n, 68) for n in (36, 4, 8))),
    "matmul": lambda library: linear.metal_matmul(library, X, array(3, 68, 36)),
    "pool": lambda library: pool.metal_pool(library, ROW, W, texts(4, 0, 5), eps=EPS),
    "qkv_prep": qkv_prep,
    "rms_norm": lambda library: norm.metal_rms_norm(library, ROW, W, eps=EPS),
    "softmax": products,
}

ORIGINAL = Library(simulator.metal_kernel)


def result(kernel: str, library: Sources) -> list[bytes]:
    arrays = CASES[kernel](library)
    arrays = [arrays] if isinstance(arrays, mx.array) else [a for a in arrays if a is not None]
    return [np.array(a).tobytes() for a in arrays]


@cache
def original(kernel: str) -> list[bytes]:
    return result(kernel, ORIGINAL)


WRONG = "a wrong result"


def noticed(kernel: str, folder: Path) -> type[SimulatorError] | str | None:
    """How `kernel` from this folder, among originals, shows that it is not the original."""
    mutant = Library(simulator.metal_kernel, folder=folder)
    for order in ("forward", "reversed"):
        try:
            with simulator.session(order=order, access_budget=10**8):
                got = result(kernel, lambda source: (mutant if source.name == kernel else ORIGINAL)(source))
        except CompileError:
            raise  # nothing was run
        except SimulatorError as error:
            return type(error)
        if got != original(kernel):
            return WRONG
    return None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of `metal_src/` to break."""
    return Path(shutil.copytree(FOLDER, tmp_path / "metal_src"))


@pytest.mark.parametrize("kernel", CASES)
def test_an_unchanged_copy_passes_for_the_original(kernel: str, folder: Path) -> None:
    assert noticed(kernel, folder) is None


def test_every_kernel_has_a_case() -> None:
    assert (
        {*CASES}
        == {source.name for source in sources()}
        == {Path(file).stem for file in FILES if file.endswith(".metal")}
    )


# --- barriers --------------------------------------------------------------------------------------------------------


class Barrier(NamedTuple):
    file: str
    line: int
    start: int
    stop: int
    redundant: bool


def barriers() -> Iterator[Barrier]:
    for file, text in FILES.items():
        code = re.sub(r"//[^\n]*", lambda comment: " " * len(comment[0]), text)
        for match in re.finditer(r"\b(?:threadgroup|simdgroup)_barrier\s*\([^;]*;", code):
            rest_of_line = text[match.end() :].split("\n", 1)[0]
            line = text.count("\n", 0, match.start()) + 1
            yield Barrier(file, line, match.start(), match.end(), "// redundant: " in rest_of_line)


# Headers that a kernel includes for a constant.
NOT_CALLED = {("softmax", "gemm.h")}

BARRIERS = list(barriers())
TRIALS = [
    (source.name, barrier)
    for source in sources()
    for barrier in BARRIERS
    if barrier.file in (f"{source.name}.metal", *(f"{header}.h" for header in source.headers))
    and (source.name, barrier.file) not in NOT_CALLED
]


@pytest.mark.parametrize(("kernel", "barrier"), [pytest.param(k, b, id=f"{k}-{b.file}:{b.line}") for k, b in TRIALS])
def test_a_kernel_without_one_of_its_barriers_is_noticed(kernel: str, barrier: Barrier, folder: Path) -> None:
    text = FILES[barrier.file]
    (folder / barrier.file).write_text(text[: barrier.start] + text[barrier.stop :], encoding="utf-8")
    how = noticed(kernel, folder)
    if barrier.redundant:
        assert how is None, "the comment says that it is redundant"
    else:
        assert how in (DataRace, UninitialisedRead, WRONG)


def test_every_barrier_is_tried() -> None:
    mentioned = sum(len(re.findall(r"_barrier\b", re.sub(r"//[^\n]*", "", text))) for text in FILES.values())
    assert len(BARRIERS) == len({barrier for _, barrier in TRIALS}) == mentioned > 0


@pytest.mark.parametrize("kernel", CASES)
def test_a_kernel_waits_at_barriers_just_when_they_are_tried(kernel: str) -> None:
    with simulator.session() as log:
        result(kernel, ORIGINAL)
    own = [counters for call, counters in log.calls if call.name.startswith(f"custom_kernel_egemma_{kernel}")]
    assert own
    waits = sum(counters.threadgroup_barriers + counters.simdgroup_barriers for counters in own)
    assert bool(waits) == (kernel in {name for name, _ in TRIALS})


# --- other changes ---------------------------------------------------------------------------------------------------


class Change(NamedTuple):
    """A text of a file that occurs once, what takes its place, and how `kernel` must show it."""

    file: str
    before: str
    after: str
    kernel: str
    shown: type[SimulatorError] | str


CHANGES = {
    "a product reads rows past the last": Change(
        "gemm.h", "return row < rows && column < columns ?", "return column < columns ?", "linear", OutOfBounds
    ),
    "a product reads past the depth": Change(
        "gemm.h", "return row < rows && column < columns ?", "return row < rows ?", "matmul", OutOfBounds
    ),
    "a product stores rows past the last": Change(
        "gemm.h", "row + 8 * i < shape.rows && column", "column", "linear", OutOfBounds
    ),
    "a product stores into the next row": Change(
        "gemm.h", " && column + 8 * j < shape.columns) {", ") {", "matmul", DataRace
    ),
    "a product leaves out a slice": Change(
        "gemm.h", "gemm_read<NN>(x, w, 0,", "gemm_read<NN>(x, w, 32,", "matmul", WRONG
    ),
    "flash reads queries past the last": Change(
        "flash.h",
        "min(8 * r + int(fragment_row(lane)), rows - 1)",
        "(8 * r + fragment_row(lane))",
        "flash",
        OutOfBounds,
    ),
    "flash reads bounds past the last": Change("flash.h", "if (row >= rows) {", "if (false) {", "flash", OutOfBounds),
    "flash stores rows past the last": Change("flash.h", "if (row < rows) {", "if (true) {", "flash", OutOfBounds),
    "flash reads keys past the last": Change(
        "flash_direct.h",
        "if (key + 8 <= rows) {\n    simdgroup_load(fragment, k",
        "if (true) {\n    simdgroup_load(fragment, k",
        "flash",
        OutOfBounds,
    ),
    "flash forgets that its greatest score grew": Change(
        "flash.h", "state.sum[r] * shrink + ", "state.sum[r] + ", "flash_staged", WRONG
    ),
    "flash stages keys past the last": Change(
        "flash_staged.metal",
        "inside ? load4(k + source) : float4(0.0f)",
        "load4(k + source)",
        "flash_staged",
        OutOfBounds,
    ),
    "flash has a tile too small": Change(
        "flash_staged.metal", "v_tile[BLOCK * wide]", "v_tile[BLOCK * D]", "flash_staged", OutOfBounds
    ),
    "flash attends beyond a segment": Change("attention.h", "key >= lo && key < hi && ", "", "flash_staged", WRONG),
    "softmax works on rows past the last": Change(
        "softmax.metal", "if (row <= last) {", "if (true) {", "softmax", OutOfBounds
    ),
    "a row is read past its end": Change(
        "rows.h", "column < D ? load4(x + column) : float4(0.0f)", "load4(x + column)", "pool", OutOfBounds
    ),
    "all lanes of pool store their count": Change("pool.metal", "if (lane == 0) {", "{", "pool", DataRace),
    "RoPE turns the other way": Change("rope.h", "low * c - high * s", "low * c + high * s", "qkv_prep", WRONG),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name: str, folder: Path) -> None:
    change = CHANGES[name]
    assert FILES[change.file].count(change.before) == 1
    changed = FILES[change.file].replace(change.before, change.after)
    (folder / change.file).write_text(changed, encoding="utf-8")
    assert noticed(change.kernel, folder) == change.shown
