"""What a process says that it reads, when another controller asks."""

import asyncio

import pytest

from skipper.control import Future
from skipper.control.model.errors import SupervisionError
from skipper.control.model.future import Promise
from skipper.torchstore.clients.controller_link import HeldLeases, held_of
from skipper.torchstore.protocol.messages import CLIENTS_BITS, Grant


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
