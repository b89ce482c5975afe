"""Real ranks of a real process group: what they put is one version a step, whatever the mesh and whoever is slow."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch

from skipper import torchstore as ts
from skipper.torchstore.algebra.manifest import Mode
from tests.torchstore.step_ranks import KEY, MeshKind
from tests.torchstore.steps import World, lost, publish, world

RANKS, STEPS = 4, 10
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def there() -> AsyncIterator[World]:
    """Four ranks and a reader, which are used by all tests."""
    async with world(RANKS, 1) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def ranks(there: World) -> AsyncIterator[list[Any]]:
    """The ranks, in a process group that is made anew."""
    group = await there.meet("ddp-tp")
    yield there.ranks
    await ts.delete_batch([KEY])
    del group


async def put(ranks: list[Any], states: list[dict[str, Any]], **options: Any) -> list[Any]:
    """Each rank puts its state dict, all at once: the number of the version, or the name of the error."""
    calls = (rank.put.call_one(state, **options) for rank, state in zip(ranks, states, strict=True))
    return list(await asyncio.gather(*calls))


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("ddp-tp", "snapshot"),
        ("hsdp", "snapshot"),
        ("ep-dp", "snapshot"),
        ("pp-tp", "snapshot"),
        ("ddp-tp", "direct"),
        ("pp-tp", "direct"),
    ],
)
async def test_each_version_is_one_step_on_every_mesh(there: World, kind: MeshKind, mode: Mode) -> None:
    seen = await publish(there, kind, STEPS, mode, delay_s=0.02)
    assert seen.mixed == []
    assert lost(seen, STEPS, mode, 0) == 0
    await ts.delete(KEY)


@pytest.mark.parametrize("mode", ["snapshot", "direct"])
async def test_plain_tensors_of_all_ranks_are_one_version_a_step(ranks: list[Any], mode: Mode) -> None:
    for step in (1, 2, 3):
        states = [{"w": torch.full((600,), float(step)), "step": step} for _ in ranks]
        assert await put(ranks, states, mode=mode) == [step] * RANKS
        read = await ts.get_state_dict(KEY)
        assert (read["w"].unique().tolist(), read["step"]) == ([step], step)
        await asyncio.gather(*(rank.fence.call_one() for rank in ranks))


@pytest.mark.parametrize("alone", [0, 3])
async def test_a_rank_that_puts_plain_tensors_alone_waits_for_nobody(ranks: list[Any], alone: int) -> None:
    for step in (1, 2):
        assert await put([ranks[alone]], [{"w": torch.full((600,), float(step))}]) == [step]
        assert (await ts.get_state_dict(KEY))["w"].unique().tolist() == [step]


async def test_a_slow_rank_completes_each_step_and_gets_no_error(ranks: list[Any]) -> None:
    for step in (1, 2, 3):
        assert await asyncio.gather(*(rank.put_step.call_one(step) for rank in ranks[:3])) == [step] * 3
    with pytest.raises(ts.PartiallyPublishedError, match="rank 3 of 4"):
        await ts.get_state_dict(KEY)
    for step in (1, 2, 3):
        assert await ranks[3].put_step.call_one(step) == step
        assert await ts.versions(KEY) == (step,)


async def test_ranks_that_put_nothing_are_named_until_they_put_an_empty_state_dict(ranks: list[Any]) -> None:
    await asyncio.gather(*(rank.put_step.call_one(1) for rank in ranks[:2]))
    with pytest.raises(ts.PartiallyPublishedError, match=r"rank 2, 3 of 4.*empty state dict.*publisher="):
        await ts.get_state_dict(KEY)
    with pytest.raises(ts.StoreTimeoutError, match="rank 2, 3 of 4"):
        await ts.get_state_dict(KEY, version=("newer_than", 0), timeout=0.2)
    assert await put(ranks[2:], [{}, {}]) == [1, 1]
    assert set(await ts.get_state_dict(KEY))


async def test_plain_stages_are_refused_until_they_say_that_they_are_parts(ranks: list[Any]) -> None:
    stages = [{f"stage {rank}": torch.ones(600)} for rank in range(RANKS)]
    assert sorted(map(str, await put(ranks, stages))) == ["1", *["ShareMismatchError"] * 3]
    await ts.delete(KEY)
    for rank, actor in enumerate(ranks):
        assert await put([actor], [stages[rank]], publisher=(rank, RANKS)) == [1]
    assert len(await ts.get_state_dict(KEY)) == RANKS


async def test_replicas_are_compared_where_that_is_asked_for(ranks: list[Any]) -> None:
    same = [{"w": torch.arange(600.0)} for _ in ranks]
    assert await put(ranks[:3], same[:3], verify_replicas=True) == [1] * 3
    assert not await ts.exists(KEY)
    assert await put(ranks[3:], same[3:], verify_replicas=True) == [1]
    same[2]["w"][77] += 1
    outcomes = await put(ranks, same, verify_replicas=True)
    assert "ReplicaMismatchError" in outcomes
    assert await ts.versions(KEY) == (1,)


BAD = {"w": torch.empty(3, device="meta")}


async def test_ranks_that_were_refused_alike_are_still_in_step(ranks: list[Any]) -> None:
    for step in (1, 2):
        assert await asyncio.gather(*(rank.put_step.call_one(step) for rank in ranks)) == [step] * RANKS
        assert await put(ranks, [BAD] * RANKS) == ["KindMismatchError"] * RANKS


async def test_a_rank_that_alone_was_refused_is_not_in_step_until_a_version_says_where_it_is(ranks: list[Any]) -> None:
    await asyncio.gather(*(rank.put_step.call_one(1) for rank in ranks))
    assert await put(ranks[:1], [BAD]) == ["KindMismatchError"]
    assert await asyncio.gather(*(rank.put_step.call_one(2) for rank in ranks[1:])) == [2] * 3
    assert await ranks[0].put_step.call_one(2) == 3  # its third put: it might be the third step
    outcomes = [await rank.put_step.call_one(3) for rank in ranks[1:]]
    assert outcomes == ["OutOfStepError", "LateShareError", "LateShareError"]
    assert await ts.versions(KEY) == (1,)
    assert await ranks[0].put_step.call_one(2, version=2) == 2
    assert await asyncio.gather(*(rank.put_step.call_one(4, version=4) for rank in ranks)) == [4] * RANKS
    assert await asyncio.gather(*(rank.put_step.call_one(5) for rank in ranks)) == [5] * RANKS
