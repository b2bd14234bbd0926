"""What is imported when: nothing with the package, and nothing optional with its main job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OPTIONAL = {
    *("PIL", "torch", "transformers", "sentence_transformers", "egemma2", "matplotlib", "IPython", "elftools"),
    *("mlx_embeddings", "mlx_vlm", "langchain_core", "llama_index", "chromadb", "bertopic", "pyarrow", "lance"),
}


def imported_by(statement: str) -> set[str]:
    """The top-level packages outside the standard library that `statement` adds to a new interpreter."""
    script = f"import sys\nbefore = set(sys.modules)\n{statement}\nprint(*sys.modules.keys() - before)"
    output = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name.partition(".")[0] for name in output.split()} - sys.stdlib_module_names


@pytest.mark.parametrize("module", ["egemma_mlx", "egemma_mlx.errors", "egemma_mlx.cli", "egemma_mlx.adapters"])
def test_import_takes_nothing_along(module: str) -> None:
    """Neither MLX nor numpy, so that it adds next to nothing to `import mlx.core`."""
    assert imported_by(f"import {module}") == {"egemma_mlx"}


def test_help_takes_nothing_along() -> None:
    help_of = "from egemma_mlx.cli import main\ntry:\n    main([{}])\nexcept SystemExit:\n    pass"
    ours = imported_by(help_of.format("'search', '--help'")) & {"mlx", "numpy", "tokenizers", "safetensors", *OPTIONAL}
    assert ours == set()


def test_embedding_texts_imports_nothing_optional() -> None:
    used = imported_by("import egemma_mlx\negemma_mlx.Encoder('mini').encode_query('a red bicycle')")
    assert {"mlx", "numpy", "tokenizers", "safetensors"} <= used
    assert used & OPTIONAL == set()
