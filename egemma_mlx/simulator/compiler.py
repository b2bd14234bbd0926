"""Compiles translated kernels and the runtime: finds clang, chooses flags, keeps what it built."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from egemma_mlx.simulator.errors import CompileError, NoCompiler

NATIVE = Path(__file__).parent / "native"
INCLUDE = NATIVE / "include"
OLDEST_CLANG = 17
NEWEST_CLANG = 22

COMMON_FLAGS = (
    "-fPIC",
    "-shared",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",  # they are locked by the C++ library; machine.py has a lock
    "-nostdlib++",
    "-fno-sanitize=all",  # zig's default is UBSan
    "-fno-stack-protector",
    "-fno-math-errno",
    "-ffp-contract=off",
)
RUNTIME_FLAGS = (*COMMON_FLAGS, "-std=c++17", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")
KERNEL_FLAGS = (
    *COMMON_FLAGS,
    # MSL before Metal 4 is C++14; the shim, a system header, may use more.
    "-std=c++14",
    "-Werror=c++17-extensions",
    "-g1",
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-fno-builtin",  # no loop becomes a memset
    "-fno-optimize-sibling-calls",  # a return address tells where a call is
    "-fno-delete-null-pointer-checks",  # a load through null is for the runtime to find
    "-flax-vector-conversions=none",
    # 1.0 is a float; half and bfloat round after each operation.
    "-Xclang",
    "-cl-single-precision-constant",
    # Any function may hold a barrier: no pass gives each branch before it a copy of its own.
    "-Xclang",
    "-fconvergent-functions",
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Xclang",
    "-fbfloat16-excess-precision=none",
    # Locals start as NaN, and reading them is an error where clang can tell.
    "-ftrivial-auto-var-init=pattern",
    "-Werror=uninitialized",
    "-Werror=sometimes-uninitialized",
    "-Werror=return-type",
    "-Wno-unknown-attributes",
    "-Wno-ignored-attributes",
    "-Wno-duplicate-decl-specifier",
    "-Wno-unused-value",
)
# Every access becomes a call of the runtime's __asan_load4_noabort and its like.
CHECKED_FLAGS = (
    "-O1",
    "-DMSL_CHECKED",
    "-fsanitize=kernel-address",
    *(
        word
        for option in (
            "-asan-instrumentation-with-call-threshold=0",
            "-asan-kernel-mem-intrinsic-prefix=1",
            "-asan-stack=0",
            "-asan-globals=0",
            "-asan-opt-same-temp=0",
            # Accesses that two branches share keep the lines of both.
            "-sink-common-insts=false",
            "-hoist-common-insts=false",
            "-enable-tail-merge=false",
        )
        for word in ("-mllvm", option)
    ),
    "-fsanitize=array-bounds,local-bounds",
    "-fno-sanitize-recover=array-bounds",
)
UNCHECKED_FLAGS = ("-O2",)


@dataclass(frozen=True)
class Compiler:
    """A clang.

    Attributes:
        command: what runs it.
        version: as it prints it.
        is_zig: names processors as zig does.
    """

    command: tuple[str, ...]
    version: str
    is_zig: bool


def compile_kernel(cpp: str, *, checked: bool) -> Path:
    """A shared object with the kernels of `cpp` (translate.py), from the cache if it is there.

    Raises:
        CompileError: clang's message, which begins with file and line of the kernel.
        NoCompiler: see `available`.
    """
    flags = (*KERNEL_FLAGS, *(CHECKED_FLAGS if checked else UNCHECKED_FLAGS), "-isystem", str(INCLUDE))
    return _build("kernel", {"kernel.cpp": cpp}, flags)


@functools.cache
def compile_runtime() -> Path:
    """The shared object that kernels run in."""
    sources = {str(path): None for path in sorted((NATIVE / "runtime").glob("*.cpp"))}
    return _build("runtime", sources, RUNTIME_FLAGS)


@functools.cache
def available() -> str | None:
    """None when the simulator runs here, else one line that says why not."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"the simulator runs on Linux on x86_64 and aarch64, not on {sys.platform} on {platform.machine()}"
    if importlib.util.find_spec("elftools") is None:
        return "the simulator needs the package pyelftools: pip install pyelftools"
    try:
        find_compiler()
    except NoCompiler as error:
        return str(error)
    return None


def find_compiler() -> Compiler:
    """$EGEMMA_CLANG, else a clang of the system that is new enough, else the one in the ziglang package."""
    named = os.environ.get("EGEMMA_CLANG")
    if named:
        compiler = _probe(tuple(shlex.split(named)))
        if compiler is None:
            raise NoCompiler(f"EGEMMA_CLANG is {named!r}, which is no clang {OLDEST_CLANG} or later")
        return compiler
    numbered = [f"clang-{number}" for number in range(NEWEST_CLANG, OLDEST_CLANG - 1, -1)]
    for name in (*numbered, "clang"):
        if shutil.which(name) and (compiler := _probe((name,))):
            return compiler
    if importlib.util.find_spec("ziglang") and (compiler := _probe((sys.executable, "-m", "ziglang", "cc"))):
        return compiler
    raise NoCompiler(
        f"the simulator needs clang {OLDEST_CLANG} or later: install one, or pip install ziglang, or set EGEMMA_CLANG"
    )


@functools.cache
def _probe(command: tuple[str, ...]) -> Compiler | None:
    try:
        run = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    version = re.search(r"clang version (\d+)\S*", run.stdout)
    if run.returncode or not version or int(version[1]) < OLDEST_CLANG:
        return None
    return Compiler(command, version[0], is_zig="ziglang" in run.stdout or "zig" in Path(command[0]).name)


@functools.cache
def _machine_flags(zig: bool) -> tuple[str, ...]:
    """The instruction set, never `native`: the cache may be shared with another machine."""
    if platform.machine() != "x86_64":
        return ("-mcpu=generic",)
    features = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0]))
    level = "x86-64-v3" if {"avx2", "fma", "bmi2", "f16c"} <= features else "x86-64"
    return (f"-march={level.replace('-', '_') if zig else level}",)


@functools.cache
def _native_digest() -> bytes:
    digest = hashlib.sha256()
    for path in sorted(path for path in NATIVE.rglob("*") if path.is_file()):
        digest.update(str(path.relative_to(NATIVE)).encode() + b"\0" + path.read_bytes())
    return digest.digest()


def cache_folder() -> Path:
    """$EGEMMA_CACHE, else egemma_mlx/simulator in the user's cache folder."""
    if named := os.environ.get("EGEMMA_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "egemma_mlx" / "simulator"


def _build(kind: str, sources: Mapping[str, str | None], flags: Sequence[str]) -> Path:
    """Compiles files (or, with a text, files that do not exist yet) unless the cache has the result."""
    compiler = find_compiler()
    flags = (*_machine_flags(compiler.is_zig), *flags)
    key = repr((compiler, flags, platform.machine(), dict(sources))).encode() + _native_digest()
    library = cache_folder() / f"{kind}-{hashlib.sha256(key).hexdigest()[:32]}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        for name, text in sources.items():
            if text is not None:
                (Path(folder) / name).write_text(text)
        built = Path(folder) / library.name
        command = [*compiler.command, "-x", "c++", *flags, *sources, "-o", built.name]
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if run.returncode:
            raise CompileError(_message(run.stderr))
        built.replace(library)
    return library


def _message(stderr: str) -> str:
    """Clang's text, after the first place of the kernel that it mentions: an error in the shim has notes about it."""
    error = re.search(r"^.*?error: (.*)$", stderr, re.MULTILINE)
    if error is None:
        return stderr
    for place in re.finditer(r"^(.+?):(\d+):\d+: (?:fatal error|error|note): ", stderr[error.start() :], re.MULTILINE):
        if not Path(place[1]).is_relative_to(INCLUDE):
            return f"{place[1]}:{place[2]}: {error[1]}\n{stderr}"
    return f"{error[1]}\n{stderr}"
