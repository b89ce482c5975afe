"""State dicts and their versions, in both modes, between real processes."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from skipper import dataplane
from skipper import torchstore as ts
from skipper.torchstore.algebra.manifest import Mode
from tests.torchstore.actors import fill_model, make_model, model_values


async def until(condition: Callable[[], bool]) -> None:
    """Let the other tasks run until it is so."""
    controller = (await ts.client()).remote.controller
    async with asyncio.timeout(20):
        while not condition():
            await controller.exists.call_one("anything")  # beside the client, which counts its calls


pytestmark = pytest.mark.usefixtures("store")

MODES: list[Mode] = ["snapshot", "direct"]


@pytest.mark.parametrize("mode", MODES)
async def test_a_state_dict_comes_back_nested_as_it_was_put(mode: Mode) -> None:
    state = {
        "model": {"layers": [{"weight": torch.randn(40, 50)}, {"weight": torch.randn(3)}]},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "lr": 0.1},
        "empty": torch.empty(0, 4),
        "epoch": 7,
    }
    assert await ts.put_state_dict(state, "s", mode=mode) == 1
    fetched = await ts.get_state_dict("s")
    assert torch.equal(fetched["model"]["layers"][0]["weight"], state["model"]["layers"][0]["weight"])
    assert torch.equal(fetched["optimizer"]["state"][0]["step"], torch.tensor(3.0))
    assert fetched["empty"].shape == (0, 4)
    assert (fetched["epoch"], fetched["optimizer"]["lr"]) == (7, 0.1)
    assert torch.equal(await ts.get("s/model.layers.1.weight"), state["model"]["layers"][1]["weight"])
    assert await ts.get("s/epoch") == 7


@pytest.mark.parametrize("mode", MODES)
async def test_given_tensors_are_filled_in_place(mode: Mode) -> None:
    state = {"a": torch.randn(40, 50), "b": {"c": torch.randn(30)}, "step": 3}
    await ts.put_state_dict(state, "s", mode=mode)
    frame = torch.zeros(42, 52)
    mine = {"a": frame[1:-1, 1:-1], "b": {"c": torch.zeros(30)}, "step": 0}
    fetched = await ts.get_state_dict("s", mine)
    assert fetched["a"] is mine["a"]
    assert torch.equal(mine["a"], state["a"])
    assert torch.equal(mine["b"]["c"], state["b"]["c"])
    assert fetched["step"] == 3
    mine["a"].zero_()
    assert not bool(frame.any())


@pytest.mark.parametrize("mode", MODES)
async def test_a_warm_sync_replays_its_plan_with_two_messages(mode: Mode, peers: Any) -> None:
    one, other = peers.slice(gpus=0), peers.slice(gpus=1)
    for seed in range(1, 7):
        assert await one.put_state_dict.call_one("m", seed, mode) == seed
        put = await one.last_sync.call_one()
        assert await other.get_state_dict.call_one("m") == {seed}
        got = await other.last_sync.call_one()
    assert put.plan_hit
    assert put.control_calls <= (1 if mode == "direct" else 2)
    assert got.plan_hit
    assert got.compile_s == 0
    assert got.control_calls <= 2
    assert got.nbytes == sum(tensor.nbytes for tensor in make_model(share=False).values())


async def test_versions_count_up_and_old_ones_are_named_in_the_error() -> None:
    state = {"w": torch.zeros(40, 40)}
    for number in (1, 2, 3):
        fill_model(state, number)
        assert await ts.put_state_dict(state, "s") == number
    assert await ts.versions("s") == (3,)
    assert model_values(await ts.get_state_dict("s", version=3)) == {3}
    with pytest.raises(ts.VersionNotFoundError, match="ready versions: 3"):
        await ts.get_state_dict("s", version=2)


async def test_versions_given_by_number_are_immutable() -> None:
    state = {"w": torch.zeros(40, 40)}
    assert await ts.put_state_dict(state, "s", version=10) == 10
    for number in (10, 9):
        with pytest.raises(ts.VersionExistsError, match="newest one is 10"):
            await ts.put_state_dict(state, "s", version=number)
    assert await ts.put_state_dict(state, "s") == 11


async def test_a_reader_of_a_newer_version_is_woken_when_it_is_published(peers: Any) -> None:
    state = {"w": torch.zeros(64, 64)}
    for number in (1, 2, 3):
        fill_model(state, number)
        waiting = asyncio.create_task(ts.get_state_dict("s", version=("newer_than", number - 1), timeout=20))
        await ts.exists("s")  # the wait has reached the controller before what we send next
        assert not waiting.done()
        await ts.put_state_dict(state, "s")
        assert model_values(await waiting) == {number}


async def test_waiting_for_a_version_that_does_not_come_ends_in_time() -> None:
    begin = time.monotonic()
    with pytest.raises(ts.StoreTimeoutError, match=r"after 0\.2 s.*'never'"):
        await ts.get_state_dict("never", version=("newer_than", 0), timeout=0.2)
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("mode", MODES)
async def test_names_that_differ_are_refused_unless_asked_for_leniently(mode: Mode) -> None:
    await ts.put_state_dict({"a": torch.ones(40, 40), "b": torch.ones(30)}, "s", mode=mode)
    mine = {"a": torch.zeros(40, 40), "c": torch.zeros(3)}
    with pytest.raises(ts.StateDictMismatchError, match=r"not stored: c; stored but not .*: b"):
        await ts.get_state_dict("s", mine)
    assert not bool(mine["a"].any())
    fetched = await ts.get_state_dict("s", mine, strict=False)
    assert sorted(fetched) == ["a", "b"]
    assert fetched["a"] is mine["a"]
    assert bool(mine["a"].all())


@pytest.mark.parametrize("mode", MODES)
async def test_what_does_not_fit_is_found_before_anything_is_moved(mode: Mode) -> None:
    await ts.put_state_dict({"a": torch.ones(40, 40), "b": torch.ones(30)}, "s", mode=mode)
    for wrong, error in (
        (torch.zeros(30, dtype=torch.int32), ts.DTypeMismatchError),
        (torch.zeros(31), ts.LayoutMismatchError),
    ):
        mine = {"a": torch.zeros(40, 40), "b": wrong}
        with pytest.raises(error, match="'s/b'"):
            await ts.get_state_dict("s", mine)
        assert not bool(mine["a"].any())


async def test_the_same_key_may_change_shape_dtype_and_kind_between_versions() -> None:
    for value in (torch.ones(40, 40), torch.ones(50, dtype=torch.int64), torch.ones(90, 9).t()):
        await ts.put_state_dict({"w": value}, "s")
        fetched = await ts.get_state_dict("s")
        assert torch.equal(fetched["w"], value)
        assert fetched["w"].dtype == value.dtype
    await ts.put("s", "a plain value now")
    assert await ts.get("s") == "a plain value now"
    with pytest.raises(ts.KindMismatchError):
        await ts.get_state_dict("s")


async def test_entries_of_a_state_dict_can_be_deleted_one_by_one() -> None:
    await ts.put_state_dict({"a": torch.ones(40, 40), "b": torch.ones(30)}, "s")
    await ts.delete("s/a")
    assert await ts.keys("s") == ["s/b"]
    with pytest.raises(ts.KeyNotFoundError, match="s/a"):
        await ts.get_state_dict("s")
    await ts.delete_batch(["s/b", "s/a"])
    assert await ts.keys() == []
    assert not await ts.exists("s")


async def test_direct_mode_copies_nothing_and_registers_once() -> None:
    model = make_model(share=True)
    for seed in (1, 2, 3):
        fill_model(model, seed)
        await ts.put_state_dict(model, "m", mode="direct")
        record = ts.last_sync()
        assert record is not None
        assert (record.nbytes, record.mode, record.plan_hit) == (0, "direct", seed > 1)
        assert model_values(await ts.get_state_dict("m")) == {seed}


async def test_direct_mode_reads_memory_that_was_not_made_to_be_shared(peers: Any) -> None:
    weight = torch.randn(300, 500)
    await ts.put_state_dict({"w": weight[:, 100:300].t()}, "m", mode="direct")
    assert not dataplane.is_shared(weight)
    fetched = await peers.slice(gpus=0).get.call_one("m/w")
    assert torch.equal(fetched, weight[:, 100:300].t())


async def test_a_fence_keeps_new_readers_away_until_the_next_version(peers: Any) -> None:
    one = peers.slice(gpus=0)
    await one.put_state_dict.call_one("f", 1, "direct")
    await one.fence.call_one("f")
    waiting = asyncio.create_task(ts.get_state_dict("f", timeout=20))
    with pytest.raises(ts.SourceChangedError, match="withdrawn it"):
        await ts.get_state_dict("f", version=1)
    assert not waiting.done()
    await one.put_state_dict.call_one("f", 2, "direct")
    assert model_values(await waiting) == {2}


async def test_a_fence_waits_for_a_reader_and_names_it_when_it_does_not_leave(peers: Any) -> None:
    model = make_model(share=True)
    await ts.put_state_dict(model, "m", mode="direct")
    reader = peers.slice(gpus=1)
    pid = await reader.pid.call_one()
    await reader.lease.call_one("m")
    with pytest.raises(ts.StoreTimeoutError, match=f"still being read by process {pid}"):
        await ts.fence("m", timeout=0.2)
    with pytest.raises(ts.StoreTimeoutError, match=str(pid)):
        await ts.wait_for_readers("m", timeout=0.2)


async def test_a_reader_whose_publisher_breaks_the_seal_gets_an_error_and_not_a_mixture() -> None:
    model = make_model(share=True)
    await ts.put_state_dict(model, "m", mode="direct")
    client = await ts.client()
    await ts.get_state_dict("m", version=1)
    client.publisher.withdraw("m")  # as a publisher does that no longer waits for late readers
    with pytest.raises(ts.SourceChangedError, match="is changing it"):
        await ts.get_state_dict("m", version=1)


async def test_a_direct_version_that_a_snapshot_replaces_lets_go_of_its_memory() -> None:
    import gc
    import weakref

    model = make_model(share=True)
    await ts.put_state_dict(model, "m", mode="direct")
    await ts.put_state_dict(make_model(share=False), "m")
    watched = weakref.ref(model["0.weight"].untyped_storage())
    del model
    gc.collect()
    assert watched() is None


async def test_keys_that_others_delete_leave_nothing_behind_in_the_publisher(peers: Any) -> None:
    for number in range(5):
        await ts.put(f"k{number}", torch.ones(64, 96))
        await ts.put(f"k{number}", torch.ones(64, 96))
        await peers.slice(gpus=0).delete.call_one(f"k{number}")
    await ts.put("last", torch.ones(64, 96))
    pool = (await ts.client()).publisher.snapshots.arenas
    assert [arena.key for arena in pool._all.values()] == ["last"]
    assert (list(pool._of_key), pool._idle) == (["last"], {})


async def test_a_reader_of_the_latest_version_moves_on_to_the_next_when_it_is_taken_back() -> None:
    model = make_model(share=True)
    await ts.put_state_dict(model, "m", mode="direct")
    client = await ts.client()
    client.publisher.withdraw("m")
    reading = asyncio.create_task(ts.get_state_dict("m", timeout=20))
    # It asks, finds the seal broken, gives back, and asks for the next version.
    await until(lambda: client.remote.calls >= 3)
    fill_model(model, 2)
    await ts.put_state_dict(model, "m", mode="direct")
    assert model_values(await reading) == {2}
    client.publisher.withdraw("m")
    with pytest.raises(ts.SourceChangedError, match="is changing it"):
        await ts.get_state_dict("m", timeout=0.2)


async def test_memory_of_a_replaced_direct_version_is_let_go() -> None:
    import gc
    import weakref

    model = make_model(share=True)
    await ts.put_state_dict(model, "m", mode="direct")
    watched = weakref.ref(model["0.weight"].untyped_storage())
    other = make_model(share=True)
    fill_model(other, 5)
    await ts.put_state_dict(other, "m", mode="direct")
    assert model_values(await ts.get_state_dict("m")) == {5}
    await ts.put_state_dict(other, "m", mode="direct")
    del model
    gc.collect()
    assert watched() is None


async def test_a_temporary_state_dict_is_not_kept_alive_by_a_snapshot() -> None:
    import gc
    import weakref

    state = {"w": torch.ones(300, 300)}
    watched = weakref.ref(state["w"])
    await ts.put_state_dict(state, "s")
    del state
    gc.collect()
    assert watched() is None


async def test_a_snapshot_does_not_change_with_its_source() -> None:
    state = {"w": torch.ones(300, 300)}
    await ts.put_state_dict(state, "s")
    state["w"].zero_()
    assert model_values(await ts.get_state_dict("s")) == {1}


async def test_versions_never_mix_while_they_are_read_and_overwritten(peers: Any) -> None:
    one, other = peers.slice(gpus=0), peers.slice(gpus=1)
    await one.put_state_dict.call_one("busy", 0, "snapshot")
    reads = [other.get_state_dict.call_one("busy") for _ in range(10)]
    writes = [one.put_state_dict.call_one("busy", seed, "snapshot") for seed in range(1, 11)]
    seen = [await read for read in reads]
    assert [await write for write in writes] == list(range(2, 12))
    assert all(len(values) == 1 for values in seen)


@pytest.mark.parametrize("mode", MODES)
async def test_a_hundred_publishes_against_two_readers_never_tear_or_mix(mode: Mode, peers: Any) -> None:
    # The publisher writes its parameters all the while: between its fence and its next put in direct mode,
    # at any moment in snapshot mode. Every element says which version it belongs to.
    one, other = peers.slice(gpus=0), peers.slice(gpus=1)
    publishing = one.publish_many.call_one("hot", 100, mode)
    seen = await other.read_many.call_one("hot", 100)
    assert await publishing == 100
    assert seen[-1] == 100
    assert seen == sorted(seen)


async def test_wrong_modes_and_versions_are_refused() -> None:
    with pytest.raises(ValueError, match="snapshot"):
        await ts.put_state_dict({}, "s", mode="copy")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="version"):
        await ts.put_state_dict({}, "s", version="new")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="newer_than"):
        await ts.get_state_dict("s", version="newest")  # type: ignore[arg-type]


async def test_a_state_dict_without_tensors_can_be_put() -> None:
    await ts.put_state_dict({"step": 3}, "s")
    assert await ts.get_state_dict("s") == {"step": 3}
    await ts.put_state_dict({}, "s")
    assert await ts.get_state_dict("s") == {}


async def test_a_reader_that_gives_up_waiting_leaves_no_lease_behind(peers: Any) -> None:
    model = make_model(share=True)
    await ts.put_state_dict(model, "m", mode="direct")
    waiting = asyncio.create_task(ts.get_state_dict("m", version=("newer_than", 1), timeout=20))
    await ts.exists("m")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await ts.put_state_dict(model, "m", mode="direct")  # grants what nobody waits for any more
    await ts.fence("m", timeout=20)


async def test_a_key_deleted_while_it_is_put_is_put_again_whole() -> None:
    tensor = torch.ones(64, 96)
    for _ in range(3):
        await ts.put("t", tensor)
    client = await ts.client()
    publisher, tell = client.publisher, client.publisher._tell
    attempts = 0

    async def delete_before_the_first(*args: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            await client.remote.delete(("t",), missing_ok=False, timeout=20)
        return await tell(*args)

    publisher._tell = delete_before_the_first  # type: ignore[method-assign]
    await ts.put("t", tensor * 2)
    assert attempts == 2
    assert torch.equal(await ts.get("t"), tensor * 2)


async def test_a_store_that_was_shut_down_and_initialized_again_is_found_by_old_clients(peers: Any) -> None:
    one = peers.slice(gpus=0)
    tensor = torch.randn(300, 300)
    for _ in range(2):
        await one.put.call_one("k", tensor)
        assert torch.equal(await ts.get("k"), tensor)
        await ts.shutdown()
        with pytest.raises(ts.StoreNotInitializedError):
            await ts.get("k")
        await ts.initialize()
    with pytest.raises(Exception, match="no value under the key"):
        await one.get.call_one("k")
