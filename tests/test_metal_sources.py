"""What the MSL sources are made of: no Apple compiler is at hand, so they use what its users are known to use.

Every function, type, attribute and flag of Metal in `metal_src/` stands in `KNOWN` with a place that it is known from:
the seed library, or a kernel header of MLX's (which MLX's wheels ship).
"""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

import mlx
import pytest

from egemma_mlx.kernels.library import source_folder

SEED = Path(__file__).parents[2] / "shared" / "seed" / "egemma2_msl.metal"
MLX_KERNELS = Path(next(iter(mlx.__path__))) / "include" / "mlx" / "backend" / "metal" / "kernels"

KNOWN = {
    # functions
    "abs": "unary_ops.h",
    "clamp": "fp_quantized.h",
    "dot": "seed",
    "make_filled_simdgroup_matrix": "seed",
    "max": "seed",
    "min": "seed",
    "precise::exp": "seed",
    "precise::rsqrt": "unary_ops.h",
    "simd_any": "seed",
    "simd_max": "seed",
    "simd_shuffle_xor": "seed",
    "simd_sum": "seed",
    "simdgroup_load": "seed",
    "simdgroup_multiply_accumulate": "seed",
    "simdgroup_store": "seed",
    "thread_elements": "seed",
    "threadgroup_barrier": "seed",
    # types
    "bfloat16_t": "bf16.h",
    "decltype": "steel/gemm/mma.h",
    "float2": "fft.h",
    "float4": "seed",
    "int2": "steel/gemm/transforms.h",
    "simdgroup_float8x8": "seed",
    "uint": "seed",
    "ulong": "seed",
    "ulong2": "seed",
    "vec": "dot.h",
    # attributes (MLX writes them into the signature), flags and macros
    "METAL_FUNC": "utils.h",
    "_Pragma": "steel/defines.h",
    "unroll": "steel/defines.h",
    "mem_flags::mem_threadgroup": "seed",
    "simdgroup_index_in_threadgroup": "seed",
    "thread_index_in_simdgroup": "seed",
    "thread_index_in_threadgroup": "seed",
    "thread_position_in_grid": "seed",
    "threadgroup_position_in_grid": "seed",
    "threads_per_grid": "copy.h",
    "threads_per_threadgroup": "softmax.h",
}

CPP = {"for", "if", "return", "float", "int", "bool", "uint", "while", "template", "else"}
TYPES = r"u?(?:char|short|int|long)\d*|bfloat\w*|half\w*|float\d\w*|simdgroup_float\w*|vec|METAL_FUNC"
ATTRIBUTES = r"(?:threads?|threadgroups?|simdgroups?|quadgroups?|dispatch|grid)\w*_(?:in|per)_\w+"

SOURCES = {path.name: path for path in sorted(Path(source_folder()).iterdir())}


def code(text: str) -> str:
    return re.sub(r"//[^\n]*|#include[^\n]*", "", text)


def functions_of_ours() -> set[str]:
    heads = r"METAL_FUNC\s+[\w<>, ]+?\s+(\w+)\("
    return {name for path in SOURCES.values() for name in re.findall(heads, code(path.read_text(encoding="utf-8")))}


def used(text: str) -> set[str]:
    """Names of Metal's in a source: what is called and not ours, types, attributes, qualified names."""
    text = code(text)
    calls = re.findall(r"((?:\w+::)?\w+)\s*(?:<[\w\s,/*+]*>)?\s*\(", text)
    types = [name for name in re.findall(rf"\b({TYPES})\b", text) if name not in ("int", "half_count")]
    return (
        ({*calls} - functions_of_ours() - CPP)
        | {*types}
        | {*re.findall(rf"\b{ATTRIBUTES}\b", text)}
        | {*re.findall(r"\b\w+::\w+\b", text)}
    )


@pytest.mark.parametrize("file", SOURCES)
def test_a_source_uses_what_the_list_knows(file: str) -> None:
    assert not used(SOURCES[file].read_text(encoding="utf-8")) - set(KNOWN)


def test_the_list_holds_nothing_that_no_source_uses() -> None:
    assert set(KNOWN) == {name for path in SOURCES.values() for name in used(path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("name", KNOWN)
def test_a_name_is_where_the_list_says(name: str) -> None:
    place = SEED if KNOWN[name] == "seed" else MLX_KERNELS / KNOWN[name]
    if not place.is_file():
        pytest.skip(f"{place.name} is not at hand")
    text = code(place.read_text(encoding="utf-8"))
    assert re.search(rf"(?<![\w]){re.escape(name)}\b", text)


@pytest.mark.parametrize("file", SOURCES)
def test_a_source_opens_with_what_it_computes(file: str) -> None:
    lines = SOURCES[file].read_text(encoding="utf-8").splitlines()
    header = "\n".join(takewhile(lambda line: line.startswith("//"), lines))
    assert header
    if file.endswith(".metal"):  # the equation, the shapes, the thread mapping
        assert " = " in header and "→" in header
        mapping = r"one (simdgroup|threadgroup|thread)|threadgroup (\(|j )|as linear.metal"
        assert re.search(mapping, header, re.IGNORECASE)
