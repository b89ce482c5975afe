"""Batches of many values: one arena, one call, one transfer; what of it dies lets go of its memory."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch

from skipper import torchstore as ts
from skipper.control import SupervisionError, this_proc
from skipper.torchstore.tensors.values import INLINE_BYTES
from tests.torchstore.actors import Keeper

LIMIT_S = 60.0
SIZE = 16384  # bytes of a tensor of `batch`


def batch(number: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return {f"k{n}": torch.full((SIZE // 4,), float(seed * 1000 + n)) for n in range(number)}


async def usage(store_name: str = "default") -> tuple[int, int]:
    """Arenas of the only volume, and the bytes that they hold."""
    await ts.exists("any", store_name)  # the controller has told the volume before it answers this
    (volume,) = (await ts.client(store_name)).remote.info.volumes.values()
    count, nbytes = await volume.usage.call_one()
    return count, nbytes


async def calls_of(work: Awaitable[Any]) -> int:
    await work
    record = ts.last_sync()
    assert record is not None
    return record.control_calls


async def is_equal(expected: dict[str, torch.Tensor]) -> bool:
    found = await ts.get_batch(list(expected))
    return list(found) == list(expected) and all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.fixture(autouse=True)
async def store() -> AsyncIterator[None]:
    await ts.initialize()
    yield
    await ts.shutdown()


async def test_a_batch_lies_in_one_arena_and_costs_one_call_each_way() -> None:
    values = batch(100)
    into = {key: torch.zeros_like(value) for key, value in values.items()}
    for seed in range(5):
        for key, value in values.items():
            value.fill_(float(seed))
            into[key].zero_()
        calls = [await calls_of(ts.put_batch(values)), await calls_of(ts.get_batch(into))]
        assert all(torch.equal(into[key], values[key]) for key in values)
    assert calls == [1, 2]  # a get gives back what it was granted
    assert await usage() == (2, 2 * 100 * SIZE)
    assert await ts.versions("k7") == (5,)


async def test_a_warm_batch_is_one_transfer_of_what_was_compiled() -> None:
    values = batch(50)
    into = {key: torch.zeros_like(value) for key, value in values.items()}
    for _ in range(6):
        await ts.put_batch(values)
        put = ts.last_sync()
        await ts.get_batch(into)
    got = ts.last_sync()
    assert put is not None
    assert got is not None
    assert (put.plan_hit, put.nbytes) == (True, 50 * SIZE)
    assert (got.plan_hit, got.nbytes) == (True, 50 * SIZE)


async def test_values_of_all_kinds_and_sizes_go_together() -> None:
    values: dict[str, Any] = batch(10)
    values |= {"small": torch.arange(5), "text": "x" * 3, "long": "y" * INLINE_BYTES, "empty": torch.zeros(0, 3)}
    values |= {"large": torch.randn(3_000_000), "bf16": torch.randn(99, 99).bfloat16(), "t": torch.randn(90, 80).t()}
    values |= {"parameter": torch.nn.Parameter(torch.randn(70, 70)), "scalar": torch.tensor(3)}
    for _ in range(2):
        await ts.put_batch(values)
        found = await ts.get_batch(list(values))
        assert list(found) == list(values)
        for key, value in values.items():
            same = torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
            assert same, key
    for key in ("k3", "long", "large", "t", "text"):
        single = await ts.get(key)
        assert torch.equal(single, values[key]) if isinstance(single, torch.Tensor) else single == values[key]
    assert (await ts.get_meta("bf16")).tensors[""].shape == (99, 99)


async def test_parts_strides_and_entries_of_state_dicts_can_be_asked_for_in_a_batch() -> None:
    values = {"a": torch.randn(100, 90), "b": torch.randn(80, 70), "c": torch.randn(60, 50)}
    await ts.put_batch(values)
    await ts.put_state_dict({"w": torch.ones(40, 40)}, "policy")
    part = ts.TensorSlice(offsets=(1, 2), coordinates=(), global_shape=(80, 70), local_shape=(3, 4), mesh_shape=())
    into = torch.zeros(90, 100).t()
    found = await ts.get_batch({"a": into, "b": part, "c": None, "policy/w": None})
    assert found["a"] is into
    assert torch.equal(into, values["a"])
    assert torch.equal(found["b"], values["b"][1:4, 2:6])
    assert torch.equal(found["c"], values["c"])
    assert torch.equal(found["policy/w"], torch.ones(40, 40))


async def test_what_is_deleted_or_put_again_lets_go_of_its_bytes_and_the_rest_stays() -> None:
    values = batch(100)
    await ts.put_batch(values)
    assert await usage() == (1, 100 * SIZE)
    await ts.delete_batch([f"k{n}" for n in range(10, 60)])
    assert await usage() == (1, 50 * SIZE)
    await ts.delete("k99")
    await ts.put("k98", "now a text")
    assert await usage() == (1, 48 * SIZE)
    left = {key: value for key, value in values.items() if not 10 <= int(key[1:]) < 60 and int(key[1:]) < 98}
    assert await is_equal(left)
    await ts.delete_batch(list(left))
    assert await usage() == (0, 0)
    await ts.put_batch(values)
    assert await is_equal(values)


async def test_each_key_of_a_batch_has_versions_of_its_own() -> None:
    await ts.put_batch(batch(3))
    await ts.put("k1", torch.ones(9000))
    await ts.put_batch(batch(3, 1))
    assert [await ts.versions(f"k{n}") for n in range(3)] == [(2,), (3,), (2,)]
    assert await is_equal(batch(3, 1))


async def test_alternating_batches_of_other_sizes_use_a_bounded_number_of_arenas() -> None:
    for seed in range(12):
        await ts.put_batch(batch(10 + seed, seed))
        assert await is_equal(batch(10 + seed, seed))
    assert (await usage())[0] <= 6
    for seed in range(12):
        await ts.put_batch({f"other{n}": torch.full((5000,), float(seed)) for n in range(20)})
        await ts.put_batch(batch(21, seed))
    assert (await usage())[0] <= 8


async def test_tied_values_are_stored_and_read_once() -> None:
    tied, other = torch.randn(8192), torch.randn(8192)
    await ts.put_batch({"embedding": tied, "head": tied.view(64, 128), "other": other})
    record = ts.last_sync()
    assert record is not None
    assert record.nbytes == 2 * tied.nbytes
    fresh = await ts.get_batch(["embedding", "head", "other"])
    assert fresh["embedding"].data_ptr() != fresh["head"].data_ptr()
    assert torch.equal(fresh["head"].view(-1), tied)
    into = torch.zeros(8192)
    await ts.get_batch({"embedding": into, "head": into.view(64, 128), "other": None})
    record = ts.last_sync()
    assert record is not None
    assert record.nbytes == 2 * tied.nbytes
    assert torch.equal(into, tied)
    await ts.delete("embedding")
    assert torch.equal(await ts.get("head"), tied.view(64, 128))


async def test_two_values_are_not_read_into_one_place() -> None:
    await ts.put_batch(batch(3))
    memory = torch.zeros(SIZE // 2)
    one = memory[: SIZE // 4]
    with pytest.raises(ts.LayoutMismatchError, match=r"k0.*k1"):
        await ts.get_batch({"k0": one, "k1": one})
    with pytest.raises(ts.LayoutMismatchError, match=r"the same memory"):
        await ts.get_batch({"k0": one, "k1": memory[100 : 100 + SIZE // 4]})
    with pytest.raises(ts.LayoutMismatchError, match="k2"):
        await ts.get_batch({"k0": one, "k2": torch.zeros(7)})
    with pytest.raises(ts.DTypeMismatchError, match="k2"):
        await ts.get_batch({"k0": one, "k2": torch.zeros(SIZE // 4, dtype=torch.int32)})
    assert not memory.any()
    await ts.delete_batch(["k0", "k1", "k2"])
    assert await usage() == (0, 0)  # nothing is leased any more


@pytest.mark.parametrize(
    "bad",
    [lambda: None, torch.zeros(3000, device="meta"), torch.zeros(3000).to_sparse()],
    ids=["pickle", "meta", "sparse"],
)
async def test_a_value_that_cannot_be_stored_is_named_and_nothing_is_sent(bad: Any) -> None:
    class Unpicklable:
        def __reduce__(self) -> Any:
            raise RuntimeError("not this one")

    values = batch(5) | {"small": 1, "the bad one": Unpicklable() if callable(bad) else bad}
    with pytest.raises(ts.MismatchError, match="the bad one"):
        await ts.put_batch(values)
    assert await ts.keys() == []
    assert await usage() == (0, 0)


async def test_a_missing_key_takes_no_lease_and_touches_nothing() -> None:
    await ts.put_batch(batch(5))
    into = torch.zeros(SIZE // 4)
    with pytest.raises(ts.KeyNotFoundError, match="absent"):
        await ts.get_batch({"k0": None, "k3": into, "absent": None})
    assert not into.any()
    await ts.delete_batch(list(batch(5)))
    assert await usage() == (0, 0)


async def test_many_keys_are_asked_for_at_once() -> None:
    await ts.put_batch(batch(3))
    await ts.put_state_dict({"w": torch.ones(3)}, "policy")
    asked = ["k0", "k2", "k3", "policy", "policy/w", "policy/b", "k0"]
    found = await ts.exists_batch(asked)
    assert found == {"k0": True, "k2": True, "k3": False, "policy": True, "policy/w": True, "policy/b": False}
    assert await ts.exists_batch([]) == {}
    with pytest.raises(TypeError, match="key"):
        await ts.exists_batch([3])  # type: ignore[list-item]


async def test_batches_with_checksums_are_proved() -> None:
    values = batch(4)
    await ts.put_batch(values, checksum=True)
    assert await is_equal(values)
    into = {key: torch.zeros_like(value) for key, value in values.items()}
    await ts.get_batch(into)
    assert all(torch.equal(into[key], values[key]) for key in values)


async def test_readers_and_writers_of_batches_see_every_batch_whole(peers: Any) -> None:
    async def write() -> None:
        for seed in range(30):
            await peers.slice(gpus=0).put_batch.call_one("k", 40, seed)

    await peers.slice(gpus=0).put_batch.call_one("k", 40, 0)
    writing = asyncio.create_task(write())
    reads = 0
    while not writing.done() or reads < 5:
        found = await ts.get_batch([f"k{n}" for n in range(40)])
        assert len({float(tensor[0]) for tensor in found.values()}) == 1
        assert all((tensor == tensor[0]).all() for tensor in found.values())
        reads += 1
    await writing


@pytest.fixture
async def small_store() -> AsyncIterator[None]:
    await ts.initialize(volume_nbytes=20 * SIZE, store_name="small")
    yield
    await ts.shutdown("small")


@pytest.mark.usefixtures("small_store")
async def test_a_full_volume_refuses_a_batch_whole_and_takes_what_dies_for_the_next() -> None:
    with pytest.raises(ts.VolumeFullError, match="may hold"):
        await ts.put_batch(batch(21), "small")
    assert await ts.keys(store_name="small") == []
    await ts.put_batch(batch(18), "small")
    with pytest.raises(ts.StoreTimeoutError, match="full"):
        await ts.put_batch({f"more{n}": value for n, value in enumerate(batch(6).values())}, "small", timeout=0.2)
    assert len(await ts.keys(store_name="small")) == 18
    waiting = asyncio.create_task(ts.put_batch({f"k{n}": torch.ones(SIZE // 4) for n in range(20, 26)}, "small"))
    await ts.delete_batch([f"k{n}" for n in range(4, 12)], store_name="small")
    await waiting
    assert (await usage("small"))[1] <= 20 * SIZE
    assert torch.equal(await ts.get("k25", store_name="small"), torch.ones(SIZE // 4))
    assert torch.equal(await ts.get("k17", store_name="small"), batch(18)["k17"])


@pytest.fixture(scope="module")
def victims() -> Iterator[Iterator[Any]]:
    """Actors that can be killed, one after the other; they are started together, which takes less time."""
    keeper = this_proc().spawn("keeper of batches", Keeper, len(PUT) + len(GET))
    mesh = keeper.spawn.call_one().get(timeout=LIMIT_S)
    yield (mesh.slice(gpus=rank) for rank in range(len(PUT) + len(GET)))
    keeper.stop().get(timeout=LIMIT_S)


PUT = [
    ("before", "skipper.torchstore.clients.batch_put:BatchWriter._fill", False),
    ("before", "skipper.torchstore.clients.arenas:execute", False),
    ("after", "skipper.torchstore.clients.arenas:execute", False),
    ("before", "skipper.torchstore.clients.remote:RemoteStore.publish", False),
    ("after", "skipper.torchstore.clients.remote:RemoteStore.publish", True),
]
GET = [
    ("after", "skipper.torchstore.clients.remote:RemoteStore.acquire_values"),
    ("after", "skipper.torchstore.clients.batch_get:execute"),
    ("before", "skipper.torchstore.clients.remote:RemoteStore.release_values"),
]


async def perish(call: Any) -> None:
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(SupervisionError):
            await call


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask again and again until it is so; each question goes to another process and back."""
    async with asyncio.timeout(LIMIT_S):
        while not await condition():
            pass


@pytest.mark.parametrize(("when", "step", "is_put"), PUT)
async def test_a_batch_whose_publisher_dies_is_whole_or_was_never(
    victims: Iterator[Any], when: str, step: str, is_put: bool
) -> None:
    victim = next(victims)
    await ts.put_batch(batch(20))
    await victim.die.call_one(when, step)
    await perish(victim.put_batch.call_one("k", 30, 5))

    async def is_settled() -> bool:
        return (await usage())[1] == (20 + 30 if is_put else 20) * SIZE  # this process keeps its idle arena

    await until(is_settled)
    if is_put:
        assert {float(tensor[0]) for tensor in (await ts.get_batch([f"k{n}" for n in range(30)])).values()} == {5.0}
    else:
        assert await is_equal(batch(20))
        assert len(await ts.keys()) == 20
    await ts.put_batch(batch(30, 2))
    assert await is_equal(batch(30, 2))


@pytest.mark.parametrize(("when", "step"), GET)
async def test_a_reader_that_dies_holding_a_batch_holds_nothing_back(
    victims: Iterator[Any], when: str, step: str
) -> None:
    victim = next(victims)
    await ts.put_batch(batch(20))
    await victim.die.call_one(when, step)
    await perish(victim.get_batch.call_one("k", 20))
    await ts.delete_batch(list(batch(20)))

    async def is_free() -> bool:
        return await usage() == (0, 0)

    await until(is_free)


async def test_a_volume_that_dies_is_named_by_puts_and_gets_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    await ts.initialize(2, ts.LocalRankStrategy(), "two")
    try:
        monkeypatch.setenv("LOCAL_RANK", "0")
        await ts.put_batch(batch(10), "two")
        process = (await ts.client("two")).remote.info.processes["0"]
        os.kill(process.pid, signal.SIGKILL)
        into = {key: torch.zeros_like(value) for key, value in batch(10).items()}

        async def is_noticed() -> bool:
            try:
                await ts.get_batch(into, "two", timeout=LIMIT_S)
            except ts.VolumeLostError as error:
                return error.volume == "0"
            return False

        await until(is_noticed)
        for _ in range(2):
            with pytest.raises(ts.VolumeLostError, match="'0'"):
                await ts.put_batch(batch(10), "two", timeout=LIMIT_S)
        monkeypatch.setenv("LOCAL_RANK", "1")
        await ts.put_batch(batch(10, 3), "two")
        assert torch.equal(await ts.get("k4", store_name="two"), batch(10, 3)["k4"])
    finally:
        await ts.shutdown("two")
