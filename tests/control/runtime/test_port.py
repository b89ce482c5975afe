import contextlib
import gc
import os
import pickle
import threading
from typing import Any

import pytest

from skipper.control import (
    Actor,
    ActorError,
    ActorMesh,
    Channel,
    ChannelClosedError,
    PayloadError,
    Port,
    PortReceiver,
    ProcMesh,
    SupervisionError,
    endpoint,
)
from tests.control.actors import Answerer
from tests.control.conftest import PATIENCE_S


@pytest.fixture
def answerer(procs: ProcMesh) -> ActorMesh[Answerer]:
    return procs.slice(gpus=0).spawn("answerer", Answerer)


def test_an_explicit_port_answers_from_any_thread(answerer: ActorMesh[Answerer]) -> None:
    assert answerer.from_a_thread.call_one("x").get(PATIENCE_S) == "x"


def test_explicit_ports_answer_later_and_out_of_order(answerer: ActorMesh[Answerer]) -> None:
    kept = [answerer.keep.call_one() for _ in range(3)]
    assert answerer.from_a_thread.call_one(1).get(PATIENCE_S) == 1
    assert not any(future.done() for future in kept)
    assert answerer.release.call_one("free").get(PATIENCE_S) == 3
    assert [future.get(PATIENCE_S) for future in kept] == ["free"] * 3


def test_explicit_ports_answer_for_every_member_of_a_call(procs: ProcMesh) -> None:
    answerers = procs.spawn("answerers", Answerer)
    assert answerers.from_a_thread.call("x").get(PATIENCE_S) == ["x", "x"]
    answerers.from_a_thread.broadcast("nobody listens")
    assert answerers.release.call(None).get(PATIENCE_S) == [0, 0]


def test_a_port_brings_exceptions(answerer: ActorMesh[Answerer]) -> None:
    with pytest.raises(ActorError, match="no such thing") as caught:
        answerer.refuse.call_one().get(PATIENCE_S)
    assert isinstance(caught.value.cause, KeyError)


def test_a_dropped_port_ends_the_wait(answerer: ActorMesh[Answerer]) -> None:
    with pytest.raises(SupervisionError, match="dropped"):
        answerer.drop.call_one().get(PATIENCE_S)


def test_ports_kept_by_an_actor_that_stops_end_the_wait(answerer: ActorMesh[Answerer]) -> None:
    kept = answerer.keep.call_one()
    answerer.stop().get(PATIENCE_S)
    with pytest.raises(SupervisionError):
        kept.get(PATIENCE_S)


def test_a_port_may_be_passed_on_and_answered_elsewhere(procs: ProcMesh) -> None:
    answerers = procs.spawn("answerers", Answerer)
    first, second = answerers.slice(gpus=0), answerers.slice(gpus=1)
    assert first.pass_on.call_one(second, "from afar").get(PATIENCE_S) == "from afar"


def test_channels_bring_values_in_order(answerer: ActorMesh[Answerer]) -> None:
    port, receiver = Channel.open()
    for number in range(5):
        answerer.send_to.broadcast(port, number)
    assert [receiver.recv().get(PATIENCE_S) for _ in range(5)] == list(range(5))


async def test_channels_can_be_awaited_before_anything_comes() -> None:
    port, receiver = Channel.open()
    threading.Timer(0.01, port.send, args=("late",)).start()
    assert await receiver.recv() == "late"


def test_a_receive_that_timed_out_does_not_swallow_the_next_value() -> None:
    port, receiver = Channel.open()
    with pytest.raises(TimeoutError):
        receiver.recv().get(0.01)
    gc.collect()
    port.send("kept")
    assert receiver.recv().get(PATIENCE_S) == "kept"


def test_a_closed_channel_gives_what_has_arrived_and_then_raises() -> None:
    port, receiver = Channel.open()
    port.send(1)
    waiting: Any = receiver.recv()
    assert waiting.get(PATIENCE_S) == 1
    pending = receiver.recv()
    receiver.close()
    receiver.close()
    port.send(2)
    for future in (pending, receiver.recv(), receiver.recv()):
        with pytest.raises(ChannelClosedError):
            future.get(PATIENCE_S)


def test_ports_survive_pickling() -> None:
    port, receiver = Channel.open()
    pickle.loads(pickle.dumps(port)).send(os.getpid())
    assert receiver.recv().get(PATIENCE_S) == os.getpid()


class Clumsy(Actor):
    @endpoint(explicit_response_port=True)
    def pass_on(self, port: Port[Any], other: ActorMesh[Any]) -> None:
        with contextlib.suppress(PayloadError):
            other.send_to.broadcast(port, threading.Lock())


def test_a_port_that_could_not_be_passed_on_still_owes_its_answer(
    procs: ProcMesh, answerer: ActorMesh[Answerer]
) -> None:
    clumsy = procs.slice(gpus=1).spawn("clumsy", Clumsy)
    with pytest.raises(SupervisionError, match="dropped the response port"):
        clumsy.pass_on.call_one(answerer).get(PATIENCE_S)


def test_channels_are_generic_at_run_time_as_ports_and_receivers_are() -> None:
    port, receiver = Channel[int].open()
    assert (type(port), type(receiver)) == (Port, PortReceiver)
    assert (Port[int], PortReceiver[str]) == (Port[int], PortReceiver[str])
    port.send(3)
    assert receiver.recv().get(PATIENCE_S) == 3


def test_a_channel_for_one_value_closes_with_it() -> None:
    for value_first in (True, False):
        port, receiver = Channel[int].open(once=True)
        waiting = None if value_first else receiver.recv()
        port.send(1)
        port.send(2)
        assert (receiver.recv() if waiting is None else waiting).get(PATIENCE_S) == 1
        with pytest.raises(ChannelClosedError, match="opened for one value"):
            receiver.recv().get(PATIENCE_S)
        assert not receiver.is_alive()
