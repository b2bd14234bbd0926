"""docs/ says what is so: examples run, links lead somewhere, the API reference is that of the docstrings."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import README, ROOT, TORCHVISION, anchors, blocks, environment, links, run_console, run_doctests

from egemma_mlx import simulator

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
LINKING = [README, ROOT / ".github" / "CONTRIBUTING.md", *PAGES, *sorted((ROOT / "notebooks").glob("*.md"))]
API = DOCS / "api.md"
RUN_ELSEWHERE = {"adapters.md"}  # by test_adapters.py, a section where its library is installed


def _tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = _tool("api_reference")
NAMES = [name for names in reference.PUBLIC.values() for name in names]

# --- links -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in links(page):
        target, _, anchor = link.partition("#")
        if ":" in target:  # the web's
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(link)
    assert not broken


def test_every_page_is_in_the_index() -> None:
    assert {page.name for page in PAGES} - {"README.md"} <= set(links(DOCS / "README.md"))


# --- examples --------------------------------------------------------------------------------------------------------


def _needs(source: str) -> set[str]:
    """The packages that an example imports and that are not installed."""
    tree = ast.parse(source)
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    return {name for name in (name.partition(".")[0] for name in imported) if importlib.util.find_spec(name) is None}


PROGRAMS = [
    pytest.param(page, program, id=f"{page.stem}-{number}")
    for page in PAGES
    if page != API  # signatures
    for number, program in enumerate(blocks(page, "python"), start=1)
]


@pytest.mark.parametrize(("page", "program"), PROGRAMS)
def test_programs_run(page: Path, program: str, tmp_path: Path) -> None:
    if missing := _needs(program):
        pytest.skip(f"needs {', '.join(sorted(missing))}")
    done = subprocess.run(
        [sys.executable, "-c", (TORCHVISION if "mlx_embeddings" in program else "") + program],
        cwd=tmp_path,
        env=environment(tmp_path, EGEMMA_MODEL="mini"),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks(page, "pycon") and page.name not in RUN_ELSEWHERE],
    ids=lambda page: page.stem,
)
def test_sessions_print_what_the_page_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "".join(blocks(page, "pycon"))
    if "simulator" in source and (lack := simulator.available()):
        pytest.skip(lack)
    monkeypatch.setenv("EGEMMA_MODEL", "mini")
    monkeypatch.chdir(tmp_path)
    assert run_doctests(page, source)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "console")], ids=lambda page: page.stem)
def test_commands_print_what_the_page_says(page: Path, tmp_path: Path) -> None:
    assert run_console(page, tmp_path, environment(tmp_path))


# --- the API reference -----------------------------------------------------------------------------------------------


def test_the_reference_is_up_to_date() -> None:
    assert API.read_text(encoding="utf-8") == reference.page(), "run python tools/api_reference.py"


@pytest.mark.parametrize("name", NAMES)
def test_public_names_have_docstrings(name: str) -> None:
    # The methods of an adapter are those of the interface that it is for.
    assert [what for what in reference.undocumented(name) if "adapters" not in name or what == name] == []


def test_what_the_package_exports_is_in_the_reference() -> None:
    import egemma_mlx

    assert {f"egemma_mlx.{name}" for name in egemma_mlx.__all__ if not name.startswith("__")} <= set(NAMES)
