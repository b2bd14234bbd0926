"""Checkpoints that several test files read. Nothing may write into them."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from egemma_mlx.random_checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text model of six small layers, window 8."""
    return write_checkpoint(tmp_path_factory.mktemp("session") / "tiny", "tiny", modalities=("text",))


@pytest.fixture(scope="session")
def full_text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The text model in its published size: 7 s to write, 543 MB, removed afterwards. For tests marked slow."""
    folder = write_checkpoint(tmp_path_factory.mktemp("session") / "full", "full", modalities=("text",))
    yield folder
    shutil.rmtree(folder)
