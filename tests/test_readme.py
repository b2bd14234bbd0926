"""The README's examples run, and print what it says they print."""

import shutil
from pathlib import Path

import pytest
from pages import README, ROOT, blocks, environment, run_console, run_doctests
from PIL import Image

from egemma_mlx.random_checkpoint import write_checkpoint


def test_python_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As wide as the real model, which the examples name by default.
    folder = write_checkpoint(tmp_path / "model", "tiny", modalities=("text", "image"), embedding_dim=768)
    monkeypatch.setenv("EGEMMA_MODEL", str(folder))
    monkeypatch.chdir(tmp_path)
    assert run_doctests(README, "".join(blocks(README, "pycon"))) > 10


def test_shell_examples(tmp_path: Path) -> None:
    for name in ("LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "photos").mkdir()
    for color in ("red", "navy"):
        Image.new("RGB", (64, 48), color).save(tmp_path / "photos" / f"{color}.png")
    assert run_console(README, tmp_path, environment(tmp_path)) > 10
