"""What hollow hosts are, beyond what a script sees of hosts."""

import os
import secrets
from collections.abc import Iterator

import pytest

from skipper import control
from skipper.control import ActorError, SupervisionError
from skipper.control.cluster.hollow import MAX_HOSTS, HollowHosts, HostsUsage
from skipper.control.cluster.hosts import attach_to_hosts
from skipper.control.cluster.hosts.agent_link import AgentLink
from skipper.control.model.errors import AuthenticationError, HollowHostError, HostError
from skipper.control.runtime import peer_failures
from skipper.control.wire import addresses
from tests.control.conftest import PATIENCE_S, Failures, alive, wait_until

from .actors import Plain, Waiting


@pytest.fixture
def hollow() -> Iterator[HollowHosts]:
    """Three hosts on the sockets of this host."""
    with HollowHosts(3) as hosts:
        yield hosts
        control.shutdown()


def test_many_hosts_take_a_handful_of_threads_and_leave_nothing(hollow: HollowHosts) -> None:
    with HollowHosts(60) as many:
        held: list[HostsUsage] = []
        for _ in range(3):
            actors = many.attach(timeout=PATIENCE_S).spawn_procs().spawn("plain", Plain)
            assert list(actors.rank.call().get(PATIENCE_S)) == list(range(60))
            busy = many.usage()
            assert busy.threads < 30, busy  # of gRPC's listener, and of exits; not some for each host
            control.shutdown()
            wait_until(lambda: many.usage().descriptors < 100, "no socket is left of the job")
            wait_until(lambda: many.usage().threads < 15, "no thread is left of the job")
            held.append(many.usage())
        # The first job has modules imported and gRPC begun; the last sockets of a job close a moment after the others.
        wait_until(lambda: many.usage().descriptors <= held[1].descriptors, "nothing is left of the third job")
        assert many.usage().threads <= held[1].threads


def test_a_process_of_a_host_is_killed_alone(hollow: HollowHosts, failures: Failures) -> None:
    hosts = hollow.attach()
    procs = hosts.spawn_procs({"gpus": 2})
    actors = procs.spawn("plain", Plain)
    actors.rank.call().get(PATIENCE_S)
    ended = procs.slice(hosts=1, gpus=1).ended
    hollow.kill_process(1, 1)
    ended.get(PATIENCE_S)
    assert "was killed by signal 9 (SIGKILL)" in str(failures.wait().message)
    assert actors.slice(hosts=1, gpus=0).rank.call_one().get(PATIENCE_S) == 0
    assert hosts.lost() == ()


def test_a_death_is_told_at_once_in_whatever_order_it_is_learned(
    failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    # That of the link and that of the launcher may come first; a death that waits for the other one waits for ever.
    monkeypatch.setattr(peer_failures, "EXIT_REASON_S", 1e6)
    with HollowHosts(12, own_ips=True) as many:
        procs = many.attach().spawn_procs()
        procs.initialized.get(PATIENCE_S)
        for host in range(11):
            ended = procs.slice(hosts=host).ended
            many.kill(host)
            ended.get(PATIENCE_S)
        control.shutdown()


def test_a_killed_host_can_be_attached_again(hollow: HollowHosts, failures: Failures) -> None:
    hosts = hollow.attach()
    procs = hosts.spawn_procs()
    procs.initialized.get(PATIENCE_S)
    ended = procs.slice(hosts=2).ended
    hollow.kill(2)
    ended.get(PATIENCE_S)
    assert hosts.lost() == (2,)
    again = hosts.reattach()
    assert list(again.spawn_procs().spawn("plain", Plain).rank.call().get(PATIENCE_S)) == [0, 1, 2]


def test_what_takes_a_process_of_its_own_is_refused(hollow: HollowHosts, failures: Failures) -> None:
    procs = hollow.attach().spawn_procs()
    actors = procs.spawn("plain", Plain)
    with pytest.raises(ActorError, match="HollowHostError: an actor of a hollow host answers calls"):
        actors.slice(hosts=0).ask.call_one(actors.slice(hosts=1)).get(PATIENCE_S)
    with pytest.raises(SupervisionError, match="share a thread have no async endpoints"):
        procs.spawn("waiting", Waiting).rank.call().get(PATIENCE_S)
    prepared = procs.host_mesh.spawn_procs(bootstrap=lambda: None)
    with pytest.raises(SupervisionError, match=r"could not be started.*runs no bootstrap"):
        prepared.initialized.get(PATIENCE_S)
    assert list(actors.rank.call().get(PATIENCE_S)) == [0, 1, 2]


def test_agents_of_hollow_hosts_ask_for_their_secret(hollow: HollowHosts) -> None:
    host, port = addresses.parse(hollow.addresses[0])
    with pytest.raises(AuthenticationError, match="another secret"):
        AgentLink(host, port, secrets.token_bytes(32), None, timeout=PATIENCE_S)
    with AgentLink(host, port, hollow.secret_file.read_bytes(), None, timeout=PATIENCE_S) as link:
        with pytest.raises(HostError, match="does not know the request 'status'"):
            link.ask("status", {}, timeout=PATIENCE_S)
        with pytest.raises(HostError, match="the request 'attach' failed: KeyError"):
            link.ask("attach", {"me": {"name": "host 127.0.0.1:1"}}, timeout=PATIENCE_S)


def test_a_host_is_attached_once(hollow: HollowHosts) -> None:
    hollow.attach()
    with pytest.raises(HostError, match="is attached already"):
        attach_to_hosts(hollow.addresses[:1], secret_file=hollow.secret_file)


def test_the_end_of_their_process_is_told(hollow: HollowHosts, failures: Failures) -> None:
    hosts = hollow.attach()
    procs = hosts.spawn_procs()
    procs.initialized.get(PATIENCE_S)
    (pid,) = hollow.pids
    os.kill(pid, 9)
    for host in range(3):
        procs.slice(hosts=host).ended.get(PATIENCE_S)
    wait_until(lambda: not alive(pid), "the process ends")
    with pytest.raises(HollowHostError, match=f"pid {pid}"):
        hollow.usage()
    with pytest.raises(HollowHostError, match=f"pid {pid}"):
        hollow.kill(0)


@pytest.mark.parametrize("count", [0, -1, MAX_HOSTS + 1])
def test_a_senseless_number_of_hosts_starts_nothing(count: int) -> None:
    with pytest.raises(ValueError, match="number of hollow hosts"):
        HollowHosts(count)


def test_a_host_that_is_not_there_cannot_be_killed(hollow: HollowHosts) -> None:
    for host in (3, -1):
        with pytest.raises(IndexError, match="no hollow host"):
            hollow.kill(host)
