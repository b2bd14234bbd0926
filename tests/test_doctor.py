"""`egemma-mlx doctor`, and the backend that the other commands run on."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import numpy as np
import pytest
from executors import Executor, executors, simulated

import egemma_mlx
from egemma_mlx import cli, doctor, encoder, export
from egemma_mlx.config import Config
from egemma_mlx.errors import EgemmaError
from egemma_mlx.kernels import backend as backends
from egemma_mlx.kernels import metal_kernels, selfcheck
from egemma_mlx.kernels.backend import Backend
from egemma_mlx.kernels.library import Library, source_folder
from egemma_mlx.kernels.selfcheck import PUBLISHED, TOLERANCE, Verdict, Widths
from egemma_mlx.loading import load_model
from egemma_mlx.simulator.compiler import compile_kernel
from egemma_mlx.simulator.translate import translate

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        return (code, *capsys.readouterr())

    handler = signal.getsignal(signal.SIGTERM)
    yield call
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def widths(tiny_text: Path) -> Widths:
    return Widths.of(Config.from_file(tiny_text / "config.json").text)


# --- the report ------------------------------------------------------------------------------------------------------


def test_without_metal_it_offers_the_simulator(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "picked", lambda _: "ops")
    monkeypatch.setattr(doctor, "verdicts", lambda *_: pytest.fail("a kernel ran"))
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    for part in (
        f"| egemma-mlx | {egemma_mlx.__version__} ",
        "| MLX ",
        "| Python ",
        "| OS ",
        "| device ",
        "| backend ",
    ):
        assert part in out
    assert "`egemma-mlx doctor --simulator`" in out
    assert "| ops (what `auto` picks)" in out and "max error" not in out
    (facts,) = map(json.loads, run("doctor", "--json")[1].splitlines())
    assert (facts["kernels_ran_on"], facts["kernels"], facts["msl"]) == (None, [], [])


@simulated
def test_on_the_simulator_every_kernel_is_right(run: Run, tiny_text: Path, widths: Widths) -> None:
    code, out, err = run("doctor", "--simulator", "--json", "--model", tiny_text)
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert facts["kernels_ran_on"] == "simulator"
    assert all(row["compiled"] and row["problem"] is None and row["error"] <= TOLERANCE for row in facts["kernels"])
    names = {name for row in facts["kernels"] for name in re.split(r"[ ,]+", row["kernel"])}
    assert {"fragment_probe", "linear_3", "pool", "flash", "flash_staged"} <= names
    # Each shape of attention of this model, no others.
    assert sum(row["kernel"].startswith("qkv_prep ") for row in facts["kernels"]) == len(widths.attention)


@executors
def test_a_wrong_kernel_and_one_that_does_not_compile(
    executor: Executor, run: Run, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "metal_src"
    shutil.copytree(source_folder(), folder)
    right = (folder / "gelu_mul.metal").read_text()
    (folder / "gelu_mul.metal").write_text(right.replace("* load4(u", "* 1.001f * load4(u"))
    (folder / "rms_norm.metal").write_text("this is not Metal;\n")
    planted = Library(executor.make, folder)
    monkeypatch.setattr(doctor, "verdicts", lambda _, widths: selfcheck.verdicts(planted, widths))
    where = ["--simulator"] if executor.name == "simulator" else []

    code, out, err = run("doctor", "--model", tiny_text, *where)
    assert (code, err) == (1, "")
    assert re.search(r"^\| gelu_mul +\| gelu_mul +\| yes +\| \S+e-0\d +\| is off by ", out, re.M)
    assert re.search(r"^\| rms_norm +\| rms_norm +\| no +\| +\| does not run: ", out, re.M)
    assert re.search(r"^\| pool +\| pool +\| yes +\| \S+e-0\d +\| ok ", out, re.M)
    assert re.search(r"^3 of \d+ checks failed on ", out, re.M)


def test_what_fits_no_table_and_no_json() -> None:
    machine = doctor.facts()
    found = [Verdict("pool", "pool", float("nan"), "is off by nan"), Verdict("a|b", "f", None, "does not run: x | y")]
    text = doctor.as_text(machine, ("metal", found))
    table = [line for line in text.splitlines() if line.startswith("|")][-4:]
    assert len({len(line) for line in table}) == 1
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in table] == [6] * 4
    assert "2 of 2 checks failed on Metal" in text
    facts = json.loads(json.dumps(doctor.as_json(machine, ("metal", found), []), allow_nan=False))
    assert [row["error"] for row in facts["kernels"]] == [None, None]
    assert [row["compiled"] for row in facts["kernels"]] == [True, False]


def test_a_simulator_that_cannot_run_says_why(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("egemma_mlx.simulator.available", lambda: "no clang here")
    assert run("doctor", "--simulator") == (2, "", "egemma-mlx: error: no clang here\n")


# --- the sources -----------------------------------------------------------------------------------------------------


def test_every_source_is_dumped_once(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *_, **__: None)
    folder = tmp_path / "new" / "msl"
    code, out, err = run("doctor", "--dump-msl", folder)
    assert (code, err) == (0, "")
    files = sorted(folder.iterdir())
    assert f"{len(files)} kernels are in {folder}." in out and doctor.compile_command(folder) in out
    texts = [file.read_text() for file in files]
    assert len(set(texts)) == len(files)
    bodies = {path.stem for path in source_folder().glob("*.metal")}
    assert {re.findall(r'^#line 1 "(\w+)\.metal"', text, re.M)[0] for text in texts} == bodies
    for file, text in zip(files, texts, strict=True):
        assert text.startswith(doctor._PRELUDE)
        assert len(re.findall(rf"\bvoid custom_kernel_egemma_{re.escape(file.stem.split('__')[0])}", text)) == 1
    # The published widths: of the text model's heads, and of those that take flash attention.
    widths = {int(file.name.split("__")[1].split("_")[0]) for file in files if file.name.startswith("qkv_prep")}
    assert widths == {64, 256, 512}


def test_a_models_forward_has_no_other_source(tiny_text: Path, widths: Widths) -> None:
    config = Config.from_file(tiny_text / "config.json")
    model = load_model(tiny_text, config, metal_kernels(Library(mx.fast.metal_kernel), "metal"), compiled=True)
    dumped = doctor.sources(widths)
    for tokens, segments in ((1, 1), (40, 3), (700, 9)):
        launched = doctor._kernels(export.forward(model), export.example(tokens, segments))
        assert len(launched) > 10
        assert launched.items() <= dumped.items()


def test_a_dump_needs_neither_compiler_nor_simulator(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "sys.modules['egemma_mlx.simulator'] = sys.modules['elftools'] = None\n"
        "from egemma_mlx import doctor\n"
        "from egemma_mlx.kernels.selfcheck import PUBLISHED\n"
        "print(len(doctor.dump_msl(Path(sys.argv[1]), PUBLISHED)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "msl")],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PATH": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(list((tmp_path / "msl").iterdir())) > 15


def test_a_dump_is_complete_or_absent(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    (tmp_path / "file").touch()
    for name in ("used", "file"):
        code, out, err = run("doctor", "--dump-msl", tmp_path / name)
        assert (code, out) == (2, "") and f"{tmp_path / name}: expected a new or empty folder" in err
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["file"]

    write, written = Path.write_text, []

    def full(path: Path, *arguments: Any, **options: Any) -> int:
        written.append(path)
        if len(written) == 3:
            raise OSError(28, "Disk full")
        return write(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(EgemmaError, match=r"msl: cannot be written \(.*Disk full"):
        doctor.dump_msl(tmp_path / "msl", PUBLISHED)
    assert len(written) == 3 and list((tmp_path / "msl").iterdir()) == []


@simulated
def test_a_dumped_file_stands_alone(tmp_path: Path, widths: Widths) -> None:
    """As far as clang can tell."""
    for file in doctor.dump_msl(tmp_path, widths):
        text = file.read_text()
        (name,) = set(re.findall(r"\b(custom_kernel_egemma_\w+)\(", text))
        compile_kernel(translate(text, name).cpp, checked=True)


def _has_apples_compiler() -> bool:
    find = ["xcrun", "-sdk", "macosx", "metal", "--version"]
    return shutil.which("xcrun") is not None and subprocess.run(find, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _has_apples_compiler(), reason="no Metal compiler (it is part of Xcode)")
@pytest.mark.parametrize("size", ["tiny", "published"])
def test_apples_compiler_takes_every_file(tmp_path: Path, widths: Widths, size: str) -> None:
    folder = tmp_path / "a folder"
    doctor.dump_msl(folder, widths if size == "tiny" else PUBLISHED)
    done = subprocess.run(["bash", "-c", doctor.compile_command(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- backends --------------------------------------------------------------------------------------------------------


def test_what_is_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    for metal, cpu in ((True, False), (True, True), (False, True), (False, False)):
        monkeypatch.setattr(mx.metal, "is_available", lambda metal=metal: metal)
        monkeypatch.setattr(backends, "on_cpu", lambda cpu=cpu: cpu)
        assert backends.picked("auto") == ("metal" if metal and not cpu else "ops")
        assert [backends.picked(name) for name in ("ops", "simulator")] == ["ops", "simulator"]
        if metal and not cpu:
            assert backends.picked("metal") == "metal"
        else:
            with pytest.raises(EgemmaError, match="expected a Metal GPU for backend 'metal'"):
                backends.picked("metal")


def test_choices_are_those_of_the_package() -> None:
    for command, named in ((cli.embed, Backend), (cli.export, export.ExportBackend)):
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        (action,) = (action for action in parser._actions if "--backend" in action.option_strings)
        assert action.choices == get_args(named)


@pytest.mark.parametrize("command", [("embed", "a text"), ("search", "a text", "notes.md")])
def test_the_backend_goes_to_load(
    run: Run, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.md").write_text("A paragraph.\n")
    asked, load = [], encoder.load

    def spy(*arguments: Any, **options: Any) -> Any:
        asked.append(options["backend"])
        return load(*arguments, **options | {"backend": "ops"})

    monkeypatch.setattr(encoder, "load", spy)
    for backend in get_args(Backend):
        assert run(*command, "--backend", backend, "--model", tiny_text)[0] == 0
    assert run(*command, "--model", tiny_text)[0] == 0
    assert asked == [*get_args(Backend), "auto"]


@simulated
def test_embedding_on_the_simulator(run: Run, tiny_text: Path) -> None:
    """The kernels' vectors, not those of plain operations once more."""
    ops, simulated = (
        np.array(json.loads(run("embed", "a text", "--backend", name, "--model", tiny_text)[1])["embedding"])
        for name in ("ops", "simulator")
    )
    np.testing.assert_allclose(simulated, ops, atol=2e-6)
    assert (simulated != ops).any()


def test_info_shows_the_backend_without_a_check(run: Run, tiny_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "verdicts", lambda *_: pytest.fail("kernels were checked"))
    for backend, kernels in (("auto", backends.picked("auto")), ("ops", "ops"), ("simulator", "simulator")):
        code, out, _ = run("info", "--json", "--backend", backend, "--model", tiny_text)
        assert code == 0 and json.loads(out)["kernels"] == kernels
    assert f"kernels {backends.picked('auto')}\n" in run("info", "--model", tiny_text)[1]
