"""Markdown pages whose examples run: README.md and docs/.

blocks(page, "pycon")          the fenced blocks of a language
run_doctests(page, source)     sessions print what the page says
run_console(page, folder, …)   so do commands
anchors(page), links(page)     what a page's headings are called on GitHub, and where it points
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run_doctests(page: Path, source: str) -> int:
    """Run the sessions of a page, one after the other, and say how many examples there were."""
    examples = doctest.DocTestParser().get_doctest(source, {}, page.stem, str(page), 0)
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples, out=report.append)
    assert result.failed == 0, "".join(report)
    return result.attempted


# What a process runs first that imports transformers' processors: see oracle.py. Paths behind the others, so that no
# module of the tests hides another.
TORCHVISION = f"import sys; sys.path.append({str(ROOT / 'tests')!r}); import oracle\n"


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Of a newcomer's process: this checkout's package and command, and no model or setting of anybody's."""
    tool = folder / "bin" / "egemma-mlx"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m egemma_mlx.cli "$@"\n')
    tool.chmod(0o755)
    return (
        {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "EGEMMA_"))}
        | {
            "HF_HOME": str(folder / "hub"),  # which has nothing
            "PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "COLUMNS": "80",
        }
        | more
    )


def run_console(page: Path, folder: Path, variables: Mapping[str, str]) -> int:
    """Run the console blocks of a page in a folder, and say how many commands there were."""
    count = 0
    for block in blocks(page, "console"):
        steps = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
        script = "set -e\nexec 2>&1\n" + "".join(f"echo '\x01'\n{command}\n" for command, _ in steps)
        done = subprocess.run(
            ["bash", "-c", script], cwd=folder, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout
        for (command, expected), output in zip(steps, done.stdout.split("\x01\n")[1:], strict=True):
            if expected:  # digits depend on the machine's rounding
                pattern = re.sub(r"(\\?-)?\d+(\\?[.,]\d+)*(e\\?-\d+)?", "[-0-9.,e]+", re.escape(expected))
                assert re.fullmatch(pattern.replace("…", ".*"), output), f"$ {command}\n{output}"
        count += len(steps)
    return count


def prose(page: Path) -> str:
    """A page without its code, which may hold what looks like links and headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", lambda code: re.sub(r"[\[\]()]", "", code[0]), text)


def links(page: Path) -> list[str]:
    """The targets of a page's links."""
    return re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(page))


def anchors(page: Path) -> set[str]:
    """The names by which GitHub links to a page's headings."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ +(.*?) *$", prose(page), re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found[name] = found.get(name, 0) + 1
    return {name if i == 0 else f"{name}-{i}" for name, count in found.items() for i in range(count)}
