"""What is put with copies survives the loss of any one volume, and of its publisher besides."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from skipper import torchstore as ts
from skipper.control import this_proc
from skipper.torchstore.algebra.copies import neighbours, place
from tests.torchstore.actors import Keeper, model_values

LIMIT_S = 60.0
VOLUMES = 3


@pytest.fixture
async def volumes() -> AsyncIterator[dict[str, int]]:
    """A store with three volumes, each in a process of its own: their names and process ids."""
    await ts.initialize(VOLUMES, ts.LocalRankStrategy())
    info = (await ts.client()).remote.info
    yield {name: process.pid for name, process in info.processes.items()}
    await ts.shutdown()


def whole(seed: int) -> dict[str, torch.Tensor]:
    """Tensors that are too large for a message, and one that is not."""
    made = torch.Generator().manual_seed(seed)
    return {f"layer.{at}": torch.randn(257, 129, generator=made) for at in range(4)} | {"step": torch.tensor(seed)}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


async def put_in_three_parts(key: str, seed: int, **options: Any) -> None:
    """As three processes would put: each of them writes to another volume."""
    for part in range(VOLUMES):
        os.environ["LOCAL_RANK"] = str(part)
        try:
            mine = {name: tensor for at, (name, tensor) in enumerate(whole(seed).items()) if at % VOLUMES == part}
            await ts.put_state_dict(mine, key, publisher=(part, VOLUMES), timeout=LIMIT_S, **options)
        finally:
            del os.environ["LOCAL_RANK"]


async def read_until_it_fails(key: str) -> None:
    """What is mapped already can be read until the store has noticed that it is gone."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            assert same(await ts.get_state_dict(key, timeout=LIMIT_S), whole(1))


@pytest.mark.parametrize("victim", ["0", "1", "2"])
async def test_a_version_survives_the_loss_of_any_one_volume(volumes: dict[str, int], victim: str) -> None:
    await put_in_three_parts("m", 1, copies=2)
    assert (await ts.get_meta("m")).volumes == (("0", "1"), ("1", "2"), ("2", "0"))
    held = {name: torch.zeros_like(tensor) for name, tensor in whole(1).items()}
    await ts.get_state_dict("m", held, timeout=LIMIT_S)  # the plan that is kept reads from the volume that is to die
    os.kill(volumes[victim], signal.SIGKILL)
    for tensor in held.values():
        tensor.zero_()
    await ts.get_state_dict("m", held, timeout=LIMIT_S)
    assert same(held, whole(1))
    assert same(await ts.get_state_dict("m", timeout=LIMIT_S), whole(1))
    await put_in_three_parts("m", 2, copies=2)  # the neighbours' neighbours stand in
    assert same(await ts.get_state_dict("m", timeout=LIMIT_S), whole(2))
    assert all(victim not in holders for holders in (await ts.get_meta("m")).volumes)


async def test_what_is_lost_wholly_is_an_error_by_name(volumes: dict[str, int]) -> None:
    await put_in_three_parts("m", 1, copies=2)
    await ts.put_state_dict(whole(5), "elsewhere", copies=1)
    for victim in ("1", "2"):
        os.kill(volumes[victim], signal.SIGKILL)
    with pytest.raises(ts.VolumeLostError, match=r"volume '[12]' is lost"):
        await read_until_it_fails("m")
    assert same(await ts.get_state_dict("elsewhere", timeout=LIMIT_S), whole(5))
    with pytest.raises(ts.VolumeLostError, match="1 of 3 are left"):
        await ts.put_state_dict(whole(6), "m", copies=2, timeout=LIMIT_S)


async def test_a_version_survives_a_volume_and_its_publisher(volumes: dict[str, int]) -> None:
    keeper = this_proc().spawn("keeper", Keeper)
    publisher = keeper.spawn.call_one().get(timeout=LIMIT_S)
    await publisher.put_state_dict.call_one("m", 3, "snapshot", copies=2)
    (holders,) = (await ts.get_meta("m")).volumes
    for pid in (await publisher.pid.call_one(), volumes[holders[0]]):
        os.kill(pid, signal.SIGKILL)
    assert model_values(await ts.get_state_dict("m", timeout=LIMIT_S)) == {3}
    keeper.stop().get(timeout=LIMIT_S)


async def test_a_version_that_is_not_whole_yet_survives_the_loss_of_a_volume(volumes: dict[str, int]) -> None:
    first, second = whole(1), {"more": torch.ones(9000)}
    await ts.put_state_dict(first, "m", publisher=(0, 2), copies=2)
    os.kill(volumes["0"], signal.SIGKILL)
    await ts.put_state_dict(second, "m", publisher=(1, 2), copies=2, timeout=LIMIT_S)
    assert same(await ts.get_state_dict("m", timeout=LIMIT_S), first | second)


@pytest.mark.usefixtures("volumes")
async def test_arenas_of_copies_are_used_again() -> None:
    for seed in range(6):
        await ts.put_state_dict(whole(seed), "m", copies=2)
    used = [await volume.usage.call_one() for volume in (await ts.client()).remote.info.volumes.values()]
    assert [arenas for arenas, _ in used] == [2, 2, 0]
    await ts.delete("m")
    assert not await ts.exists("m")


async def test_a_store_can_be_told_to_keep_copies_of_everything() -> None:
    await ts.initialize(2, ts.LocalRankStrategy(), copies=2)
    try:
        info = (await ts.client()).remote.info
        await ts.put("large", torch.ones(100_000))
        await ts.put_state_dict(whole(1), "m")
        await ts.put_state_dict({"w": torch.ones(9000)}, "direct", mode="direct")
        await ts.put_state_dict(whole(1), "single", copies=1)
        assert (await ts.get_meta("m")).volumes == (("0", "1"),)
        assert (await ts.get_meta("direct")).volumes == ((),)
        assert (await ts.get_meta("single")).volumes == (("0",),)
        os.kill(info.processes["0"].pid, signal.SIGKILL)
        assert (await ts.get("large", timeout=LIMIT_S)).sum() == 100_000
        assert same(await ts.get_state_dict("m", timeout=LIMIT_S), whole(1))
    finally:
        await ts.shutdown()


@pytest.mark.usefixtures("store")
async def test_more_copies_than_volumes_are_refused_before_anything_is_sent() -> None:
    with pytest.raises(ts.StrategyError, match="copies=2 needs 2 volumes"):
        await ts.put_state_dict(whole(1), "m", copies=2)
    with pytest.raises(ValueError, match="copies are made of snapshots"):
        await ts.put_state_dict(whole(1), "m", mode="direct", copies=2)
    with pytest.raises(ValueError, match="copies are made of snapshots"):
        await ts.put_state_dict(whole(1), "m", delta=True, copies=2)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="copies must be at least 1"):
            await ts.put_state_dict(whole(1), "m", copies=wrong)
    with pytest.raises(TypeError, match="copies is a whole number"):
        await ts.put_state_dict(whole(1), "m", copies="two")  # type: ignore[arg-type]
    assert not await ts.exists("m")


async def test_a_store_with_fewer_volumes_than_copies_is_not_started() -> None:
    with pytest.raises(ts.StrategyError, match="copies=3 needs 3 volumes"):
        await ts.initialize(2, ts.LocalRankStrategy(), copies=3)
    await ts.initialize()  # nothing is left of it
    await ts.shutdown()


def test_a_copy_goes_to_another_host_where_there_is_one() -> None:
    hosts = {"0": "a", "1": "a", "2": "b", "3": "b", "4": "c", "5": "c"}
    assert [place(hosts, own, 2, ()) for own in hosts] == [
        ("0", "2"),
        ("1", "3"),
        ("2", "4"),
        ("3", "5"),
        ("4", "0"),
        ("5", "1"),
    ]
    assert place(hosts, "0", 2, {"2"}) == ("0", "4")  # still another host
    assert place(hosts, "1", 4, ()) == ("1", "3", "5", "0")


def test_every_volume_is_some_time_a_neighbour() -> None:
    for hosts in ({"0": "a"}, {"0": "a", "1": "b", "2": "b", "3": "b"}, {"x": "a", "y": "a", "z": "a"}):
        for own in hosts:
            order = list(neighbours(hosts, own))
            assert order[0] == own
            assert sorted(order) == sorted(hosts)
