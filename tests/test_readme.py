"""The README's examples run, and print what it says they print."""

import doctest
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from egemma_mlx.random_checkpoint import write_checkpoint

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_python_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As wide as the real model, which the examples name by default.
    folder = write_checkpoint(tmp_path / "model", "tiny", modalities=("text", "image"), embedding_dim=768)
    monkeypatch.setenv("EGEMMA_MODEL", str(folder))
    monkeypatch.chdir(tmp_path)
    source = "".join(_blocks("pycon"))
    examples = doctest.DocTestParser().get_doctest(source, {}, "README", str(README), 0)
    assert len(examples.examples) > 10
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples, out=report.append)
    assert result.failed == 0, "".join(report)


def test_shell_examples(tmp_path: Path) -> None:
    for name in ("LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "photos").mkdir()
    for color in ("red", "navy"):
        Image.new("RGB", (64, 48), color).save(tmp_path / "photos" / f"{color}.png")
    tool = tmp_path / "bin" / "egemma-mlx"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m egemma_mlx.cli "$@"\n')
    tool.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "EGEMMA_"))} | {
        "HF_HOME": str(tmp_path / "hub"),  # which has nothing
        "PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "COLUMNS": "80",
    }
    for block in _blocks("console"):
        steps = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
        script = "set -e\nexec 2>&1\n" + "".join(f"echo '\x01'\n{command}\n" for command, _ in steps)
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout
        for (command, expected), output in zip(steps, done.stdout.split("\x01\n")[1:], strict=True):
            if expected:  # digits depend on the machine's rounding
                pattern = re.sub(r"(\\?-)?\d+(\\?[.,]\d+)*(e\\?-\d+)?", "[-0-9.,e]+", re.escape(expected))
                assert re.fullmatch(pattern.replace("…", ".*"), output), f"$ {command}\n{output}"
