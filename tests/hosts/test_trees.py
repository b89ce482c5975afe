"""Casts to many processes on several machines."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from skipper import control
from skipper.control import HostMesh
from tests.control.conftest import PATIENCE_S
from tests.hosts.actors import Worker
from tests.hosts.netns import Capture, Network


@pytest.fixture
def trees() -> Iterator[None]:
    """Casts go down trees that branch as little as trees do: four machines are more than that."""
    before = control.configure()
    control.configure(tree_threshold=1, tree_fanout=2)
    yield
    control.configure(tree_threshold=before.tree_threshold, tree_fanout=before.tree_fanout)


@pytest.mark.parametrize("count", [2, 4])
def test_a_cast_enters_each_machine_once(net: Network, hosts: HostMesh, trees: None, count: int) -> None:
    machines = net.machines[:count]
    procs = hosts.reattach().slice(hosts=slice(0, count)).spawn_procs(per_host={"gpus": 3})
    workers = procs.spawn("workers", Worker)
    assert len(workers.nbytes.call(b"").get(PATIENCE_S)) == 3 * count  # its links stand, and so does the tree
    value = "x" * 200_000  # less than what is lent
    everybody = [net.address, *(machine.address for machine in machines)]
    with ExitStack() as stack:
        captures = [stack.enter_context(Capture(machine)) for machine in machines]
        assert set(workers.nbytes.call(value).get(PATIENCE_S)) == {len(value)}
    for machine, capture in zip(machines, captures, strict=True):
        came = sum(capture.nbytes_between(sender, machine.address) for sender in everybody)
        assert len(value) < came < 1.5 * len(value)
    procs.stop().get(PATIENCE_S)
