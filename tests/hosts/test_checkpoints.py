"""A checkpoint with copies is in memory on several machines: one of them is lost wholly, the others load all of it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from skipper.control import ActorMesh, HostMesh, ProcMesh
from tests.control.conftest import PATIENCE_S, Failures, wait_until
from tests.hosts.checkpoints import Rank
from tests.hosts.conftest import serve, wait_for_nothing
from tests.hosts.netns import Network
from tests.preloading import preloading

HOSTS = 4
HEARTBEAT_S = 8.0  # four machines import torch at once, and show no sign of life while they do on busy processors


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> Iterator[None]:
    """Each machine imports torch once; the processes of both tests there are forked from the one that has."""
    with preloading("torch"):
        yield


@pytest.fixture
def ranks(hosts: HostMesh) -> Iterator[ActorMesh[Rank]]:
    """One rank on each machine, and a volume beside it."""
    hosts = hosts.reattach()
    procs = hosts.spawn_procs(name="ranks")
    ranks = procs.spawn("ranks", Rank)
    volumes: ProcMesh = hosts.spawn_procs(name="volumes")
    ranks.slice(hosts=0).initialize.call_one(volumes).get(2 * PATIENCE_S)
    yield ranks
    ranks.slice(hosts=0).close.call_one().get(PATIENCE_S)
    procs.stop().get(PATIENCE_S)
    volumes.stop().get(PATIENCE_S)


@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_checkpoint_survives_the_loss_of_a_machine(
    net: Network, hosts: HostMesh, ranks: ActorMesh[Rank], failures: Failures, secret_file: Path, how: str
) -> None:
    ranks.put.call(1, HOSTS).get(2 * PATIENCE_S)
    first = ranks.slice(hosts=0)
    assert first.holders.call_one().get(PATIENCE_S) == (("0", "1"), ("1", "2"), ("2", "3"), ("3", "0"))
    assert not any(ranks.differs.call(1, HOSTS).get(2 * PATIENCE_S))

    lost, left = net.machines[2], [ranks.slice(hosts=rank) for rank in (0, 1, 3)]
    try:
        if how == "killed":
            os.kill(lost.agent(), signal.SIGKILL)
        else:
            lost.unplug_silently()
        reading = [rank.differs.call_one(1, HOSTS) for rank in left]  # before anybody has noticed
        assert [read.get(3 * PATIENCE_S) for read in reading] == [[], [], []]
        assert "hosts" in failures.wait().rank
        wait_until(
            lambda: all("2" not in held for held in first.holders.call_one().get(PATIENCE_S)), "the store knows of it"
        )
        assert [rank.differs.call_one(1, HOSTS).get(2 * PATIENCE_S) for rank in left] == [[], [], []]
    finally:
        if how == "killed":
            wait_until(lambda: not lost.running(), "nothing is left on its host")
            lost.clear()
            serve(lost, "--insecure", "--secret-file", str(secret_file))
        else:
            wait_for_nothing(lost)
            lost.plug_silently()
