"""The simulated GPU: what it computes and counts, and that it catches each fault in the line that makes it."""

import importlib.util
import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from egemma_mlx.simulator import compiler, symbols
from egemma_mlx.simulator.errors import (
    CompileError,
    DataRace,
    Divergence,
    Misaligned,
    NoCompiler,
    OutOfBounds,
    ReadOnlyStore,
    ResourceLimit,
    SimulatorError,
    UninitialisedRead,
)
from egemma_mlx.simulator.machine import Buffer, Counters, Options, run

pytestmark = pytest.mark.skipif(compiler.available() is not None, reason=str(compiler.available()))

ZIG = (sys.executable, "-m", "ziglang", "cc")
HAS_ZIG = importlib.util.find_spec("ziglang") is not None

SIGNATURE = """\
void k(device float* out [[buffer(0)]], device const float* a [[buffer(1)]], constant uint& n [[buffer(2)]],
       uint tid [[thread_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]],
       ushort sg [[simdgroup_index_in_threadgroup]], uint gid [[thread_position_in_grid]])
"""
CODES = (
    "0, 1, 2, ::msl::at_thread_index_in_threadgroup, ::msl::at_thread_index_in_simdgroup, "
    "::msl::at_simdgroup_index_in_threadgroup, ::msl::at_thread_position_in_grid"
)
TILE = "threadgroup auto& t = ::msl::threadgroup_variable<float[64], 1>();\n"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
ORDERS = ("forward", "reversed")


def text_of(body: str, header: str = "", signature: str = SIGNATURE, codes: str = CODES) -> str:
    """What translate.py makes of a kernel. The body begins in line 1 of body.metal."""
    return (
        "#include <msl.h>\n#include <metal_stdlib>\nusing namespace metal;\n"
        f'#line 1 "header.metal"\n{header}\n{signature}{{\n#line 1 "body.metal"\n{body}\n}}\n#line 1 "thunk"\n'
        'extern "C" void entry(msl_buffers b, const msl_lane MSL_RAW* l, const msl_group MSL_RAW* g) {\n'
        f"  ::msl::launch(&k, ::msl::codes<{codes}>(), b, l, g);\n}}\n"
    )


def launch(
    body: str,
    *,
    header: str = "",
    threads: int = 64,
    groups: int = 1,
    initialised: bool = False,
    checked: bool = True,
    order: Any = "forward",
    budget: int = 10_000_000,
) -> tuple[np.ndarray, Counters]:
    """Runs a body over 128 floats 0, 1, 2, … in `a`, n = 100 and 128 floats of output."""
    library = compiler.compile_kernel(text_of(body, header), checked=checked)
    out = np.zeros(128, np.float32)
    buffers = [
        Buffer("out", out, writable=True, initialised=initialised),
        Buffer("a", np.arange(128, dtype=np.float32)),
        Buffer("n", np.array([100], np.uint32), constant=True),
    ]
    options = Options(checked=checked, order=order, access_budget=budget)
    return out, run(library, "entry", buffers, (threads * groups, 1, 1), (threads, 1, 1), options)


# ---- faults

FAULTS: list[tuple[str, type[SimulatorError], int, str, dict[str, Any]]] = [
    ("barrier in a branch", Divergence, 1, "if (tid < 40) " + BARRIER + "out[tid] = 1;", {}),
    ("barrier that a simdgroup skips", Divergence, 1, "if (sg == 0) " + BARRIER + "out[tid] = 1;", {}),
    ("return before a barrier", Divergence, 2, "if (tid >= 50) return;\n" + BARRIER + "out[tid] = 1;", {}),
    (
        "whole simdgroup returns before a barrier",
        Divergence,
        2,
        "if (sg == 1) return;\n" + BARRIER + "out[tid] = 1;",
        {},
    ),
    (
        "two barriers in two branches",
        Divergence,
        1,
        f"if (lane & 1) {{ {BARRIER.strip()} }} else {{ {BARRIER.strip()} }}",
        {},
    ),
    (
        "two barriers in two simdgroups",
        Divergence,
        1,
        f"if (sg == 0) {{ {BARRIER.strip()} }} else {{ {BARRIER.strip()} }}",
        {},
    ),
    ("one helper's barrier from two branches", Divergence, 1, "if (lane & 1) sync(); else sync();", {"header": "h"}),
    ("simdgroup_barrier in a branch", Divergence, 1, "if (lane < 3) simdgroup_barrier(mem_flags::mem_none);", {}),
    ("simd_sum in half a simdgroup", Divergence, 1, "if (lane < 16) out[tid] = simd_sum(a[tid]);", {}),
    (
        "matrix product in half a simdgroup",
        Divergence,
        3,
        "simdgroup_float8x8 m, r;\nsimdgroup_load(m, a, 8);\nif (lane < 16) simdgroup_multiply(r, m, m);",
        {},
    ),
    (
        "matrix product in half a simdgroup, read",
        Divergence,
        2,
        "simdgroup_float8x8 m(1.0f);\nif (lane < 9) { simdgroup_multiply(m, m, m); out[0] = m.thread_elements()[0]; }",
        {},
    ),
    ("lane's own matrix pointer", Divergence, 2, "simdgroup_float8x8 m;\nsimdgroup_load(m, a + lane, 8);", {}),
    (
        "matrix in a partial simdgroup",
        Divergence,
        2,
        "simdgroup_float8x8 m;\nsimdgroup_load(m, a, 8);",
        {"threads": 40},
    ),
    ("load past the end", OutOfBounds, 1, "out[tid] = a[tid + 65];", {}),
    ("load before the start", OutOfBounds, 1, "out[tid] = a[(int)tid - 1];", {}),
    ("store past the end", OutOfBounds, 1, "out[tid * 3] = 1;", {}),
    ("far load", OutOfBounds, 1, "out[tid] = a[tid * 1000003u];", {}),
    ("load through null", OutOfBounds, 2, "device const float* p = tid < 99 ? nullptr : a;\nout[tid] = p[tid];", {}),
    ("threadgroup store past the end", OutOfBounds, 2, TILE + "t[tid + 1] = 1;", {}),
    ("index of a local array", OutOfBounds, 2, "float x[4] = {1, 2, 3, 4};\nout[tid] = x[tid & 7];", {}),
    ("matrix past the end", OutOfBounds, 2, "simdgroup_float8x8 m;\nsimdgroup_load(m, a + 65, 8);", {}),
    ("matrix store past the end", OutOfBounds, 2, "simdgroup_float8x8 m(1.0f);\nsimdgroup_store(m, out + 8, 17);", {}),
    ("shuffle from a lane that is not there", OutOfBounds, 1, "out[tid] = simd_shuffle(a[tid], 40);", {}),
    ("misaligned float4", Misaligned, 1, "float4 v = *(device const float4*)(a + 1); out[tid] = v.x + v.w;", {}),
    ("misaligned float2", Misaligned, 1, "*(device float2*)(out + 2 * (tid & 31) + 1) = float2(1);", {}),
    (
        "misaligned half",
        Misaligned,
        2,
        "device const uchar* p = (device const uchar*)a;\nout[tid] = *(device const half*)(p + 1);",
        {},
    ),
    ("misaligned float", Misaligned, 1, "out[tid] = *(device const float*)((device const uchar*)a + 2);", {}),
    ("misaligned threadgroup float4", Misaligned, 2, TILE + "*(threadgroup float4*)(t + 2) = float4(0);", {}),
    ("store through a cast", ReadOnlyStore, 1, "((device float*)a)[tid] = 1;", {}),
    ("no barrier before a read", DataRace, 3, TILE + "t[tid] = a[tid];\nout[tid] = t[63 - tid];", {}),
    (
        "no barrier before the next round",
        DataRace,
        3,
        TILE + "for (int i = 0; i < 2; ++i) {\nt[tid] = a[tid];\n" + BARRIER + "out[tid] = t[63 - tid]; }",
        {},
    ),
    (
        "simdgroup_barrier between simdgroups",
        DataRace,
        4,
        TILE + "t[tid] = a[tid];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\nout[tid] = t[63 - tid];",
        {},
    ),
    (
        "mem_none orders nothing",
        DataRace,
        4,
        TILE + "t[tid] = a[tid];\nthreadgroup_barrier(mem_flags::mem_none);\nout[tid] = t[63 - tid];",
        {},
    ),
    (
        "mem_device does not order threadgroup memory",
        DataRace,
        4,
        TILE + "t[tid] = a[tid];\nthreadgroup_barrier(mem_flags::mem_device);\nout[tid] = t[63 - tid];",
        {},
    ),
    (
        "mem_threadgroup does not order device memory",
        DataRace,
        3,
        "out[tid] = a[tid];\n" + BARRIER + "out[tid + 64] = out[63 - tid];",
        {},
    ),
    (
        "simd_sum orders nothing",
        DataRace,
        4,
        TILE + "t[tid] = a[tid];\nfloat s = simd_sum(a[tid]);\nout[tid] = t[tid ^ 1] + s;",
        {},
    ),
    (
        "simd_sum does not order a write after a read",
        DataRace,
        3,
        "float s = simd_sum(out[tid ^ 1]);\n\nout[tid] = s;",
        {"initialised": True},
    ),
    ("same value from two threads", DataRace, 1, "out[tid / 2] = 1;", {}),
    ("same value from two threadgroups", DataRace, 1, "out[tid] = 1;", {"groups": 2}),
    (
        "read of another threadgroup's output",
        DataRace,
        2,
        "out[gid] = 1;\nif (gid >= 64) out[gid] += out[gid - 64];",
        {"groups": 2},
    ),
    (
        "matrix load of what was just stored",
        DataRace,
        4,
        TILE + "simdgroup_float8x8 m;\nt[tid] = a[tid];\nsimdgroup_load(m, t, 8);\nout[tid] = m.thread_elements()[0];",
        {},
    ),
    (
        "read of a matrix that was just stored",
        DataRace,
        4,
        TILE + "simdgroup_float8x8 m(1.0f);\nif (sg == 0) { simdgroup_store(m, t, 8);\nout[tid] = t[63 - tid]; }",
        {},
    ),
    (
        "plain read beside an atomic add",
        DataRace,
        3,
        "device atomic_uint* c = (device atomic_uint*)out;\natomic_fetch_add_explicit(c, 1, memory_order_relaxed);\n"
        "out[1 + tid] = ((device uint*)out)[0];",
        {"initialised": True},
    ),
    (
        "threadgroup memory that nothing wrote",
        UninitialisedRead,
        4,
        TILE + "if (tid < 10) t[tid] = 1;\n" + BARRIER + "out[tid] = t[tid];",
        {},
    ),
    ("output that nothing wrote", UninitialisedRead, 1, "out[tid] = out[tid] + 1;", {}),
    ("what rubbish led to", UninitialisedRead, 2, TILE + "out[(int)t[tid]] = 1;", {}),
    (
        "over 32 KiB of threadgroup memory",
        ResourceLimit,
        1,
        "threadgroup auto& t = ::msl::threadgroup_variable<float[8193], 1>(); t[tid] = 1;",
        {},
    ),
    ("loop without end", ResourceLimit, 1, "while (a[0] == 0) out[tid] = 1;", {"budget": 100_000}),
    ("barriers without end", ResourceLimit, 1, "for (;;) simdgroup_barrier(mem_flags::mem_none);", {"budget": 100_000}),
]
SYNC = "inline void sync() { threadgroup_barrier(mem_flags::mem_threadgroup); }\n"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("name", "error", "line", "body", "how"), FAULTS, ids=[case[0] for case in FAULTS])
def test_fault_is_caught(
    name: str, error: type[SimulatorError], line: int, body: str, how: dict[str, Any], order: str
) -> None:
    helper = "header" in how
    if helper:
        how = {**how, "header": SYNC}
    with pytest.raises(SimulatorError) as caught:
        launch(body, order=order, **how)
    assert type(caught.value) is error, caught.value
    places = re.findall(r"(\w+\.metal):(\d+)", str(caught.value))
    assert str(caught.value).startswith(f"{places[0][0]}:{places[0][1]}: ")
    # Of the two halves of a race, either may come last.
    expected = ("header.metal", "1") if helper else ("body.metal", str(line))
    assert expected in places if error is DataRace else expected == places[0]


def test_race_names_both_lines_and_threads() -> None:
    with pytest.raises(DataRace) as caught:
        launch(TILE + "t[tid] = a[tid];\nout[tid] = t[63 - tid];")
    assert re.match(
        r"body\.metal:2: data race: no barrier orders this store of byte \d+ of threadgroup variable #1 "
        r"after a load by thread \d+ at body\.metal:3 \[threadgroup \(0, 0, 0\), thread \d+: simdgroup \d, lane \d+\]$",
        str(caught.value),
    )


def test_out_of_bounds_says_where() -> None:
    with pytest.raises(OutOfBounds, match=r"body.metal:1: load of 4 bytes at byte 512 of buffer a, which has 512 "):
        launch("out[tid] = a[tid + 65];")
    with pytest.raises(OutOfBounds, match=r"load of 4 bytes at byte -4 of buffer a, "):
        launch("out[tid] = a[(int)tid - 1];")


def test_failed_run_leaves_outputs_and_the_next_run_alone() -> None:
    library = compiler.compile_kernel(text_of("out[gid] = gid < 128 ? 1 : a[999];"), checked=True)
    out = np.zeros(128, np.float32)
    buffers = [
        Buffer("out", out, writable=True),
        Buffer("a", np.zeros(4, np.float32)),
        Buffer("n", np.ones(1, np.int32)),
    ]
    with pytest.raises(OutOfBounds):
        run(library, "entry", buffers, (160, 1, 1), (32, 1, 1))
    assert not out.any()
    run(library, "entry", buffers, (128, 1, 1), (32, 1, 1))
    assert (out == 1).all()


def test_limits_of_a_launch() -> None:
    library = compiler.compile_kernel(text_of("out[tid] = 1;"), checked=True)
    many = [Buffer(f"b{i}", np.zeros(1, np.float32)) for i in range(32)]
    with pytest.raises(ResourceLimit, match="32 buffers, Metal allows 31"):
        run(library, "entry", many, (1, 1, 1), (1, 1, 1))
    with pytest.raises(ResourceLimit, match="1025 threads in a threadgroup"):
        run(library, "entry", many[:3], (1025, 1, 1), (1025, 1, 1))
    with pytest.raises(SimulatorError, match="buffer b0 is not C-contiguous"):
        run(library, "entry", [Buffer("b0", np.zeros((4, 4), np.float32).T)], (1, 1, 1), (1, 1, 1))


# ---- what the language refuses

REFUSED = [
    ("constant for device", "void f(device const float* p) {}", "f((constant float*)nullptr);"),
    ("device for thread", "float f(thread const float* p) { return *p; }", "out[tid] = f(a);"),
    ("threadgroup for device", "", TILE.replace("\n", "") + "device float* p = t;"),
    ("device reference for thread reference", "void f(thread float& x) { x = 1; }", "f(out[tid]);"),
    (
        "threadgroup for a deduced device pointer",
        "template <class T> T f(device T* p) { return *p; }",
        TILE.replace("\n", "") + "f(t);",
    ),
    ("store to constant", "", "n = 3;"),
    ("store to device const", "", "a[tid] = 3;"),
    ("three components of four", "", "float4 v = float4(1, 2, 3); out[tid] = v.x;"),
    ("int and uint", "", "out[tid] = min(tid, 3);"),
    ("barrier without flags", "", "threadgroup_barrier();"),
    ("double", "", "double x = 1; out[tid] = x;"),
    ("int vector for float vector", "", "float4 v = int4(1); out[tid] = v.x;"),
    ("uninitialised local", "", "float x; out[tid] = x;"),
    ("sometimes uninitialised local", "", "float x; if (tid > 3) x = 1; out[tid] = x;"),
    ("C++17", "", "if constexpr (true) out[tid] = 1;"),
]


@pytest.mark.parametrize(("name", "header", "body"), REFUSED, ids=[case[0] for case in REFUSED])
def test_refused_by_the_compiler(name: str, header: str, body: str) -> None:
    with pytest.raises(CompileError) as caught:
        compiler.compile_kernel(text_of(body, header), checked=True)
    assert str(caught.value).startswith("body.metal:1: ")


# ---- what it computes


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("checked", [True, False])
def test_reverse_in_threadgroup_memory(order: str, checked: bool) -> None:
    body = TILE + "t[tid] = a[gid];\n" + BARRIER + "out[gid] = t[63 - tid] + simd_sum(1.0f);"
    out, counters = launch(body, groups=2, order=order, checked=checked)
    expected = np.arange(128).reshape(2, 64)[:, ::-1].ravel() + 32
    np.testing.assert_array_equal(out, expected)
    assert counters.threads == 128
    assert counters.threadgroups == 2
    assert counters.threadgroup_barriers == 2
    assert counters.simd_operations == 4
    assert counters.threadgroup_memory == 256
    byte_counts = {"device_load_bytes": 512, "device_store_bytes": 512, "threadgroup_load_bytes": 512}
    for name, expected_bytes in {**byte_counts, "threadgroup_store_bytes": 512}.items():
        assert getattr(counters, name) == (expected_bytes if checked else 0)
    if checked:
        assert counters.per_buffer == {"out": (0, 512), "a": (512, 0), "n": (0, 0)}


def test_orders_are_what_they_say() -> None:
    body = (
        "device atomic_uint* c = (device atomic_uint*)out;\n"
        "out[1 + tid] = atomic_fetch_add_explicit(c, 1, memory_order_relaxed);"
    )
    for order, expected in (("forward", np.arange(64)), ("reversed", np.arange(64)[::-1])):
        out, counters = launch(body, order=order, initialised=True)
        np.testing.assert_array_equal(out[1:65], expected)
        assert out.view(np.uint32)[0] == 64
        assert counters.atomics == 64


def test_correct_use_of_barriers_passes() -> None:
    body = (
        TILE + "for (int i = 0; i < 3; ++i) {\n"
        "t[tid] = a[tid] + i; simdgroup_barrier(mem_flags::mem_threadgroup); float x = t[tid ^ 31];\n"
        "simdgroup_barrier(mem_flags::mem_threadgroup); t[tid] = x; "
        + BARRIER
        + "x += t[63 - tid]; "
        + BARRIER
        + "out[tid] = x; threadgroup_barrier(mem_flags::mem_device); out[64 + (tid ^ 32)] = out[tid ^ 32]; "
        "threadgroup_barrier(mem_flags::mem_device); }"
    )
    for order in ORDERS:
        out, counters = launch(body, order=order)
        lanes = np.arange(64)
        np.testing.assert_array_equal(out[:64], (lanes ^ 31) + 2 + ((63 - lanes) ^ 31) + 2)
        assert counters.simdgroup_barriers == 3 * 2 * 2
        assert counters.threadgroup_barriers == 3 * 4


SIMD = [
    ("simd_sum(a[tid])", lambda x: np.full(32, x.sum())),
    ("simd_max(a[tid])", lambda x: np.full(32, x.max())),
    ("simd_min(a[tid])", lambda x: np.full(32, x.min())),
    ("simd_any(a[tid] == 3.0f) + 2 * simd_all(lane < 32)", lambda x: np.full(32, (3 in x) + 2)),
    ("simd_shuffle(a[tid], 5)", lambda x: np.full(32, x[5])),
    ("simd_broadcast(a[tid], 31)", lambda x: np.full(32, x[31])),
    ("simd_broadcast_first(a[tid])", lambda x: np.full(32, x[0])),
    ("simd_shuffle_xor(a[tid], 6)", lambda x: x[np.arange(32) ^ 6]),
    ("simd_shuffle_down(a[tid], 3)", lambda x: np.concatenate([x[3:], x[29:]])),
    ("simd_shuffle_up(a[tid], 3)", lambda x: np.concatenate([x[:3], x[:29]])),
    ("simd_shuffle_and_fill_up(a[tid], -1.0f, 2)", lambda x: np.concatenate([[-1, -1], x[:30]])),
    ("simd_prefix_inclusive_sum(a[tid])", np.cumsum),
    ("simd_prefix_exclusive_sum(a[tid])", lambda x: np.cumsum(x) - x),
    ("simd_sum(float4(a[tid], 1, 2, 3)).z", lambda x: np.full(32, 64)),
    ("float(simd_sum(bfloat(a[lane])))", lambda x: np.full(32, 496)),
]


@pytest.mark.parametrize(("expression", "oracle"), SIMD, ids=[case[0] for case in SIMD])
def test_simd_operation(expression: str, oracle: Any) -> None:
    for order in ORDERS:
        out, _ = launch(f"out[tid] = {expression};", order=order)
        values = np.arange(64, dtype=np.float32).reshape(2, 32)
        np.testing.assert_array_equal(out[:64].reshape(2, 32), [oracle(row) for row in values])


def test_simd_operations_of_a_partial_simdgroup() -> None:
    out, _ = launch("out[tid] = simd_sum(a[tid]);", threads=39)
    np.testing.assert_array_equal(out[:39], [496] * 32 + [sum(range(32, 39))] * 7)
    with pytest.raises(OutOfBounds, match="simd_shuffle_xor reads lane 7 of a simdgroup of 7"):
        launch("out[tid] = simd_shuffle_xor(a[tid], 1);", threads=39)


def bfloat(array: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, as the uint16 that buffers hold."""
    bits = array.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(array: np.ndarray) -> np.ndarray:
    return (array.astype(np.uint32) << 16).view(np.float32)


PRODUCT_SIGNATURE = """\
void k(device {accumulator}* out [[buffer(0)]], const device {operand}* a [[buffer(1)]],
       const device {operand}* b [[buffer(2)]], uint3 tg [[threadgroup_position_in_grid]])
"""
PRODUCT_BODY = """\
simdgroup_matrix<ACC, 8, 8> sum = make_filled_simdgroup_matrix<ACC, 8, 8>(ACC(0));
simdgroup_matrix<OPERAND, 8, 8> x, y;
for (uint i = 0; i < 40; i += 8) {
  simdgroup_load(x, a, 40, ulong2(i, tg.y * 8));
  simdgroup_load(y, b, 40, ulong2(i, tg.x * 8), true);
  simdgroup_multiply_accumulate(sum, x, y, sum);
}
simdgroup_store(sum, out, 24, ulong2(tg.x * 8, tg.y * 8));
"""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("operand", "accumulator"), [("float", "float"), ("half", "float"), ("bfloat", "float"), ("half", "half")]
)
def test_matrix_product(operand: str, accumulator: str, order: str) -> None:
    random = np.random.default_rng(1)
    a, b = random.standard_normal((16, 40)), random.standard_normal((24, 40))
    store = {"float": np.float32, "half": np.float16, "bfloat": bfloat}[operand]
    a, b = (bfloat(x) if operand == "bfloat" else x.astype(store) for x in (a, b))
    out = np.zeros((16, 24), np.float16 if accumulator == "half" else np.float32)
    cpp = text_of(
        PRODUCT_BODY.replace("ACC", accumulator).replace("OPERAND", operand),
        signature=PRODUCT_SIGNATURE.format(operand=operand, accumulator=accumulator),
        codes="0, 1, 2, ::msl::at_threadgroup_position_in_grid",
    )
    buffers = [Buffer("out", out, writable=True, initialised=False), Buffer("a", a), Buffer("b", b)]
    library = compiler.compile_kernel(cpp, checked=True)
    counters = run(library, "entry", buffers, (3 * 32, 2, 1), (32, 1, 1), Options(order=order))
    a, b = (widened(x) if operand == "bfloat" else x for x in (a, b))
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(out, expected, atol=0.03 if accumulator == "half" else 1e-5)
    assert counters.multiply_accumulates == 2 * 3 * 5
    item = 4 if operand == "float" else 2
    assert counters.device_load_bytes == 2 * 3 * 5 * 2 * 64 * item
    assert counters.device_store_bytes == 16 * 24 * out.dtype.itemsize


def test_fragment_layout_is_apples() -> None:
    body = (
        "simdgroup_float8x8 m;\nsimdgroup_load(m, a, 8);\n"
        "out[2 * tid] = m.thread_elements()[0]; out[2 * tid + 1] = m.thread_elements()[1];"
    )
    out, _ = launch(body, threads=32)
    for lane, (first, second) in enumerate(out[:64].reshape(32, 2)):
        quad = lane // 4
        row, column = (quad & 4) + lane // 2 % 4, (quad & 2) * 2 + lane % 2 * 2
        assert (first, second) == (row * 8 + column, row * 8 + column + 1)


# Products are queued: results must be right however lanes come to read them.
LAZY = [
    (
        "some lanes read",
        "if (lane % 3 == 0) out[tid] = sum.thread_elements()[0];\nelse out[tid] = -1;",
        lambda x, i: np.where(i % 3, -1, x),
    ),
    (
        "some lanes read, then all multiply on",
        "float early = 0; if (lane < 5) early = sum.thread_elements()[0];\n"
        "simdgroup_multiply_accumulate(sum, two, one, sum);\nout[tid] = sum.thread_elements()[0] + early;",
        lambda x, i: x + 2 * (i_is_diagonal(i)) + np.where(i < 5, x, 0),
    ),
    (
        "some lanes write, then all multiply on",
        "if (lane >= 20) sum.thread_elements()[0] = 7;\n"
        "simdgroup_multiply_accumulate(sum, two, one, sum);\nout[tid] = sum.thread_elements()[0];",
        lambda x, i: np.where(i >= 20, 7, x) + 2 * i_is_diagonal(i),
    ),
    (
        "a copy is not the original",
        "simdgroup_float8x8 copy = sum; simdgroup_multiply_accumulate(sum, two, one, sum); copy = copy;\n"
        "out[tid] = copy.thread_elements()[0];",
        lambda x, i: x,
    ),
    (
        "some lanes read before a copy",
        "float early = 0; if (lane & 4) early = sum.thread_elements()[0];\nsimdgroup_float8x8 copy = sum;\n"
        "simdgroup_multiply_accumulate(sum, two, one, copy);\n"
        "out[tid] = sum.thread_elements()[0] - copy.thread_elements()[0] + early;",
        lambda x, i: 2 * i_is_diagonal(i) + np.where(i & 4, x, 0),
    ),
    (
        "a matrix that ends before it is read",
        "{ simdgroup_float8x8 temporary; simdgroup_multiply(temporary, two, two); sum = temporary; }\n"
        "simdgroup_float8x8 other(3.0f);\nout[tid] = sum.thread_elements()[0] + 0 * other.thread_elements()[0];",
        lambda x, i: 4 * i_is_diagonal(i),
    ),
    (
        "more products than the queue holds",
        "for (int i = 0; i < 300; ++i) { if (i % 7 == 0 && lane == 9) sum.thread_elements()[1] += 0;\n"
        "simdgroup_multiply_accumulate(sum, two, one, sum); }\nout[tid] = sum.thread_elements()[0];",
        lambda x, i: x + 600 * i_is_diagonal(i),
    ),
]


def i_is_diagonal(lane: np.ndarray) -> np.ndarray:
    """Does the lane's first element lie on the diagonal?"""
    quad = lane // 4
    return ((quad & 4) + lane // 2 % 4 == (quad & 2) * 2 + lane % 2 * 2).astype(np.float32)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("name", "tail", "oracle"), LAZY, ids=[case[0] for case in LAZY])
def test_matrix_results_however_they_are_read(name: str, tail: str, oracle: Any, order: str) -> None:
    head = (
        "simdgroup_float8x8 x, one(1.0f), two(2.0f), sum(0.0f);\nsimdgroup_load(x, a, 8);\n"
        "simdgroup_multiply_accumulate(sum, x, two, sum);\n"
    )
    out, _ = launch(head + tail, threads=32, order=order)
    lanes = np.arange(32)
    quad = lanes // 4
    loaded = ((quad & 4) + lanes // 2 % 4) * 8 + (quad & 2) * 2 + lanes % 2 * 2
    np.testing.assert_array_equal(out[:32], oracle(2.0 * loaded, lanes))


def test_in_place_matrix_update_needs_no_barrier() -> None:
    body = (
        "simdgroup_float8x8 m, one(1.0f);\nsimdgroup_load(m, out, 8);\n"
        "simdgroup_multiply_accumulate(m, one, one, m);\nsimdgroup_store(m, out, 8);"
    )
    out, _ = launch(body, threads=32, initialised=True)
    np.testing.assert_array_equal(out[:64].reshape(8, 8), np.eye(8))


LANGUAGE = [
    ("float4(bfloat4(1.5f, 2, 3, 4)).w + half4(2).x", 6.0),
    ("float(bfloat2(half2(1, 3)).y) + float(half3(bfloat2(1, 2), 3.0f).x)", 4.0),
    ("dot(float3(1, 2, 3), float3(float2(1, 1), 1))", 6.0),
    ("float4(1, 2, 3, 4).wzyx.x + float4(float2(1, 2).yx, 0, 0).x", 6.0),
    ("clamp(7.5f, 0.0f, 2.0f) + min(3u, 4u) + max(-1, 1)", 6.0),
    ("max(float2(1, 5), 3.0f).x + clamp(float2(9, -9), -1.0f, 1.0f).y", 2.0),
    ("select(1.0f, 2.0f, true) + select(float2(0), float2(4), float2(1, 2) < float2(2, 2)).x", 6.0),
    ("any(float2(0, 1) > float2(0, 0)) + all(float2(0, 1) > float2(0, 0))", 1.0),
    ("precise::exp(0.0f) + fast::exp2(2.0f) + metal::rsqrt(0.25f) + fma(2.0f, 3.0f, -8.0f)", 5.0),
    ("as_type<float>(as_type<uint>(3.25f))", 3.25),
    ("-INFINITY < 0 ? numeric_limits<int>::max() == 2147483647 : 0", 1.0),
    ("1.0 / 3", np.float32(1) / np.float32(3)),
    ("float(bfloat(1.0f) + bfloat(0.001f))", 1.0),
    ("float(half(2048.0f) + half(1.0f))", 2048.0),
    ("float(bfloat(1.00390625f))", 1.0),  # halfway between two bfloats: to even
    ("metal::float4(1).y + vec<float, 4>(2).z", 3.0),
    ("abs(-2) + abs(-3.0f) + popcount(7u) + sign(-2.0f)", 7.0),
    ("tanh(0.0f) + isnan(NAN) + isinf(INFINITY) + floor(-0.5f)", 1.0),
    ("extract_bits(0xABCDu, 4, 8) + mulhi(0x80000000u, 4u) + rotate(1u, 4u)", 0xBC + 2 + 16),
]


@pytest.mark.parametrize(("expression", "expected"), LANGUAGE, ids=[case[0] for case in LANGUAGE])
def test_language(expression: str, expected: float) -> None:
    out, _ = launch(f"out[tid] = {expression};", threads=1)
    assert out[0] == np.float32(expected)


OVERLOADS = """
template <typename T> float space(const device T* p) { return 1; }
template <typename T> float space(const constant T* p) { return 2; }
template <typename T> float space(const threadgroup T* p) { return 3; }
template <typename P> float any_pointer(P p) { return float(p[0]); }
inline float4 wide(const device float4* p) { return *p; }
inline float4 wide(const device bfloat4* p) { return float4(*p); }
inline float4 wide(const constant bfloat4* p) { return float4(*p); }
template <typename T> float4 load4(const device T* p) { return float4(*(const device vec<T, 4>*)p); }
template <typename T> float4 load4(const constant T* p) { return float4(*(const constant vec<T, 4>*)p); }
"""


def test_overloads_by_address_space() -> None:
    signature = (
        "void k(device float* out [[buffer(0)]], const device bfloat* d [[buffer(1)]], "
        "const constant bfloat* c [[buffer(2)]], const device float* f [[buffer(3)]])\n"
    )
    body = (
        "threadgroup auto& t = ::msl::threadgroup_variable<bfloat[8], 1>();\n"
        "out[0] = space(d); out[1] = space(c); out[2] = space(t);\n"
        "out[3] = any_pointer(d) + any_pointer(c);\n"
        "out[4] = wide((const device bfloat4*)d).y + wide((const constant bfloat4*)c).y;\n"
        "out[4] += wide((const device float4*)f).y;\n"
        "out[5] = load4(d).z + load4(c).z + load4(f).z;\n"
        "vec<bfloat, 4> narrow = ::msl::make_vector<bfloat, 4>(load4(f)); out[6] = float(narrow.w);"
    )
    library = compiler.compile_kernel(text_of(body, OVERLOADS, signature, "0, 1, 2, 3"), checked=True)
    out, values = np.zeros(7, np.float32), np.array([1, 2, 3, 4], np.float32)
    buffers = [
        Buffer("out", out, writable=True, initialised=False),
        Buffer("d", bfloat(values)),
        Buffer("c", bfloat(values), constant=True),
        Buffer("f", values),
    ]
    counters = run(library, "entry", buffers, (1, 1, 1), (1, 1, 1))
    np.testing.assert_array_equal(out, [1, 2, 3, 2, 6, 9, 4])
    assert counters.per_buffer["c"][0] == counters.constant_load_bytes
    assert counters.constant_load_bytes > 0


def test_narrow_elements_have_shadows_of_their_own() -> None:
    """Neighbouring bytes and halves are no race, in a float buffer either."""
    body = (
        TILE + "device uchar* bytes = (device uchar*)out; threadgroup half* halves = (threadgroup half*)t;\n"
        "bytes[tid] = tid; halves[tid] = half(tid);\n" + BARRIER + "bytes[64 + tid] = uchar(halves[tid ^ 1]);"
    )
    out, _ = launch(body)
    lanes = np.arange(64)
    np.testing.assert_array_equal(out.view(np.uint8)[:128], np.concatenate([lanes, lanes ^ 1]))
    with pytest.raises(DataRace):
        launch("((device uchar*)out)[tid / 2] = 1;")


def test_attributes() -> None:
    names = {
        "thread_position_in_grid": "uint3",
        "thread_position_in_threadgroup": "ushort3",
        "threadgroup_position_in_grid": "uint2",
        "threads_per_threadgroup": "uint3",
        "dispatch_threads_per_threadgroup": "uint3",
        "threadgroups_per_grid": "uint3",
        "threads_per_grid": "uint3",
        "grid_size": "uint3",
        "grid_origin": "uint3",
        "thread_index_in_threadgroup": "uint",
        "thread_index_in_simdgroup": "ushort",
        "thread_index_in_quadgroup": "uint",
        "simdgroup_index_in_threadgroup": "uint",
        "quadgroup_index_in_threadgroup": "uint",
        "simdgroups_per_threadgroup": "uint",
        "quadgroups_per_threadgroup": "uint",
        "dispatch_simdgroups_per_threadgroup": "uint",
        "dispatch_quadgroups_per_threadgroup": "uint",
        "threads_per_simdgroup": "uint",
        "thread_execution_width": "uint",
    }
    parameters = ", ".join(f"{kind} {name} [[{name}]]" for name, kind in names.items())
    signature = f"void k(device uint* out [[buffer(0)]], {parameters})\n"
    # The last thread of a 5×7×2 grid of 4×3×2 threadgroups.
    lines = ["if (!all(thread_position_in_grid == uint3(4, 6, 1))) return;"]
    at = itertools.count()
    for name, kind in names.items():
        for axis in range(int(kind[-1])) if kind[-1].isdigit() else [None]:
            lines.append(f"out[{next(at)}] = {name}{'' if axis is None else f'[{axis}]'};")
    cpp = text_of("\n".join(lines), "", signature, "0, " + ", ".join(f"::msl::at_{name}" for name in names))
    out = np.zeros(next(at), np.uint32)
    run(compiler.compile_kernel(cpp, checked=True), "entry", [Buffer("out", out, writable=True)], (5, 7, 2), (4, 3, 2))
    edge = [1, 1, 2]  # what is left of the grid for the last threadgroup
    positions = [[4, 6, 1], [0, 0, 1], [1, 2], edge, [4, 3, 2], [2, 3, 1], [5, 7, 2], [5, 7, 2], [0, 0, 0]]
    scalars = [1, 1, 1, 0, 0, 1, 8, 1, 8, 32, 32]
    assert out.tolist() == [*itertools.chain(*positions), *scalars]


def test_program_scope_constants() -> None:
    header = "constant float table[4] = {1, 2, 4, 8};\n"
    out, counters = launch("out[tid] = table[tid & 3];", header=header)
    np.testing.assert_array_equal(out[:64], [1, 2, 4, 8] * 16)
    assert counters.constant_load_bytes == 256


def test_elem_to_loc() -> None:
    header = "constant int shape[3] = {2, 3, 4};\nconstant int64_t strides[3] = {1, 8, 2};\n"
    body = (
        "out[tid] = elem_to_loc(tid, shape, strides, 3);\n"
        "out[32 + tid] = elem_to_loc(uint3(tid % 4, tid / 4 % 3, tid / 12), shape, strides, 3);"
    )
    out, _ = launch(body, header=header, threads=24)
    expected = [z + 8 * y + 2 * x for z in range(2) for y in range(3) for x in range(4)]
    np.testing.assert_array_equal(out[:24], expected)
    np.testing.assert_array_equal(out[32:56], expected)


def test_a_thousand_fibers_keep_their_locals() -> None:
    body = (
        "float local[64];\nfor (int i = 0; i < 64; ++i) local[(i * 7 + tid) % 64] = a[i] + tid;\n"
        "float sum = 0;\nfor (int i = 0; i < 64; ++i) { sum += local[i]; if (i % 8 == 0) " + BARRIER + "}\n"
        "if (tid % 8 == 0) out[tid / 8] = sum;"
    )
    for order in ORDERS:
        out, counters = launch(body, threads=1024, order=order)
        np.testing.assert_array_equal(out, sum(range(64)) + 64 * 8 * np.arange(128))
        assert counters.threadgroup_barriers == 8


def test_counters_add_up() -> None:
    first = Counters(device_load_bytes=3, threadgroup_memory=7, per_buffer={"x": (1, 2)})
    second = Counters(device_load_bytes=4, threadgroup_memory=5, per_buffer={"x": (1, 1), "y": (3, 0)})
    total = Counters(device_load_bytes=7, threadgroup_memory=7, per_buffer={"x": (2, 3), "y": (3, 0)})
    assert first + second == total


# ---- compilers and the cache


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.skipif(not HAS_ZIG, reason="the package ziglang is not installed")
def test_zig_is_a_compiler_too(checked: bool, tmp_path: Path) -> None:
    """In a process of its own: the runtime that is loaded here is the other compiler's."""
    script = f"""
import tests.test_simulator_machine as t
from egemma_mlx.simulator import compiler
assert compiler.find_compiler().command == {ZIG!r}
t.test_reverse_in_threadgroup_memory("forward", {checked})
t.test_matrix_product("bfloat", "float", "reversed")
if {checked}:
    for name, error, line, body, how in t.FAULTS[::4]:
        t.test_fault_is_caught(name, error, line, body, how, "forward")
"""
    environment = {
        "EGEMMA_CLANG": " ".join(ZIG),
        "EGEMMA_CACHE": str(tmp_path),
        "PATH": "/usr/bin:/bin",
        "HOME": str(Path.home()),
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EGEMMA_CACHE", str(tmp_path / "cache"))
    first = compiler.compile_kernel(text_of("out[tid] = 1;"), checked=True)
    stamp = first.stat().st_mtime_ns
    assert compiler.compile_kernel(text_of("out[tid] = 1;"), checked=True) == first
    assert first.stat().st_mtime_ns == stamp
    others = [
        compiler.compile_kernel(text_of("out[tid] = 2;"), checked=True),
        compiler.compile_kernel(text_of("out[tid] = 1;"), checked=False),
    ]
    with pytest.raises(CompileError):
        compiler.compile_kernel(text_of("out[tid] = nothing;"), checked=True)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == sorted(
        path.name for path in [first, *others]
    )


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EGEMMA_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert compiler.cache_folder() == Path("/somewhere/egemma_mlx/simulator")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert compiler.cache_folder() == Path.home() / ".cache/egemma_mlx/simulator"


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EGEMMA_CLANG", raising=False)
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NoCompiler, match="needs clang 17 or later: install one, or pip install ziglang"):
        compiler.find_compiler()


def test_a_compiler_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EGEMMA_CLANG", "/no/such/clang --flag")
    with pytest.raises(NoCompiler, match="EGEMMA_CLANG is '/no/such/clang --flag', which is no clang 17 or later"):
        compiler.find_compiler()


def test_other_systems_are_told_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.sys, "platform", "darwin")
    monkeypatch.setattr(compiler.platform, "machine", lambda: "arm64")
    assert (
        compiler.available.__wrapped__() == "the simulator runs on Linux on x86_64 and aarch64, not on darwin on arm64"
    )


def test_a_place_without_debug_information() -> None:
    assert symbols.locate(compiler.compile_runtime(), 1) == "unknown place"
