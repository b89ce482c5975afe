"""The command in the upgrade page ports scripts of 0.1.0: every form of import, and the examples as they were."""

import ast
import importlib
import io
import json
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
BEFORE = "580e085"
"""The last commit with the names of 0.1.0."""

FORMS = {
    "import control": "from skipper import control",
    "import control as c": "from skipper import control as c",
    "import dataplane  # memory": "from skipper import dataplane  # memory",
    "    import tensor_engine as te": "    from skipper import tensor_engine as te",
    "import torchstore as ts": "from skipper import torchstore as ts",
    "import torchstore.sync as ts": "import skipper.torchstore.sync as ts",
    "import control.jobs": "from skipper import control; import skipper.control.cluster.jobs",
    "import control.jobs as jobs": "import skipper.control.cluster.jobs as jobs",
    "import control, sys": "from skipper import control\nimport sys",
    "  import os, numpy as np, torchstore as ts": (
        "  import os\n  import numpy as np\n  from skipper import torchstore as ts"
    ),
    "import torchstore.sync as ts, dataplane": "import skipper.torchstore.sync as ts\nfrom skipper import dataplane",
    "from control import Actor, endpoint": "from skipper.control import Actor, endpoint",
    "from control import (": "from skipper.control import (",
    "from control import *": "from skipper.control import *",
    "from dataplane import RDMABuffer as B": "from skipper.dataplane import RDMABuffer as B",
    "from torchstore import sync as ts": "from skipper.torchstore import sync as ts",
    "from torchstore.dcp import StoreReader": "from skipper.torchstore.dcp import StoreReader",
    "from tensor_engine import no_mesh": "from skipper.tensor_engine import no_mesh",
    "from benchmarks.report import Report": "from skipper.benchmarks.report import Report",
    "from control.services import Service": "from skipper.control.services import Service",
    "from control.monarch import Actor": "from skipper.control.monarch import Actor",
    "from control.jobs import SlurmJob": "from skipper.control.cluster.jobs import SlurmJob",
    "from control.hosts import own_address": "from skipper.control.cluster.hosts import own_address",
    "from control.recovery import Restart": "from skipper.control.cluster.recovery import Restart",
    "from control.workspace import sync_workspace": "from skipper.control.cluster.workspace import sync_workspace",
    "from control.naming import RpcClient": "from skipper.control.rpc import RpcClient",
    "from control.tools import job_status": "from skipper.control.observe import job_status",
    "from control.errors import JobError": "from skipper.control.model.errors import JobError",
    "from control.mesh import ActorMesh": "from skipper.control import ActorMesh",
    "from control import jobs": "from skipper.control.cluster import jobs",
    "from control import errors as e  # all": "from skipper.control.model import errors as e  # all",
    "from control import naming": "from skipper.control import rpc as naming",
    "from control import naming as n": "from skipper.control import rpc as n",
    "from control import tools": "from skipper.control import observe as tools",
    "try: import control; from control import this_host": (
        "try: from skipper import control; from skipper.control import this_host"
    ),
    ">>> import control": ">>> from skipper import control",
    "job = control.jobs.LocalJob(2)": "job = control.cluster.jobs.LocalJob(2)",
    "except control.errors.JobError:": "except control.model.errors.JobError:",
    "control.naming.RpcClient(); control.tools.job_status()": "control.rpc.RpcClient(); control.observe.job_status()",
    'run("-c", "import control; from control.tools import Table")': (
        'run("-c", "from skipper import control; from skipper.control.observe import Table")'
    ),
    'import_module("control.jobs")': 'import_module("skipper.control.cluster.jobs")',
    '[python, "-m", "control.hosts", "serve"]': '[python, "-m", "skipper.control.cluster.hosts", "serve"]',
    '"python -m benchmarks.bandwidth --local"': '"python -m skipper.benchmarks.bandwidth --local"',
    '    "import torchstore as ts\\n",': '    "from skipper import torchstore as ts\\n",',  # of a notebook
}
LEFT_ALONE = [
    "import os, sys",
    "import controller, my_control, control_room",
    "from mine.control import errors",
    "from .control import Actor",
    "self.control.errors.append(1)",
    "control = Control()",
    "control.shutdown()",
    "benchmarks = control.endpoint",
    'weights["control.errors"]',
]


def command() -> str:
    """The block of the page."""
    page = (ROOT / "docs" / "upgrade_0_2.md").read_text()
    (block,) = re.findall(r"^```sh\n(rooms=.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return str(block)


def port(folder: Path) -> None:
    done = subprocess.run(["bash", "-ec", command()], cwd=folder, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_form_of_import_is_ported(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("\n".join(FORMS))
    port(tmp_path)
    assert script.read_text().splitlines() == "\n".join(FORMS.values()).splitlines()


def test_what_is_ported_can_be_imported(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("\n".join(form.strip() for form in FORMS if re.match(r" *(from|import) [^(*]*$", form)))
    port(tmp_path)
    assert len(list(wrong_names(script.read_text()))) == 0


def test_a_second_run_changes_nothing_and_neither_does_the_first_to_other_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("\n".join([*FORMS, *LEFT_ALONE]))
    port(tmp_path)
    once = script.read_text()
    assert once.splitlines()[-len(LEFT_ALONE) :] == LEFT_ALONE
    port(tmp_path)
    assert script.read_text() == once


def test_folders_of_environments_are_left_alone(tmp_path: Path) -> None:
    files = [tmp_path / folder / "theirs.py" for folder in (".venv", "env/lib/site-packages", "mine")]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text("import control\n")
    port(tmp_path)
    assert [file.read_text() == "import control\n" for file in files] == [True, True, False]


def test_a_folder_without_scripts_is_no_error(tmp_path: Path) -> None:
    port(tmp_path)


def test_the_examples_as_they_were_are_ported(tmp_path: Path) -> None:
    try:
        archive = subprocess.run(["git", "archive", BEFORE, "examples"], cwd=ROOT, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("needs git")
    if archive.returncode:
        pytest.skip(f"needs the history of the project, {BEFORE}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(tmp_path, filter="data")
    port(tmp_path)
    sources = {file.name: file.read_text() for file in sorted(tmp_path.rglob("*.py"))}
    for notebook in tmp_path.rglob("*.ipynb"):
        cells = json.loads(notebook.read_text())["cells"]
        sources[notebook.name] = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert len(sources) > 20
    assert {name: found for name, text in sources.items() if (found := list(wrong_names(text)))} == {}


def wrong_names(source: str) -> Iterator[str]:
    """What a script takes from the rooms by a name that they do not have, or by a room's bare name."""
    tree = ast.parse(source)
    modules: dict[str, ModuleType] = {}
    for node in ast.walk(tree):
        for name, wanted, of in _imported(node):
            try:
                value = _imports(wanted, of)
            except (ImportError, AttributeError) as error:
                yield f"{ast.unparse(node)}: {error!r}"
                continue
            if isinstance(value, ModuleType):
                modules[name] = value
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (parts := ast.unparse(node).split("."))[0] in modules:
            value: object = modules[parts[0]]
            for part in parts[1:]:
                if not isinstance(value, ModuleType):
                    break
                if not hasattr(value, part):
                    yield ast.unparse(node)
                    break
                value = getattr(value, part)


def _imported(node: ast.AST) -> Iterator[tuple[str, str, str | None]]:
    """The names that an import binds, if it may be one of the rooms': each with the module, and what of it."""
    rooms = ("skipper", "control", "dataplane", "tensor_engine", "torchstore", "benchmarks")
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.partition(".")[0] in rooms:
                bound = alias.name if alias.asname else alias.name.partition(".")[0]
                yield alias.asname or bound, alias.name, None
    elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] in rooms:
        for alias in node.names:
            yield alias.asname or alias.name, node.module or "", alias.name


def _imports(module: str, name: str | None) -> object:
    if module.partition(".")[0] != "skipper":
        raise ImportError(f"{module} is the bare name of a room")
    found = importlib.import_module(module)
    if name is None or name == "*":
        return found
    try:
        return getattr(found, name)
    except AttributeError:
        return importlib.import_module(f"{module}.{name}")
