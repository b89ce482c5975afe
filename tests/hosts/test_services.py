"""Services whose replicas are spread over hosts."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from skipper.control import Actor, HostMesh, attach_to_hosts, endpoint, idempotent
from skipper.control.model.errors import ServiceEndedError
from skipper.control.runtime import current_runtime
from skipper.control.services.gpus import VISIBLE
from skipper.control.services.replica_controller import pick
from skipper.control.wire.addresses import host_of
from tests.control.conftest import PATIENCE_S, Failures, wait_until
from tests.hosts.conftest import LocalAgents, serve, wait_for_nothing
from tests.hosts.netns import Machine, Network

HEARTBEAT_S = 4.0


class Server(Actor):
    """Says where it is."""

    @endpoint
    @idempotent
    def home(self) -> str:
        return host_of(current_runtime.current().me.address)

    @endpoint
    @idempotent
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def gpus(self) -> str:
        return os.environ[VISIBLE]


@pytest.mark.parametrize(
    ("number", "lives", "load", "index"),
    [
        (4, [True, True, True], [9, 9, 9], 1),  # in turn, whatever the load
        (1, [True, False, True], [2, 0, 1], 2),
        (1, [True, False, True], [1, 0, 1], 2),
        (2, [False, True, False], [0, 7, 0], 1),
        (5, [False, False], [0, 0], 1),
    ],
)
def test_a_replica_goes_to_its_own_host_or_to_one_that_lives(
    number: int, lives: list[bool], load: list[int], index: int
) -> None:
    assert pick(number, lives, load) == index


def test_replicas_are_spread_over_hosts_and_replaced_where_they_were(
    local_agent: LocalAgents, secret_file: Path
) -> None:
    hosts = attach_to_hosts([local_agent("127.0.0.2"), local_agent("127.0.0.3")], secret_file=secret_file)
    servers = Server.options(hosts=hosts, procs=2, num_replicas=3).as_service()
    before = ["127.0.0.2", "127.0.0.3", "127.0.0.2"]
    assert [set(replica) for replica in servers.home.fanout().get(PATIENCE_S)] == [{home} for home in before]
    (_, killed), *_ = pids = [list(replica) for replica in servers.pid.fanout().get(PATIENCE_S)]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: servers.metrics().get(PATIENCE_S)[0].restarts == 1, "the replica is replaced")
    servers.initialized.get(PATIENCE_S)
    assert [set(replica) for replica in servers.home.fanout().get(PATIENCE_S)] == [{home} for home in before]
    after = [list(replica) for replica in servers.pid.fanout().get(PATIENCE_S)]
    assert after[1:] == pids[1:]
    assert not set(after[0]) & set(pids[0])
    wait_until(lambda: not Path(f"/proc/{pids[0][0]}").exists(), "the other process of the replica has been ended")
    servers.scale(1).get(PATIENCE_S)
    servers.stop().get(PATIENCE_S)


def test_replicas_get_gpus_of_their_own_hosts(local_agent: LocalAgents, secret_file: Path) -> None:
    os.environ[VISIBLE] = "GPU-a"
    try:
        first = local_agent("127.0.0.2")
        os.environ[VISIBLE] = "GPU-b"
        hosts = attach_to_hosts([first, local_agent("127.0.0.3")], secret_file=secret_file)
    finally:
        del os.environ[VISIBLE]
    servers = Server.options(hosts=hosts, with_gpus=True, num_replicas=2).as_service()
    assert list(servers.gpus.fanout().get(PATIENCE_S)) == ["GPU-a", "GPU-b"]
    assert servers.drain(1).get(PATIENCE_S) is None  # its successor gets what it gives back
    assert list(servers.gpus.fanout().get(PATIENCE_S)) == ["GPU-a", "GPU-b"]


@pytest.fixture
def two(net: Network, hosts: HostMesh) -> Iterator[tuple[list[Machine], HostMesh]]:
    """Two machines, attached; both are there afterwards, too."""
    yield net.machines[:2], hosts.reattach().slice(hosts=slice(0, 2))
    net.machines[1].plug()


def test_a_replica_of_a_lost_host_comes_up_on_another_and_goes_home_when_that_is_back(
    two: tuple[list[Machine], HostMesh],
) -> None:
    (first, second), hosts = two
    servers = Server.options(hosts=hosts, num_replicas=2).as_service()
    assert list(servers.home.fanout().get(PATIENCE_S)) == [first.address, second.address]
    second.pull()
    wait_until(lambda: servers.metrics().get(PATIENCE_S)[1].restarts == 1, "the loss is noticed")
    assert list(servers.home.fanout().get(PATIENCE_S)) == [first.address, first.address]
    wait_for_nothing(second)
    second.plug()
    hosts.reattach()
    servers.drain(1).get(PATIENCE_S)
    assert list(servers.home.fanout().get(PATIENCE_S)) == [first.address, second.address]
    servers.stop().get(PATIENCE_S)


def test_a_service_whose_hosts_are_all_lost_fails_and_says_why(
    two: tuple[list[Machine], HostMesh], failures: Failures, secret_file: Path
) -> None:
    (_, second), hosts = two
    servers = Server.options(hosts=hosts.slice(hosts=slice(1, 2)), backoff_s=0.01).as_service()
    assert servers.home.route().get(PATIENCE_S) == second.address
    os.kill(second.agent(), signal.SIGKILL)
    assert "gone" in failures.wait().root_cause().message
    with pytest.raises(ServiceEndedError, match="gone"):
        servers.home.route().get(PATIENCE_S)
    assert failures[0].mesh_name == "Server"
    second.clear()
    serve(second, "--insecure", "--secret-file", str(secret_file))
    hosts.reattach()
