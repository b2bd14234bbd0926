"""The notebooks run, and what is committed of them is such a run."""

import re
import runpy
import socket
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
TOOL = runpy.run_path(str(ROOT / "tools" / "notebooks.py"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
_MOST_BYTES = 900_000
# Of this machine or of anybody's: /home/someone, C:\Users, /tmp/….
_PATHS = re.compile(r"(?<![\w.])/(home|Users|root|tmp|var|private|usr|opt|work|mnt)/|[A-Z]:\\")


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> Any:
    """A notebook as it is committed."""
    return TOOL["read"](request.param)


def _code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _shape(notebook: Any) -> list[list[str]]:
    """For each code cell its outputs, as stream names and MIME types."""
    return [
        [output.get("name") or " ".join(sorted(output.get("data", [output.output_type]))) for output in cell.outputs]
        for cell in _code(notebook)
    ]


def _texts(notebook: Any) -> list[str]:
    """All that is text in the outputs."""
    outputs = [output for cell in _code(notebook) for output in cell.outputs]
    data = [value for output in outputs for kind, value in output.get("data", {}).items() if kind.startswith("text/")]
    return [*data, *(output.text for output in outputs if output.output_type == "stream")]


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS
    index = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\((\w+\.ipynb)\)", index)) == {path.name for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_file_is_in_the_committed_form(path: Path) -> None:
    content = path.read_text(encoding="utf-8")
    assert content == TOOL["text"](TOOL["normalised"](TOOL["read"](path))), "run tools/notebooks.py"
    assert len(content) < _MOST_BYTES


def test_committed_outputs_are_of_one_whole_run(notebook: Any) -> None:
    nbformat.validate(notebook)
    code = _code(notebook)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    kinds = {kind for outputs in _shape(notebook) for output in outputs for kind in output.split()}
    assert "image/png" in kinds
    assert not kinds & {"error", "stderr"}


def test_committed_outputs_name_no_machine(notebook: Any) -> None:
    host = socket.gethostname()
    for text in _texts(notebook):
        assert not _PATHS.search(text), text
        assert host.isalpha() or host not in text, text  # a host may be called by a word


def test_runs(notebook: Any, tmp_path: Path) -> None:
    assert _shape(TOOL["executed"](notebook, tmp_path)) == _shape(notebook)
