"""Calling in other ways than the plain ones: accumulators, concurrent endpoints, methods that are no endpoints."""

import asyncio
from typing import Any

import pytest

from skipper.control import (
    Accumulator,
    Actor,
    ActorDefinitionError,
    ActorError,
    ActorMesh,
    Port,
    ProcMesh,
    SupervisionError,
    as_endpoint,
    concurrent_endpoint,
    current_rank,
    endpoint,
)
from tests.control.actors import AsyncEcho, Echo
from tests.control.conftest import PATIENCE_S, Failures


class Door(Actor):
    """Concurrent endpoints that wait for a later message."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.order: list[Any] = []

    @concurrent_endpoint
    async def wait(self, who: Any) -> tuple[Any, int]:
        self.order.append(who)
        await self.opened.wait()
        return who, current_rank().rank

    @concurrent_endpoint(explicit_response_port=True)
    async def wait_and_send(self, port: Port[str]) -> None:
        await self.opened.wait()
        port.send("sent")

    @endpoint
    async def note(self, what: Any) -> None:
        self.order.append(what)

    @endpoint
    async def open(self) -> list[Any]:
        self.opened.set()
        return self.order

    @concurrent_endpoint
    async def call_back(self, other: ActorMesh[Any], me: ActorMesh[Any]) -> Any:
        return await other.call.call_one(me, "back")

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @concurrent_endpoint
    async def fail(self) -> None:
        raise ValueError("beside the others")


class Plain(Actor):
    """A class written without endpoints in mind."""

    def twice(self, value: int) -> int:
        return 2 * value

    def answer(self, port: Port[int], value: int) -> None:
        port.send(value)

    def nothing(self) -> None: ...

    async def later(self) -> None: ...

    def _private(self) -> None: ...


def test_an_accumulator_folds_the_answers_of_all(procs: ProcMesh) -> None:
    echoes = procs.spawn("echoes", Echo)
    total = Accumulator(echoes.echo, 10, lambda so_far, answer: so_far + answer)
    assert total.accumulate(3).get(PATIENCE_S) == 16
    assert total.accumulate(4).get(PATIENCE_S) == 18  # each begins afresh
    failing = Accumulator(echoes.fail, 0, lambda so_far, answer: so_far).accumulate(ValueError("no"))
    with pytest.raises(ActorError, match="ValueError: no"):
        failing.get(PATIENCE_S)
    with pytest.raises(TypeError):
        total.accumulate()
    echoes.stop().get(PATIENCE_S)


async def test_an_accumulated_value_can_be_awaited(procs: ProcMesh) -> None:
    echoes = procs.spawn("echoes", Echo)
    assert await Accumulator(echoes.echo, [], lambda so_far, answer: [*so_far, answer]).accumulate("x") == ["x", "x"]
    await echoes.stop()


def test_later_messages_do_not_wait_for_concurrent_endpoints(procs: ProcMesh) -> None:
    door = procs.slice(gpus=0).spawn("door", Door)
    waiting = []
    for number in range(3):
        waiting.append(door.wait.call_one(number))
        door.note.broadcast(f"after {number}")
    sent = door.wait_and_send.call_one()
    started = door.open.call_one().get(PATIENCE_S)
    assert started == [0, "after 0", 1, "after 1", 2, "after 2"]  # they start in their turn
    assert [future.get(PATIENCE_S) for future in waiting] == [(0, 0), (1, 0), (2, 0)]
    assert sent.get(PATIENCE_S) == "sent"
    door.stop().get(PATIENCE_S)


def test_a_concurrent_endpoint_may_be_called_back_by_whom_it_calls(procs: ProcMesh) -> None:
    door = procs.slice(gpus=0).spawn("door", Door)
    other = procs.slice(gpus=1).spawn("other", AsyncEcho)
    assert door.call_back.call_one(other, door).get(PATIENCE_S) == "back"
    door.stop().get(PATIENCE_S)
    other.stop().get(PATIENCE_S)


def test_stop_waits_for_concurrent_endpoints_and_failure_ends_them(procs: ProcMesh, failures: Failures) -> None:
    door = procs.slice(gpus=0).spawn("door", Door)
    waiting = door.wait.call_one("a")
    door.open.broadcast()
    door.stop().get(PATIENCE_S)
    assert waiting.get(PATIENCE_S) == ("a", 0)
    door = procs.slice(gpus=0).spawn("door", Door)
    waiting = door.wait.call_one("b")
    with pytest.raises(ActorError, match="beside the others"):
        door.fail.call_one().get(PATIENCE_S)
    door.fail.broadcast()
    with pytest.raises(SupervisionError, match="beside the others"):
        waiting.get(PATIENCE_S)
    failures.wait()


def test_concurrent_endpoints_have_to_be_async(procs: ProcMesh) -> None:
    class Wrong(Actor):
        @concurrent_endpoint
        def plain(self) -> None: ...

    with pytest.raises(ActorDefinitionError, match=r"Wrong\.plain: a concurrent endpoint must be async"):
        procs.spawn("wrong", Wrong)


def test_methods_that_are_no_endpoints_are_called_through_as_endpoint(procs: ProcMesh) -> None:
    plain = procs.spawn("plain", Plain)
    twice = as_endpoint(plain.twice)
    assert twice.call(4).get(PATIENCE_S) == [8, 8]
    assert as_endpoint(plain.twice, propagate="cached").propagate == "cached"
    answer = as_endpoint(plain.slice(gpus=1).answer, explicit_response_port=True)
    assert answer.call_one(5).get(PATIENCE_S) == 5
    with pytest.raises(TypeError, match="missing 1 required"):
        answer.call_one()
    with pytest.raises(TypeError, match=r"Plain\.nothing takes no response port"):
        as_endpoint(plain.nothing, explicit_response_port=True)
    with pytest.raises(ActorDefinitionError, match=r"Plain\.later is async and its actor sync"):
        as_endpoint(plain.later)
    with pytest.raises(AttributeError, match=r"plain\.twice is not an endpoint.*as_endpoint\(mesh\.twice\)\.call\("):
        plain.twice.call(4)
    with pytest.raises(AttributeError, match="has no endpoint '_private'"):
        as_endpoint(plain._private)
    with pytest.raises(TypeError, match="not 3"):
        as_endpoint(3)
    plain.stop().get(PATIENCE_S)


def test_as_endpoint_leaves_endpoints_as_they_are(procs: ProcMesh) -> None:
    echoes = procs.spawn("echoes", Echo)
    assert as_endpoint(echoes.echo) is echoes.echo
    told = as_endpoint(echoes.echo, propagate="inspect")
    assert (told.propagate, echoes.echo.propagate) == ("inspect", None)
    assert told.call(3).get(PATIENCE_S) == [3, 3]
    with pytest.raises(TypeError, match="is an endpoint already"):
        as_endpoint(echoes.echo, explicit_response_port=True)
    echoes.stop().get(PATIENCE_S)
