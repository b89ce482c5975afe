import asyncio

import pytest

from skipper.control import AbsentError, RendezvousError
from skipper.control.support.gathering import Gatherings

PATIENCE_S = 60.0


def test_all_that_come_get_what_the_others_have_brought() -> None:
    async def scenario() -> None:
        gatherings: Gatherings[str] = Gatherings()
        calls = [
            gatherings.gather("run", {rank: f"rank {rank}"}, expected=range(3), timeout_s=PATIENCE_S)
            for rank in (2, 0, 1)
        ]
        for found in await asyncio.gather(*calls):
            assert list(found.items()) == [(0, "rank 0"), (1, "rank 1"), (2, "rank 2")]
        assert len(gatherings) == 0, "the key is free again"

    asyncio.run(scenario())


def test_who_brings_nothing_gets_the_same() -> None:
    async def scenario() -> None:
        gatherings: Gatherings[str] = Gatherings()
        waiting = asyncio.create_task(gatherings.gather("k", {}, expected=range(2), timeout_s=PATIENCE_S))
        await asyncio.sleep(0)
        brought = {0: "zero", 1: "one"}
        assert await gatherings.gather("k", brought, expected=range(2), timeout_s=PATIENCE_S) == brought
        assert await waiting == brought

    asyncio.run(scenario())


def test_ranks_that_do_not_come_are_named_to_all_who_wait() -> None:
    async def scenario() -> None:
        gatherings: Gatherings[None] = Gatherings()
        expected = range(4)
        patient = gatherings.gather("run", {0: None}, expected=expected, timeout_s=PATIENCE_S)
        hasty = gatherings.gather("run", {2: None}, expected=expected, timeout_s=0.05)
        for error in await asyncio.gather(patient, hasty, return_exceptions=True):
            assert isinstance(error, AbsentError)
            assert isinstance(error, RendezvousError)
            assert (error.missing, error.size) == ((1, 3), 4)
            assert "ranks [1, 3] of 4 have not arrived" in str(error)
        late = asyncio.create_task(gatherings.gather("run", {1: None}, expected=expected, timeout_s=0.05))
        with pytest.raises(AbsentError, match=r"ranks \[0, 2, 3\] of 4"):
            await late

    asyncio.run(scenario())


def test_one_that_fails_ends_for_all_who_wait_and_the_key_is_free_again() -> None:
    async def scenario() -> None:
        gatherings: Gatherings[int] = Gatherings()
        waiting = [
            asyncio.create_task(gatherings.gather("run", {rank: rank}, expected=range(3), timeout_s=PATIENCE_S))
            for rank in range(2)
        ]
        await asyncio.sleep(0)
        gatherings.fail("run", ConnectionError("rank 2 is gone"))
        gatherings.fail("another", ConnectionError("nobody is there"))
        for task in waiting:
            with pytest.raises(ConnectionError, match="rank 2 is gone"):
                await task
        assert len(gatherings) == 0
        brought = {rank: rank for rank in range(3)}
        assert await gatherings.gather("run", brought, expected=range(3), timeout_s=PATIENCE_S) == brought

    asyncio.run(scenario())


def test_ranks_that_disagree_on_who_is_to_come_are_refused_and_the_others_go_on() -> None:
    async def scenario() -> None:
        gatherings: Gatherings[int] = Gatherings()
        first = asyncio.create_task(gatherings.gather("run", {0: 0}, expected=range(2), timeout_s=PATIENCE_S))
        await asyncio.sleep(0)
        for brought, expected in (({2: 2}, range(3)), ({5: 5}, range(2))):
            with pytest.raises(ValueError, match="disagree on which ranks take part in 'run'"):
                await gatherings.gather("run", brought, expected=expected, timeout_s=PATIENCE_S)
        await gatherings.gather("run", {1: 1}, expected=range(2), timeout_s=PATIENCE_S)
        assert await first == {0: 0, 1: 1}

    asyncio.run(scenario())
