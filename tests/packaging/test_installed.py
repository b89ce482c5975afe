"""The wheel does its work where there is no checkout, and nothing but what it asks for."""

import json
from pathlib import Path

import pytest

from skipper.cli.main import TOOLS
from tests.integration.test_docs import FENCE
from tests.packaging.conftest import INSTALLATION_TIMEOUT_S, PACKAGES, ROOT, Environment

SCRIPTS = Path(__file__).with_name("scripts")
OPTIONAL = {"cryptography", "opentelemetry", "ray", "verl", "vllm"}
"""What the modules for it cannot be imported without."""

pytestmark = pytest.mark.timeout(INSTALLATION_TIMEOUT_S + 60)  # the first test has the wheel installed


def _shown(page: str, number: int) -> str:
    """A script that a page shows."""
    blocks = FENCE.finditer((ROOT / page).read_text())
    return [block["body"] for block in blocks if block["info"].strip() == "python"][number]


def test_the_packages_are_those_of_the_wheel(environment: Environment) -> None:
    files = ", ".join(f"{package}.__file__" for package in PACKAGES)
    printed = environment.run_script(f"import {', '.join(PACKAGES)}\nprint({files})")
    assert all(Path(file).is_relative_to(environment.programs.parent) for file in printed.split())


def test_every_module_can_be_imported_but_for_optional_parts(environment: Environment) -> None:
    script = environment.write("modules.py", (SCRIPTS / "modules.py").read_text())
    missing = json.loads(environment.run("python", str(script), *PACKAGES).stdout)
    assert set(missing.values()) <= OPTIONAL, missing


def test_two_processes_share_a_buffer(environment: Environment) -> None:
    printed = environment.run_script(_shown("README.md", 0))
    assert printed == "worker 0 reads from worker 1: [1.0, 1.0, 1.0, 1.0]\n"


def test_a_state_dict_goes_through_the_store(environment: Environment) -> None:
    environment.run_script(_shown("README.md", 1))


def test_a_tensor_goes_through_the_store(environment: Environment) -> None:
    environment.run_script(_shown("docs/howto/store_values.md", 0))


def test_the_tensor_engine_is_found_and_computes(environment: Environment) -> None:
    printed = environment.run_script(_shown("docs/tutorials/tensor_engine.md", 0))
    assert printed.splitlines()[-2:] == ["tensor(0.) tensor(4.5000)", "[[6.0], [6.0], [6.0]]"]


def test_the_dashboard_serves_its_page_and_all_that_belongs_to_it(environment: Environment) -> None:
    web = {file.name for file in (ROOT / "control" / "observe" / "web").iterdir()} - {"index.html"}
    printed = environment.run_script((SCRIPTS / "dashboard.py").read_text())
    assert printed.split() == [*sorted(web), "True"]


def test_the_dashboard_for_grafana_is_there(environment: Environment) -> None:
    assert json.loads(environment.run("skipper", "metrics", "--grafana").stdout)["panels"]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_explains_itself(tool: str, environment: Environment) -> None:
    assert environment.run("skipper", *tool.split(), "--help").stdout.startswith(f"usage: skipper {tool}")


def test_the_doctor_finds_the_extensions(environment: Environment) -> None:
    environment.run("skipper", "doctor")


@pytest.mark.parametrize("backend", ["shm", "ucx"])
def test_bandwidth_is_measured_and_the_data_compared(backend: str, environment: Environment) -> None:
    arguments = ["--local", "-s", "4K", "-s", "1M", "-n", "20", "--check", "--backend", backend, "--json", "-"]
    report = json.loads(environment.run("skipper", "bw", *arguments).stdout)
    rows = [row for row in report["results"] if row["name"] == "read_bandwidth"]
    assert [(row["backend"], row["size"], row["verified"]) for row in rows] == [
        (backend, 4 << 10, True),
        (backend, 1 << 20, True),
    ]
