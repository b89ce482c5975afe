"""Processes are killed while they matter: the last good version stays, or a typed error says why not."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch

from skipper import torchstore as ts
from skipper.control import ActorError, SupervisionError, this_proc
from tests.torchstore.actors import Keeper, model_values

LIMIT_S = 20.0


@pytest.fixture
def victim() -> Iterator[Any]:
    """An actor in a process of its own, made to be killed."""
    keeper = this_proc().spawn("keeper", Keeper)
    yield keeper.spawn.call_one().get(timeout=LIMIT_S)
    keeper.stop().get(timeout=LIMIT_S)  # and with it what it owns


@pytest.fixture
def survivor(peers: Any) -> Any:
    """An actor in another process, which nobody kills."""
    return peers.slice(gpus=0)


async def kill(actor: Any) -> int:
    """SIGKILL an actor's process; returns when calls to it fail."""
    pid: int = await actor.pid.call_one()
    os.kill(pid, signal.SIGKILL)

    async def is_gone() -> bool:
        return isinstance(await _outcome(actor.pid.call_one()), SupervisionError)

    await until(is_gone)
    return pid


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask again and again until it is so; each question goes to another process and back."""
    async with asyncio.timeout(LIMIT_S):
        while not await condition():
            pass


@pytest.mark.usefixtures("store")
async def test_a_snapshot_outlives_its_publisher(victim: Any) -> None:
    await victim.put_state_dict.call_one("m", 3, "snapshot")
    await kill(victim)
    assert model_values(await ts.get_state_dict("m")) == {3}


@pytest.mark.usefixtures("store")
async def test_a_direct_version_dies_with_its_publisher_by_name(victim: Any, survivor: Any) -> None:
    await victim.put_state_dict.call_one("m", 3, "direct")
    assert model_values(await ts.get_state_dict("m")) == {3}
    pid = await kill(victim)
    with pytest.raises(ts.PublisherLostError, match=f"process {pid}"):
        await ts.get_state_dict("m", timeout=LIMIT_S)
    await survivor.put_state_dict.call_one("m", 4, "direct")
    assert model_values(await ts.get_state_dict("m")) == {4}


@pytest.mark.usefixtures("store")
async def test_readers_of_a_publisher_that_dies_get_its_version_or_an_error(victim: Any, survivor: Any) -> None:
    publisher, reader = victim, survivor
    await publisher.put_state_dict.call_one("m", 3, "direct")
    reads = [reader.get_state_dict.call_one("m", timeout=LIMIT_S) for _ in range(200)]
    await reads[0]
    os.kill(await publisher.pid.call_one(), signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        results = await asyncio.gather(*map(_outcome, reads))
    assert all(result == {3} or "PublisherLostError" in str(result) for result in results)


@pytest.mark.usefixtures("store")
async def test_a_killed_rank_has_put_what_it_has_put_and_its_group_is_over(victim: Any, survivor: Any) -> None:
    one, other = victim, survivor
    for actor, rank in ((one, 0), (other, 1)):
        await actor.put_fake_shard.call_one("d", rank, 2, 1)
    await one.put_fake_shard.call_one("d", 0, 2, 2)
    await kill(one)
    assert model_values(await ts.get_state_dict("d")) == {1}
    await other.put_fake_shard.call_one("d", 1, 2, 2)
    assert model_values(await ts.get_state_dict("d")) == {2}
    with pytest.raises(ActorError, match=r"LateShareError.*rank 0 of 2 is gone") as raised:
        await other.put_fake_shard.call_one("d", 1, 2, 3)
    assert isinstance(raised.value.cause, ts.LateShareError)
    assert model_values(await ts.get_state_dict("d")) == {2}


@pytest.mark.usefixtures("store")
async def test_arenas_of_a_publisher_killed_in_the_middle_of_a_put_are_freed(victim: Any) -> None:
    client = await ts.client()
    (volume,) = client.remote.info.volumes.values()
    await victim.put_state_dict.call_one("m", 1, "snapshot")
    _, published = await volume.usage.call_one()
    await victim.write_without_publishing.call_one("m")
    assert (await volume.usage.call_one())[1] > published
    await kill(victim)

    async def is_freed() -> bool:
        return bool((await volume.usage.call_one())[1] == published)

    await until(is_freed)
    assert model_values(await ts.get_state_dict("m")) == {1}


@pytest.mark.usefixtures("store")
async def test_a_fence_does_not_wait_for_a_reader_that_was_killed(victim: Any, survivor: Any) -> None:
    publisher, reader = survivor, victim
    await publisher.put_state_dict.call_one("m", 1, "direct")
    await reader.lease.call_one("m")
    fence = publisher.fence.call_one("m", LIMIT_S)
    os.kill(await reader.pid.call_one(), signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        await fence


@pytest.fixture
async def store_of_two() -> AsyncIterator[None]:
    """A store with two volumes in processes of their own."""
    await ts.initialize(2, ts.LocalRankStrategy(), "two")
    yield
    await ts.shutdown("two")


@pytest.mark.usefixtures("store_of_two")
async def test_a_killed_volume_is_named_and_the_other_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    tensor = torch.randn(300, 300)
    await ts.put("lost", tensor, "two")
    monkeypatch.setenv("LOCAL_RANK", "1")
    await ts.put("kept", tensor, "two")
    client = await ts.client("two")
    process = client.remote.info.processes["0"]
    os.kill(process.pid, signal.SIGKILL)

    async def is_noticed() -> bool:
        return isinstance(await _outcome(ts.get("lost", store_name="two")), ts.StoreError)

    await until(is_noticed)
    with pytest.raises(ts.VolumeLostError, match="'0'") as caught:
        await ts.get("lost", store_name="two", timeout=LIMIT_S)
    assert caught.value.volume == "0"
    assert torch.equal(await ts.get("kept", store_name="two"), tensor)
    monkeypatch.setenv("LOCAL_RANK", "0")
    for _ in range(2):
        with pytest.raises(ts.VolumeLostError, match="'0'"):
            await ts.put("lost", tensor, "two", timeout=LIMIT_S)
    monkeypatch.setenv("LOCAL_RANK", "1")
    await ts.put("lost", tensor, "two")
    assert torch.equal(await ts.get("lost", store_name="two"), tensor)


async def _outcome(read: Any) -> Any:
    try:
        return await read
    except Exception as error:  # noqa: BLE001 - which error it is, is what the test looks at
        return error
