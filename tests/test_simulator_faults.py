"""Small broken kernels, each with one fault: the simulator says which and on what line. Mended ones run clean.

Every kernel has x (128 floats, x[j] = j), few (4 floats, so in the constant address space), b (64 bfloat16) and an
output y (64 floats); i is the thread. The lines that a report has to name, and no others, end in `// <- here`.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from textwrap import dedent
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from egemma_mlx import simulator
from egemma_mlx.simulator.errors import (
    CompileError,
    DataRace,
    Divergence,
    Misaligned,
    OutOfBounds,
    ReadOnlyStore,
    ResourceLimit,
    SimulatorError,
    UninitialisedRead,
)

pytestmark = pytest.mark.skipif(simulator.available() is not None, reason=f"simulator: {simulator.available()}")
Order = Literal["forward", "reversed"]
ORDERS: tuple[Order, ...] = ("forward", "reversed")

HEADER = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"
START = "const uint i = thread_position_in_grid.x;\n"
MARK = "// <- here"


@dataclass(frozen=True)
class Kernel:
    """A body, which is to be run by `groups` threadgroups of `threads` threads."""

    body: str
    header: str = ""
    threads: int = 64
    groups: int = 1
    more_inputs: int = 0

    @property
    def texts(self) -> dict[str, str]:
        """The source by the names that a report gives its files."""
        return {"fault.metal": START + dedent(self.body).lstrip("\n"), "fault.h": HEADER + dedent(self.header)}

    @property
    def marked(self) -> set[str]:
        lines = ((file, n, line) for file, text in self.texts.items() for n, line in enumerate(text.split("\n"), 1))
        return {f"{file}:{n}" for file, n, line in lines if line.endswith(MARK)}

    def run(self) -> NDArray[np.float32]:
        inputs = {"x": X, "few": X[:4], "b": X[:64].astype(mx.bfloat16)}
        inputs |= {f"z{n}": X for n in range(self.more_inputs)}
        kernel = simulator.metal_kernel(
            name="fault",
            input_names=list(inputs),
            output_names=["y"],
            source=self.texts["fault.metal"],
            header=self.texts["fault.h"],
        )
        (y,) = kernel(
            inputs=list(inputs.values()),
            grid=(self.threads * self.groups, 1, 1),
            threadgroup=(self.threads, 1, 1),
            output_shapes=[(64,)],
            output_dtypes=[mx.float32],
        )
        return np.array(y)


X = mx.arange(128.0)

# --- the faults ------------------------------------------------------------------------------------------------------

FAULTS: dict[type[SimulatorError], dict[str, Kernel]] = {}

FAULTS[OutOfBounds] = {
    "load past the end": Kernel("y[i] = x[i + 65];  // <- here"),
    "load before the start": Kernel("y[i] = x[int(i) - 1];  // <- here"),
    # Where z0 is if buffers lie on every other page of 64 KiB.
    "load far away, from another buffer": Kernel("y[i] = x[i + 98304];  // <- here", more_inputs=1),
    "load at a wild index": Kernel("y[i] = x[i * 100000007u];  // <- here"),
    "store past the end": Kernel("y[2 * i] = 1.0f;  // <- here"),
    "store before the start": Kernel("(y - 1)[i] = 1.0f;  // <- here"),
    "vector over the end": Kernel("y[i] = (*(const device float4*)(x + 4 * i)).x;  // <- here"),
    "store in one of two branches that are alike": Kernel(
        """
        if (x[i] < 1000.0f) {
          y[i + 64] = 1.0f;  // <- here
        } else {
          y[i + 64] = 2.0f;
        }
        """
    ),
    "threadgroup array": Kernel(
        """
        threadgroup float t[64];
        t[i + 1] = x[i];  // <- here
        y[i] = 0.0f;
        """
    ),
    "row of a threadgroup array": Kernel(
        """
        threadgroup float t[8][8];
        t[0][i] = x[i];  // <- here
        y[i] = 0.0f;
        """
    ),
    "threadgroup array by a pointer, into the next one": Kernel(
        """
        threadgroup float t[64], u[64];
        u[i] = 0.0f;
        fill(t, i);
        y[i] = 0.0f;
        """,
        header="""
        inline void fill(threadgroup float* t, uint i) {
          t[i + 1] = 1.0f;  // <- here
        }
        """,
    ),
    "local array": Kernel(
        """
        float a[4] = {1.0f, 2.0f, 3.0f, 4.0f};
        y[i] = a[i & 7];  // <- here
        """
    ),
    "local array by a pointer": Kernel(
        """
        float a[4] = {1.0f, 2.0f, 3.0f, x[i]};
        y[i] = pick(a, i & 7);
        """,
        header="""
        inline float pick(thread const float* a, uint i) {
          return a[i];  // <- here
        }
        """,
    ),
    "component of a vector": Kernel(
        """
        const float4 v = float4(x[i]);
        y[i] = v[i & 7];  // <- here
        """
    ),
    "constant buffer": Kernel("y[i] = few[i];  // <- here"),
    "constant table of the program": Kernel(
        "y[i] = table[i];  // <- here", header="constant float table[4] = {1.0f, 2.0f, 3.0f, 4.0f};\n"
    ),
    "shape": Kernel("y[i] = x_shape[i];  // <- here"),
    "matrix load over the end": Kernel(
        """
        simdgroup_float8x8 m;
        simdgroup_load(m, x + 72, 8);  // <- here
        y[i] = m.thread_elements()[0];
        """
    ),
    "transposed matrix load over the end": Kernel(
        """
        simdgroup_float8x8 m;
        simdgroup_load(m, x, 20, ulong2(0, 0), true);  // <- here
        y[i] = m.thread_elements()[0];
        """
    ),
    "matrix store over the end": Kernel(
        """
        simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
        simdgroup_store(m, y, 9);  // <- here
        """,
        threads=32,
    ),
    "matrix load over the end of a threadgroup array": Kernel(
        """
        threadgroup float t[63];
        t[i] = 0.0f;
        if (i < 31)
          t[i + 32] = 0.0f;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        simdgroup_float8x8 m;
        simdgroup_load(m, t, 8);  // <- here
        y[i] = m.thread_elements()[0];
        """,
        threads=32,
    ),
    "lane that a small simdgroup has not": Kernel("y[i] = simd_broadcast(x[i], 20);  // <- here", threads=16),
}

FAULTS[Misaligned] = {
    "float4 at an odd element": Kernel("y[i] = (*(const device float4*)(x + 1)).x;  // <- here"),
    "float4 at an even element": Kernel("y[i] = (*(const device float4*)(x + i / 32 * 2)).x;  // <- here"),
    "float2 at an odd element": Kernel("y[i] = (*(const device float2*)(x + i)).x;  // <- here"),
    "four bfloat16 at an odd element": Kernel(
        """
        const auto v = *(const device vec<bfloat, 4>*)(b + 1);  // <- here
        y[i] = float(v[0]) + float(v[1]) + float(v[2]) + float(v[3]);
        """
    ),
    "uint at an odd half": Kernel("y[i] = *(const device uint*)(b + i % 2);  // <- here"),
    "float4 from constant memory": Kernel("y[i] = (*(const constant float2*)(few + 1)).x;  // <- here"),
    "store of float4": Kernel(
        """
        if (i < 8)
          *(device float4*)(y + 5 * i) = float4(1.0f);  // <- here
        """
    ),
    "float2 in threadgroup memory": Kernel(
        """
        threadgroup float t[130];
        *(threadgroup float2*)(t + 2 * i + 1) = float2(1.0f);  // <- here
        y[i] = 0.0f;
        """
    ),
}

FAULTS[ReadOnlyStore] = {
    "const cast away": Kernel("((device float*)x)[i] = 1.0f;  // <- here"),
    "const cast away in a helper": Kernel(
        "spoil(x + i);",
        header="""
        template <typename T>
        void spoil(const device T* p) {
          *const_cast<device T*>(p) = T(0);  // <- here
        }
        """,
    ),
    "matrix store": Kernel(
        """
        simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
        simdgroup_store(m, (device float*)x, 8);  // <- here
        """
    ),
    "atomic": Kernel(
        "atomic_fetch_add_explicit((device atomic_uint*)x, 1u, memory_order_relaxed);  // <- here",
        header="#include <metal_atomic>\n",
    ),
}

FAULTS[DataRace] = {
    "no barrier between store and load": Kernel(
        """
        threadgroup float t[64];
        t[i] = x[i];  // <- here
        y[i] = t[63 - i];  // <- here
        """
    ),
    "no barrier between load and store": Kernel(
        """
        threadgroup float t[64];
        float sum = 0.0f;
        for (int k = 0; k < 2; ++k) {
          t[i] = x[i + k];  // <- here
          threadgroup_barrier(mem_flags::mem_threadgroup);
          sum += t[63 - i];  // <- here
        }
        y[i] = sum;
        """
    ),
    "the same value stored by all": Kernel(
        """
        threadgroup float t[1];
        t[0] = 1.0f;  // <- here
        y[i] = 0.0f;
        """
    ),
    "the same device element stored by two threads": Kernel("y[i / 2] = 1.0f;  // <- here"),
    "a device element of two threadgroups": Kernel("y[i % 64] = x[i];  // <- here", groups=2),
    "load of what another threadgroup stores": Kernel(
        """
        if (i < 32)
          y[i] = x[i];  // <- here
        else
          y[i] = y[i - 32];  // <- here
        """,
        threads=32,
        groups=2,
    ),
    "a barrier orders no other threadgroup": Kernel(
        """
        y[i] = x[i];  // <- here
        threadgroup_barrier(mem_flags::mem_device);
        if (i == 32)
          y[32] = y[0];  // <- here
        """,
        threads=32,
        groups=2,
    ),
    "simdgroup_barrier between simdgroups": Kernel(
        """
        threadgroup float t[64];
        t[i] = x[i];  // <- here
        simdgroup_barrier(mem_flags::mem_threadgroup);
        y[i] = t[63 - i];  // <- here
        """
    ),
    "barrier of device memory for threadgroup memory": Kernel(
        """
        threadgroup float t[64];
        t[i] = x[i];  // <- here
        threadgroup_barrier(mem_flags::mem_device);
        y[i] = t[63 - i];  // <- here
        """
    ),
    "barrier of threadgroup memory for device memory": Kernel(
        """
        y[i] = x[i];  // <- here
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const float other = y[63 - i];  // <- here
        threadgroup_barrier(mem_flags::mem_device);
        y[i] = other;
        """
    ),
    "barrier of no memory": Kernel(
        """
        threadgroup float t[64];
        t[i] = x[i];  // <- here
        threadgroup_barrier(mem_flags::mem_none);
        y[i] = t[63 - i];  // <- here
        """
    ),
    "a simd operation orders nothing": Kernel(
        """
        threadgroup float t[32];
        t[i] = x[i];  // <- here
        const float sum = simd_sum(x[i]);
        y[i] = t[31 - i] + sum;  // <- here
        """,
        threads=32,
    ),
    "a matrix operation orders nothing": Kernel(
        """
        threadgroup float t[32];
        simdgroup_float8x8 m, square;
        t[i] = x[i];  // <- here
        simdgroup_load(m, x, 8);
        simdgroup_multiply(square, m, m);
        y[i] = t[31 - i] + square.thread_elements()[0];  // <- here
        """,
        threads=32,
    ),
    "double buffer, filled too early": Kernel(
        """
        threadgroup float t[2][64];
        float sum = 0.0f;
        t[0][i] = x[i];
        for (int k = 0; k < 4; ++k) {
          t[(k + 1) % 2][i] = x[i + k];  // <- here
          threadgroup_barrier(mem_flags::mem_threadgroup);
          sum += t[k % 2][63 - i];  // <- here
        }
        y[i] = sum;
        """
    ),
    "matrix load of what was just stored": Kernel(
        """
        threadgroup float t[64];
        t[i] = x[i];  // <- here
        simdgroup_float8x8 m;
        simdgroup_load(m, t, 8);  // <- here
        y[i] = m.thread_elements()[0];
        """
    ),
    "load of what a matrix store just wrote": Kernel(
        """
        threadgroup float t[64];
        simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
        simdgroup_store(m, t, 8);  // <- here
        y[i] = t[i];  // <- here
        """,
        threads=32,
    ),
    "matrix stores of two simdgroups": Kernel(
        """
        simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
        simdgroup_store(m, y, 8);  // <- here
        """
    ),
    "atomic and plain": Kernel(
        """
        threadgroup atomic_uint count[1];
        if (i == 0)
          *(threadgroup uint*)count = 0;  // <- here
        atomic_fetch_add_explicit(count, 1u, memory_order_relaxed);  // <- here
        y[i] = 0.0f;
        """,
        header="#include <metal_atomic>\n",
    ),
}

FAULTS[Divergence] = {
    "barrier in a branch": Kernel(
        """
        if (i < 40)
          threadgroup_barrier(mem_flags::mem_threadgroup);  // <- here
        y[i] = 0.0f;
        """
    ),
    "barrier of one simdgroup": Kernel(
        """
        if (i < 32)
          threadgroup_barrier(mem_flags::mem_threadgroup);  // <- here
        y[i] = 0.0f;
        """
    ),
    "barriers by the number of the simdgroup": Kernel(
        """
        for (uint k = 0; k <= i / 32; ++k)
          threadgroup_barrier(mem_flags::mem_threadgroup);  // <- here
        y[i] = 0.0f;
        """
    ),
    "return before a barrier": Kernel(
        """
        if (i >= 50)
          return;
        threadgroup_barrier(mem_flags::mem_threadgroup);  // <- here
        y[i] = 0.0f;
        """
    ),
    "two barriers in two branches": Kernel(
        """
        if (i % 2) {
          threadgroup_barrier(mem_flags::mem_threadgroup);  // <- here
          y[i] = 1.0f;
        } else {
          y[i] = 2.0f;
          threadgroup_barrier(mem_flags::mem_threadgroup);  // <- here
        }
        """
    ),
    "two barriers of two simdgroups": Kernel(
        """
        if (i < 32)
          threadgroup_barrier(mem_flags::mem_threadgroup);  // <- here
        else
          threadgroup_barrier(mem_flags::mem_threadgroup);  // <- here
        y[i] = 0.0f;
        """
    ),
    "simdgroup_barrier in a branch": Kernel(
        """
        if (i % 32 < 5)
          simdgroup_barrier(mem_flags::mem_threadgroup);  // <- here
        y[i] = 0.0f;
        """
    ),
    "simd operation in a branch": Kernel(
        """
        float sum = 0.0f;
        if (i % 2 == 0)
          sum = simd_sum(x[i]);  // <- here
        y[i] = sum;
        """
    ),
    "two simd operations in two branches": Kernel(
        """
        y[i] = i % 2 == 0
            ? simd_sum(x[i])  // <- here
            : simd_max(x[i]);  // <- here
        """
    ),
    "return before a simd operation": Kernel(
        """
        if (i % 32 == 31)
          return;
        y[i] = simd_shuffle_xor(x[i], 1);  // <- here
        """
    ),
    "matrix product in a branch": Kernel(
        """
        simdgroup_float8x8 m, square = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        simdgroup_load(m, x, 8);
        if (i % 32 < 16)
          simdgroup_multiply(square, m, m);  // <- here
        y[i] = 0.0f;
        """
    ),
    "matrix load in a branch": Kernel(
        """
        simdgroup_float8x8 m;
        if (i % 32 != 7)
          simdgroup_load(m, x, 8);  // <- here
        y[i] = 0.0f;
        """
    ),
    "matrix loads in two branches": Kernel(
        """
        simdgroup_float8x8 m;
        if (i % 32 < 16)
          simdgroup_load(m, x, 8);  // <- here
        else
          simdgroup_load(m, x, 8);  // <- here
        y[i] = 0.0f;
        """
    ),
    "matrix load from each lane's own address": Kernel(
        """
        simdgroup_float8x8 m;
        simdgroup_load(m, x + i % 32, 8);  // <- here
        y[i] = 0.0f;
        """
    ),
    "matrix load with each lane's own stride": Kernel(
        """
        simdgroup_float8x8 m;
        simdgroup_load(m, x, 8 + i % 2);  // <- here
        y[i] = 0.0f;
        """
    ),
    "matrix operation of half a simdgroup": Kernel(
        """
        simdgroup_float8x8 m;
        simdgroup_load(m, x, 8);  // <- here
        y[i] = 0.0f;
        """,
        threads=48,
    ),
}

FAULTS[UninitialisedRead] = {
    "threadgroup memory": Kernel(
        """
        threadgroup float t[64];
        y[i] = t[i];  // <- here
        """
    ),
    "part of a threadgroup array": Kernel(
        """
        threadgroup float t[64];
        if (i < 63)
          t[i] = x[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        y[i] = t[63 - i];  // <- here
        """
    ),
    "matrix load of a part of a tile": Kernel(
        """
        threadgroup float t[64];
        if (i < 60)
          t[i] = x[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        simdgroup_float8x8 m;
        simdgroup_load(m, t, 8);  // <- here
        y[i] = m.thread_elements()[0];
        """
    ),
    "what the threadgroup before has left": Kernel(
        """
        threadgroup float t[32];
        if (threadgroup_position_in_grid.x == 0)
          t[i] = x[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        y[i] = t[i % 32];  // <- here
        """,
        threads=32,
        groups=2,
    ),
    "output": Kernel("y[i] += x[i];  // <- here"),
    "index from an output": Kernel(
        """
        const uint at = *(device uint*)(y + i);  // <- here
        y[i] = x[at];
        """
    ),
}

FAULTS[ResourceLimit] = {
    "33 KB of threadgroup memory": Kernel(
        """
        threadgroup float t[8448];  // <- here
        t[i] = 0.0f;
        y[i] = 0.0f;
        """
    ),
    "a float more than 32 KB of threadgroup memory": Kernel(
        """
        threadgroup float t[8192];
        threadgroup float u;  // <- here
        t[i] = 0.0f;
        if (i == 0)
          u = 0.0f;
        y[i] = 0.0f;
        """
    ),
    "32 buffers": Kernel("y[i] = 0.0f;", more_inputs=28),
    "1056 threads": Kernel("y[i % 64] = 0.0f;", threads=1056),
    "endless loop": Kernel(
        """
        while (x[0] == 0.0f) y[i] = 1.0f;  // <- here
        """
    ),
    "endless loop round a barrier": Kernel(
        """
        while (true)
          threadgroup_barrier(mem_flags::mem_threadgroup);  // <- here
        """
    ),
}

FAULTS[CompileError] = {
    "constant memory for a device pointer": Kernel(
        "y[i] = first(few);  // <- here",
        header="inline float first(const device float* p) { return p[0]; }\n",
    ),
    "threadgroup memory for a device pointer": Kernel(
        """
        threadgroup float t[64];
        device float* p = t;  // <- here
        p[i] = 0.0f;
        """
    ),
    "cast to another address space": Kernel(
        """
        threadgroup float t[64];
        device float* p = (device float*)t;  // <- here
        p[i] = 0.0f;
        """
    ),
    "pointer without an address space": Kernel(
        """
        const float* p = x;  // <- here
        y[i] = p[i];
        """
    ),
    "parameter without an address space": Kernel(
        "y[i] = first(x);", header="inline float first(const float* p) {  // <- here\n  return p[0];\n}\n"
    ),
    "store to an input": Kernel("x[i] = 1.0f;  // <- here"),
    "store to constant memory": Kernel("few[0] = 1.0f;  // <- here"),
    "double": Kernel("y[i] = float(double(x[i]) * 2);  // <- here"),
    "min of int and uint": Kernel("y[i] = min(i, 3);  // <- here"),
    "vector of too few values": Kernel("y[i] = float4(x[i], 1.0f, 2.0f).x;  // <- here"),
    "barrier without flags": Kernel("threadgroup_barrier();  // <- here"),
    "unknown name": Kernel("y[i] = x[j];  // <- here"),
    "unknown name in the header": Kernel(
        "y[i] = half_of(x[i]);", header="\ninline float half_of(float a) {\n  return c / 2;  // <- here\n}\n"
    ),
    "uninitialised local": Kernel(
        """
        float sum;
        sum += x[i];  // <- here
        y[i] = sum;
        """
    ),
    "missing semicolon": Kernel("y[i] = x[i]  // <- here"),
}

ALL = [(error, name) for error, kernels in FAULTS.items() for name in kernels]
RUNS = [
    pytest.param(error, name, order, id=f"{error.__name__}-{name}-{order}")
    for error, name in ALL
    for order in (ORDERS[:1] if error is CompileError else ORDERS)
]


@pytest.mark.parametrize(("error", "name", "order"), RUNS)
def test_a_fault_is_reported_as_what_it_is_where_it_is(error: type[SimulatorError], name: str, order: Order) -> None:
    kernel = FAULTS[error][name]
    with simulator.session(order=order, access_budget=100_000), pytest.raises(SimulatorError) as raised:
        kernel.run()
    report = str(raised.value).splitlines()[0]
    assert type(raised.value) is error, report
    if kernel.marked:
        assert set(re.findall(r"\bfault\.\w+:\d+", report)) == kernel.marked, report
        assert re.match(r"fault\.\w+:\d+: ", report)
    else:  # a fault of the launch is on no line
        assert report.startswith("custom_kernel_fault"), report


def test_every_class_of_fault_is_planted_in_several_ways() -> None:
    planted = Counter(error for error, _ in ALL)
    assert {*SimulatorError.__subclasses__()} - {*planted} == {simulator.errors.NoCompiler}
    assert min(planted.values()) >= 4 and sum(planted.values()) >= 24


# --- mended ----------------------------------------------------------------------------------------------------------

_X = np.arange(128, dtype=np.float32)
_I = np.arange(64)


def fragment(matrix: NDArray[Any]) -> NDArray[Any]:
    """The first element of an 8×8 matrix that each lane holds."""
    lane = np.arange(32)
    return matrix[(lane >> 4) * 4 + ((lane >> 1) & 3), ((lane >> 3) & 1) * 4 + (lane & 1) * 2]


TILE = _X[:64].reshape(8, 8)

MENDED: dict[str, tuple[Kernel, Any]] = {
    "load up to the end": (Kernel("y[i] = x[i + 64];"), _X[64:]),
    "vectors up to the end": (Kernel("y[i] = (*(const device float4*)(x + 4 * (i % 32))).w;"), 4 * (_I % 32) + 3),
    "four bfloat16 at a multiple of 4": (
        Kernel("y[i] = float((*(const device vec<bfloat, 4>*)(b + i / 4 * 4))[i % 4]);"),
        _I,
    ),
    "one of two branches that are alike": (
        Kernel(
            """
            if (x[i] < 20.0f) {
              y[i] = 1.0f;
            } else {
              y[i] = 2.0f;
            }
            """
        ),
        np.where(_I < 20, 1, 2),
    ),
    "local array by a pointer": (
        Kernel(
            """
            float a[4] = {1.0f, 2.0f, 3.0f, x[i]};
            y[i] = pick(a, i & 3);
            """,
            header="inline float pick(thread const float* a, uint i) {\n  return a[i];\n}\n",
        ),
        np.choose(_I & 3, [1, 2, 3, _I]),
    ),
    "constant buffer": (Kernel("y[i] = few[i & 3];"), _I & 3),
    "constant table of the program": (
        Kernel("y[i] = table[i & 3];", header="constant float table[4] = {1.0f, 2.0f, 3.0f, 4.0f};\n"),
        (_I & 3) + 1,
    ),
    "matrix load and store of the last tile": (
        Kernel(
            """
            simdgroup_float8x8 m;
            simdgroup_load(m, x + 64, 8, ulong2(0, 0), true);
            simdgroup_store(m, y, 8);
            """,
            threads=32,
        ),
        (TILE + 64).T.ravel(),
    ),
    "barrier between store and load": (
        Kernel(
            """
            threadgroup float t[64];
            t[i] = x[i];
            threadgroup_barrier(mem_flags::mem_threadgroup);
            y[i] = t[63 - i];
            """
        ),
        63 - _I,
    ),
    "barriers round the loads of a loop": (
        Kernel(
            """
            threadgroup float t[64];
            float sum = 0.0f;
            for (int k = 0; k < 2; ++k) {
              threadgroup_barrier(mem_flags::mem_threadgroup);
              t[i] = x[i + k];
              threadgroup_barrier(mem_flags::mem_threadgroup);
              sum += t[63 - i];
            }
            y[i] = sum;
            """
        ),
        2 * (63 - _I) + 1,
    ),
    "double buffer with one barrier a round": (
        Kernel(
            """
            threadgroup float t[2][64];
            float sum = 0.0f;
            for (int k = 0; k < 4; ++k) {
              t[k % 2][i] = x[i + k];
              threadgroup_barrier(mem_flags::mem_threadgroup);
              sum += t[k % 2][63 - i];
            }
            y[i] = sum;
            """
        ),
        4 * (63 - _I) + 6,
    ),
    "simdgroup_barrier within a simdgroup": (
        Kernel(
            """
            threadgroup float t[64];
            t[i] = x[i];
            simdgroup_barrier(mem_flags::mem_threadgroup);
            y[i] = t[i ^ 31];
            """
        ),
        _I ^ 31,
    ),
    "barriers by a branch that all of a threadgroup take": (
        Kernel(
            """
            threadgroup float t[32];
            t[i % 32] = x[i];
            if (threadgroup_position_in_grid.x == 1)
              threadgroup_barrier(mem_flags::mem_threadgroup);
            y[i] = threadgroup_position_in_grid.x == 1 ? t[63 - i] : t[i];
            """,
            threads=32,
            groups=2,
        ),
        np.where(_I < 32, _I, 95 - _I),
    ),
    # The compiler must not give each side of the condition a barrier of its own.
    "one condition before and after a barrier": (
        Kernel(
            """
            threadgroup float t[64];
            t[i] = 0.0f;
            if (i < 10)
              t[i] = x[i];
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (i < 10)
              y[i] = t[9 - i];
            else
              y[i] = t[i] + 1.0f;
            """
        ),
        np.where(_I < 10, 9 - _I, 1),
    ),
    "one condition before and after a simd operation of a helper": (
        Kernel(
            """
            float v = 0.0f;
            if (i < 10)
              v = x[i];
            const float sum = total(v);
            if (i < 10)
              y[i] = sum - v;
            else
              y[i] = sum;
            """,
            header="inline float total(float v) {\n  return simd_sum(v);\n}\n",
        ),
        np.where(_I < 32, 45, 0) - np.where(_I < 10, _I, 0),
    ),
    "device memory behind its barrier": (
        Kernel(
            """
            y[i] = x[i];
            threadgroup_barrier(mem_flags::mem_device);
            const float other = y[63 - i];
            threadgroup_barrier(mem_flags::mem_device);
            y[i] = other;
            """
        ),
        63 - _I,
    ),
    "threadgroup memory written again by each threadgroup": (
        Kernel(
            """
            threadgroup float t[32];
            t[i % 32] = x[i];
            threadgroup_barrier(mem_flags::mem_threadgroup);
            y[i] = t[31 - i % 32];
            """,
            threads=32,
            groups=2,
        ),
        _I ^ 31,
    ),
    "all threads add to one atomic": (
        Kernel(
            """
            threadgroup atomic_uint count[1];
            if (i == 0)
              atomic_store_explicit(count, 0u, memory_order_relaxed);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            atomic_fetch_add_explicit(count, i, memory_order_relaxed);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            y[i] = atomic_load_explicit(count, memory_order_relaxed);
            """,
            header="#include <metal_atomic>\n",
        ),
        np.full(64, 2016),
    ),
    "matrix operations that one simdgroup skips": (
        Kernel(
            """
            threadgroup float t[64];
            t[i] = x[i];
            threadgroup_barrier(mem_flags::mem_threadgroup);
            y[i] = 0.0f;
            if (i < 32) {
              simdgroup_float8x8 m, square;
              simdgroup_load(m, t, 8);
              simdgroup_multiply(square, m, m);
              y[i] = square.thread_elements()[0];
            }
            """
        ),
        np.concatenate([fragment(TILE @ TILE), np.zeros(32)]),
    ),
    "32 KB of threadgroup memory": (
        Kernel(
            """
            threadgroup float t[8192];
            t[i] = x[i];
            y[i] = t[i];
            """
        ),
        _I,
    ),
    "31 buffers": (Kernel("y[i] = z26[i];", more_inputs=27), _I),
    "1024 threads": (
        Kernel(
            """
            if (i < 64)
              y[i] = x[i];
            """,
            threads=1024,
        ),
        _I,
    ),
    "casts within an address space": (
        Kernel("y[i] = *(const device float*)((const device uchar*)x + 4 * i);"),
        _I,
    ),
    "min of uint and uint": (Kernel("y[i] = min(i, 3u);"), np.minimum(_I, 3)),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MENDED)
def test_a_mended_kernel_runs_clean(name: str, order: Order) -> None:
    kernel, expected = MENDED[name]
    with simulator.session(order=order):
        assert np.array_equal(kernel.run(), expected)
