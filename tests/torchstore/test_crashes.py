"""SIGKILL at every step of the protocol: the last ready version stays readable, nothing hangs, memory comes back."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from skipper import torchstore as ts
from skipper.control import SupervisionError, this_proc
from tests.torchstore.actors import Keeper, make_model, model_values

LIMIT_S = 20.0

OLD, NEW, NEXT = 1, 2, 3

# Each step of a put of version NEW, in order, with the version that is the latest one when its process dies there.
SNAPSHOT_PUT = [
    ("before", "skipper.torchstore.clients.publish:pack", OLD),
    ("before", "skipper.torchstore.clients.arenas:ArenaPool.take", OLD),
    ("after", "skipper.torchstore.clients.arenas:ArenaPool.take", OLD),
    ("before", "skipper.torchstore.clients.arenas:execute", OLD),
    ("after", "skipper.torchstore.clients.arenas:execute", OLD),
    ("before", "skipper.torchstore.clients.remote:RemoteStore.publish", OLD),
    ("after", "skipper.torchstore.clients.remote:RemoteStore.publish", NEW),
]
DIRECT_PUT = [
    ("before", "skipper.torchstore.clients.direct_put:DirectMemory.publish", OLD),
    ("after", "skipper.torchstore.clients.direct_put:DirectMemory.publish", OLD),
    ("before", "skipper.torchstore.clients.remote:RemoteStore.publish", OLD),
    ("after", "skipper.torchstore.clients.remote:RemoteStore.publish", NEW),
]
FENCE = [
    ("before", "skipper.torchstore.clients.remote:RemoteStore.fence"),
    ("after", "skipper.torchstore.clients.remote:RemoteStore.fence"),
    ("after", "skipper.torchstore.clients.publish:Publisher.withdraw"),
]
GET = [
    ("before", "skipper.torchstore.clients.remote:RemoteStore.acquire"),
    ("after", "skipper.torchstore.clients.remote:RemoteStore.acquire"),
    ("before", "skipper.torchstore.clients.transfer:execute"),
    ("after", "skipper.torchstore.clients.transfer:execute"),
    ("before", "skipper.torchstore.clients.remote:RemoteStore.release"),
]


QUANTIZED = {"transfer_dtype": ts.BlockFP8()}

# The steps of what a put can do besides: its options, the step, and the version that is the latest one afterwards.
OTHER_PUTS = [
    ({"delta": True}, "before", "skipper.torchstore.clients.snapshot_put:Bases.compare", NEW),
    (QUANTIZED, "after", "skipper.torchstore.clients.publish:Staged.fill", NEW),
]
# And of a get: the options of the put, its own, and the step.
OTHER_GETS = [
    (QUANTIZED | {"delta": True}, {"delta": True}, "before", "skipper.torchstore.clients.transfer:_finish"),
    ({}, {"serve": True}, "after", "skipper.torchstore.clients.peer_source:PeerSource.offer"),
    ({}, {"serve": True}, "after", "skipper.torchstore.clients.remote:RemoteStore.finish"),
    ({}, {"serve": True}, "before", "skipper.torchstore.clients.fetch:Fetcher._borrow"),
]


@pytest.fixture
def victim() -> Iterator[Any]:
    keeper = this_proc().spawn("keeper", Keeper)
    yield keeper.spawn.call_one().get(timeout=LIMIT_S)
    keeper.stop().get(timeout=LIMIT_S)


@pytest.fixture(scope="module")
def victims() -> Iterator[Iterator[Any]]:
    """One after the other; they are started together, which takes less time."""
    number = len(OTHER_PUTS) + len(OTHER_GETS)
    keeper = this_proc().spawn("keeper of many", Keeper, number)
    mesh = keeper.spawn.call_one().get(timeout=3 * LIMIT_S)
    yield (mesh.slice(gpus=rank) for rank in range(number))
    keeper.stop().get(timeout=LIMIT_S)


@pytest.fixture
async def survivor(peers: Any, store: None) -> Any:
    """An actor that has put version OLD as a snapshot."""
    actor = peers.slice(gpus=0)
    await actor.put_state_dict.call_one("m", OLD, "snapshot")
    return actor


async def perish(call: Any) -> None:
    """Wait for the death of the process that handles a call: a typed error, within the limit."""
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(SupervisionError):
            await call


async def arenas() -> int:
    (volume,) = (await ts.client()).remote.info.volumes.values()
    count: int = (await volume.usage.call_one())[0]
    return count


async def settled_at(count: int) -> None:
    """Wait until the volume holds so many arenas; each question goes there and back."""
    async with asyncio.timeout(LIMIT_S):
        while await arenas() != count:
            pass


async def can_be_read(version: int, **options: Any) -> None:
    """A version is the latest one and can be read in this way."""
    into = make_model(share=False)
    await ts.get_state_dict("m", into, timeout=LIMIT_S, **options)
    assert model_values(into) == {version}


async def goes_on(survivor: Any) -> None:
    """The next version can be put and read, and only its memory and that of its writer's last one are left."""
    await survivor.put_state_dict.call_one("m", NEXT, "snapshot")
    assert model_values(await ts.get_state_dict("m", timeout=LIMIT_S)) == {NEXT}
    assert await arenas() <= 2


@pytest.mark.parametrize(("when", "step", "latest"), SNAPSHOT_PUT)
async def test_a_snapshot_put_is_whole_or_was_never(
    victim: Any, survivor: Any, when: str, step: str, latest: int
) -> None:
    await victim.die.call_one(when, step)
    await perish(victim.put_state_dict.call_one("m", NEW, "snapshot"))
    assert model_values(await ts.get_state_dict("m", timeout=LIMIT_S)) == {latest}
    await settled_at(1 if latest == OLD else 2)  # the survivor keeps its idle one for its next version
    await goes_on(survivor)
    await settled_at(1 if latest == NEW else 2)


@pytest.mark.parametrize(("when", "step", "latest"), DIRECT_PUT)
async def test_a_direct_put_is_whole_or_was_never(
    victim: Any, survivor: Any, when: str, step: str, latest: int
) -> None:
    await victim.die.call_one(when, step)
    await perish(victim.put_state_dict.call_one("m", NEW, "direct"))
    if latest == OLD:
        assert model_values(await ts.get_state_dict("m", timeout=LIMIT_S)) == {OLD}
    else:
        with pytest.raises(ts.PublisherLostError, match=f"version {NEW}"):
            await ts.get_state_dict("m", timeout=LIMIT_S)
    await goes_on(survivor)


@pytest.mark.parametrize(("when", "step"), FENCE)
async def test_a_publisher_that_dies_in_its_fence_is_named(victim: Any, survivor: Any, when: str, step: str) -> None:
    await victim.put_state_dict.call_one("m", NEW, "direct")
    await victim.die.call_one(when, step)
    await perish(victim.fence.call_one("m", LIMIT_S))
    with pytest.raises(ts.PublisherLostError, match=f"version {NEW}"):
        await ts.get_state_dict("m", timeout=LIMIT_S)
    await goes_on(survivor)


@pytest.mark.parametrize(("when", "step"), GET)
async def test_a_reader_that_dies_holds_nothing_back(victim: Any, survivor: Any, when: str, step: str) -> None:
    await survivor.put_state_dict.call_one("m", NEW, "direct")
    await victim.die.call_one(when, step)
    await perish(victim.get_state_dict.call_one("m"))
    await survivor.fence.call_one("m", LIMIT_S)
    await goes_on(survivor)


@pytest.mark.parametrize(("options", "when", "step", "latest"), OTHER_PUTS)
async def test_a_put_by_another_way_is_whole_or_was_never(
    victims: Iterator[Any], survivor: Any, options: dict[str, Any], when: str, step: str, latest: int
) -> None:
    victim = next(victims)
    await victim.put_state_dict.call_one("m", NEW, "snapshot", **options)
    await can_be_read(NEW, delta=True)
    await victim.die.call_one(when, step)
    await perish(victim.put_state_dict.call_one("m", NEXT, "snapshot", **options))
    await can_be_read(latest, delta=True)
    await settled_at(2)  # that of this version, and the idle one of the survivor
    await goes_on(survivor)


@pytest.mark.parametrize(("put", "get", "when", "step"), OTHER_GETS)
async def test_a_reader_by_another_way_that_dies_holds_nothing_back(
    victims: Iterator[Any], survivor: Any, put: dict[str, Any], get: dict[str, Any], when: str, step: str
) -> None:
    victim = next(victims)
    await survivor.put_state_dict.call_one("m", OLD, "snapshot", **put)
    await victim.get_state_dict.call_one("m", **get)
    await survivor.put_state_dict.call_one("m", NEW, "snapshot", **put)
    if "_borrow" in step:
        await can_be_read(NEW, **get)  # and is lent from now on
    await victim.die.call_one(when, step)
    await perish(victim.get_state_dict.call_one("m", **get))
    await can_be_read(NEW, **get)
    await settled_at(2)
    await goes_on(survivor)
