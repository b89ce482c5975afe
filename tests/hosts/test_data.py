"""The data plane and the store between machines."""

import os
from collections.abc import Iterator

import pytest

from skipper.control import ActorError, ActorMesh, HostMesh, ProcMesh, SupervisionError
from tests.control.conftest import PATIENCE_S, Failures, wait_until
from tests.hosts.actors import Storing, Worker
from tests.hosts.netns import Capture, Network

HEARTBEAT_S = 2.0


def test_memory_of_another_machine_is_read_one_sidedly(net: Network, hosts: HostMesh) -> None:
    workers = hosts.slice(hosts=slice(0, 2)).spawn_procs().spawn("workers", Worker)
    content = os.urandom(3 << 20)
    handle = workers.slice(hosts=0).lend.call_one(content).get(PATIENCE_S)
    with Capture(net.machines[0]) as capture:
        assert workers.slice(hosts=1).read.call_one(handle, len(content)).get(PATIENCE_S) == content
    assert capture.nbytes > len(content)
    workers.slice(hosts=0).end_lending.call_one().get(PATIENCE_S)
    with pytest.raises(ActorError, match="BufferDroppedError"):
        workers.slice(hosts=1).read.call_one(handle, len(content)).get(PATIENCE_S)


@pytest.fixture
def storing(hosts: HostMesh) -> Iterator[ActorMesh[Storing]]:
    """Users of a store on three machines; its volume is on the fourth."""
    hosts = hosts.reattach()
    procs = hosts.slice(hosts=slice(0, 3)).spawn_procs(name="storing")
    storing = procs.spawn("storing", Storing)
    volumes: ProcMesh = hosts.slice(hosts=slice(3, 4)).spawn_procs(name="volumes")
    storing.slice(hosts=0).initialize.call_one(volumes).get(2 * PATIENCE_S)
    yield storing
    storing.slice(hosts=0).close.call_one().get(PATIENCE_S)
    procs.stop().get(PATIENCE_S)
    volumes.stop().get(PATIENCE_S)


def test_a_store_serves_state_dicts_from_one_machine_to_another(storing: ActorMesh[Storing]) -> None:
    for mode in ("snapshot", "direct"):
        storing.slice(hosts=0).publish.call_one(mode, 7.0).get(2 * PATIENCE_S)
        assert storing.slice(hosts=1).sync.call_one(mode).get(2 * PATIENCE_S) == 7.0


def test_a_reader_that_is_cut_off_holds_up_its_publisher_no_longer_than_its_loss_takes_to_be_noticed(
    net: Network, storing: ActorMesh[Storing], failures: Failures
) -> None:
    publisher, reader, other = (storing.slice(hosts=rank) for rank in range(3))
    first, second, *_ = net.machines
    rows = 8192  # 16 MiB, half a minute at this rate
    publisher.publish.call_one("direct", 1.0, rows).get(2 * PATIENCE_S)
    with Capture(second) as capture, second.slowed("4mbit"):
        reading = reader.sync.call_one("direct", rows)
        wait_until(lambda: capture.nbytes_between(first.address, second.address) > 1 << 18, "it reads")
        second.pull()
    publisher.fence.call_one("direct", 3 * PATIENCE_S).get(2 * PATIENCE_S)
    with pytest.raises(SupervisionError, match="no sign of life"):
        reading.get(PATIENCE_S)
    assert failures.wait().rank == {"hosts": 1}
    publisher.publish.call_one("direct", 2.0, rows).get(PATIENCE_S)
    assert other.sync.call_one("direct", rows).get(2 * PATIENCE_S) == 2.0
    second.plug()
