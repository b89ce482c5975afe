"""Routing, fanout, death and replacement."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from skipper.control import ActorError, DeadlineError, Future, ProcMesh, SupervisionError, this_proc
from skipper.control.model.errors import ReplicaLostError, ServiceEndedError
from skipper.control.observe.job_query import survey
from skipper.control.runtime import current_runtime
from skipper.control.runtime.status_providers import Table
from skipper.control.services import ReplicaState, Service
from tests.control.conftest import PATIENCE_S, Failures, alive, wait_until
from tests.control.services.conftest import REPLICAS, Gate, outcome
from tests.control.services.parties import Client, Fragile, Quitter, Worker


def test_a_request_waits_for_the_first_replica(shared: Service[Worker]) -> None:
    assert shared.double.route(4).get(PATIENCE_S) == 8
    assert repr(shared) == "<service workers>"


def test_results_and_exceptions_come_as_from_any_actor(service: Service[Worker]) -> None:
    assert service.rank_and_tag.route().get(PATIENCE_S) == (0, "tag")
    with pytest.raises(ActorError, match="ValueError: no good") as raised:
        service.fail.route("no good").get(PATIENCE_S)
    assert isinstance(raised.value.cause, ValueError)
    with pytest.raises(SupervisionError, match="has dropped the response port"):
        service.drop.route().get(PATIENCE_S)


def test_arguments_and_names_are_checked_where_the_mistake_is(service: Service[Worker]) -> None:
    with pytest.raises(TypeError):
        service.double.route()
    with pytest.raises(TypeError):
        service.double.fanout(1, 2, 3)
    with pytest.raises(ValueError, match="rolling must be at least 1"):
        service.double.fanout(1, rolling=0)
    with pytest.raises(AttributeError, match="no endpoint 'dubble'; it has: double"):
        service.dubble.route(1)
    with pytest.raises(ValueError, match="num_replicas must be at least 1"):
        service.scale(0)
    with pytest.raises(ActorError) as raised:
        service.drain(77).get(PATIENCE_S)
    assert isinstance(raised.value.cause, IndexError)


def test_a_fanout_reaches_every_replica_in_order(service: Service[Worker]) -> None:
    pids = service.pid.fanout().get(PATIENCE_S)
    assert pids.extent == {"replicas": REPLICAS}
    assert len(set(pids)) == REPLICAS
    assert service.pid.fanout(rolling=2).get(PATIENCE_S) == pids
    assert {service.pid.route().get(PATIENCE_S) for _ in range(3 * REPLICAS)} == set(pids)


def test_the_first_error_of_a_fanout_is_raised(service: Service[Worker]) -> None:
    for rolling in (None, 1):
        with pytest.raises(ActorError, match="ValueError: in vain"):
            service.fail.fanout("in vain", rolling=rolling).get(PATIENCE_S)
    assert service.double.fanout(1).get(PATIENCE_S) == [2] * REPLICAS


def test_busy_replicas_are_spared(service: Service[Worker], gate: Gate) -> None:
    waiting = [service.wait_for.route(gate.path) for _ in range(REPLICAS - 1)]
    busy = gate.wait(REPLICAS - 1)
    answers = {service.pid.route().get(PATIENCE_S) for _ in range(10)}
    assert len(answers) == 1
    assert not answers & busy
    gate.open()
    assert {future.get(PATIENCE_S) for future in waiting} == busy


def test_a_death_ends_what_may_have_been_handled_and_hands_on_what_is_idempotent(
    service: Service[Worker], gate: Gate
) -> None:
    pids = list(service.pid.fanout().get(PATIENCE_S))
    once = [service.wait_for.route(gate.path) for _ in range(REPLICAS)]
    gate.wait(REPLICAS)
    again = [service.wait_again_for.route(gate.path) for _ in range(REPLICAS)]
    os.kill(pids[1], signal.SIGKILL)
    lost = first_lost(once)
    assert (lost.service, lost.replica, lost.is_unhandled) == ("workers", 1, False)
    assert "SIGKILL" in str(lost)
    assert lost.failure is not None
    gate.open()
    values = [outcome(lambda future=future: future.get(PATIENCE_S)) for future in once]
    assert sorted(value for value in values if isinstance(value, int)) == sorted({pids[0], pids[2]})
    answers = [future.get(PATIENCE_S) for future in again]
    assert len(answers) == REPLICAS
    assert pids[1] not in answers
    service.initialized.get(PATIENCE_S)
    successors = service.pid.fanout().get(PATIENCE_S)
    assert (successors[0], successors[2]) == (pids[0], pids[2])
    assert successors[1] != pids[1]


@pytest.mark.parametrize("way", ["keep_port", "work_on"])
def test_a_replica_that_is_stopped_before_it_has_answered_is_lost_as_one_that_dies(way: str, tmp_path: Path) -> None:
    """Whether it has kept the port for its answer, or was interrupted since it did not stop in time."""
    service: Any = Quitter.options(num_replicas=3).as_service(name=f"quitters_{way}")
    service.initialized.get(PATIENCE_S)
    with pytest.raises(ReplicaLostError, match=r"may or may not have handled .* has been stopped") as lost:
        getattr(service, way).route(str(tmp_path / "once")).get(PATIENCE_S)
    assert (lost.value.failure, lost.value.is_unhandled) == (None, False)
    handled = tmp_path / "again"
    pid = getattr(service, f"{way}_again").route(str(handled)).get(PATIENCE_S)
    first, second = map(int, handled.read_text().split())
    assert first != second == pid
    service.stop().get(PATIENCE_S)


def first_lost(futures: Sequence[Future[Any]]) -> ReplicaLostError:
    """What the first of them ends in whose replica is lost; the others have no value yet."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        for future in futures:
            try:
                future.get(0.1)
            except DeadlineError:
                continue
            except ReplicaLostError as error:
                return error
    raise AssertionError("no replica was lost")


def test_a_request_that_kills_whoever_handles_it_is_not_sent_for_ever(service: Service[Worker]) -> None:
    before = {each.replica: each.restarts for each in service.metrics().get(PATIENCE_S)}
    with pytest.raises(ReplicaLostError, match="may or may not have handled kill_who_handles"):
        service.kill_who_handles.route().get(PATIENCE_S)
    service.initialized.get(PATIENCE_S)
    after = service.metrics().get(PATIENCE_S)
    assert sum(each.restarts - before[each.replica] for each in after) == 1 + 3  # once, and three retries


def test_large_arguments_are_sent_again_as_they_were(service: Service[Worker], gate: Gate) -> None:
    large = bytearray(b"x") * (1 << 20)
    for _ in range(REPLICAS):
        service.wait_again_for.route(gate.path)
    victim = min(gate.wait(REPLICAS))
    futures = [service.nbytes.route(large) for _ in range(REPLICAS)]  # each behind one that waits
    large.clear()
    os.kill(victim, signal.SIGKILL)
    gate.open()
    assert [future.get(PATIENCE_S) for future in futures] == [1 << 20] * REPLICAS


def test_a_service_is_called_from_other_processes_too(
    service: Service[Worker], own_procs: Callable[..., ProcMesh]
) -> None:
    client = own_procs().spawn("client", Client, service)
    before = sum(each.done for each in service.metrics().get(PATIENCE_S))
    assert client.double.call_one(20).get(PATIENCE_S) == [2 * number for number in range(20)]
    assert client.pids.call_one().get(PATIENCE_S) == list(service.pid.fanout().get(PATIENCE_S))
    after = sum(each.done for each in service.metrics().get(PATIENCE_S))
    assert after == before + 20 + 2 * REPLICAS


def test_metrics_tell_of_each_replica(service: Service[Worker], gate: Gate) -> None:
    before = service.metrics().get(PATIENCE_S)
    waiting = [service.wait_for.route(gate.path) for _ in range(2 * REPLICAS)]
    gate.wait(REPLICAS)
    during = service.metrics().get(PATIENCE_S)
    assert [each.replica for each in during] == list(range(REPLICAS))
    assert [each.state for each in during] == [ReplicaState.READY] * REPLICAS
    assert [each.outstanding for each in during] == [2] * REPLICAS
    gate.open()
    for future in waiting:
        future.get(PATIENCE_S)
    with pytest.raises(ActorError):
        service.fail.route("counted").get(PATIENCE_S)
    after = service.metrics().get(PATIENCE_S)
    assert [each.outstanding for each in after] == [0] * REPLICAS
    assert sum(each.done for each in after) == sum(each.done for each in before) + 2 * REPLICAS + 1
    assert sum(each.errors for each in after) == sum(each.errors for each in before) + 1
    assert all(0 < each.mean_s <= each.longest_s for each in after)


def test_a_service_that_cannot_come_up_fails_with_the_first_error_as_headline(failures: Failures) -> None:
    service = Fragile.options(max_restarts=2, backoff_s=0.01).as_service()
    request = service.anything.route()
    everywhere = service.anything.fanout()
    failure = failures.wait()
    assert failure.mesh_name == "Fragile"
    assert "RuntimeError: no such luck" in failure.root_cause().message
    for future in (request, everywhere, service.anything.route(), service.anything.fanout()):
        with pytest.raises(ServiceEndedError, match="no such luck"):
            future.get(PATIENCE_S)
    with pytest.raises(SupervisionError):
        service.initialized.get(PATIENCE_S)
    assert len(failures) == 1


def test_a_stopped_service_leaves_no_process_and_says_so(own_procs: Callable[..., ProcMesh]) -> None:
    service = Worker.options(num_replicas=2).as_service(name="brief")
    pids = service.pid.fanout().get(PATIENCE_S)
    service.stop().get(PATIENCE_S)
    for future in (service.double.route(1), service.double.fanout(1)):
        with pytest.raises(ServiceEndedError, match="service brief has ended"):
            future.get(PATIENCE_S)
    for pid in pids:
        wait_until(lambda pid=pid: not alive(pid), f"{pid} ends")
    service.stop().get(PATIENCE_S)


def test_a_service_ends_with_its_owner(own_procs: Callable[..., ProcMesh]) -> None:
    from skipper.control import Actor, endpoint

    class Owner(Actor):
        def __init__(self) -> None:
            self.service = Worker.options(num_replicas=2).as_service(name="owned")

        @endpoint
        def lend(self) -> Service[Worker]:
            return self.service

    owner = this_proc().spawn("owner", Owner)
    service = owner.lend.call_one().get(PATIENCE_S)
    pids = service.pid.fanout().get(PATIENCE_S)
    owner.stop().get(PATIENCE_S)
    with pytest.raises(ServiceEndedError):
        service.double.route(1).get(PATIENCE_S)
    for pid in pids:
        wait_until(lambda pid=pid: not alive(pid), f"{pid} ends")


def test_a_service_reports_its_replicas_to_those_who_watch(service: Service[Worker]) -> None:
    def reported() -> Table:
        answers = survey(current_runtime.current(), "status", True, timeout=PATIENCE_S)
        tables = [table for answer in answers if answer.packed for table in answer.value().tables]
        (table,) = [table for table in tables if table.title == "Service workers"]
        return table

    for number in range(4 * REPLICAS):
        assert service.double.route(number).get(PATIENCE_S) == 2 * number
    table = reported()
    assert table.columns[:3] == ("replica", "state", "restarts")
    assert [row[:2] for row in table.rows] == [(number, "ready") for number in range(REPLICAS)]
    done, mean, longest = (table.columns.index(name) for name in ("done", "mean ms", "longest ms"))
    # The look has the callers tell their counts, which the next one shows.
    wait_until(lambda: sum(row[done] for row in reported().rows) >= 4 * REPLICAS, "callers have told their counts")
    assert all(0 < row[mean] <= row[longest] for row in reported().rows if row[done])
