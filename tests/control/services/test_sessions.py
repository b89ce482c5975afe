"""Sessions: calls that stay with one replica."""

import os
import pickle
import signal

import pytest

from skipper.control.model.errors import ServiceEndedError, SessionLostError
from skipper.control.services import ReplicaState, Service, Session
from tests.control.conftest import PATIENCE_S, wait_until
from tests.control.services.conftest import REPLICAS, Gate
from tests.control.services.parties import Worker


def test_calls_of_a_session_go_to_one_replica_in_their_order(shared: Service[Worker]) -> None:
    with shared.session() as session:  # before any replica is up
        futures = [session.note.route(str(number)) for number in range(50)]
        answers = [future.get(PATIENCE_S) for future in futures]
        assert [len(answer) for answer in answers] == list(range(1, 51))
        assert answers[-1] == [str(number) for number in range(50)]
        assert session.replica in range(REPLICAS)
        shared.initialized.get(PATIENCE_S)
        assert session.pid.route().get(PATIENCE_S) == shared.pid.fanout().get(PATIENCE_S)[session.replica]


def test_sessions_are_spread(service: Service[Worker]) -> None:
    sessions = [service.session() for _ in range(2 * REPLICAS)]
    try:
        assert sorted(session.replica or 0 for session in sessions) == sorted([*range(REPLICAS)] * 2)
        assert [each.sessions for each in service.metrics().get(PATIENCE_S)] == [2] * REPLICAS
    finally:
        for session in sessions:
            session.close()
    assert [each.sessions for each in service.metrics().get(PATIENCE_S)] == [0] * REPLICAS


def test_a_session_is_lost_with_its_replica_whatever_the_endpoint(service: Service[Worker], gate: Gate) -> None:
    with service.session() as session:
        pending = session.wait_again_for.route(gate.path)
        (victim,) = gate.wait(1)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(SessionLostError, match="and this session with it") as raised:
            pending.get(PATIENCE_S)
        assert (raised.value.replica, raised.value.is_unhandled) == (session.replica, False)
        service.initialized.get(PATIENCE_S)
        with pytest.raises(SessionLostError) as raised:
            session.double.route(1).get(PATIENCE_S)
        assert raised.value.is_unhandled
    with service.session() as another:
        assert another.double.route(1).get(PATIENCE_S) == 2


def test_an_open_session_holds_up_the_draining_of_its_replica(service: Service[Worker]) -> None:
    session = service.session()
    pid = session.pid.route().get(PATIENCE_S)
    assert session.replica is not None
    drained = service.drain(session.replica)
    wait_until(
        lambda: service.metrics().get(PATIENCE_S)[session.replica or 0].state is ReplicaState.DRAINING, "it drains"
    )
    assert pid not in {service.pid.route().get(PATIENCE_S) for _ in range(10)}
    assert session.pid.route().get(PATIENCE_S) == pid
    assert not drained.done()
    session.close()
    session.close()
    drained.get(PATIENCE_S)
    with pytest.raises(ValueError, match="the session is closed"):
        session.pid.route()


def test_draining_ends_sessions_that_stay_open_too_long() -> None:
    service = Worker.options(num_replicas=1, drain_timeout_s=0.3).as_service(name="hasty")
    with service.session() as session:
        session.note.route("a").get(PATIENCE_S)
        service.drain(0).get(PATIENCE_S)
        with pytest.raises(SessionLostError):
            session.note.route("b").get(PATIENCE_S)
    service.stop().get(PATIENCE_S)
    with service.session() as session, pytest.raises(ServiceEndedError):
        session.note.route("c").get(PATIENCE_S)


def test_a_session_stays_where_it_was_opened_and_warns_if_it_is_forgotten(service: Service[Worker]) -> None:
    session: Session[Worker] | None = service.session()
    with pytest.raises(TypeError, match="send the service instead"):
        pickle.dumps(session)
    with pytest.warns(ResourceWarning, match="was not closed"):
        session = None
    assert session is None
    assert sum(each.sessions for each in service.metrics().get(PATIENCE_S)) == 0
