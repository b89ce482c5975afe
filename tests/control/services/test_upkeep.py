"""Scaling, draining, rolling updates and health checks; none of them costs a request."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from skipper.control import Future
from skipper.control.model.errors import ReplicaLostError
from skipper.control.services import ReplicaState, Service
from tests.control.conftest import PATIENCE_S, alive, wait_until
from tests.control.services.conftest import REPLICAS, Gate, outcome
from tests.control.services.parties import Worker


class Load:
    """Requests that are not idempotent, in flight all the time."""

    def __init__(self, service: Service[Worker]) -> None:
        self.answered = 0
        self.wrong: list[object] = []
        self._service = service
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._call, daemon=True) for _ in range(4)]

    def _call(self) -> None:
        while not self._is_over.is_set():
            futures: list[Future[object]] = [self._service.rank_and_tag.route() for _ in range(5)]
            for future in futures:
                answer = outcome(lambda future=future: future.get(PATIENCE_S))  # type: ignore[misc]
                if answer == (0, "tag"):
                    self.answered += 1
                else:
                    self.wrong.append(answer)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let it go on around something that takes its time, and see that every request was answered."""
        for thread in self._threads:
            thread.start()
        try:
            wait_until(lambda: self.answered > 20, "the load is there")
            yield
            enough = self.answered + 20
            wait_until(lambda: self.answered > enough or bool(self.wrong), "the load goes on")
        finally:
            self._is_over.set()
            for thread in self._threads:
                thread.join(PATIENCE_S)
        assert self.wrong == []
        assert not any(thread.is_alive() for thread in self._threads)


def test_scaling_costs_no_request(service: Service[Worker]) -> None:
    before = service.pid.fanout().get(PATIENCE_S)
    with Load(service).running():
        service.scale(REPLICAS + 1).get(PATIENCE_S)
        more = service.pid.fanout().get(PATIENCE_S)
        service.scale(1).get(PATIENCE_S)
        one = service.pid.fanout().get(PATIENCE_S)
        service.scale(REPLICAS).get(PATIENCE_S)
    after = service.pid.fanout().get(PATIENCE_S)
    assert more[:REPLICAS] == list(before)
    assert list(one) == [before[0]]
    assert after[0] == before[0]
    assert not set(after[1:]) & set(more)
    assert not any(alive(pid) for pid in more[1:])


def test_a_drained_replica_is_replaced_and_costs_no_request(service: Service[Worker]) -> None:
    before = service.pid.fanout().get(PATIENCE_S)
    with Load(service).running():
        service.drain(1).get(PATIENCE_S)
    after = service.pid.fanout().get(PATIENCE_S)
    assert [after[0], after[2]] == [before[0], before[2]]
    assert after[1] != before[1]
    assert service.metrics().get(PATIENCE_S)[1].lost == 0


def test_a_drained_replica_finishes_what_it_has(service: Service[Worker], gate: Gate) -> None:
    waiting = [service.wait_for.route(gate.path) for _ in range(2 * REPLICAS)]
    busy = gate.wait(REPLICAS)
    drained = service.drain(0)
    wait_until(lambda: service.metrics().get(PATIENCE_S)[0].state is ReplicaState.DRAINING, "it drains")
    assert not drained.done()
    gate.open()
    drained.get(PATIENCE_S)
    assert sorted(future.get(PATIENCE_S) for future in waiting) == sorted([*busy, *busy])


def test_a_rolling_fanout_spares_the_replicas_in_their_turn(service: Service[Worker], gate: Gate) -> None:
    pids = list(service.pid.fanout().get(PATIENCE_S))
    with Load(service).running():
        rolling = service.wait_for.fanout(gate.path, rolling=1)
        (updating,) = gate.wait(1)
        assert updating == pids[0]
        assert {service.pid.route().get(PATIENCE_S) for _ in range(20)} == set(pids[1:])
        states = [each.state for each in service.metrics().get(PATIENCE_S)]
        assert states == [ReplicaState.UPDATING, ReplicaState.READY, ReplicaState.READY]
        assert gate.waiting() == {updating}
        gate.open()
        assert list(rolling.get(PATIENCE_S)) == pids


def test_a_rolling_fanout_goes_on_with_the_successor_where_that_is_safe(service: Service[Worker], gate: Gate) -> None:
    pids = list(service.pid.fanout().get(PATIENCE_S))
    again = service.wait_again_for.fanout(gate.path, rolling=REPLICAS)
    gate.wait(REPLICAS)
    os.kill(pids[2], signal.SIGKILL)
    gate.wait(REPLICAS + 1)
    once = service.wait_for.fanout(gate.path, rolling=1)
    gate.open()
    results = list(again.get(PATIENCE_S))
    assert results[:2] == pids[:2]
    assert results[2] not in pids
    assert list(once.get(PATIENCE_S)) == results


def test_a_rolling_fanout_that_is_not_idempotent_tells_of_a_death(service: Service[Worker], gate: Gate) -> None:
    pids = list(service.pid.fanout().get(PATIENCE_S))
    once = service.wait_for.fanout(gate.path, rolling=REPLICAS)
    gate.wait(REPLICAS)
    os.kill(pids[1], signal.SIGKILL)
    gate.open()
    with pytest.raises(ReplicaLostError, match="replica 1 of workers died in wait_for"):
        once.get(PATIENCE_S)


@pytest.mark.parametrize("rolling", [None, 1])
def test_a_fanout_may_leave_out_who_is_not_there(service: Service[Worker], gate: Gate, rolling: int | None) -> None:
    pids = list(service.pid.fanout().get(PATIENCE_S))
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: service.metrics().get(PATIENCE_S)[0].state is not ReplicaState.READY, "the death is known")
    there = list(service.rank_and_tag.fanout(absent="skip", rolling=rolling).get(PATIENCE_S))
    assert REPLICAS - 1 <= len(there) <= REPLICAS  # its successor may be up already
    service.initialized.get(PATIENCE_S)
    waiting = service.wait_for.fanout(gate.path, absent="skip", rolling=REPLICAS if rolling else None)
    victim = min(gate.wait(REPLICAS))
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: not alive(victim), "the victim is dead")
    gate.open()
    left = list(waiting.get(PATIENCE_S))
    assert len(left) == REPLICAS - 1
    assert victim not in left
    with pytest.raises(ValueError, match='absent is "wait" or "skip"'):
        service.pid.fanout(absent="never")  # type: ignore[arg-type]
