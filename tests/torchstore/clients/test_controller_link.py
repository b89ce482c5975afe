"""What a process says that it reads, when another controller asks."""

import asyncio
import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from skipper.control import Future
from skipper.control.model.errors import SupervisionError
from skipper.control.model.future import Promise
from skipper.torchstore.clients.controller_link import ControllerLink, HeldLeases, held_of
from skipper.torchstore.errors import StoreTimeoutError
from skipper.torchstore.protocol.messages import CLIENTS_BITS, Grant, Successor
from skipper.torchstore.support.process import this_process
from tests.control.conftest import PATIENCE_S, wait_until


def answered(grant: Grant) -> Future[Grant]:
    return Future.of(grant)


def test_what_was_granted_is_held_until_it_is_given_back() -> None:
    held = HeldLeases()
    held.expect(answered(Grant("k", 1, 7)), 0)
    held.expect(answered(Grant("inline", 1)), 0)
    assert held.after(0, 1.0) == ({("k", 7)}, set())
    held.give_back([("k", 7)])
    assert held.after(0, 1.0) == (set(), set())
    assert held.without(frozenset({("k", 7)}), frozenset({3})) == ({("k", 7)}, {3})


def test_an_answer_is_taken_once_however_many_see_it() -> None:
    held = HeldLeases()
    answer = answered(Grant("k", 1, 7))
    held.expect(answer, 0)
    held.give_back([("k", 7)])
    held.take(answer)
    assert held.after(0, 1.0) == (set(), set()), "it was given back since"


async def test_answers_of_a_lost_controller_are_waited_for_and_those_of_the_next_one_are_not() -> None:
    held = HeldLeases()
    held.expect(Future(), 1)
    assert held.after(0, 0.0) == (set(), set())
    with pytest.raises(TimeoutError):
        held.after(1, 0.01)
    late: Promise[Grant] = Promise()
    held.expect(late, 0)
    waiting = asyncio.to_thread(held.after, 0, 30.0)
    task = asyncio.ensure_future(waiting)
    await asyncio.sleep(0.05)
    assert not task.done()

    def raise_() -> Grant:
        raise SupervisionError("it is gone")

    late.settle_by(raise_)
    assert await task == (set(), set())


def test_stores_of_one_name_have_accounts_of_their_own() -> None:
    first = held_of("s", 1 << CLIENTS_BITS)
    first.expect(answered(Grant("k", 1, 1)), 0)
    assert held_of("s", (1 << CLIENTS_BITS) + 9) is first
    second = held_of("s", 2 << CLIENTS_BITS)
    second.expect(answered(Grant("k", 1, 1)), 0)
    first.give_back([("k", 1)])
    assert second.after(0, 1.0) == ({("k", 1)}, set())


def raising(error: Exception) -> Future[Any]:
    promise: Promise[Any] = Promise()
    promise.set_exception(error)
    return promise


@dataclass
class FakeController:
    """Answers until it has got so many messages; then it is dead."""

    answers: int
    got: list[tuple[str, Any]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        def send(*arguments: Any) -> Future[Any]:
            if self.answers <= 0:
                return raising(SupervisionError("it is gone"))
            self.answers -= 1
            self.got.append((name, arguments))
            return Future.of(None)

        return SimpleNamespace(call=send, call_one=send)


_clients = itertools.count(7 << CLIENTS_BITS)


def linked(*controllers: FakeController) -> tuple[ControllerLink, int]:
    """A client of the first of these controllers. The others follow, one after another."""
    lives = [Successor(life, each, this_process()) for life, each in enumerate(controllers)]  # type: ignore[arg-type]

    def after(life: int, timeout: float) -> Future[Any]:
        return Future.of(lives[min(life + 1, len(lives) - 1)])

    entrance: Any = SimpleNamespace(successor=SimpleNamespace(call_one=after))
    info: Any = SimpleNamespace(client=next(_clients), successor=lives[0])
    return ControllerLink(f"s{info.client}", entrance, info), info.client


def test_a_lease_that_is_given_back_to_dying_controllers_is_given_back_to_the_last() -> None:
    third = FakeController(9)
    link, client = linked(FakeController(0), FakeController(1), third)
    link.give_back([("k", 7)], 0, lambda to: to.release.call((("k", 7),), 0))
    wait_until(lambda: len(third.got) == 2, "the third has got it")
    assert third.got == [("return_to", (client, set(), set())), ("release", ((("k", 7),), 0))]


def test_a_controller_that_dies_before_it_has_heard_of_a_client_is_followed_at_once() -> None:
    third = FakeController(9)
    link, client = linked(FakeController(0), FakeController(0), third)
    link._begin_switch(0).result(PATIENCE_S)
    assert third.got == [("return_to", (client, set(), set()))]


async def test_a_grant_that_came_from_a_dead_controller_when_nobody_waited_any_more_is_returned() -> None:
    second = FakeController(9)
    link, client = linked(FakeController(0), second)
    late: Promise[Any] = Promise()
    with pytest.raises(StoreTimeoutError):
        await link.ask(lambda to: late, 0.01, grants=True)
    late.set_exception(SupervisionError("it is gone"))
    wait_until(lambda: bool(second.got), "the second is told what this process reads")
    assert second.got == [("return_to", (client, set(), set()))]
