"""A larger job over wires that delay packets, unevenly, and lose some: 16 hosts, or SKIPPER_TEST_MANY_HOSTS of them."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skipper import control
from skipper.control import ActorMesh, FailureKind, HostMesh, ProcMesh, SupervisionError
from skipper.control.cluster.hosts import attach_to_hosts
from tests.control.conftest import PATIENCE_S, Failures
from tests.hosts.actors import Recorder, Worker
from tests.hosts.conftest import addresses_of, start_agent, wait_for_agent, wait_for_nothing
from tests.hosts.netns import Network, NotPermittedError, network
from tests.hosts.wires import Rules

HEARTBEAT_S = 20.0  # 272 processes on two cores: their hosts may be silent for seconds
NOTICED_S = HEARTBEAT_S + 10.0
"""The bound, and what a busy machine and the wires take."""
HOSTS = int(os.environ.get("SKIPPER_TEST_MANY_HOSTS", "16"))
PER_HOST = 256 // HOSTS
STAY = HOSTS - HOSTS // 4
"""How many hosts are not cut off."""
SPAWN_S = 120.0
"""Within which 256 processes run, also on a busy machine."""
BAD = Rules(delay_s=0.005, jitter_s=0.004, loss=0.01)


@pytest.fixture(scope="module")
def bad_net(net: Network) -> Iterator[Network]:
    """Sixteen machines on bad wires; ``net`` says whether there can be any."""
    try:
        with network(HOSTS, with_wires=True) as found:
            assert found.wires is not None
            with found.wires.shaped(BAD):
                yield found
    except NotPermittedError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def many_hosts(bad_net: Network, secret_file: Path) -> Iterator[HostMesh]:
    agents = [start_agent(machine, "--insecure", "--secret-file", str(secret_file)) for machine in bad_net.machines]
    for agent in agents:
        wait_for_agent(agent)
    before = control.configure()
    control.configure(preload=["tests.hosts.actors"])  # 256 interpreters from the beginning would take minutes
    yield attach_to_hosts(addresses_of(bad_net.machines), secret_file=secret_file, insecure=True)
    control.shutdown()
    control.configure(preload=before.preload)


@pytest.fixture(scope="module")
def many_procs(many_hosts: HostMesh) -> ProcMesh:
    procs = many_hosts.spawn_procs(per_host={"gpus": PER_HOST})
    procs.initialized.get(SPAWN_S)
    return procs


@pytest.fixture
def workers(many_hosts: HostMesh) -> Iterator[ActorMesh[Worker]]:
    """One on each host, which has been heard."""
    procs = many_hosts.reattach().spawn_procs()
    workers = procs.spawn("workers", Worker)
    workers.rank.call().get(PATIENCE_S)
    yield workers
    procs.stop().get(PATIENCE_S)


def test_casts_to_256_actors_keep_their_order(many_procs: ProcMesh) -> None:
    recorders = many_procs.spawn("recorders", Recorder)
    for number in range(100):
        recorders.record.broadcast(number)
    recorded = recorders.recorded.call().get(PATIENCE_S)
    assert len(recorded) == HOSTS * PER_HOST
    assert all(numbers == list(range(100)) for numbers in recorded)
    many_procs.stop().get(PATIENCE_S)


def test_memory_of_another_host_is_read_whole(workers: ActorMesh[Worker]) -> None:
    content = bytes(range(256)) * 1024
    buffer = workers.slice(hosts=3).lend.call_one(content).get(PATIENCE_S)
    assert workers.slice(hosts=5).read.call_one(buffer, len(content)).get(PATIENCE_S) == content
    workers.slice(hosts=3).end_lending.call_one().get(PATIENCE_S)


def test_a_part_of_the_network_that_is_cut_off_is_lost_within_the_bound_and_comes_back(
    bad_net: Network, many_hosts: HostMesh, workers: ActorMesh[Worker], failures: Failures
) -> None:
    lost = bad_net.machines[STAY:]
    begin = time.monotonic()
    for machine in lost:
        machine.unplug_silently()
    try:
        answers = [workers.slice(hosts=host).rank.call_one() for host in range(STAY, HOSTS)]
        for answer in answers:
            with pytest.raises(SupervisionError, match="no sign of life"):
                answer.get(NOTICED_S)
        assert time.monotonic() - begin < NOTICED_S
        assert list(workers.slice(hosts=slice(0, STAY)).rank.call().get(PATIENCE_S)) == list(range(STAY))
        assert failures.wait().kind is FailureKind.UNREACHABLE
        for machine in lost:
            wait_for_nothing(machine)
    finally:
        for machine in lost:
            machine.plug_silently()
    procs = many_hosts.reattach().spawn_procs()
    assert list(procs.spawn("again", Worker).rank.call().get(PATIENCE_S)) == list(range(HOSTS))
    procs.stop().get(PATIENCE_S)
