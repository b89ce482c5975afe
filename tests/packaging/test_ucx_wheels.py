"""Environments without UCX, with the wheel of one CUDA, of the wrong one, of both: what works, and what is said."""

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.packaging.conftest import INSTALLATION_TIMEOUT_S, ROOT, Environment, layer

pytestmark = pytest.mark.timeout(INSTALLATION_TIMEOUT_S + 60)  # the first test has the wheel installed

ORDINARY_MEMORY = """
import numpy as np
from skipper.dataplane import RDMABuffer
try:
    RDMABuffer(np.ones(3)).serialize()
except Exception as error:
    print(type(error).__name__, error)
"""


def run_without_the_systems_ucx(environment: Environment, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python where the loader finds a libucp that is none before that of the system, if there is one."""
    hidden = environment.folder / "hidden"
    hidden.mkdir(exist_ok=True)
    (hidden / "libucp.so.0").touch()
    return subprocess.run(
        [str(environment.programs / "python"), *arguments],
        cwd=environment.folder,
        env={"PATH": os.defpath, "LD_LIBRARY_PATH": str(hidden)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def examined(environment: Environment, expected: int = 0) -> dict[str, dict[str, Any]]:
    """The checks of `skipper doctor` by their names."""
    done = run_without_the_systems_ucx(environment, "-m", "skipper", "doctor", "--json", "-")
    assert done.returncode == expected, done.stdout + done.stderr
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def add_torch(environment: Environment, cuda: str) -> None:
    """Put before torch one that says that it is for a CUDA: such a one is gigabytes, and it is only asked for that."""
    package = environment.packages / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('nobody needs to import torch for this')\n")
    (package / "version.py").write_text(f"__version__ = '2.13.0'\ncuda = {cuda!r}\n")


def test_without_ucx_the_doctor_has_the_command_and_no_problem(plain: Environment) -> None:
    check = examined(plain)["ucx"]
    assert (check["verdict"], check["found"].partition(":")[0]) == ("warning", "not installed")
    assert check["advice"].startswith(f"{plain.programs}/python -m pip install 'libucx-cu12==1.22.*' ")


def test_without_ucx_processes_of_a_host_share_what_they_allocate_by_dataplane(plain: Environment) -> None:
    hello = (ROOT / "examples" / "hello_mesh.py").read_text()
    assert plain.run_script(hello) == "worker 0 reads from worker 1: [1.0, 1.0, 1.0, 1.0]\n"


def test_without_ucx_a_handle_of_other_memory_is_an_error_with_the_command(plain: Environment) -> None:
    done = run_without_the_systems_ucx(plain, str(plain.write("memory.py", ORDINARY_MEMORY)))
    assert done.stdout.startswith("BackendUnavailableError"), done.stderr
    assert f"({plain.programs}/python -m pip install 'libucx-cu12==1.22.*')" in done.stdout


@pytest.fixture
def own(plain: Environment) -> Iterator[Environment]:
    """Without UCX, and with a pip of its own."""
    with layer(plain, pip=True) as made:
        yield made


def test_what_is_wrong_with_the_wheels_of_ucx_is_said_and_mended_by_the_command(own: Environment) -> None:
    add_torch(own, "13.0")
    command = f"{own.programs}/python -m pip install 'libucx-cu13==1.22.*'"
    assert examined(own)["ucx"]["advice"].startswith(f"{command} ")

    own.install("libucx-cu12")
    check = examined(own)["ucx wheel"]
    assert check["verdict"] == "warning"
    assert check["found"].startswith("libucx-cu12 1.22.0 with a torch for CUDA 13.0")
    headers = headers_of_ucx(own)

    own.install("libucx-cu13")
    check = examined(own)["ucx wheel"]
    assert check["verdict"] == "warning"
    assert "the later has overwritten the other" in check["found"]

    # To remove one of two removes the files of both.
    own.run("python", "-m", "pip", "uninstall", "--quiet", "-y", "libucx-cu12", timeout=INSTALLATION_TIMEOUT_S)
    check = examined(own, expected=1)["ucx"]
    assert check["verdict"] == "problem"
    assert check["advice"].endswith(f" && {command}")
    subprocess.run(
        check["advice"], shell=True, cwd=own.folder, capture_output=True, check=True, timeout=INSTALLATION_TIMEOUT_S
    )
    checks = examined(own)
    assert checks["ucx"]["verdict"] == "ok"
    assert (checks["ucx wheel"]["verdict"], checks["ucx wheel"]["found"]) == (
        "ok",
        "libucx-cu13 1.22.0, for the CUDA 13.0 of torch",
    )
    assert headers_of_ucx(own) == headers  # so what was compiled with those of one is right for the other


def headers_of_ucx(environment: Environment) -> dict[str, bytes]:
    folder = environment.packages / "libucx" / "include"
    headers = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.h")}
    assert "ucp/api/ucp.h" in headers
    return headers
