"""Ports linked to actors, answers that are passed on, and those who only hold a reference."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from skipper.control import (
    ActorError,
    ActorMesh,
    Channel,
    ChannelClosedError,
    FailureKind,
    LinkError,
    MeshFailure,
    Port,
    PortReceiver,
    ProcMesh,
    SupervisionError,
    subscribe,
)
from tests.control.actors import Answerer, Echo
from tests.control.conftest import PATIENCE_S, Failures, wait_until


def link_itself(port: Port[Any]) -> None:
    port.link()
    port.send("linked")


def test_a_receive_raises_once_every_linked_actor_is_dead(
    own_procs: Callable[..., ProcMesh], failures: Failures
) -> None:
    echoes = own_procs({"gpus": 2}).spawn("echoes", Echo)
    pids = echoes.pid.call().get(PATIENCE_S)
    port, receiver = Channel.open()
    port.link(echoes)
    waiting = receiver.recv()
    os.kill(pids[0], signal.SIGKILL)
    failures.wait()
    assert receiver.is_alive()
    assert not waiting.done()  # one of them lives
    began = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(LinkError, match=r"every actor linked to this port is dead.*SIGKILL.*SIGKILL") as caught:
        waiting.get(PATIENCE_S)
    assert time.monotonic() - began < 5  # far below the bound of the heartbeats
    assert caught.value.failure is not None
    assert caught.value.failure.kind is FailureKind.PROCESS
    assert not receiver.is_alive()
    with pytest.raises(LinkError):
        receiver.recv().get(PATIENCE_S)  # later ones, too
    port.send("late")
    assert receiver.recv().get(PATIENCE_S) == "late"  # what has arrived is received


async def test_an_actor_links_itself_and_what_it_has_sent_is_received_before_its_end(procs: ProcMesh) -> None:
    echo = procs.slice(gpus=0).spawn("echo", Echo)
    port, receiver = Channel.open()
    echo.run.broadcast(link_itself, port)
    await echo.stop()
    assert await receiver.recv() == "linked"
    with pytest.raises(LinkError, match="echo has stopped") as caught:
        await receiver.recv()
    assert caught.value.failure is None


def test_links_are_taken_back_and_replaced(procs: ProcMesh) -> None:
    first, second = procs.slice(gpus=0).spawn("first", Echo), procs.slice(gpus=1).spawn("second", Echo)
    port, receiver = Channel.open()
    port.link(first)
    port.relink(first, second)
    first.stop().get(PATIENCE_S)
    waiting = receiver.recv()
    assert receiver.is_alive()
    port.unlink(second)
    second.stop().get(PATIENCE_S)
    assert receiver.is_alive()
    port.send("unlinked")
    assert waiting.get(PATIENCE_S) == "unlinked"


def test_linking_an_actor_that_is_dead_already_ends_the_wait(procs: ProcMesh) -> None:
    echo = procs.slice(gpus=0).spawn("echo", Echo)
    echo.stop().get(PATIENCE_S)
    port, receiver = Channel.open()
    waiting = receiver.recv()
    port.link(echo)
    with pytest.raises(LinkError, match="echo has stopped"):
        waiting.get(PATIENCE_S)


def test_a_call_ends_when_the_actor_dies_to_which_its_answer_was_passed_on(
    procs: ProcMesh, own_procs: Callable[..., ProcMesh], failures: Failures
) -> None:
    other_procs = own_procs(name="other")
    answerer = procs.slice(gpus=0).spawn("answerer", Answerer)
    other, killer = other_procs.spawn("other", Answerer), other_procs.spawn("killer", Echo)
    kept = answerer.pass_on_for_keeps.call_one(other)
    streamed = list(answerer.pass_on_for_keeps.stream(other))
    of_all = answerer.pass_on_for_keeps.call(other)
    wait_until(lambda: other.has_kept.call_one().get(PATIENCE_S) == 3, "the other one has the ports")
    killer.die.broadcast()
    for future in (kept, *streamed, of_all):
        with pytest.raises(SupervisionError, match="every actor linked to this port is dead"):
            future.get(PATIENCE_S)
    failures.wait()
    answerer.stop().get(PATIENCE_S)


def test_an_answer_passed_on_survives_the_actor_that_owed_it(
    procs: ProcMesh, own_procs: Callable[..., ProcMesh]
) -> None:
    first_procs = own_procs(name="first")
    first, other = first_procs.spawn("first", Answerer), procs.slice(gpus=0).spawn("other", Answerer)
    kept = first.pass_on_for_keeps.call_one(other)
    wait_until(lambda: other.has_kept.call_one().get(PATIENCE_S) == 1, "the other one has the port")
    first_procs.stop().get(PATIENCE_S)
    assert not kept.done()
    other.release.call_one("answer").get(PATIENCE_S)
    assert kept.get(PATIENCE_S) == "answer"
    other.stop().get(PATIENCE_S)


def first_failure(mesh: ActorMesh[Any]) -> MeshFailure:
    return subscribe(mesh).recv().get(PATIENCE_S)


def test_those_who_hold_a_reference_learn_of_failures_without_calling(
    procs: ProcMesh, own_procs: Callable[..., ProcMesh], failures: Failures
) -> None:
    victims = own_procs({"gpus": 2}, name="victims")
    echoes = victims.spawn("echoes", Echo)
    told = procs.slice(gpus=0).spawn("subscriber", Echo).run.call_one(first_failure, echoes)
    mine: PortReceiver[MeshFailure] = subscribe(echoes.slice(gpus=1))
    processes = subscribe(victims)
    echoes.slice(gpus=0).fail.broadcast(ValueError("nobody listens"))
    failure = told.get(PATIENCE_S)
    assert (failure.mesh_name, failure.rank, failure.kind) == ("echoes", {"gpus": 0}, FailureKind.EXCEPTION)
    echoes.slice(gpus=1).die.broadcast()
    failure = mine.recv().get(PATIENCE_S)
    assert (failure.mesh_name, failure.rank, failure.kind) == ("echoes", {"gpus": 1}, FailureKind.PROCESS)
    assert "SIGKILL" in failure.message
    with pytest.raises(ChannelClosedError):
        mine.recv().get(PATIENCE_S)  # there is nobody left to fail
    assert processes.recv().get(PATIENCE_S).rank == {"gpus": 1}
    victims.stop().get(PATIENCE_S)
    with pytest.raises(ChannelClosedError):
        processes.recv().get(PATIENCE_S)  # being stopped is no failure


def test_a_caller_is_given_the_failure_of_whom_it_called(
    own_procs: Callable[..., ProcMesh], failures: Failures
) -> None:
    echo = own_procs().spawn("echo", Echo)
    with pytest.raises(SupervisionError) as caught:
        echo.die.call_one().get(PATIENCE_S)
    failure = caught.value.failure
    assert failure is not None
    assert (failure.mesh_name, failure.kind) == ("echo", FailureKind.PROCESS)
    assert failure.actor_id == failures.wait().actor_id


def test_a_receiver_cannot_be_sent(procs: ProcMesh) -> None:
    echo = procs.slice(gpus=0).spawn("echo", Echo)
    _, receiver = Channel.open()
    with pytest.raises(TypeError, match="send the port instead"):
        echo.echo.call_one(receiver)
    with pytest.raises(ActorError, match="send the port instead"):
        echo.run.call_one(Channel.open).get(PATIENCE_S)
    echo.stop().get(PATIENCE_S)
