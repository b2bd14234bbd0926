"""A real BLAS under MLX's Linux CPU wheel (egemma_mlx/blas.py).

What the module does is process-wide, so each test that lets it act runs a Python of its own.
"""

import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from egemma_mlx import blas
from egemma_mlx.errors import EgemmaError

REPOSITORY = Path(__file__).parents[1]
COMPILER = shutil.which("cc")

cpu_wheel = pytest.mark.skipif(blas._cpu_wheel() is None, reason="not MLX's Linux CPU wheel")
compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler to build a stub BLAS with")

PRELUDE = """
import ctypes, json, time
from egemma_mlx import blas

def multiply(rows=64):
    import mlx.core as mx
    x = mx.random.normal((rows, 512), key=mx.random.key(0), stream=mx.cpu)
    w = mx.random.normal((1024, 512), key=mx.random.key(1), stream=mx.cpu)
    mx.eval(x, w)
    start = time.perf_counter()
    y = mx.matmul(x, w.T, stream=mx.cpu)
    mx.eval(y)
    return time.perf_counter() - start, x, w, y

def bound_to():
    \"\"\"The file of the library that libmlx's cblas_sgemm jumps into.\"\"\"
    slot = blas._jump_slots(ctypes.CDLL(str(blas._cpu_wheel())), b"cblas_sgemm")["cblas_sgemm"]
    return blas._file_of(ctypes.c_void_p.from_address(slot).value)

def out(**values):
    print(json.dumps(values))
"""


def python(code: str, **environment: str) -> dict[str, object]:
    """What `code` hands to `out`, run by a Python that inherits nothing that chooses a BLAS."""
    inherited = {k: v for k, v in os.environ.items() if k not in (blas.VARIABLE, "LD_PRELOAD")}
    process = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        env=inherited | {"PYTHONPATH": str(REPOSITORY)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def real_blas() -> str:
    """The name of the BLAS found here."""
    name = python("out(name=blas.load().name)")["name"]
    if name in (blas.REFERENCE, "MLX's own"):
        pytest.skip("no real BLAS on this machine")
    return str(name)


STUB = """
/* A BLAS whose every product is 42. */
void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda, const float *b,
                 int ldb, float beta, float *c, int ldc) {
    for (int i = 0; i < m; i++) for (int j = 0; j < n; j++) c[i * ldc + j] = 42;
}
void cblas_dgemm(void) {}
void cblas_cgemm(void) {}
"""


def build(folder: Path, name: str, source: str, *flags: str) -> str:
    library, code = folder / f"lib{name}.so", folder / f"{name}.c"
    code.write_text(source)
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", str(library), str(code), *flags], check=True)
    return str(library)


# MLX's products


@cpu_wheel
@pytest.mark.parametrize("first", ["egemma_mlx", "mlx", "a product"])
def test_mlx_multiplies_with_it_whichever_was_imported_first(real_blas: str, first: str) -> None:
    before = {"egemma_mlx": "", "mlx": "import mlx.core", "a product": "multiply()"}[first]
    result = python(f"""
        {before}
        loaded = blas.load()
        import numpy as np
        _, x, w, y = multiply()
        exact = np.array(x, np.float64) @ np.array(w, np.float64).T
        out(name=loaded.name, path=loaded.path, bound_to=bound_to(), error=float(abs(np.array(y) - exact).max()))
    """)
    assert result["name"] == real_blas
    assert result["bound_to"] == result["path"]
    assert 0 < result["error"] < 1e-3  # |x·w| reaches 100 over K = 512


@cpu_wheel
def test_it_is_many_times_faster_than_the_bundled_one(real_blas: str) -> None:
    result = python("""
        slow = min(multiply(256)[0] for _ in range(2))
        blas.load()
        fast = min(multiply(256)[0] for _ in range(5))
        out(ratio=slow / fast)
    """)
    assert result["ratio"] > 5  # 100 on two quiet cores


@cpu_wheel
@compiler
def test_every_product_goes_to_the_library_that_the_variable_names(tmp_path: Path) -> None:
    stub = build(tmp_path, "stub", STUB)
    code = "b = blas.load(); out(name=b.name, path=b.path, reason=b.reason, y=[*map(float, multiply()[3][0, :2])])"
    assert python(code, EGEMMA_BLAS=stub) == {
        "name": "libstub.so",
        "path": os.path.realpath(stub),
        "reason": f"EGEMMA_BLAS={stub}",
        "y": [42, 42],
    }


@cpu_wheel
@compiler
def test_a_blas_that_the_process_made_global_is_kept(tmp_path: Path) -> None:
    stub = build(tmp_path, "stub", STUB)
    code = "b = blas.load(); out(name=b.name, reason=b.reason, y=float(multiply()[3][0, 0]))"
    expected = {"name": "libstub.so", "reason": "already global in this process", "y": 42}
    assert python(code, LD_PRELOAD=stub) == expected
    late = f"import mlx.core; multiply(); ctypes.CDLL({stub!r}, mode=ctypes.RTLD_GLOBAL); " + code
    assert python(late) == expected


@cpu_wheel
def test_none_keeps_the_bundled_one_without_a_warning() -> None:
    result = python(
        """
        import warnings
        warnings.simplefilter("error")
        loaded = blas.load()
        blas.warn_if_slow()
        multiply()
        out(name=loaded.name, bound_to=bound_to(), threads=blas.set_threads(1))
        """,
        EGEMMA_BLAS="none",
    )
    assert result["name"] == blas.REFERENCE
    assert Path(str(result["bound_to"])).parent.name == "mlx_cpu.libs"
    assert result["threads"] is None


# The search


@cpu_wheel
@pytest.mark.parametrize(
    ("library", "complaint"), [("/nowhere/libblas.so", "No such file"), ("libm.so.6", "undefined symbol: cblas_sgemm")]
)
def test_a_bad_library_is_refused_by_the_name_of_the_variable(
    monkeypatch: pytest.MonkeyPatch, library: str, complaint: str
) -> None:
    monkeypatch.setenv(blas.VARIABLE, library)
    with pytest.raises(
        EgemmaError, match=f"^EGEMMA_BLAS: expected auto, none or .* but got '{library}': .*{complaint}"
    ):
        blas.load.__wrapped__()


@cpu_wheel
@compiler
def test_a_blas_with_64_bit_integers_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Debian's libopenblas64.so.0 exports the plain names, and only its configuration tells.
    config = 'char *openblas_get_config(void) { return "OpenBLAS 0.3.21 USE64BITINT Zen"; }'
    monkeypatch.setenv(blas.VARIABLE, build(tmp_path, "wide", STUB + config))
    with pytest.raises(EgemmaError, match=r"^EGEMMA_BLAS: expected .* its integers have 64 bits"):
        blas.load.__wrapped__()


@cpu_wheel
@compiler
def test_an_unusable_candidate_gives_way_to_the_next(tmp_path: Path) -> None:
    partial = build(tmp_path, "partial", "void cblas_sgemm(void) {}")
    stub = build(tmp_path, "stub", STUB)
    result = python(f"""
        names = ["/nowhere/libblas.so", "libm.so.6", {partial!r}, {stub!r}]
        blas._candidates = lambda: iter([(name, "test") for name in names])
        out(path=blas.load().path, y=float(multiply()[3][0, 0]))
    """)
    assert result == {"path": os.path.realpath(stub), "y": 42}


@cpu_wheel
def test_without_any_the_reader_is_warned_once() -> None:
    result = python("""
        import warnings
        blas._candidates = lambda: iter([("libno-such-blas.so.0", "test")])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = blas.load()
            quiet = len(caught)
            blas.warn_if_slow()
            blas.warn_if_slow()
        out(name=loaded.name, quiet=quiet, caught=[[w.category.__name__, str(w.message)] for w in caught])
    """)
    assert result["name"] == blas.REFERENCE
    assert result["quiet"] == 0
    [(category, message)] = result["caught"]
    assert category == "RuntimeWarning"
    assert "egemma-mlx[cpu]" in message
    assert "libopenblas0-pthread" in message


@cpu_wheel
def test_with_one_nobody_is_warned(real_blas: str) -> None:
    result = python("""
        import warnings
        warnings.simplefilter("error")
        blas.warn_if_slow()
        out(name=blas.current().name)
    """)
    assert result["name"] == real_blas


@cpu_wheel
def test_loading_imports_neither_mlx_nor_numpy() -> None:
    result = python("import sys; blas.load(); out(imported=[m for m in ('mlx.core', 'numpy') if m in sys.modules])")
    assert result["imported"] == []


@cpu_wheel
def test_the_number_of_threads_can_be_set(real_blas: str) -> None:
    result = python(
        "before = blas.set_threads(1); out(before=before, one=blas.set_threads(before), back=blas.set_threads(1))"
    )
    assert result["before"] >= 1
    assert (result["one"], result["back"]) == (1, result["before"])


def test_macos_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert blas.load.__wrapped__() == blas.Blas("MLX's own", None, "this is not MLX's Linux CPU wheel")


@pytest.mark.parametrize(
    ("installed", "is_cpu"),
    [
        (["mlx_cpu.libs/libblas-1.so.3"], True),
        (["mlx_cuda_13.libs/libblas-1.so.3"], False),
        (["mlx_cpu.libs/libblas-1.so.3", "mlx_cuda_13.libs/libblas-1.so.3"], False),
        (["mlx_cpu.libs/libopenblas-1.so.0"], False),
        ([], False),
    ],
    ids=["cpu", "cuda", "cuda over cpu", "cpu with a real BLAS", "built here"],
)
def test_only_the_cpu_wheel_is_touched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: list[str], is_cpu: bool
) -> None:
    libmlx = tmp_path / "mlx" / "lib" / "libmlx.so"
    for file in [libmlx, *(tmp_path / name for name in installed)]:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "mlx")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(sys, "platform", "linux")
    assert blas._cpu_wheel() == (libmlx if is_cpu else None)


# The jump slots


@compiler
@pytest.mark.skipif(sys.platform != "linux", reason="ELF")
@pytest.mark.parametrize("linked", ["-Wl,-z,lazy", "-Wl,-z,now,-z,relro"])
def test_a_jump_slot_is_found_and_written(tmp_path: Path, linked: str) -> None:
    one = build(tmp_path, "one", "int answer(void) { return 1; } int other(void) { return 10; }")
    two = ctypes.CDLL(build(tmp_path, "two", "int answer(void) { return 2; }"))
    source = "int answer(void); int other(void); int call(void) { return answer() + other(); }"
    caller = ctypes.CDLL(build(tmp_path, "caller", source, one, linked))
    assert caller.call() == 11
    slots = blas._jump_slots(caller, b"ans")
    assert list(slots) == ["answer"]
    blas._write(slots["answer"], blas._address(two, "answer"))
    assert caller.call() == 12
