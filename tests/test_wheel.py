"""The built wheel, installed into an environment that has nothing else, does the main job."""

import os
import subprocess
import sys
import zipfile
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
    kernels = {f"egemma_mlx/metal_src/{path.name}" for path in (ROOT / "metal_src").iterdir()}
    assert native and kernels and source | native | kernels <= set(names)


@pytest.mark.slow
def test_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(sys.executable, "-m", "venv", "venv")
    scripts = tmp_path / "venv" / "bin"
    extra = "cpu,simulator" if sys.platform == "linux" else ""
    run(str(scripts / "python"), "-m", "pip", "install", "--quiet", f"egemma-mlx[{extra}] @ file://{wheel}")
    tool = str(scripts / "egemma-mlx")
    assert run(tool, "--version").startswith("egemma-mlx ")
    run(tool, "checkpoint", "model", "--modalities", "text")
    run(tool, "embed", "a text", "another", "--model", "model", "--output", "vectors.npy")
    run(tool, "doctor", "--dump-msl", "msl", "--model", "model")
    assert (tmp_path / "msl").is_dir()
    if sys.platform == "linux":
        assert "checks passed on the simulator" in run(tool, "doctor", "--simulator", "--model", "model")
    shape = "import numpy; print(numpy.load('vectors.npy').shape)"
    assert run(str(scripts / "python"), "-c", shape).strip() == "(2, 96)"
    assert "README.md:1" in run(
        tool, "search", "what is it", str(ROOT / "README.md"), "--model", "model", "--top", "99"
    )
