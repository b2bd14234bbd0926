"""`python -m egemma_mlx.bench image`: times beside transformers, memory, the report; and contenders' processes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from egemma_mlx.bench import __main__ as bench
from egemma_mlx.bench import image, processes
from egemma_mlx.errors import EgemmaError
from egemma_mlx.random_checkpoint import write_checkpoint

pytest.importorskip("PIL", reason="images need Pillow")

Run = Callable[..., str]
FEWEST = ("--max-soft-tokens", 70)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("bench") / "tiny", "tiny", modalities=("text", "image"))


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line on the tiny checkpoint and small images."""

    def call(*arguments: object) -> str:
        bench.main(["image", "--model", str(folder), *map(str, (*FEWEST, *arguments))])
        return capsys.readouterr().out

    return call


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)


# --- time ------------------------------------------------------------------------------------------------------------


def test_both_contenders_make_the_same(run: Run, folder: Path) -> None:
    for package in ("torch", "transformers"):
        pytest.importorskip(package)
    report = json.loads(run("--rounds", 1, "--json"))
    assert report["model"] == str(folder) and report["left_out"] == report["memory"] == []
    assert report["machine"]["mlx"] and list(report["versions"]) == ["transformers", "torch"]
    assert [each["stage"] for each in report["timings"]] == ["pixels to soft tokens", "JPEG to unit vector"]
    for each in report["timings"]:
        assert list(each["seconds"]) == ["egemma-mlx", "transformers"] and min(each["seconds"].values()) > 0
        # Of the second the pixels differ too, where transformers has its torchvision processor.
        assert 0 < each["difference"] <= (2e-6 if each["stage"] == "pixels to soft tokens" else 5e-4)


def test_without_transformers_a_line_says_so(run: Run, alone: None) -> None:
    lines = run("--rounds", 1).splitlines()
    assert lines[-1] == "Left out: transformers is not installed."
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    head = table.index(["median seconds", "egemma-mlx", "rounds"])
    assert [row[0] for row in table[head + 1 :]] == ["pixels to soft tokens", "JPEG to unit vector"]
    assert all(float(row[1]) > 0 and row[2] == "1" for row in table[head + 1 :])


def test_a_contender_that_does_not_start_is_a_line(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise KeyError('gemma')")
    (tmp_path / "torch.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    report = json.loads(run("--rounds", 1, "--json"))
    assert len(report["left_out"]) == 1 and report["left_out"][0].startswith("transformers did not start (")
    assert all(list(each["seconds"]) == ["egemma-mlx"] and each["difference"] is None for each in report["timings"])


def test_the_order_alternates_and_the_first_round_warms_up(tmp_path: Path) -> None:
    asked: list[str] = []

    def contender(name: str, result: list[list[float]]) -> Callable[[Any], float]:
        def answer(question: list[str]) -> float:
            asked.append(name)
            assert question[0] == "a stage"
            np.save(question[1], np.array(result, np.float32))
            return float(len(asked))

        return answer

    contenders = {"a": contender("a", [[3, 4], [1, 0]]), "b": contender("b", [[6, 8], [0, 2]])}
    found = image._timed("a stage", contenders, 3, tmp_path)
    assert "".join(asked) == "ba" + "ab" + "ba" + "ab"
    assert found.seconds == {"a": 6.0, "b": 5.0} and found.rounds == 3
    assert found.difference == 1.0  # the second rows, at a right angle; lengths are of no account


def test_ratio_and_difference_are_beside_the_times() -> None:
    rows = image._timing_rows([image.Timing("s", 6, {"egemma-mlx": 2.0, "transformers": 3.0}, 1.25e-7)])
    assert dict(zip(*rows, strict=True)) == {
        "median seconds": "s",
        "egemma-mlx": "2.000",
        "transformers": "3.000",
        "ratio": "1.50",
        "max difference": "1.2e-07",
        "rounds": "6",
    }


# --- memory ----------------------------------------------------------------------------------------------------------


def test_memory_is_of_the_passes_not_of_the_batch(run: Run) -> None:
    report = json.loads(run("--memory", "--memory-images", 2, 24, "--json"))
    assert report["timings"] == []
    few, many = report["memory"]
    assert (few["images"], many["images"]) == (2, 24) and many["patches"] > 20 * few["patches"] / 2
    for each in (few, many):
        assert each["soft_bytes"] == each["patches"] // 9 * 64 * 4 and each["seconds"] > 0
        assert each["mlx_bytes"] > each["patches"] / each["images"] * 768 * 4  # a pass's copy of its pixels
        assert (each["resident_bytes"] is None) == (sys.platform != "linux")
    # Passes hold 5,120 patches, eight of these images, and 24 of them would take twelve times the memory of two.
    assert many["mlx_bytes"] <= 6 * few["mlx_bytes"]


def test_growth_is_beside_the_later_batches() -> None:
    batches = [image.Memory(32, 76_000, 9.0, 17_000_000, 400_000_000, 500_000_000)]
    batches.append(image.Memory(128, 304_000, 36.0, 67_000_000, 404_000_000, None))
    _, few, many = image._memory_rows(batches)
    assert few == ("32", "76,000", "17", "400", "500", "9.0")
    assert many == ("128", "304,000", "67", "404 (+1%)", "", "36.0")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_most_that_was_resident_is_seen_and_what_malloc_keeps_is_not() -> None:
    size, slack = 1 << 26, 1 << 21  # the kernel counts in batches of pages
    before = image._rest()
    assert before is not None
    grown = np.ones(size, np.uint8)
    del grown
    assert image._status("VmHWM") - before >= size - slack
    after = image._rest()
    assert after is not None and max(after, image._status("VmHWM")) - before <= slack


@pytest.mark.parametrize("arguments", [("--memory-images", 0), ("--rounds", -1), ("--max-soft-tokens", 100)])
def test_what_is_no_count_is_refused(run: Run, arguments: tuple[object, ...]) -> None:
    with pytest.raises(SystemExit):
        run(*arguments)
    with pytest.raises(argparse.ArgumentTypeError, match="expected a positive integer but got '0'"):
        image._positive("0")


# --- processes -------------------------------------------------------------------------------------------------------

CHILD = """
import os
from egemma_mlx.bench import processes

def start():
    print("chatter", flush=True)
    return lambda question: os._exit(3) if question is None else [question, os.environ.get("OPENBLAS_CORETYPE")]

processes.serve(start)
"""


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a program the one that `served` runs."""
    return lambda program: monkeypatch.setattr(processes, "command", lambda *_: [sys.executable, "-c", program])


def test_answers_come_back_past_what_a_library_prints(
    child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_CORETYPE", "NEHALEM")
    child(CHILD)
    with processes.served("x") as ask:
        assert callable(ask)
        assert ask({"a": 1}) == [{"a": 1}, None] and ask("b") == ["b", None]
        with pytest.raises(EgemmaError, match=r"^x: the process ended: chatter$"):
            ask(None)


@pytest.mark.parametrize(
    ("program", "line"), [("raise ValueError('no model')", "ValueError: no model"), ("", "it wrote nothing")]
)
def test_a_process_that_does_not_start_says_why(child: Callable[[str], None], program: str, line: str) -> None:
    child(program)
    with processes.served("x") as found:
        assert found == line
