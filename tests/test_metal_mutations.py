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
from egemma_mlx.kernels import attention_metal, fused, gelu, linear, norm, pool, probe, qkv
from egemma_mlx.kernels.library import Kernel, Library, Source, source_folder
from egemma_mlx.simulator.errors import CompileError, DataRace, OutOfBounds, SimulatorError, UninitialisedRead

pytestmark = pytest.mark.skipif(simulator.available() is not None, reason=f"simulator: {simulator.available()}")

MODULES = (attention_metal, fused, gelu, linear, norm, pool, probe, qkv)
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
    q, k, v = (array(i, 5, heads * 48) for i, heads in enumerate((2, 1, 1)))
    positions = mx.array([[0, 0], [1, 2], [2, 4], [3, 8], [-1, -1]])
    angles = qkv.metal_rope(library, qkv.rope_table(9, 24, 100.0), positions)
    w = mx.array(weight(3, 48))
    return qkv.metal_qkv_prep(library, q, k, v, w, w, angles, head_dim=48, eps=EPS)


X, W, ROW = array(0, 70, 68), mx.array(weight(1, 132)), array(2, 9, 132)
# Three slices and three simdgroups of columns; few rows, and a slice for each of eight simdgroups and one more.
WEIGHTS, UP, RESIDUAL = array(3, 132, 68), array(4, 132, 68), array(5, 70, 132)
FEW, NARROW, FEW_P = array(6, 20, 260), array(7, 36, 260), array(8, 20, 36)
products = attention(attention_metal.product_attention, 72)

CASES: dict[str, Callable[[Any], Any]] = {
    "add_norm": lambda library: norm.metal_add_norm(library, ROW, 2 * ROW, W, eps=EPS),
    "add_norm_next": lambda library: norm.metal_add_norm(library, ROW, 2 * ROW, W, eps=EPS, next_w=W),
    "attention_bounds": lambda library: attention_metal.metal_plan(library, texts(7, 61, 2), 5).rows,
    "attention_scores": products,
    "attention_values": products,
    "flash": attention(attention_metal.flash_attention, 16, staged=False),
    "flash_split": attention(attention_metal.split_attention, 256, fragments=2),
    "flash_staged": attention(attention_metal.flash_attention, 16, staged=True),
    "fragment_probe": probe.metal_fragment_probe,
    "gelu_mul": lambda library: gelu.metal_gelu_mul(library, ROW, 2 * ROW),
    "gated": lambda library: fused.metal_gated(library, X, WEIGHTS, UP, short=False),
    "gated_short": lambda library: fused.metal_gated(library, FEW, NARROW, NARROW[::-1], short=True),
    "linear": lambda library: linear.metal_linear(library, X, WEIGHTS, short=False),
    "linear_3": lambda library: linear.metal_linear(library, X, *(WEIGHTS[:n] for n in (36, 4, 8)), short=False),
    "linear_add_norm": lambda library: fused.metal_linear_add_norm(
        library, X, WEIGHTS, RESIDUAL, W, eps=EPS, short=False
    ),
    "linear_add_norm_next": lambda library: fused.metal_linear_add_norm(
        library, X, WEIGHTS, RESIDUAL, W, eps=EPS, next_w=W, short=False
    ),
    "linear_gelu_mul": lambda library: fused.metal_linear_gelu_mul(library, X, WEIGHTS, RESIDUAL, short=False),
    "linear_gelu_mul_short": lambda library: fused.metal_linear_gelu_mul(library, FEW, NARROW, FEW_P, short=True),
    "linear_rms_norm": lambda library: fused.metal_linear_rms_norm(library, X, WEIGHTS, W, eps=EPS, short=False),
    "linear_short": lambda library: linear.metal_linear(library, FEW, NARROW, short=True),
    "linear_short_3": lambda library: linear.metal_linear(library, FEW, *(NARROW[:n] for n in (36, 4, 8)), short=True),
    "linear_unit": lambda library: fused.metal_linear_unit(library, FEW[:5], NARROW, short=False),
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
    "a table is read past its rows": Change(
        "load.h", "return row < rows && column < columns ?", "return column < columns ?", "linear", OutOfBounds
    ),
    "a table is read past its columns": Change(
        "load.h", "return row < rows && column < columns ?", "return row < rows ?", "matmul", OutOfBounds
    ),
    "a product stores rows past the last": Change(
        "gemm.h", "row + 8 * i < shape.rows && column", "column", "matmul", OutOfBounds
    ),
    "a product stores into the next row": Change(
        "gemm.h", " && column + 8 * j < shape.columns) {", ") {", "matmul", DataRace
    ),
    "a product leaves out a slice": Change(
        "gemm.h", "gemm_read<NN>(x, w, 0,", "gemm_read<NN>(x, w, 32,", "matmul", WRONG
    ),
    "both elements of a fragment are a lane's first": Change(
        "columns.h", "[1] = fours.second[j]", "[1] = fours.first[j]", "linear_short", WRONG
    ),
    "a lane reads one column of weights twice": Change(
        "columns.h", "band.w, column + 1, at", "band.w, column, at", "linear", WRONG
    ),
    "inputs lie in another order than weights": Change(
        "columns.h", "+ 8 * j + quarter]", "+ 4 * quarter + j]", "gated", WRONG
    ),
    "a lane reads one four of inputs twice": Change(
        "columns.h", "in.x, r, at + 4,", "in.x, r, at,", "gated_short", WRONG
    ),
    "a band adds to the other's sums": Change(
        "columns.h", "a[i], b, tile.sum[i][first + n]);", "a[i], b, tile.sum[i][n]);", "gated", WRONG
    ),
    "a slice is filled while it is read": Change(
        "shared.h", "(k / slice_depth + 1) % 2", "k / slice_depth % 2", "linear_3", DataRace
    ),
    "the next slice is this one again": Change(
        "shared.h", "ROWS, k + slice_depth, self.index", "ROWS, k, self.index", "linear_rms_norm", WRONG
    ),
    "simdgroups work on the rows of the first": Change(
        "shared.h", "(self.row - self.first_row) * slice_stride", "0", "linear_gelu_mul", WRONG
    ),
    "fewer threads than are told fill a slice": Change(
        "linear_add_norm.metal", "int(32 * groups)", "256", "linear_add_norm", UninitialisedRead
    ),
    "linear stores rows past the last": Change(
        "linear.h", "row < rows && c < columns", "c < columns", "linear", OutOfBounds
    ),
    "linear stores into the next row": Change(
        "linear.h", "row < rows && c < columns", "row < rows", "linear_3", DataRace
    ),
    "a tile is that of another weight": Change("linear_3.metal", "tile - third)", "tile - second)", "linear_3", WRONG),
    "a gate stores into the next row": Change("gated.metal", "r < rows && c < columns", "r < rows", "gated", DataRace),
    "up is gate": Change("gated.metal", "Band<decltype(gate)>{up,", "Band<decltype(gate)>{gate,", "gated", WRONG),
    "a gate reads p past its rows": Change(
        "linear_gelu_mul.metal", "r < rows && c < columns", "c < columns", "linear_gelu_mul", OutOfBounds
    ),
    "a norm leaves out the lanes beside": Change("whole.h", "square = row_sum(square);", "", "linear_rms_norm", WRONG),
    "simdgroups of a norm store in one place": Change(
        "whole.h", "sums[whole_rows * group + 8 * i", "sums[8 * i", "linear_add_norm", DataRace
    ),
    "a norm adds up what no simdgroup stored": Change(
        "whole.h", "g < groups;", "g < most_groups;", "linear_rms_norm", UninitialisedRead
    ),
    "two norms share their sums": Change(
        "linear_add_norm_next.metal", "tile, next_sums,", "tile, sums,", "linear_add_norm_next", DataRace
    ),
    "a residual is read past its rows": Change(
        "whole.h",
        "if (r < rows && c < columns) {\n        const ulong at",
        "if (c < columns) {\n        const ulong at",
        "linear_add_norm",
        OutOfBounds,
    ),
    "a residual is stored past its rows": Change(
        "whole.h",
        "if (r < rows && c < columns) {\n        store_pair(y + ulong(r) * columns + c, pair);",
        "if (c < columns) {\n        store_pair(y + ulong(r) * columns + c, pair);",
        "linear_add_norm_next",
        OutOfBounds,
    ),
    "a normed row is stored into the next": Change(
        "whole.h",
        "if (r < rows && c < columns) {\n        store_pair(y + ulong(r) * columns + c, pair * ",
        "if (r < rows) {\n        store_pair(y + ulong(r) * columns + c, pair * ",
        "linear_rms_norm",
        OutOfBounds,
    ),
    "a simdgroup takes the slices of others": Change(
        "short.h", "k += slice_depth * short_groups", "k += slice_depth", "linear_short", WRONG
    ),
    "simdgroups store their parts in one place": Change(
        "short.h", "(8 * R * group + 8 * i)", "(8 * i)", "linear_short_3", DataRace
    ),
    "the parts of one simdgroup are left out": Change(
        "short.h", "g < short_groups;", "g < short_groups - 1;", "linear_gelu_mul_short", WRONG
    ),
    "few rows are stored past the last": Change(
        "linear_short.metal", "row + r < rows && column", "column", "linear_short", OutOfBounds
    ),
    "few rows are stored into the next": Change(
        "gated_short.metal", " && column + c < columns) {", ") {", "gated_short", DataRace
    ),
    "the parts of few rows have too little room": Change(
        "linear_short_3.metal", "sums[short_groups * 8 * R *", "sums[short_groups * 8 *", "linear_short_3", OutOfBounds
    ),
    "half a tile of few rows is stored": Change(
        "linear_gelu_mul_short.metal", "i += 256", "i += 512", "linear_gelu_mul_short", WRONG
    ),
    "unit vectors are read past their rows": Change(
        "linear_unit.metal",
        "load4_within(x, first + int(r), int(row_column<K>(lane, i)), rows, K, K)",
        "load4(x + ulong(first + int(r)) * K + min(row_column<K>(lane, i), uint(K - 4)))",
        "linear_unit",
        OutOfBounds,
    ),
    "unit vectors are stored past their rows": Change(
        "linear_unit.metal", "if (first + int(r) < rows) {", "{", "linear_unit", OutOfBounds
    ),
    "simdgroups store their squares in one place": Change(
        "linear_unit.metal", "squares[height * group + lane]", "squares[lane]", "linear_unit", DataRace
    ),
    "all rows of a threadgroup have one norm": Change(
        "linear_unit.metal", "squares[height * g + r]", "squares[height * g]", "linear_unit", WRONG
    ),
    "every lane stores a product": Change(
        "linear_unit.metal", "  if (lane < height) {\n    products", "  {\n    products", "linear_unit", OutOfBounds
    ),
    "a gate has another cubic": Change("gelu.h", "0.044715f * g", "0.05f * g", "gated_short", WRONG),
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
    "wide flash reads queries past the last": Change(
        "flash_split.metal", "min(first + own / group, rows - 1)", "(first + own / group)", "flash_split", OutOfBounds
    ),
    "wide flash reads keys past the last": Change(
        "flash_split.h", "ulong(min(key + 1, rows - 1))", "ulong(key + 1)", "flash_split", OutOfBounds
    ),
    "wide flash reads values past the last": Change(
        "flash_split.h",
        "min(first + int(fragment_row(lane)), rows - 1)",
        "(first + int(fragment_row(lane)))",
        "flash_split",
        OutOfBounds,
    ),
    "wide flash stores rows past the last": Change(
        "flash_split.metal", " && first + own / group < rows) {", ") {", "flash_split", DataRace
    ),
    "wide flash leaves out a part of the scores": Change(
        "flash_split.metal",
        "i = 0; i < split_simdgroups",
        "i = 1; i < split_simdgroups",
        "flash_split",
        WRONG,
    ),
    "wide flash forgets that its greatest score grew": Change(
        "flash_split.h", "row.sum * shrink + ", "row.sum + ", "flash_split", WRONG
    ),
    "wide flash keeps what it summed under another greatest score": Change(
        "flash_split.metal", "if (simd_any(factor != 1.0f)) {", "if (false) {", "flash_split", WRONG
    ),
    "all lanes of a row of wide flash store how it shrinks": Change(
        "flash_split.metal", "if (key_offset == 0) {\n    shrinks", "{\n    shrinks", "flash_split", DataRace
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
    "RoPE turns all sections by one position": Change(
        "rope.h", "positions[pair / (SECTION / 2)]", "positions[0]", "qkv_prep", WRONG
    ),
    "RoPE's angles go on from section to section": Change(
        "rope.h", "(SECTION / 2) + pair % (SECTION / 2)", "(SECTION / 2) + pair", "qkv_prep", OutOfBounds
    ),
    "RoPE takes the positions of the first row": Change(
        "qkv_prep.metal", "ulong(row) * (D / SECTION)", "0", "qkv_prep", WRONG
    ),
    "a row without a token has its angles before the table": Change(
        "rope.h",
        "clamp(positions[pair / (SECTION / 2)], 0, length - 1)",
        "positions[pair / (SECTION / 2)]",
        "qkv_prep",
        OutOfBounds,
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name: str, folder: Path) -> None:
    change = CHANGES[name]
    assert FILES[change.file].count(change.before) == 1
    changed = FILES[change.file].replace(change.before, change.after)
    (folder / change.file).write_text(changed, encoding="utf-8")
    assert noticed(change.kernel, folder) == change.shown
