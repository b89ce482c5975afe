"""Running a notebook as Jupyter does, and writing it down without what differs from run to run.

    python -m tests.integration.notebooks examples/notebook.ipynb

runs it and writes its outputs into it.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from skipper.control.model.settings import PRELOAD_VARIABLE

CELL_S = 60


def execute(path: Path) -> NotebookNode:
    """The notebook with the outputs of a run in its own folder, from which what varies is taken out.

    Raises:
        CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    there = {"metadata": {"path": path.parent}}
    client = NotebookClient(notebook, timeout=CELL_S, kernel_name="python3", coalesce_streams=True, resources=there)
    client.execute(env={**as_users_have_it(), PRELOAD_VARIABLE: "torch"})
    return clean(notebook)


def as_users_have_it() -> dict[str, str]:
    """This environment for a kernel: one that takes itself for a test leaves alone what processes write."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def clean(notebook: NotebookNode) -> NotebookNode:
    """The same without times, versions and what went to standard error, where paths and numbers of processes are."""
    notebook = copy.deepcopy(notebook)
    notebook.metadata = {key: notebook.metadata[key] for key in ("kernelspec", "language_info")}
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


if __name__ == "__main__":
    for name in sys.argv[1:]:
        nbformat.write(execute(Path(name)), name)
