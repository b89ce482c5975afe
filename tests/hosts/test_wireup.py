"""Strangers at the ports of UCX while hosts of a job move data: of no host of it, and of another user of its hosts."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skipper.control import ActorMesh, HostMesh
from skipper.dataplane import RDMABuffer
from tests.control.conftest import PATIENCE_S
from tests.dataplane import stranger
from tests.hosts.actors import Worker
from tests.hosts.conftest import QUIET, environment
from tests.hosts.netns import REPOSITORY, Machine, Network

NBYTES = 1 << 20
OWNER, READER = 0, 1

SCAN = Path(__file__).with_name("scan_script.py")


@pytest.fixture(scope="module")
def workers(hosts: HostMesh) -> Iterator[ActorMesh[Worker]]:
    procs = hosts.slice(hosts=slice(0, 2)).spawn_procs()
    yield procs.spawn("workers", Worker)
    procs.stop().get(PATIENCE_S)


@pytest.fixture
def buffer(workers: ActorMesh[Worker]) -> RDMABuffer:
    handle: RDMABuffer = workers.slice(hosts=OWNER).lend.call_one(bytes([stranger.SECRET]) * NBYTES).get(PATIENCE_S)
    return handle


def reads(workers: ActorMesh[Worker], buffer: RDMABuffer) -> bool:
    content = workers.slice(hosts=READER).read.call_one(buffer, NBYTES).get(PATIENCE_S)
    return bool(content == bytes([stranger.SECRET]) * NBYTES)


def start(machine: Machine, command: list[str]) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return machine.start(command, cwd=REPOSITORY, env={**environment(), **QUIET}, **pipes)


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    with process:
        yield process
        process.kill()


def ports_of(machine: Machine) -> list[int]:
    """Whatever listens on TCP on a machine."""
    (pid, *_) = machine.running()
    with Path(f"/proc/{pid}/net/tcp").open(encoding="ascii") as file:
        lines = [line.split() for line in list(file)[1:]]
    return [int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A"]


@pytest.mark.parametrize("number", [3, OWNER, READER], ids=["another machine", "the owner's", "the reader's"])
def test_a_stranger_reads_nothing_and_disturbs_nobody(
    net: Network, workers: ActorMesh[Worker], buffer: RDMABuffer, number: int
) -> None:
    with ended(start(net.machines[number], stranger.command("eth0,lo"))) as process:
        stranger.begin(process, buffer)
        for _ in range(5):
            assert reads(workers, buffer)
        assert stranger.has_read(process) == 0
    assert reads(workers, buffer)


def test_no_port_of_ucx_is_to_be_seen(net: Network, workers: ActorMesh[Worker], buffer: RDMABuffer) -> None:
    owner = net.machines[OWNER]
    assert reads(workers, buffer)
    address = bytes.fromhex(stranger.victim(buffer)["worker"])
    ports = ports_of(owner)
    of_ucx = {port for port in ports if port.to_bytes(2, "big") in address}
    assert of_ucx
    with ended(start(net.machines[3], [sys.executable, str(SCAN), owner.address, *map(str, ports)])) as process:
        seen = set(map(int, process.communicate(timeout=PATIENCE_S)[0].split()))
    assert seen  # those that ask for a proof
    assert not seen & of_ucx
    assert reads(workers, buffer)
