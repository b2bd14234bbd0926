"""Execute the notebooks in place and put them into the form that is committed.

    python tools/notebooks.py                                  # all of them
    python tools/notebooks.py notebooks/01_text_search.ipynb   # or some

Each runs in an empty folder, with this repository's package. The form: cells numbered by place, the kernel `python3`,
no times, no versions, so that a second run changes nothing but digits that depend on the machine. A notebook with a
failing cell is left as it was.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).parents[1]
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_CELL_SECONDS = 600


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def executed(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """A copy of the notebook with the outputs of a run in `folder`, which also holds the caches that it asks for.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("EGEMMA_", "HF_", "MPL"))}
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "IPYTHONDIR": str(folder / ".ipython"),  # nobody's own settings
        "HF_HOME": str(folder / ".hub"),  # which has nothing
    }
    copy = nbformat.from_dict(notebook)
    client = NotebookClient(
        copy,
        timeout=_CELL_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute(env=environment)
    return copy


def normalised(notebook: NotebookNode) -> NotebookNode:
    """A copy of the notebook in the form that is committed."""
    copy = nbformat.from_dict(notebook)
    copy.metadata = nbformat.from_dict(_METADATA)
    copy.nbformat, copy.nbformat_minor = 4, 5
    for place, cell in enumerate(copy.cells, start=1):
        cell.id = f"cell-{place}"
        cell.metadata = NotebookNode()
    return copy


def text(notebook: NotebookNode) -> str:
    """The content of a notebook's file."""
    return nbformat.writes(notebook) + "\n"


def main(names: list[str]) -> None:
    for path in map(Path, names) if names else sorted((ROOT / "notebooks").glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            notebook = normalised(executed(read(path), Path(folder)))
        path.write_text(text(notebook), encoding="utf-8")
        print(f"{path.name}: {len(notebook.cells)} cells, {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
