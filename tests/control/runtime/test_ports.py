import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from skipper.control import (
    Actor,
    ActorError,
    ActorMesh,
    Channel,
    ChannelClosedError,
    DeadlineError,
    FailureKind,
    LinkError,
    MeshFailure,
    Port,
    PortReceiver,
    ProcMesh,
    SupervisionError,
    endpoint,
    subscribe,
)
from skipper.control.runtime.messages import Loss
from skipper.control.runtime.ports import Awaited, OneReply, PortTable
from skipper.control.wire.process_ref import ProcessRef
from tests.control.actors import Answerer, Echo
from tests.control.conftest import PATIENCE_S, Failures, wait_until
from tests.freezing import freeze


class Slow(Actor):
    """Waits for a file, in ``__init__`` or in an endpoint."""

    def __init__(self, until: str = "") -> None:
        wait_for(until)

    @endpoint
    def step(self, until: str) -> None:
        wait_for(until)

    @endpoint
    def pid(self) -> int:
        return os.getpid()


def wait_for(path: str) -> None:
    while path and not os.path.exists(path):
        time.sleep(0.01)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "open"
    yield str(path)
    path.touch()


@pytest.fixture(scope="module", autouse=True)
def _up(procs: ProcMesh) -> None:
    procs.initialized.get(PATIENCE_S)


def words(get: Callable[[], object]) -> str:
    with pytest.raises(DeadlineError) as caught:
        get()
    return str(caught.value)


def comes_to_say(get: Callable[[], object], *parts: str) -> None:
    """A busy machine may answer a question too late; the wait can be repeated."""
    wait_until(lambda: all(part in words(get) for part in parts), f"the error says {parts}")


def test_a_wait_that_is_too_short_says_who_is_waited_for_and_what_it_does(procs: ProcMesh, gate: str) -> None:
    slow = procs.slice(gpus=1).spawn("slow", Slow)
    step, pid = slow.step.call_one(gate), slow.pid.call_one()
    begin = "no result within 0.5 s: slow has not answered pid; it has been running step for "
    comes_to_say(lambda: pid.get(0.5), begin, " s; 1 message waits for it")
    assert words(lambda: pid.get(0.01)) == "no result within 0.01 s: slow has not answered pid"
    assert words(lambda: pid.get(0)) == "no result yet: slow has not answered pid"
    Path(gate).touch()
    step.get(PATIENCE_S)
    assert isinstance(pid.get(PATIENCE_S), int)


def test_a_wait_for_several_names_those_that_have_not_answered(procs: ProcMesh, gate: str) -> None:
    slow = procs.spawn("slow", Slow)
    step = slow.slice(gpus=1).step.call_one(gate)
    pids = slow.pid.call()
    begin = (
        "no result within 0.5 s: 1 of 2 have not answered pid: slow{'gpus': 1}; slow{'gpus': 1}: it has been running "
    )
    comes_to_say(lambda: pids.get(0.5), begin)
    Path(gate).touch()
    step.get(PATIENCE_S)


def test_a_wait_for_an_actor_that_is_being_constructed_says_so(procs: ProcMesh, gate: str) -> None:
    slow = procs.slice(gpus=0).spawn("slow", Slow, gate)
    pid, constructed = slow.pid.call_one(), slow.initialized
    comes_to_say(lambda: pid.get(0.5), "slow has not answered pid; it has been in __init__ for ")
    comes_to_say(lambda: constructed.get(0.5), "slow has not been constructed; it has been in __init__ for ")
    Path(gate).touch()
    slow.initialized.get(PATIENCE_S)


def test_a_wait_for_an_answer_that_somebody_owes_says_that_the_actor_is_idle(procs: ProcMesh) -> None:
    answerer = procs.slice(gpus=0).spawn("answerer", Answerer)
    kept = answerer.keep.call_one()
    comes_to_say(lambda: kept.get(0.5), "it runs nothing at the moment")
    answerer.release.call_one(3).get(PATIENCE_S)
    assert kept.get(PATIENCE_S) == 3


def test_a_wait_for_a_process_that_stands_still_says_so_and_takes_no_longer(procs: ProcMesh) -> None:
    echo = procs.slice(gpus=0).spawn("echo", Echo)
    pid = echo.pid.call_one().get(PATIENCE_S)
    freeze(pid)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "the process stands still")
    try:
        answer = echo.pid.call_one()
        assert "does not say what it is doing: it is frozen" in words(lambda: answer.get(0.5))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert answer.get(PATIENCE_S) == pid


def test_a_stream_says_who_has_not_come(procs: ProcMesh, gate: str) -> None:
    slow = procs.spawn("slow", Slow)
    step = slow.slice(gpus=0).step.call_one(gate)
    first, second = slow.pid.stream()
    first.get(PATIENCE_S)
    assert "1 of 2 have not answered pid: slow{'gpus': 0}" in words(lambda: second.get(0.01))
    Path(gate).touch()
    step.get(PATIENCE_S)


def test_the_death_of_a_process_is_told_without_the_names_of_requests(
    own_procs: Callable[..., ProcMesh], failures: Failures, gate: str
) -> None:
    procs = own_procs({"gpus": 1})
    slow = procs.slice(gpus=0).spawn("slow", Slow, gate)
    constructed = slow.initialized
    pid = procs.slice(gpus=0).spawn("echo", Echo).pid.call_one().get(PATIENCE_S)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        SupervisionError, match=r"^slow has not been constructed: process .* is gone: .*SIGKILL"
    ) as caught:
        constructed.get(PATIENCE_S)
    assert caught.value.failure is not None
    with pytest.raises(SupervisionError, match=r"does not answer: process .* is gone"):
        procs.initialized.get(PATIENCE_S)
    failures.wait()


def test_a_call_of_an_actor_that_has_been_stopped_names_it(procs: ProcMesh) -> None:
    echo = procs.slice(gpus=0).spawn("echo", Echo)
    echo.stop().get(PATIENCE_S)
    with pytest.raises(SupervisionError, match=r"^cannot answer echo: actor echo has been stopped$"):
        echo.echo.call_one(1).get(PATIENCE_S)


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
    with pytest.raises(LinkError, match=r"every actor that this port is linked to is dead.*SIGKILL.*SIGKILL") as caught:
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
        with pytest.raises(SupervisionError, match="every actor that this port is linked to is dead"):
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


class _Untouched:
    """What waits at a port and must not be asked about the end of a process that owes it nothing."""

    def process_lost(self, process_id: str, loss: Loss) -> bool:
        raise AssertionError(process_id)

    def ids(self) -> tuple[str, ...]:
        return ("another",)


def test_the_end_of_a_process_costs_nothing_at_the_ports_of_requests_to_others() -> None:
    """With thousands of hosts, thousands of requests are on their way when one of them dies."""
    table = PortTable()
    for _ in range(1000):
        table.open_owed(_Untouched())  # type: ignore[arg-type]
    awaited = OneReply[Any](Awaited(ProcessRef("lost", "", "lost"), "process lost", "launch"))
    port = table.open_owed(awaited)
    table.process_lost("lost", Loss("it died"))
    assert not table.is_open(port)
    with pytest.raises(SupervisionError, match="process lost cannot answer launch: it died"):
        awaited.get(0)
