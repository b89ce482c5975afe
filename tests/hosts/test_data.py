"""The data plane and the store between machines."""

import os

import pytest

from control import ActorError, HostMesh
from tests.control.conftest import PATIENCE_S
from tests.hosts.actors import Storing, Worker
from tests.hosts.netns import Capture, Network


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


def test_a_store_serves_state_dicts_from_one_machine_to_another(hosts: HostMesh) -> None:
    storing = hosts.slice(hosts=slice(0, 2)).spawn_procs().spawn("storing", Storing)
    first, second = storing.slice(hosts=0), storing.slice(hosts=1)
    volumes = hosts.slice(hosts=slice(2, 3)).spawn_procs(name="volumes")
    first.initialize.call_one(volumes).get(2 * PATIENCE_S)
    for mode in ("snapshot", "direct"):
        first.publish.call_one(mode, 7.0).get(2 * PATIENCE_S)
        assert second.sync.call_one(mode).get(2 * PATIENCE_S) == 7.0
    first.close.call_one().get(PATIENCE_S)
