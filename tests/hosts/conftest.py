"""Hosts for the tests: agents on a network of namespaces, or on loopback addresses of this machine."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from skipper import control, dataplane
from skipper.control import HostMesh
from skipper.control.cluster.hosts import attach_to_hosts
from skipper.control.cluster.hosts import command as host_command
from skipper.control.runtime.data_plane_access import DATA_PLANE_DEVICES, DATA_PLANE_HOST
from tests.control.conftest import (
    PATIENCE_S,
    Failures,
    Script,
    failures,
    leave_nothing_behind,
    root_failures,
    script,
    wait_until,
)
from tests.hosts.netns import REPOSITORY, SKIPPER, Machine, Network, NotPermittedError, network

__all__ = ["PATIENCE_S", "Failures", "Script", "failures", "leave_nothing_behind", "root_failures", "script"]

VARIABLE_OF_TESTS = "SKIPPER_TEST_HOSTS"
PORT = 7000


@pytest.fixture(scope="session")
def net() -> Iterator[Network]:
    """Four machines."""
    if VARIABLE_OF_TESTS not in os.environ:
        pytest.skip("network namespaces are made by make test-hosts alone")
    dataplane.configure(ucx={})  # as it is without the tests' choice of the loopback
    try:
        with network(4) as machines:
            yield machines
    except NotPermittedError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hosts") / "secret"
    assert host_command.main(["secret", str(path)]) == 0
    return path


@pytest.fixture(scope="module", autouse=True)
def bounds(request: pytest.FixtureRequest) -> Iterator[None]:
    """The HEARTBEAT_S of a module whose hosts fall silent; and an environment without traces of the hosts.

    Where none does, a short bound shows nothing, and takes hosts that a busy machine holds up for lost ones.
    """
    before = control.configure()
    control.configure(heartbeat_s=getattr(request.module, "HEARTBEAT_S", before.heartbeat_s))
    yield
    control.shutdown()
    control.configure(heartbeat_s=before.heartbeat_s)
    for variable in (DATA_PLANE_HOST, DATA_PLANE_DEVICES):
        os.environ.pop(variable, None)


def serve(machine: Machine, *options: str) -> subprocess.Popen[str]:
    """Start the agent of a machine, and wait until it listens."""
    agent = start_agent(machine, *options)
    wait_for_agent(agent)
    return agent


def wait_for_agent(agent: subprocess.Popen[str]) -> None:
    """Wait until an agent listens."""
    assert agent.stdout is not None
    assert agent.stdout.readline().startswith("serving at tcp://")


def start_agent(machine: Machine, *options: str, own_folder: Path | None = None) -> subprocess.Popen[str]:
    """Start the agent of a machine; with a folder of its own if that is wanted (see `Machine.start`)."""
    command = [*SKIPPER, "host", "serve", "--address", f"tcp://{machine.address}:{PORT}", *options]
    return machine.start(command, own_folder=own_folder, cwd=REPOSITORY, stdout=subprocess.PIPE, env=environment())


def environment() -> dict[str, str]:
    """Of an agent: that of this process, but for what control has put there."""
    return {
        **{name: value for name, value in os.environ.items() if name not in (DATA_PLANE_HOST, DATA_PLANE_DEVICES)},
        **QUIET,
    }


QUIET = {"PYTHONDONTWRITEBYTECODE": "1"}


def addresses_of(machines: Sequence[Machine]) -> list[str]:
    """What they are attached with."""
    return [f"tcp://{machine.address}:{PORT}" for machine in machines]


def wait_for_nothing(machine: Machine) -> None:
    """Wait until nothing of a job is left on a machine: its agent runs alone, below what started it."""
    wait_until(lambda: len(machine.running()) <= 2, f"nothing of the job is left on {machine.address}")


@pytest.fixture(scope="module")
def hosts(net: Network, secret_file: Path) -> Iterator[HostMesh]:
    """The four machines, attached."""
    agents = [start_agent(machine, "--insecure", "--secret-file", str(secret_file)) for machine in net.machines]
    for agent in agents:
        wait_for_agent(agent)
    yield attach_to_hosts(addresses_of(net.machines), secret_file=secret_file, insecure=True)
    control.shutdown()
    for machine in net.machines:
        machine.clear()


LocalAgents = Callable[..., str]


@pytest.fixture
def local_agent(secret_file: Path) -> Iterator[LocalAgents]:
    """Starts an agent on a loopback address; returns that as ``tcp://IP:PORT``."""
    agents: list[subprocess.Popen[str]] = []

    def start(host: str = "127.0.0.2", *options: str) -> str:
        options = options or ("--secret-file", str(secret_file))
        command = [*SKIPPER, "host", "serve", "--address", f"tcp://{host}:0", *options]
        agent = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, env=environment())
        agents.append(agent)
        assert agent.stdout is not None
        return agent.stdout.readline().removeprefix("serving at ").strip()

    yield start
    control.shutdown()
    for agent in agents:
        agent.terminate()
        with agent:
            assert agent.wait(PATIENCE_S) in (0, -signal.SIGTERM)  # the latter where it was ending by itself
