"""The built wheel, installed into an environment that has nothing else, does the main job."""

import os
import shutil
import subprocess
import sys
import time
import zipfile
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"egemma_mlx"}
    assert "egemma_mlx/py.typed" in names
    files = [path for path in (ROOT / "egemma_mlx").rglob("*") if path.is_file()]
    source = {str(path.relative_to(ROOT)) for path in files if path.suffix == ".py"}
    native = {str(path.relative_to(ROOT)) for path in files if "native" in path.parts}
    mini = {str(path.relative_to(ROOT)) for path in files if "mini" in path.parts}
    kernels = {f"egemma_mlx/metal_src/{path.name}" for path in (ROOT / "metal_src").iterdir()}
    assert native and kernels and mini and source | native | kernels | mini <= set(names)


def run_in(folder: Path, *command: object, **environment: str) -> str:
    """What a command prints, in an environment that knows nothing of this checkout or of any model."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHONPATH", "HF_", "EGEMMA_"))}
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of an environment with the wheel and what it needs."""
    folder = tmp_path_factory.mktemp("installed")
    run_in(folder, sys.executable, "-m", "venv", "venv")
    scripts = folder / "venv" / "bin"
    extra = "cpu,simulator" if sys.platform == "linux" else ""
    run_in(folder, scripts / "python", "-m", "pip", "install", "--quiet", f"egemma-mlx[{extra}] @ file://{wheel}")
    return scripts


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [True, False])
def test_a_newcomers_first_search(scripts: Path, tmp_path: Path, compiler: bool) -> None:
    """Without a model, a network or anything compiled earlier: a sensible answer, soon."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "tmp").mkdir()
    for name in ("README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "docs")
    environment = {
        "PATH": os.pathsep.join([str(scripts), *([os.environ["PATH"]] if compiler else [])]),
        "TMPDIR": str(tmp_path / "tmp"),
        "HF_HOME": str(tmp_path / "hub"),
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }
    start = time.perf_counter()
    found = run_in(tmp_path, "egemma-mlx", "search", "what if somebody sues over a patent", "docs", **environment)
    spent = time.perf_counter() - start
    place, text, *_ = found.splitlines()
    assert "docs/LICENSE:" in place and "Grant of Patent License" in text
    print(f"{spent:.1f} s")
    assert spent < 60  # on a busy machine; a few seconds on a quiet one


@pytest.mark.slow
def test_wheel_works_in_an_empty_environment(scripts: Path, tmp_path: Path) -> None:
    run = partial(run_in, tmp_path)
    tool = scripts / "egemma-mlx"
    assert run(tool, "--version").startswith("egemma-mlx ")
    run(tool, "checkpoint", "model", "--modalities", "text")
    run(tool, "embed", "a text", "another", "--model", "model", "--output", "vectors.npy")
    run(tool, "doctor", "--dump-msl", "msl", "--model", "model")
    assert (tmp_path / "msl").is_dir()
    if sys.platform == "linux":
        assert "checks passed on the simulator" in run(tool, "doctor", "--simulator", "--model", "model")
    shape = "import numpy; print(numpy.load('vectors.npy').shape)"
    assert run(scripts / "python", "-c", shape).strip() == "(2, 96)"
    assert "README.md:1" in run(tool, "search", "what is it", ROOT / "README.md", "--model", "model", "--top", "99")
