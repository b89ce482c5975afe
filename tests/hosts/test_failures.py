"""What fails between machines is noticed in time, told to whom it concerns, and leaves the rest alone."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skipper.control import ActorError, ActorMesh, FailureKind, HostMesh, SupervisionError
from tests.control.conftest import PATIENCE_S, Failures, Script, wait_until
from tests.hosts.actors import Worker
from tests.hosts.conftest import addresses_of, serve, wait_for_nothing
from tests.hosts.netns import Network

HEARTBEAT_S = 2.0
NOTICED_S = HEARTBEAT_S + 2.0
"""The bound, and what a busy machine takes."""


@pytest.fixture
def workers(hosts: HostMesh) -> Iterator[ActorMesh[Worker]]:
    """One on each host, which has been heard."""
    procs = hosts.reattach().spawn_procs()
    workers = procs.spawn("workers", Worker)
    workers.rank.call().get(PATIENCE_S)
    yield workers
    procs.stop().get(PATIENCE_S)


def test_a_cut_link_is_noticed_within_the_bound_and_the_host_comes_back(
    net: Network, hosts: HostMesh, workers: ActorMesh[Worker], failures: Failures
) -> None:
    lost = net.machines[1]
    cut = time.monotonic()
    lost.pull()
    answer = workers.slice(hosts=1).rank.call_one()
    others = workers.slice(hosts=slice(2, 4)).rank.call()
    with pytest.raises(SupervisionError, match=r"hosts': 1.* is gone: .*no sign of life") as error:
        answer.get(PATIENCE_S)
    assert time.monotonic() - cut < NOTICED_S
    assert list(others.get(PATIENCE_S)) == [0, 1]
    assert error.value.failure is not None
    assert failures.wait().rank == {"hosts": 1}
    assert failures[0].kind is FailureKind.UNREACHABLE
    assert workers.slice(hosts=0).ask.call_one(workers.slice(hosts=2)).get(PATIENCE_S) == [
        workers.slice(hosts=2).pid.call_one().get(PATIENCE_S)
    ]
    wait_for_nothing(lost)

    lost.plug()
    whole = hosts.reattach()
    assert whole.names == hosts.names
    procs = whole.spawn_procs()
    assert list(procs.spawn("again", Worker).rank.call().get(PATIENCE_S)) == [0, 1, 2, 3]
    procs.stop().get(PATIENCE_S)


def test_packets_that_are_all_lost_are_like_a_cut_link(
    net: Network, hosts: HostMesh, workers: ActorMesh[Worker], failures: Failures
) -> None:
    lost = net.machines[2]
    lost.unplug_silently()
    begin = time.monotonic()
    try:
        with pytest.raises(SupervisionError, match="no sign of life"):
            workers.slice(hosts=2).rank.call_one().get(PATIENCE_S)
        assert time.monotonic() - begin < NOTICED_S
        assert failures.wait().rank == {"hosts": 2}
        wait_for_nothing(lost)
    finally:
        lost.plug_silently()


def test_two_hosts_that_do_not_reach_each_other_are_no_loss_for_the_script(
    net: Network, hosts: HostMesh, workers: ActorMesh[Worker]
) -> None:
    first, second = workers.slice(hosts=0), workers.slice(hosts=1)
    first.ask.call_one(second).get(PATIENCE_S)
    begin = time.monotonic()
    with net.machines[0].without_way_to(net.machines[1].address):
        with pytest.raises(ActorError, match="is gone"):
            first.ask.call_one(second).get(PATIENCE_S)
        assert time.monotonic() - begin < NOTICED_S
        assert first.ask.call_one(workers.slice(hosts=2)).get(PATIENCE_S)
    assert list(workers.rank.call().get(PATIENCE_S)) == [0, 1, 2, 3]


def test_a_killed_agent_takes_its_part_of_the_job_along_and_nothing_else(
    net: Network, hosts: HostMesh, workers: ActorMesh[Worker], failures: Failures, secret_file: Path
) -> None:
    lost = net.machines[3]
    os.kill(lost.agent(), signal.SIGKILL)
    with pytest.raises(SupervisionError, match=r"hosts': 3"):
        workers.slice(hosts=3).stall.call_one(PATIENCE_S).get(PATIENCE_S)
    assert failures.wait().rank == {"hosts": 3}
    wait_until(lambda: not lost.running(), "nothing is left on its host")
    assert list(workers.slice(hosts=slice(0, 3)).rank.call().get(PATIENCE_S)) == [0, 1, 2]
    lost.clear()
    serve(lost, "--insecure", "--secret-file", str(secret_file))
    procs = hosts.reattach().slice(hosts=3).spawn_procs()
    assert procs.spawn("again", Worker).rank.call_one().get(PATIENCE_S) == 0
    procs.stop().get(PATIENCE_S)


def test_an_agent_that_stands_still_harms_no_running_job(
    net: Network, hosts: HostMesh, workers: ActorMesh[Worker]
) -> None:
    agent = net.machines[0].agent()
    os.kill(agent, signal.SIGSTOP)
    try:
        until = time.monotonic() + 1.5 * HEARTBEAT_S
        while time.monotonic() < until:
            assert list(workers.rank.call().get(PATIENCE_S)) == [0, 1, 2, 3]
    finally:
        os.kill(agent, signal.SIGCONT)
    until = time.monotonic() + HEARTBEAT_S
    while time.monotonic() < until:
        assert list(workers.rank.call().get(PATIENCE_S)) == [0, 1, 2, 3]


def test_a_launcher_on_another_host_vouches_for_a_busy_process_and_not_for_a_frozen_one(
    hosts: HostMesh, workers: ActorMesh[Worker], failures: Failures
) -> None:
    silent, other = workers.slice(hosts=0), workers.slice(hosts=1)
    pid = silent.pid.call_one().get(PATIENCE_S)
    assert other.ask.call_one(silent).get(PATIENCE_S) == [pid]  # so that it is heard on another host than the script's
    assert silent.hold_lock.call_one(2 * HEARTBEAT_S).get(PATIENCE_S) == pid
    assert other.ask.call_one(silent).get(PATIENCE_S) == [pid]

    began = time.monotonic()
    with pytest.raises(SupervisionError, match="is gone"):
        silent.freeze.call_one().get(PATIENCE_S)
    assert time.monotonic() - began < NOTICED_S
    assert "is stopped" in failures.wait().message
    with pytest.raises(ActorError, match="is gone"):
        other.ask.call_one(silent).get(PATIENCE_S)


def test_a_host_whose_part_of_the_job_stands_still_is_lost_and_cleared(
    net: Network, hosts: HostMesh, workers: ActorMesh[Worker], failures: Failures
) -> None:
    (stopped,) = net.machines[1].below_agent()
    os.kill(stopped, signal.SIGSTOP)
    assert failures.wait().rank == {"hosts": 1}
    wait_for_nothing(net.machines[1])
    wait_until(lambda: not net.machines[1].has_zombies(), "the agent, first of its machine, reaps what was left to it")
    assert list(workers.slice(hosts=slice(2, 4)).rank.call().get(PATIENCE_S)) == [0, 1]


SCRIPT = """
    import sys, time
    from skipper import control
    from skipper.control.cluster.hosts import attach_to_hosts
    from tests.hosts.actors import Worker

    control.configure(heartbeat_s={heartbeat_s}, unresponsive_s=2 * {heartbeat_s})
    hosts = attach_to_hosts({addresses}, secret_file={secret_file!r}, insecure=True)
    workers = hosts.spawn_procs(per_host={{"gpus": 2}}).spawn("workers", Worker)
    print(len(workers.pid.call().get(20)), flush=True)
    workers.stall.broadcast(100.0)
    {then}
"""


@pytest.mark.parametrize("how", ["ends", "killed", "stopped", "stopped with its processes"])
def test_a_script_leaves_nothing_on_any_host(
    net: Network, hosts: HostMesh, secret_file: Path, script: Callable[[str], Script], how: str
) -> None:
    machines = net.machines[:2]
    before = [set(machine.running()) for machine in machines]
    then = "" if how == "ends" else "time.sleep(100)"
    addresses = addresses_of(machines)
    program = SCRIPT.format(addresses=addresses, secret_file=str(secret_file), then=then, heartbeat_s=HEARTBEAT_S)
    started = script(program)
    assert started.line() == "4"
    if how != "ends":
        there = [set(machine.running()) - had for machine, had in zip(machines, before, strict=True)]
        assert all(there)
        os.kill(started.process.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        if how == "stopped with its processes":  # none of them can miss it: the agents do, after `unresponsive_s`
            for pid in set().union(*there):
                os.kill(pid, signal.SIGSTOP)
    for machine, had in zip(machines, before, strict=True):
        wait_until(
            lambda machine=machine, had=had: set(machine.running()) <= had, f"nothing is left on {machine.address}"
        )


def test_a_script_that_was_killed_and_started_again_attaches_at_once(
    net: Network, hosts: HostMesh, secret_file: Path, script: Callable[[str], Script]
) -> None:
    addresses = addresses_of(net.machines[:2])
    program = SCRIPT.format(
        addresses=addresses, secret_file=str(secret_file), then="time.sleep(100)", heartbeat_s=HEARTBEAT_S
    )
    for _ in range(2):
        started = script(program)
        assert started.line() == "4"
        started.process.kill()
