"""Recovery between machines: a cut link is a lost host, which is attached again and put to use once it is back."""

from typing import Any

import pytest

from skipper.control import ActorMesh, HostMesh, this_proc
from skipper.control.cluster.recovery import AttachedHosts, RecoveryPolicy, ReplaceHost, Restart
from tests.control.cluster.recovery.owners import Owner
from tests.control.conftest import PATIENCE_S, wait_until
from tests.hosts.conftest import wait_for_nothing
from tests.hosts.netns import Network

HEARTBEAT_S = 2.0


def test_processes_on_a_machine_that_was_cut_off_are_made_anew_once_it_is_back(
    net: Network, hosts: HostMesh, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = hosts.reattach()
    policy = RecoveryPolicy(
        process=Restart(attempts=1), host=ReplaceHost(AttachedHosts(hosts), attempts=50, timeout_s=2.0, backoff_s=0.1)
    )
    owner: ActorMesh[Any] = this_proc().spawn("owner", Owner, policy, hosts.slice(hosts=slice(1, 2)))
    first = owner.pids.call_one().get(PATIENCE_S)
    lost = net.machines[1]
    lost.pull()
    try:
        wait_until(lambda: owner.actors.call_one().get(PATIENCE_S) is None, "the loss is noticed")
        wait_for_nothing(lost)
        wait_until(lambda: "its successor could not be started" in caplog.text, "the host is asked for in vain")
    finally:
        lost.plug()
    second = owner.pids.call_one(1).get(3 * PATIENCE_S)
    assert len(first) == len(second) == 2
    made, failures = owner.history.call_one().get(PATIENCE_S)
    assert made[:2] == [0, 1]
    assert set(failures) <= {"crew", "crew.1"}
    owner.stop().get(PATIENCE_S)
