"""Casts to many processes on several machines."""

import control
from control import HostMesh
from tests.control.conftest import PATIENCE_S
from tests.hosts.actors import Worker
from tests.hosts.netns import Capture, Network


def test_a_cast_crosses_the_link_of_each_machine_once(net: Network, hosts: HostMesh) -> None:
    before = control.configure()
    control.configure(tree_threshold=1)
    try:
        workers = hosts.slice(hosts=slice(0, 2)).spawn_procs(per_host={"gpus": 4}).spawn("workers", Worker)
        assert len(workers.nbytes.call(b"").get(PATIENCE_S)) == 8  # its links stand, and so does the tree
        value = "x" * 200_000  # less than what is lent
        with Capture(net.machines[0]) as first, Capture(net.machines[1]) as second:
            assert set(workers.nbytes.call(value).get(PATIENCE_S)) == {len(value)}
        for capture in (first, second):
            assert len(value) < capture.nbytes < 2 * len(value)
    finally:
        control.configure(tree_threshold=before.tree_threshold)
