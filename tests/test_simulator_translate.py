"""MSL → C++: what is rewritten, that lines stay, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import pytest

from egemma_mlx import simulator
from egemma_mlx.simulator import compiler
from egemma_mlx.simulator.errors import CompileError
from egemma_mlx.simulator.translate import ATTRIBUTES, signature, translate

runs = pytest.mark.skipif(simulator.available() is not None, reason=f"simulator: {simulator.available()}")

SEED = Path(__file__).parents[2] / "shared" / "seed" / "egemma2_msl.metal"

PARAMETERS = (
    "const device float* x [[buffer(0)]], device float* y [[buffer(1)]], uint lane [[thread_index_in_simdgroup]]"
)


def kernel(body: str, before: str = "", parameters: str = PARAMETERS) -> str:
    return f"{before}[[kernel]] void k({parameters}) {{\n{body}\n}}\n"


def test_the_entry_launches_the_kernel_with_its_codes() -> None:
    translation = translate(kernel("y[0] = x[lane];"), "k")
    assert translation.cpp.startswith('#include <msl.h>\n#line 1 "k.metal"\n')
    assert f'extern "C" void {translation.entry}(' in translation.cpp
    assert "::msl::launch(&k, ::msl::codes<0, 1, ::msl::at_thread_index_in_simdgroup>(), b, l, g);" in translation.cpp


def test_an_explicit_instantiation_becomes_the_entrys_function() -> None:
    name = "custom_kernel_k__bfloat16_t_4_1"
    function = f"{name}<bfloat16_t, 4, 1>"
    source = (
        f"template <typename T, int N, bool B>\n[[kernel]] void {name}({PARAMETERS}) {{ y[0] = T(N); }}\n"
        f'template [[host_name("{name}")]] [[kernel]] decltype({function}) {function};\n'
    )
    cpp = translate(source, name).cpp
    assert f"launch(&{function}, " in cpp
    assert "host_name" not in cpp
    assert "decltype" not in cpp


def test_a_signature_may_be_a_macro_and_address_spaces_stand_anywhere() -> None:
    source = (
        "#define ARGS \\\n device const float* x [[buffer(0)]], \\\n constant Row& row [[ buffer( 4 ) ]], \\\n"
        " uint3 at [[threadgroup_position_in_grid]]\nkernel void k(ARGS)\n{ }\n"
    )
    x, row, at = signature(source, "k")
    assert (x.name, x.buffer, x.constant) == ("x", 0, False)
    assert (row.name, row.buffer, row.constant) == ("row", 4, True)
    assert (at.name, at.buffer, at.attribute) == ("at", None, "threadgroup_position_in_grid")


@pytest.mark.parametrize("attribute", sorted(ATTRIBUTES))
def test_every_attribute_of_mlx_has_a_code(attribute: str) -> None:
    cpp = translate(kernel("", parameters=f"device float* y [[buffer(0)]], uint a [[{attribute}]]"), "k").cpp
    assert f"codes<0, ::msl::at_{attribute}>" in cpp


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("device float* y [[buffer(0)]], uint a [[thread_position_in_world]]", "thread_position_in_world"),
        ("device float* y [[buffer(0)]], threadgroup float* t [[threadgroup(0)]]", "threadgroup"),
        ("device float* y [[buffer(0)]] uint a [[thread_position_in_grid]]", "one attribute"),
        ("device float* y", "one attribute but got 'device float"),
        ("float* y [[buffer(0)]]", "without an address space|a buffer"),
    ],
)
def test_bad_signatures_are_refused(parameters: str, message: str) -> None:
    with pytest.raises(CompileError, match=rf"^k\.metal:2: .*({message})"):
        translate("\n" + kernel("", parameters=parameters), "k")


@pytest.mark.parametrize("mark", ["kernel", "[[ kernel ]]", "[[kernel, max_total_threads_per_threadgroup(64)]]"])
def test_a_kernel_may_be_marked_in_metals_ways(mark: str) -> None:
    source = f"{mark}\nvoid k({PARAMETERS}) {{ threadgroup float t[4]; }}"
    assert [parameter.name for parameter in signature(source, "k")] == ["x", "y", "lane"]
    assert "threadgroup_variable<float[4], 0>" in translate(source, "k").cpp


def test_a_missing_kernel_is_named() -> None:
    with pytest.raises(CompileError, match="no kernel function other"):
        translate(kernel(""), "other")


# --- threadgroup variables -------------------------------------------------------------------------------------------


def variables(body: str) -> list[tuple[str, str]]:
    """(name, type) of the references in a translated body, numbered from 0."""
    found = re.findall(
        r"threadgroup auto& (\w+) = ::msl::threadgroup_variable<(.*?), (\d+)>\(\);", translate(kernel(body), "k").cpp
    )
    assert [int(number) for *_, number in found] == list(range(len(found)))
    return [(name, type_) for name, type_, _ in found]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("threadgroup float t[32];", [("t", "float[32]")]),
        ('#line 1 "b.metal"\n  threadgroup float4 t[N + 1][ (M - 1) * 4 ];', [("t", "float4[N + 1][ (M - 1) * 4 ]")]),
        ("threadgroup uint n;", [("n", "uint")]),
        ("threadgroup T a[4], b, c [2][3];", [("a", "T[4]"), ("b", "T"), ("c", "T[2][3]")]),
        ("threadgroup vec<T, 4> t[8];", [("t", "vec<T, 4>[8]")]),
        ("threadgroup metal::atomic_uint t[8];", [("t", "metal::atomic_uint[8]")]),
        ("threadgroup unsigned int t[8];", [("t", "unsigned int[8]")]),
        (
            "{ threadgroup float t[1]; } threadgroup half u[N > 4 ? 1 : 2];",
            [("t", "float[1]"), ("u", "half[N > 4 ? 1 : 2]")],
        ),
        ("threadgroup float* p = t; threadgroup_barrier(mem_flags::mem_threadgroup);", []),
        ("threadgroup float4* p = c ? (threadgroup float4*)(t + a) : (threadgroup float4*)(t);", []),
        ("threadgroup auto& r = t; const threadgroup float& s = t[0];", []),
        ("// threadgroup float t[32];\n/* threadgroup float u[32]; */", []),
    ],
)
def test_threadgroup_variables_become_references(body: str, expected: list[tuple[str, str]]) -> None:
    assert variables(body) == expected


def test_lines_stay() -> None:
    body = '// one\nthreadgroup float a[4],\n  b[\n 2];\n/* two\nlines */ y[0] = 1; // "not a string\n'
    source = kernel(body + "here();", before='#line 40 "h.metal"\nfloat f(); // "\n')
    lines = translate(source, "k").cpp.split("\n")[2:]
    original = source.split("\n")
    assert lines[original.index("here();")] == "here();"
    assert lines[0] == original[0]
    assert lines[len(original)].startswith("#line 1 ")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("threadgroup float t[4];\n" + kernel(""), r"1: .*outside the body of a kernel"),
        ("void f() {\n  threadgroup float t[4];\n}\n" + kernel(""), r"2: .*outside the body of a kernel"),
        (kernel("int i;\nthreadgroup float t[4] = {0};"), r"3: .*initial value"),
    ],
)
def test_misplaced_threadgroup_variables_are_refused(source: str, message: str) -> None:
    with pytest.raises(CompileError, match=rf"^k\.metal:{message}"):
        translate(source, "k")


# --- lint ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "line", "message"),
    [
        ("constexpr double pi = 3.14;", 7, "Metal has no double"),
        ("void f() { goto end; end:; }", 7, "Metal has no goto"),
        ("void f() { static int n;\n thread int* p = new int; }", 8, "Metal has no new"),
        ("#pragma once\n#include <vector>", 8, "Metal has no #include <vector>"),
        ("void f(float* p);", 7, "without an address space: 'float*'"),
        ("void f(const float4 &p, int n);", 7, "without an address space: 'float4 &'"),
        ("void f(device float* q,\n int n, T* p) {}", 8, "without an address space: 'T* p'"),
        ("template <typename T> T f(const T* p, int n) { return p[n]; }", 7, "without an address space: 'const T* p'"),
        ("template <typename T> T f(thread const T& q, vec<T, 4>& p) { return p[0]; }", 7, "'vec<T, 4>& p'"),
        ("void f(device float* x) {\n float y = *(float*)(x); }", 8, "'float*'"),
        ("void f() { uint8_t x[2]; uint8_t* p = x; }", 7, "'uint8_t*'"),
    ],
)
def test_what_metal_would_refuse_is_refused_with_its_line(before: str, line: int, message: str) -> None:
    with pytest.raises(CompileError, match=rf"^h\.h:{line}: .*{re.escape(message)}"):
        translate(kernel("", before=f'#line 7 "h.h"\n{before}\n'), "k")


@pytest.mark.parametrize(
    "before",
    [
        "template <typename P> float f(P p, thread float& q, int n) { return p[n] * q; }",
        "void f(const device float* p, device const float4& q, threadgroup half* r, constant uint& n) { }",
        "float g(float a, float b) { float c = a * b; int n = int(a) & int(b); bool d = a < b && b > c; return c; }",
        "template <typename T> void f(device\n  T* p) { *(device float4*)(p) = *(threadgroup float4*)(0); }",
        "// double goto float* p\n#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;",
        "float h(float x) { if (x > 0) { return sizeof(float) * x; } else if (x * x > 2) { return x; } return 0; }",
        "struct S { float newer; int throwing; float4 operator()(float4 x) const { return x; } };",
        "template <typename F> void each(F&& f) { f(); }",
    ],
)
def test_what_metal_takes_is_taken(before: str) -> None:
    assert before.splitlines()[-1] in translate(kernel("", before=before + "\n"), "k").cpp


MLX_HEADERS = sorted((Path(mx.__file__).parent / "include" / "mlx" / "backend" / "metal" / "kernels").rglob("*.h"))


@pytest.mark.skipif(not MLX_HEADERS, reason="this mlx comes without its Metal headers")
def test_mlxs_own_kernels_are_taken() -> None:
    for header in MLX_HEADERS:
        text = header.read_text()
        if "MetalPerformancePrimitives" not in text:
            translate(f'#line 1 "{header.name}"\n{text}\n{kernel("")}', "k")


@runs
@pytest.mark.skipif(not SEED.exists(), reason=f"no {SEED.name} beside this repository")
def test_every_kernel_of_the_seed_compiles() -> None:
    source = SEED.read_text()
    names = re.findall(r"^kernel void (\w+)\(", source, re.M)
    assert len(names) == 12
    for name in names:
        assert compiler.compile_kernel(translate(source, name).cpp, checked=False).exists()
