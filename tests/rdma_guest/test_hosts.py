"""Inside the guest, two hosts of a job at the ends of a link: the data plane between them takes the RDMA devices."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skipper import control
from skipper.control import ActorError, ActorMesh, HostMesh, attach_to_hosts
from tests.control.conftest import PATIENCE_S
from tests.hosts.actors import Worker
from tests.rdma_guest.gates import needs_device
from tests.rdma_guest.links import cut_link, received
from tests.sameness import assert_same

pytestmark = [pytest.mark.verbs, needs_device("rxa", "rxb")]

NBYTES = 8 << 20
ADDRESSES = ("10.9.0.1", "10.9.0.2")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostMesh]:
    """Agents with processes of their own, so that what runs below one takes the other for another host."""
    secret = tmp_path_factory.mktemp("hosts") / "secret"
    secret.touch(0o600)
    secret.write_text(secrets.token_hex(32))
    agents = [_agent(address, secret) for address in ADDRESSES]
    for agent in agents:
        assert agent.stdout is not None
        assert agent.stdout.readline().startswith("serving at tcp://")
    names = [f"tcp://{address}:7000" for address in ADDRESSES]
    # The script is a host of its own: with the IP of one of the others it would take that for its own.
    yield attach_to_hosts(names, secret_file=secret, insecure=True, address="127.0.0.1", timeout=PATIENCE_S)
    control.shutdown()
    for agent in agents:
        agent.kill()
        with agent:
            agent.wait(PATIENCE_S)


def _agent(address: str, secret: Path) -> subprocess.Popen[str]:
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    serve = [
        sys.executable,
        "-m",
        "skipper.control.cluster.hosts",
        "serve",
        "--address",
        f"tcp://{address}:7000",
        "--insecure",
    ]
    command = [*apart, *serve, "--secret-file", str(secret)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))


@pytest.fixture(scope="module")
def workers(hosts: HostMesh) -> ActorMesh[Worker]:
    """One on each host."""
    return hosts.spawn_procs(name="workers").spawn("workers", Worker)


def test_memory_of_another_host_is_read_through_the_devices_that_have_the_addresses_of_the_hosts(
    workers: ActorMesh[Worker],
) -> None:
    owner, reader = workers.slice(hosts=0), workers.slice(hosts=1)
    content = os.urandom(NBYTES)
    handle = owner.lend.call_one(content).get(PATIENCE_S)
    before = received("eb")[0]
    assert reader.way_to.call_one(handle).get(PATIENCE_S) == "verbs"
    assert_same(reader.read.call_one(handle, NBYTES).get(PATIENCE_S), content)
    assert received("eb")[0] - before > NBYTES  # over the link, by devices: nothing else goes that way
    owner.end_lending.call_one().get(PATIENCE_S)
    with pytest.raises(ActorError, match="BufferDroppedError"):
        reader.read.call_one(handle, NBYTES).get(PATIENCE_S)


def test_a_cut_link_is_an_error_of_the_transfer_and_a_healed_one_serves_again(workers: ActorMesh[Worker]) -> None:
    owner, reader = workers.slice(hosts=0), workers.slice(hosts=1)
    content = os.urandom(NBYTES)
    handle = owner.lend.call_one(content).get(PATIENCE_S)
    assert_same(reader.read.call_one(handle, NBYTES).get(PATIENCE_S), content)
    with cut_link("ea"), pytest.raises(ActorError, match="TransferError"):
        reader.read.call_one(handle, NBYTES).get(PATIENCE_S)
    assert_same(reader.read.call_one(handle, NBYTES).get(PATIENCE_S), content)
    owner.end_lending.call_one().get(PATIENCE_S)
