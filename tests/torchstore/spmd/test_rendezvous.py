"""Where the ranks of a store meet and part: who is waited for, and what comes of those that fail or die."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from skipper import torchstore as ts
from skipper.control import ActorMesh, ProcMesh, this_host, this_proc
from skipper.torchstore.spmd.ranks import RankPlace
from skipper.torchstore.spmd.rendezvous import Arrival, Rendezvous
from skipper.torchstore.support.deadlines import ask

PATIENCE_S = 60.0
SOON_S = 0.2


@pytest.fixture(scope="module")
def ranks() -> Iterator[ProcMesh]:
    """The processes of ranks 1 and 2."""
    procs = this_host().spawn_procs({"ranks": 2})
    yield procs
    procs.stop().get(PATIENCE_S)


@pytest.fixture
async def rendezvous() -> Any:
    mesh = this_proc().spawn("meeting", Rendezvous)
    yield mesh
    await mesh.stop()


def arrival(rank: int, procs: ProcMesh | None = None, host: str = "one", pids: int = 1) -> Arrival:
    return Arrival(rank, host, 100 + rank, pids, procs or this_proc())


def of(ranks: ProcMesh, rank: int) -> ProcMesh:
    return ranks.slice(ranks=rank - 1)


async def arrive(
    rendezvous: ActorMesh[Rendezvous], arrival: Arrival, timeout: float = PATIENCE_S
) -> tuple[RankPlace, int]:
    return await ask(rendezvous.arrive.call_one(arrival, timeout), PATIENCE_S)


async def met(rendezvous: ActorMesh[Rendezvous], *arrivals: Arrival) -> list[tuple[RankPlace, int]]:
    await rendezvous.open.call_one(len(arrivals))
    found = await asyncio.gather(*(arrive(rendezvous, arrival) for arrival in arrivals))
    await asyncio.gather(*(rendezvous.ready.call_one(arrival.rank, PATIENCE_S) for arrival in arrivals))
    return list(found)


async def test_each_rank_is_told_its_place_among_those_of_its_host(
    rendezvous: ActorMesh[Rendezvous], ranks: ProcMesh
) -> None:
    there = [arrival(0, host="a"), arrival(1, of(ranks, 1), "b"), arrival(2, of(ranks, 2), "a")]
    first, second, third = await met(rendezvous, *there)
    assert first == (RankPlace(0, 3, 0, 2, 0, 2, (100, 102)), 1)
    assert second == (RankPlace(1, 3, 0, 1, 1, 2, (101,)), 1)
    assert third == (RankPlace(2, 3, 1, 2, 0, 2, (100, 102)), 1)


async def test_process_ids_of_another_container_are_no_concern(
    rendezvous: ActorMesh[Rendezvous], ranks: ProcMesh
) -> None:
    first, second = await met(rendezvous, arrival(0), arrival(1, of(ranks, 1), pids=2))
    assert (first[0].local_pids, second[0].local_pids) == ((100,), (101,))
    assert first[0].local_world_size == 2


async def test_who_does_not_come_is_named(rendezvous: ActorMesh[Rendezvous], ranks: ProcMesh) -> None:
    await rendezvous.open.call_one(3)
    with pytest.raises(ts.StoreTimeoutError, match="rank 1, rank 2 did not arrive"):
        await arrive(rendezvous, arrival(0), SOON_S)
    await rendezvous.open.call_one(1)
    await arrive(rendezvous, arrival(0))
    with pytest.raises(ts.StoreTimeoutError, match="only 0 of 1 processes for volumes arrived"):
        await ask(rendezvous.brought.call_one(1, SOON_S), PATIENCE_S)
    with pytest.raises(ts.StoreTimeoutError, match="rank 0 did not start the store"):
        await ask(rendezvous.wait_for_start.call_one(SOON_S), PATIENCE_S)


async def test_a_rank_that_fails_fails_all_in_its_words(rendezvous: ActorMesh[Rendezvous], ranks: ProcMesh) -> None:
    await rendezvous.open.call_one(3)
    waiting = [asyncio.ensure_future(arrive(rendezvous, each)) for each in (arrival(0), arrival(1, of(ranks, 1)))]
    await rendezvous.fail.call_one(2, "StrategyError: no", False)
    for each in (*waiting, arrive(rendezvous, arrival(2, of(ranks, 2)))):
        with pytest.raises(ts.StoreRendezvousError, match="rank 2 failed: StrategyError: no"):
            await each
    await met(rendezvous, arrival(0), arrival(1, of(ranks, 1)))  # and then it is tried again


async def test_a_rank_that_dies_fails_all(rendezvous: ActorMesh[Rendezvous]) -> None:
    procs = this_host().spawn_procs()
    await rendezvous.open.call_one(3)
    waiting = [asyncio.ensure_future(arrive(rendezvous, each)) for each in (arrival(0), arrival(1, procs))]
    await rendezvous.inform.call_one(0)  # it is behind the arrivals
    await procs.stop()
    for each in waiting:
        with pytest.raises(ts.StoreRendezvousError, match="rank 1 has ended, process 101"):
            await each


async def test_rank_0_waits_for_those_that_have_not_left(rendezvous: ActorMesh[Rendezvous], ranks: ProcMesh) -> None:
    await met(rendezvous, arrival(0), arrival(1, of(ranks, 1)), arrival(2, of(ranks, 2)))
    leaving = rendezvous.leave.call_one(1, 1, PATIENCE_S)
    assert await rendezvous.wait_for_others.call_one(SOON_S) == [2]
    leaving_too = rendezvous.leave.call_one(1, 2, PATIENCE_S)
    assert await rendezvous.wait_for_others.call_one(PATIENCE_S) == []
    closed = rendezvous.close.call_one()
    await leaving
    await leaving_too
    assert not closed.done()
    for rank in (1, 2):
        await rendezvous.inform.call_one(rank)
    await closed


async def test_a_rank_that_has_ended_has_left(rendezvous: ActorMesh[Rendezvous]) -> None:
    procs = this_host().spawn_procs()
    await met(rendezvous, arrival(0), arrival(1, procs))
    await procs.stop()
    assert await rendezvous.wait_for_others.call_one(PATIENCE_S) == []
    await rendezvous.close.call_one()


async def test_a_rank_that_leaves_late_does_not_leave_the_next_store(
    rendezvous: ActorMesh[Rendezvous], ranks: ProcMesh
) -> None:
    there = [arrival(0), arrival(1, of(ranks, 1))]
    await met(rendezvous, *there)
    await rendezvous.close.call_one()
    early = asyncio.ensure_future(arrive(rendezvous, there[1]))  # it waits for rank 0 to begin anew
    await asyncio.sleep(0)  # it is sent
    await rendezvous.inform.call_one(0)  # and it is there: this is behind it
    await rendezvous.open.call_one(2)
    assert (await arrive(rendezvous, there[0]))[1] == (await early)[1] == 2
    await rendezvous.leave.call_one(1, 1, PATIENCE_S)
    assert await rendezvous.wait_for_others.call_one(SOON_S) == [1]
