"""Waits end in time, each by its own deadline, although one timer serves them all."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest
import uvloop

from skipper.torchstore.support import deadlines
from skipper.torchstore.support.deadlines import within

TICK_S = 0.02
"""The clock of an event loop stands still while it runs, so a deadline may be a little early."""


@pytest.fixture(params=[asyncio.run, uvloop.run])
def run(request: pytest.FixtureRequest) -> Any:
    return request.param


async def in_time() -> str:
    await asyncio.sleep(0)
    return "value"


async def never() -> None:
    await asyncio.get_running_loop().create_future()


async def fails() -> None:
    raise KeyError("its own")


async def ends(seconds: float, work: Coroutine[Any, Any, Any]) -> tuple[object, float]:
    begin = time.monotonic()
    outcomes: list[object] = await asyncio.gather(within(seconds, work), return_exceptions=True)
    return outcomes[0], time.monotonic() - begin


def test_each_wait_ends_by_its_own_deadline(run: Any) -> None:
    async def all_of_them() -> list[tuple[object, float]]:
        waits = ((30.0, in_time()), (0.2, never()), (0.05, never()), (30.0, fails()), (0.1, never()))
        return list(await asyncio.gather(*(ends(seconds, work) for seconds, work in waits)))

    value, long, short, failed, between = run(all_of_them())
    assert value[0] == "value"
    assert isinstance(failed[0], KeyError)
    for (outcome, taken_s), seconds in ((long, 0.2), (short, 0.05), (between, 0.1)):
        assert isinstance(outcome, TimeoutError)
        assert seconds - TICK_S < taken_s < seconds + 5


def test_a_shorter_wait_that_begins_later_ends_first(run: Any) -> None:
    async def one_after_another() -> list[str]:
        order: list[str] = []

        async def note(name: str, seconds: float) -> None:
            with pytest.raises(TimeoutError):
                await within(seconds, never())
            order.append(name)

        async with asyncio.TaskGroup() as group:
            group.create_task(note("long", 0.3))
            await asyncio.sleep(0)
            group.create_task(note("short", 0.05))
        return order

    assert run(one_after_another()) == ["short", "long"]


def test_who_is_cancelled_is_not_told_of_a_timeout(run: Any) -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(within(30, never()))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        run(cancelled())


def test_loops_that_are_closed_are_forgotten(run: Any) -> None:
    for _ in range(5):
        run(within(30, in_time()))
    assert sum(loop.is_closed() for loop in deadlines._clocks) <= 1
