"""The wheel at work where other packages have the bare names of the rooms, as python-control and Meta's torchstore do.

Those are stand-ins, made as installed distributions are: the real ones need more than they show here.
"""

import dataclasses
import json
from pathlib import Path

import pytest

from tests.packaging.conftest import INSTALLATION_TIMEOUT_S, Environment

SCRIPTS = Path(__file__).with_name("scripts")
INSTALLED = ["control", "torchstore", "dataplane", "tensor_engine", "benchmarks"]
STAND_IN = 'MAKER = "somebody else"\n'

pytestmark = pytest.mark.timeout(INSTALLATION_TIMEOUT_S + 60)  # the first test has the wheel installed


@pytest.fixture(scope="module")
def beside(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel's environment with the others' packages first on the path, in a folder with one named benchmarks."""
    site, folder = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("work")
    for name in INSTALLED:
        _write(site / name / "__init__.py", STAND_IN)
        _write(site / f"{name}-1.0.dist-info" / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        _write(site / f"{name}-1.0.dist-info" / "top_level.txt", f"{name}\n")
    _write(folder / "benchmarks" / "__init__.py", STAND_IN)
    _write(folder / "benchmarks" / "bandwidth.py", 'raise SystemExit("this is not the one")\n')
    return dataclasses.replace(environment, folder=folder, path=(site,))


def test_actors_buffers_store_and_engine_work(beside: Environment) -> None:
    printed = beside.run_script((SCRIPTS / "beside_others.py").read_text())
    assert printed.splitlines() == ["[3.0, 3.0, 3.0, 3.0]", "[1.0, 1.0, 1.0]", "[1.0, 1.0]"]


@pytest.mark.parametrize("command", [["skipper"], ["python", "-m", "skipper"]], ids=" ".join)
def test_the_command_measures_bandwidth(command: list[str], beside: Environment) -> None:
    arguments = ["bw", "--local", "-s", "4K", "-n", "5", "--json", "-"]
    report = json.loads(beside.run(command[0], *command[1:], *arguments).stdout)
    assert {row["size"] for row in report["results"] if row["name"] == "read_bandwidth"} == {4 << 10}


def test_each_name_leads_to_its_own_package(beside: Environment) -> None:
    printed = beside.run_script("import control, skipper\nprint(control.__file__, skipper.__file__)\n").split()
    assert Path(printed[0]).is_relative_to(beside.path[0])
    assert not Path(printed[1]).is_relative_to(beside.path[0])


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
