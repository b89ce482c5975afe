"""Volumes that may hold so many bytes and no more."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from skipper import torchstore as ts

ELEMENTS = 40_000
NBYTES = 4 * ELEMENTS
LIMIT = 3 * NBYTES + 4096
LIMIT_S = 20.0


@pytest.fixture
async def small_store() -> AsyncIterator[None]:
    """A store whose volume holds three versions of the tensor, and which keeps ten if there is room."""
    await ts.initialize(keep_versions=10, volume_nbytes=LIMIT)
    yield
    await ts.shutdown()


pytestmark = pytest.mark.usefixtures("small_store")


def tensor(number: int) -> torch.Tensor:
    return torch.full((ELEMENTS,), float(number))


async def used() -> int:
    (volume,) = (await ts.client()).remote.info.volumes.values()
    nbytes: int = (await volume.usage.call_one())[1]
    return nbytes


async def test_as_many_versions_are_kept_as_fit() -> None:
    for number in range(1, 9):
        await ts.put("t", tensor(number))
        assert await used() <= LIMIT
    assert await ts.versions("t") == (6, 7, 8)
    assert torch.equal(await ts.get("t"), tensor(8))


async def test_the_newest_version_of_each_key_stays_and_the_oldest_of_all_goes_first() -> None:
    await ts.put("a", tensor(1))
    await ts.put("b", tensor(2))
    await ts.put("b", tensor(3))
    await ts.put("b", tensor(4))
    assert [await ts.versions(key) for key in "ab"] == [(1,), (2, 3)]
    assert [torch.equal(await ts.get(key), tensor(number)) for key, number in (("a", 1), ("b", 4))] == [True, True]


async def test_a_put_waits_for_a_reader_to_make_room(peers: Any) -> None:
    for key in "abc":
        await ts.put(key, tensor(1))
    reader = peers.slice(gpus=0)
    await reader.lease.call_one("a")
    await ts.delete("a")  # whoever is reading it finishes
    waiting = asyncio.create_task(ts.put("d", tensor(2), timeout=LIMIT_S))
    assert not await ts.exists("d")
    await reader.end_lease.call_one()
    async with asyncio.timeout(LIMIT_S):
        await waiting
    assert torch.equal(await ts.get("d"), tensor(2))
    assert await used() <= LIMIT


async def test_a_put_that_finds_no_room_in_time_says_so_and_changes_nothing() -> None:
    for key in "abc":
        await ts.put(key, tensor(1))
    with pytest.raises(ts.StoreTimeoutError, match="volume '0' is full"):
        await ts.put("d", tensor(2), timeout=0.2)
    assert await ts.keys() == ["a", "b", "c"]
    await ts.delete("b")
    await ts.put("d", tensor(2))
    assert torch.equal(await ts.get("d"), tensor(2))


async def test_what_never_fits_is_refused_at_once() -> None:
    await ts.put("t", tensor(1))
    with pytest.raises(ts.VolumeFullError, match=r"may hold 484,096") as caught:
        await ts.put("t", torch.zeros(4 * ELEMENTS))
    assert (caught.value.volume, caught.value.nbytes, caught.value.limit) == ("0", 4 * NBYTES, LIMIT)
    assert torch.equal(await ts.get("t"), tensor(1))


async def test_puts_of_many_keys_at_once_all_get_their_turn() -> None:
    async def put_many(key: str) -> None:
        for number in range(20):
            await ts.put(key, tensor(number), timeout=LIMIT_S)

    await asyncio.gather(put_many("a"), put_many("b"))
    assert await used() <= LIMIT
    for key in "ab":
        assert torch.equal(await ts.get(key), tensor(19))


async def test_a_limit_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        await ts.initialize(volume_nbytes=0, store_name="other")
