"""Hosts with processes of their own, and hollow ones: a script sees the same of both."""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from skipper import control
from skipper.benchmarks.scale.host_sources import HOLLOW, MEASURED, HostSource, hosts_of
from skipper.control import ActorError, ActorMesh, FailureKind, HostMesh, ProcMesh, SupervisionError, configure
from skipper.control.model.settings import adopt, settings
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime.requests import EXIT_REASON
from tests.control.conftest import PATIENCE_S, Failures, wait_until

from .actors import Plain

HOSTS = 5
HEARTBEAT_S = 4.0
NOTICED_S = HEARTBEAT_S + 4.0
"""The bound, and what a busy machine takes."""

KINDS = [(HOLLOW, True), (HOLLOW, False), (MEASURED, True)]


@pytest.fixture(scope="module", params=KINDS, ids=["hollow-tcp", "hollow-local", "real-tcp"])
def kind(request: pytest.FixtureRequest) -> tuple[str, bool]:
    found: tuple[str, bool] = request.param
    return found


@pytest.fixture
def source(kind: tuple[str, bool]) -> Iterator[HostSource]:
    """Some hosts, whose job ends with the test."""
    before = settings()
    configure(heartbeat_s=HEARTBEAT_S, tree_threshold=1, tree_fanout=2)
    label, own_ips = kind
    with ExitStack() as stack:
        stack.callback(adopt, before)
        found = stack.enter_context(hosts_of(label, HOSTS, own_ips=own_ips))
        stack.callback(control.shutdown)
        yield found


@pytest.fixture
def hosts(source: HostSource) -> HostMesh:
    return source.attach(timeout=PATIENCE_S)


@pytest.fixture
def procs(hosts: HostMesh) -> ProcMesh:
    return hosts.spawn_procs()


@pytest.fixture
def actors(procs: ProcMesh) -> ActorMesh[Plain]:
    """One on each host, which has answered."""
    actors = procs.spawn("plain", Plain)
    assert list(actors.rank.call().get(PATIENCE_S)) == list(range(HOSTS))
    return actors


def test_casts_are_answered_and_stay_in_order(actors: ActorMesh[Plain], procs: ProcMesh) -> None:
    for number in range(50):
        actors.note.broadcast(number)
        if number % 10 == 0:
            actors.slice(hosts=3).note.broadcast(1000 + number)
    noted = list(actors.noted.call().get(PATIENCE_S))
    alone = list(range(50))
    mixed = list(itertools.chain.from_iterable([n, 1000 + n] if n % 10 == 0 else [n] for n in range(50)))
    assert noted == [alone, alone, alone, mixed, alone]
    content = bytes(300_000)  # is lent, or goes in pieces
    assert set(actors.echo.call(content).get(PATIENCE_S)) == {content}
    actors.stop().get(PATIENCE_S)
    with pytest.raises(SupervisionError, match="has been stopped"):
        actors.rank.call().get(PATIENCE_S)
    procs.stop().get(PATIENCE_S)


def test_errors_of_endpoints_and_constructors_are_those_of_real_actors(
    actors: ActorMesh[Plain], procs: ProcMesh, failures: Failures
) -> None:
    with pytest.raises(ActorError, match="KeyError: 'no such thing'") as error:
        actors.slice(hosts=2).refuse.call_one().get(PATIENCE_S)
    assert error.value.endpoint == "refuse"
    assert not failures
    bad = procs.spawn("bad", Plain, bad_rank=1)
    with pytest.raises(SupervisionError, match="rank 1 is not to be"):
        bad.rank.call().get(PATIENCE_S)
    assert failures.wait().kind is FailureKind.CONSTRUCTION
    assert failures[0].rank == {"hosts": 1}
    actors.slice(hosts=4).note.broadcast(-1)  # nobody waits: it is the end of the actor
    wait_until(lambda: len(failures) == 2, "the second failure")
    assert failures[1].kind is FailureKind.EXCEPTION
    with pytest.raises(SupervisionError, match="a negative number"):
        actors.slice(hosts=4).rank.call_one().get(PATIENCE_S)
    assert list(actors.slice(hosts=slice(0, 4)).rank.call().get(PATIENCE_S)) == [0, 1, 2, 3]


def test_the_death_of_a_host_is_told_and_the_others_go_on(
    source: HostSource, actors: ActorMesh[Plain], failures: Failures
) -> None:
    source.kill(1)
    assert failures.wait().rank == {"hosts": 1}
    with pytest.raises(SupervisionError, match=r"'hosts': 1.* is gone") as error:
        actors.slice(hosts=1).rank.call_one().get(PATIENCE_S)
    assert error.value.failure is not None
    assert error.value.failure.kind is failures[0].kind
    outcomes = [_outcome(future) for future in actors.rank.stream()]
    assert sorted(outcomes) == [0, 2, 3, 4, 99]  # those below it in the tree, too


def _outcome(future: "control.Future[int]") -> int:
    try:
        return future.get(PATIENCE_S)
    except SupervisionError:
        return 99


def test_a_host_that_falls_silent_is_lost_within_the_bound(
    source: HostSource, procs: ProcMesh, actors: ActorMesh[Plain], failures: Failures
) -> None:
    ended = procs.slice(hosts=2).ended
    source.freeze(2)
    answer = actors.slice(hosts=2).rank.call_one()
    with pytest.raises(SupervisionError, match="no sign of life"):
        answer.get(NOTICED_S)
    ended.get(NOTICED_S)
    assert failures.wait().kind is FailureKind.UNREACHABLE
    assert list(actors.slice(hosts=slice(3, 5)).rank.call().get(PATIENCE_S)) == [0, 1]


def test_hosts_are_let_go_and_attached_again(hosts: HostMesh, actors: ActorMesh[Plain], source: HostSource) -> None:
    hosts.stop().get(PATIENCE_S)
    with pytest.raises(SupervisionError):
        actors.rank.call().get(PATIENCE_S)
    again = source.attach(timeout=PATIENCE_S)
    assert list(again.spawn_procs().spawn("again", Plain).rank.call().get(PATIENCE_S)) == list(range(HOSTS))


def test_a_process_whose_link_to_its_owner_has_broken_is_ended_by_its_launcher(
    actors: ActorMesh[Plain], procs: ProcMesh, failures: Failures
) -> None:
    process, lost = runtime.current(), procs.root_members[2]
    assert lost.launcher is not None
    end = process.request(lost.launcher, EXIT_REASON, lost.id)
    link = process.transport.find(lost.id)
    assert link is not None
    assert link._stream is not None
    link._stream.end()
    assert "its owner's process has lost the connection to it" in end.get(PATIENCE_S)
    with pytest.raises(SupervisionError):
        actors.slice(hosts=2).rank.call_one().get(PATIENCE_S)
    assert failures.wait().mesh_name == "plain"
