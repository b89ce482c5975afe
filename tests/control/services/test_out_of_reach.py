"""Connections that break between processes which all live: found by `tests.simulation`."""

import contextlib
import threading
from typing import Any

import pytest

from skipper.control import Actor, ActorMesh, concurrent_endpoint, endpoint, idempotent, this_host
from skipper.control.api.endpoint import Endpoint
from skipper.control.model.errors import ActorError, BackpressureError, ReplicaLostError
from skipper.control.runtime import current_runtime
from skipper.control.services import ReplicaState, Service, Session, replica_controller
from skipper.control.wire.process_ref import ProcessRef
from tests.control.conftest import PATIENCE_S, wait_until


def cut(peer: ProcessRef) -> None:
    """Break the connection from this process to another."""
    process, is_cut = current_runtime.current(), threading.Event()
    process.loop.call_soon_threadsafe(process.transport.lose, peer, "the test has cut it")
    process.loop.call_soon_threadsafe(is_cut.set)
    assert is_cut.wait(PATIENCE_S)


class Cutter(Actor):
    """Breaks connections of its process, and calls a service."""

    @endpoint
    @idempotent
    async def where(self) -> ProcessRef:
        return current_runtime.current().me

    @concurrent_endpoint
    async def cut(self, peer: ProcessRef) -> None:
        if peer.id != current_runtime.current().me.id:
            cut(peer)

    @concurrent_endpoint
    async def call(self, service: Service["Cutter"]) -> ProcessRef:
        return await service.where.route()

    @concurrent_endpoint
    async def call_all(self, service: Service["Cutter"]) -> int:
        return len(await service.where.fanout())


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service[Cutter]:
    monkeypatch.setattr(replica_controller, "_DOUBT_S", 0.3)
    return Cutter.options(num_replicas=1).as_service(name="cutters")


def caller() -> ActorMesh[Cutter]:
    return this_host().spawn_procs(name="caller").spawn("caller", Cutter)


def test_who_has_lost_the_only_replica_does_not_wait_for_ever(service: Service[Cutter]) -> None:
    from_there = caller()
    replica = from_there.call.call_one(service).get(PATIENCE_S)
    from_there.cut.call_one(replica).get(PATIENCE_S)
    for call in (
        from_there.call,
        from_there.call_all,
        from_there.call,
    ):  # the first waits to be told, the last is not sent
        with pytest.raises(ActorError, match=r"lost its connection to every replica of cutters.* drain\(0\)") as caught:
            call.call_one(service).get(PATIENCE_S)
        assert isinstance(caught.value.cause, ReplicaLostError)
    assert service.where.route().get(PATIENCE_S) == replica  # this process has not lost it
    service.drain(0).get(PATIENCE_S)
    assert from_there.call.call_one(service).get(PATIENCE_S) == service.where.route().get(PATIENCE_S) != replica
    service.stop().get(PATIENCE_S)


def test_who_has_lost_all_replicas_that_stay_does_not_wait_for_one_that_leaves(service: Service[Cutter]) -> None:
    service.scale(2).get(PATIENCE_S)
    service.where.fanout().get(PATIENCE_S)
    sessions = [service.session(), service.session()]
    staying, leaving = (session.where.route().get(PATIENCE_S) for session in sorted(sessions, key=number_of))
    from_there = caller()
    from_there.call.call_one(service).get(PATIENCE_S)
    for replica in (staying, leaving):
        from_there.cut.call_one(replica).get(PATIENCE_S)
    scaled = service.scale(1)
    wait_until(lambda: service.metrics().get(PATIENCE_S)[1].state is ReplicaState.DRAINING, "it drains")
    call = from_there.call.call_one(service)
    threading.Event().wait(1.0)  # it is told by now that the one that stays is out of its reach
    assert not call.done()
    for session in sessions:
        session.close()
    scaled.get(PATIENCE_S)
    with pytest.raises(ActorError, match="lost its connection to every replica of cutters"):
        call.get(PATIENCE_S)
    service.stop().get(PATIENCE_S)


def number_of(session: Session[Cutter]) -> int:
    assert session.replica is not None
    return session.replica


def test_a_replica_whose_processes_have_lost_each_other_is_replaced() -> None:
    service = Cutter.options(procs=2, num_replicas=1, stable_s=0.0).as_service(name="pairs")
    before = list(service.where.route().get(PATIENCE_S))
    with contextlib.suppress(ReplicaLostError):  # the answer of the other may come no more
        service.cut.route(before[1]).get(PATIENCE_S)
    wait_until(lambda: list(service.where.route().get(PATIENCE_S)) != before, "others have taken their place")
    service.stop().get(PATIENCE_S)


def test_a_caller_asks_again_if_the_controller_had_no_room_for_its_question(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {"watch": 2, "replaces": 2}
    call_one = Endpoint.call_one

    def refuse(self: Endpoint[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = self.spec.name
        if refused.get(name):
            refused[name] -= 1
            raise BackpressureError("the controller is far behind")
        return call_one(self, *args, **kwargs)

    monkeypatch.setattr(Endpoint, "call_one", refuse)
    monkeypatch.setattr(replica_controller, "_DOUBT_S", 0.3)
    service = Cutter.options(num_replicas=1).as_service(name="cutters")
    cut(service.where.route().get(PATIENCE_S))
    with pytest.raises(ReplicaLostError, match="lost its connection to every replica of cutters"):
        service.where.route().get(PATIENCE_S)
    assert not any(refused.values())
    service.stop().get(PATIENCE_S)


def test_a_fanout_during_a_drain_reaches_the_successor() -> None:
    service = Cutter.options(num_replicas=1).as_service(name="single")
    (before,) = service.where.fanout().get(PATIENCE_S)
    drained, after = service.drain(0), [before]
    while not drained.done():
        after = list(service.where.fanout().get(PATIENCE_S))
        assert len(after) == 1
    assert list(service.where.fanout().get(PATIENCE_S)) != [before]
    service.stop().get(PATIENCE_S)


def test_a_fanout_that_leaves_everybody_out_says_so() -> None:
    service = Slow.options(num_replicas=2).as_service(name="slow")
    with pytest.raises(ReplicaLostError, match="slow has no replica 1 that is up") as caught:
        service.nothing.fanout(absent="skip").get(PATIENCE_S)
    assert caught.value.is_unhandled
    service.stop().get(PATIENCE_S)


class Slow(Actor):
    """Takes its time to come up."""

    def __init__(self) -> None:
        threading.Event().wait(0.5)

    @endpoint
    def nothing(self) -> None:
        """Do nothing."""
