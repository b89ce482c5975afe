"""A store with a journal, whose controller is killed: what others notice of it is that it takes a moment."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from skipper import torchstore as ts
from skipper.control import ControlError, this_proc
from skipper.torchstore.clients.pinning import PinnedBlock
from skipper.torchstore.controller import succession
from skipper.torchstore.protocol.batches import BatchGrant
from tests.freezing import freeze
from tests.torchstore import controller_kills
from tests.torchstore.actors import Keeper, fill_model, make_model

KEY = "model"


@pytest.fixture
async def journaled() -> AsyncIterator[None]:
    await ts.initialize(journal=True, timeout=100)
    yield
    await ts.shutdown()


async def controller(after: int = -1) -> Any:
    """The one that is there now."""
    client = await ts.client()
    return await client.remote.entrance.successor.call_one(after, 60.0)


async def kill() -> int:
    """Kill the controller. Returns its number, when nobody has noticed yet."""
    found = await controller()
    os.kill(found.process.pid, signal.SIGKILL)
    life: int = found.life
    return life


async def leases(after: int = -1) -> int:
    """How many there are, by a controller after one that was killed."""
    count: int = await (await controller(after)).actor.count_leases.call_one()
    return count


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + 30
    while not await condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


async def until_given_back(life: int, what: str) -> None:
    """Wait until a controller after one that was killed knows of no reader."""

    async def are_given_back() -> bool:
        return await leases(life) == 0

    await until(are_given_back, what)


def memory() -> list[int]:
    """The descriptors of journals in this process."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if "skipper-journal" in os.readlink(entry):
                found.append(int(entry.name))
    return found


def is_gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


@pytest.mark.usefixtures("journaled")
async def test_what_was_put_is_there_after_the_controller_and_goes_on_from_there() -> None:
    big, model = torch.randn(1 << 16), make_model(share=False)
    await ts.put("big", big)
    await ts.put("small", {"answer": 42})
    await ts.put_batch({f"batch/{number}": torch.full((8192,), float(number)) for number in range(5)})
    for seed in (1, 2, 3):
        fill_model(model, seed)
        assert await ts.put_state_dict(model, KEY, keep=3) == seed
    keys = await ts.keys()
    for life in (1, 2):
        await kill()
        assert torch.equal(await ts.get("big"), big)
        assert await ts.get("small") == {"answer": 42}
        assert (await ts.get("batch/3")).tolist() == [3.0] * 8192
        assert await ts.keys() == keys
        assert await ts.versions(KEY) == ((1, 2, 3) if life == 1 else (1, 2))
        if life == 1:
            await ts.get_state_dict(KEY, model, version=2)
            assert {int(value) for tensor in model.values() for value in tensor.unique()} == {2}
            await ts.rollback(KEY, 2)
    await ts.delete("big")
    await kill()
    with pytest.raises(ts.KeyNotFoundError):
        await ts.get("big")
    assert await ts.put_state_dict(model, KEY) == 4, "numbers are never given again"


@pytest.mark.usefixtures("journaled")
async def test_puts_under_way_are_done_once(peers: Any) -> None:
    sizes = [4] * 60 + [4096] * 20

    async def put(number: int, size: int) -> None:
        await ts.put(f"k{number}", torch.full((size,), float(number)), timeout=60)
        await ts.put(f"k{number}", torch.full((size,), -float(number)), timeout=60)

    puts = [asyncio.ensure_future(put(number, size)) for number, size in enumerate(sizes)]
    await asyncio.sleep(0.01)
    await kill()
    await asyncio.gather(*puts)
    for number, size in enumerate(sizes):
        assert (await ts.get(f"k{number}")).tolist() == [-float(number)] * size
    assert {(await ts.get_meta(f"k{number}")).version for number in range(len(sizes))} == {2}


@pytest.mark.usefixtures("journaled")
async def test_who_waits_for_a_version_gets_it_from_the_next_one(peers: Any) -> None:
    publisher, reader = peers.slice(gpus=0), peers.slice(gpus=1)
    await publisher.put_state_dict.call_one(KEY, 1, "snapshot")
    waiting = reader.get_state_dict.call_one(KEY, ("newer_than", 1), 60.0)
    await asyncio.sleep(0.2)
    await kill()
    await publisher.put_state_dict.call_one(KEY, 2, "snapshot")
    assert await waiting == {2}


@pytest.mark.usefixtures("journaled")
@pytest.mark.parametrize("mode", ["snapshot", "direct"])
async def test_a_version_that_is_read_stays_while_controllers_come_and_go(peers: Any, mode: Any) -> None:
    publisher, reader = peers.slice(gpus=0), peers.slice(gpus=1)
    await publisher.put_state_dict.call_one(KEY, 1, mode)
    await reader.lease.call_one(KEY)
    life = await kill()
    assert await leases(life) == 1
    if mode == "direct":
        with pytest.raises(ControlError, match="still being read"):
            await publisher.fence.call_one(KEY, 0.5)
    else:
        pinned = await (await ts.client()).pin(KEY, timeout=20)
        into = torch.zeros(512, 512)
        for seed in range(2, 6):
            await publisher.put_state_dict.call_one(KEY, seed, mode)
            if seed == 3:
                life = await kill()
        await pinned.read([PinnedBlock("0.weight", (0, 0), into)], 20.0)
        assert into.unique().tolist() == [1.0]
        pinned.release()
    await reader.end_lease.call_one()

    await until_given_back(life, "leases are left")
    if mode == "direct":
        await publisher.fence.call_one(KEY, 20.0)


@pytest.mark.usefixtures("journaled")
async def test_a_lease_that_is_given_back_to_nobody_is_not_kept(peers: Any) -> None:
    """An idle reader whose last word was not heard says it again, without being asked."""
    reader = peers.slice(gpus=1)
    await ts.put(KEY, torch.ones(1 << 16))
    await reader.lease.call_one(KEY)
    frozen = await controller()
    freeze(frozen.process.pid)
    await reader.end_lease.call_one()
    os.kill(frozen.process.pid, signal.SIGKILL)
    life = frozen.life

    await until_given_back(life, "the lease is left")


@pytest.mark.usefixtures("journaled")
async def test_answers_that_did_not_arrive_hold_nothing() -> None:
    """A frozen controller has granted what nobody was told of."""
    await ts.put(KEY, torch.ones(1 << 16))
    await ts.put_batch({f"b{number}": torch.ones(1 << 14) for number in range(3)})
    remote = (await ts.client()).remote
    state = (await controller()).actor
    for _ in range(3):
        await state.acquire.call_one(remote.info.client, KEY, None, None, "", 20.0)  # past the client's account
        granted = await state.acquire_values.call_one(remote.info.client, ("b0", "b1"), 20.0)
        assert isinstance(granted, BatchGrant)
    assert await leases() == 6
    life = await kill()
    assert (await ts.get(KEY)).sum() == 1 << 16

    await until_given_back(life, "leases are left")


@pytest.mark.usefixtures("journaled")
async def test_a_reader_that_dies_without_a_controller_is_missed_by_the_next_one() -> None:
    keeper = this_proc().spawn("keeper", Keeper)
    (victim,) = [await keeper.spawn.call_one()]
    await ts.put(KEY, torch.ones(1 << 16))
    await victim.lease.call_one(KEY)
    victim_pid = await victim.pid.call_one()
    assert await leases() == 1
    life = await kill()
    os.kill(victim_pid, signal.SIGKILL)

    await until_given_back(life, "the lease of the dead is left")
    await keeper.stop()


@pytest.mark.usefixtures("journaled")
async def test_a_volume_that_dies_is_told_of_by_the_next_one() -> None:
    await ts.put("big", torch.ones(1 << 16))
    (volume,) = (await ts.client()).remote.info.processes.values()
    assert volume.pid != os.getpid(), "a journal is of no use where the volume is in the script"
    await kill()
    os.kill(volume.pid, signal.SIGKILL)

    async def is_lost() -> bool:
        with suppress(ts.VolumeLostError):
            await ts.get("big")
            return False
        return True

    await until(is_lost, "the volume is not missed")
    await ts.put("small", 1)
    assert await ts.get("small") == 1


async def test_memory_is_freed_that_a_lost_controller_had_no_time_to_free() -> None:
    nbytes = 1 << 22
    await ts.initialize(journal=True, volume_nbytes=4 * nbytes, timeout=100)
    try:
        for number in range(12):
            await ts.put(f"k{number}", torch.full((nbytes // 4,), float(number)))
            if number % 3 == 2:
                await kill()
            await ts.delete(f"k{number}")
        (volume,) = (await ts.client()).remote.info.volumes.values()

        async def is_empty() -> bool:
            used: tuple[int, int] = await volume.usage.call_one()
            return used[1] <= nbytes

        await until(is_empty, "arenas are left")
    finally:
        await ts.shutdown()


async def test_a_store_is_shut_down_wholly_and_begun_anew_without_a_journal(peers: Any) -> None:
    before = memory()
    await ts.initialize(journal=True, timeout=100)
    await ts.put("k", torch.ones(1 << 16))
    assert (await peers.slice(gpus=0).get.call_one("k")).sum() == 1 << 16
    await kill()
    await ts.put("k", torch.ones(1 << 16))
    pid = (await controller()).process.pid
    waiting = peers.slice(gpus=1).get_state_dict.call_one("never", ("newer_than", 0), 60.0)
    await asyncio.sleep(0.2)
    assert len(memory()) == len(before) + 2
    await ts.shutdown()
    with pytest.raises(ControlError, match="not initialized"):
        await waiting
    assert memory() == before
    assert is_gone(pid)
    await ts.initialize()
    try:
        with pytest.raises(ControlError, match="KeyNotFoundError"):
            await peers.slice(gpus=0).get.call_one("k")
        await peers.slice(gpus=0).put.call_one("k", 7)
        assert await ts.get("k") == 7
    finally:
        await ts.shutdown()


async def test_two_stores_have_journals_of_their_own() -> None:
    for name in ("one", "two"):
        await ts.initialize(store_name=name, journal=True, timeout=100)
        await ts.put("k", name, name)
    client = await ts.client("one")
    first = await client.remote.entrance.successor.call_one(-1, 60.0)
    os.kill(first.process.pid, signal.SIGKILL)
    assert [await ts.get("k", store_name=name) for name in ("one", "two")] == ["one", "two"]
    await ts.shutdown("one")
    assert await ts.get("k", store_name="two") == "two"
    await ts.shutdown("two")


async def test_a_controller_that_fails_again_and_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    before = memory()
    monkeypatch.setattr(succession, "_DEATHS", 1)
    await ts.initialize(journal=True, timeout=100)
    try:
        await ts.put("k", 1)
        await kill()
        assert await ts.get("k") == 1
        await kill()
        for _ in range(2):
            with pytest.raises(ts.ControllerLostError, match="failed too often"):
                await ts.get("k")
    finally:
        await ts.shutdown()
    assert memory() == before


async def test_a_journal_that_cannot_be_read_is_the_end_of_the_store() -> None:
    before = memory()
    await ts.initialize(journal=True, timeout=100)
    try:
        await ts.put("k", 1)
        for fd in set(memory()).difference(before):
            os.pwrite(fd, bytes(28), 0)
        await kill()
        with pytest.raises(ts.ControllerLostError, match="no header"):
            await ts.get("k")
    finally:
        await ts.shutdown()


def is_ours(pid: int) -> bool:
    """Whether a process was started by this one, or by one that was."""
    while pid > 1 and pid != os.getpid():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == os.getpid()


def controllers() -> dict[int, int]:
    """The process ids of all controllers of the default store, by their numbers: that which acts, and the spare one."""
    found = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            words = (entry / "cmdline").read_text().split("\0") if entry.name.isdecimal() else []
            name = next((word for word in words if word.startswith("torchstore-default-controller.")), "")
            if name and is_ours(int(entry.name)):
                found[int(name.split(".")[1].partition("{")[0])] = int(entry.name)
    return dict(sorted(found.items()))


async def both_controllers() -> dict[int, int]:
    """`controllers`, once the spare one is there: the store is there before it is."""

    async def are_there() -> bool:
        return len(controllers()) == 2

    await until(are_there, "there are no controllers")
    return controllers()


@pytest.mark.parametrize("which", [0, -1])
async def test_a_controller_that_dies_while_the_store_begins_is_followed_too(which: int) -> None:
    beginning = asyncio.ensure_future(ts.initialize(journal=True, timeout=100))
    os.kill(list((await both_controllers()).values())[which], signal.SIGKILL)
    await beginning
    try:
        await ts.put("k", 1)
        await kill()
        assert await ts.get("k") == 1
    finally:
        await ts.shutdown()
    assert controllers() == {}


@pytest.mark.usefixtures("journaled")
async def test_spare_controllers_that_die_are_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "_DEATHS", 2)  # of that which acts, and of a spare one that dies as it is needed
    monkeypatch.setattr(succession, "_SPARE_BACKOFF_S", 0.01)
    await ts.put("k", 1)
    killed: set[int] = set()
    for _ in range(3):

        async def is_another() -> bool:
            there = controllers()
            return len(there) == 2 and max(there) not in killed

        await until(is_another, "there is no spare controller")
        spare = max(controllers())
        os.kill(controllers()[spare], signal.SIGKILL)
        killed.add(spare)
    await kill()
    assert await ts.get("k") == 1


@pytest.mark.usefixtures("journaled")
async def test_who_has_little_time_does_not_wait_as_long_as_others() -> None:
    await ts.put("k", 1)
    there = await both_controllers()
    freeze(there[max(there)])  # nobody can take its place
    await kill()
    patient = asyncio.ensure_future(ts.get("k", timeout=60))
    await asyncio.sleep(0.3)
    with pytest.raises(ts.StoreTimeoutError):
        await ts.get("k", timeout=0.5)
    gone = asyncio.ensure_future(ts.get("k", timeout=60))
    await asyncio.sleep(0.1)
    gone.cancel()
    assert not patient.done()
    os.kill(there[max(there)], signal.SIGCONT)
    assert await patient == 1
    assert await ts.get("k") == 1


async def test_a_frozen_controller_does_not_hold_up_a_shutdown() -> None:
    await ts.initialize(journal=True, timeout=100)
    await ts.put("k", 1)
    for pid in (await both_controllers()).values():
        freeze(pid)
    await ts.shutdown()
    assert controllers() == {}


async def test_a_client_of_a_store_without_a_journal_finds_the_next_one_with_one(peers: Any) -> None:
    peer = peers.slice(gpus=0)
    await ts.initialize()
    await ts.put("k", 1)
    assert await peer.get.call_one("k") == 1
    await ts.shutdown()
    await ts.initialize(journal=True, timeout=100)
    try:
        await ts.put("k", 2)
        assert await peer.get.call_one("k") == 2
        await kill()
        assert await peer.get.call_one("k") == 2
    finally:
        await ts.shutdown()


async def test_a_death_while_nobody_asks_is_made_good_all_the_same() -> None:
    await ts.initialize(journal=True, timeout=100)
    try:
        await ts.put("k", 1)
        life = await kill()
        assert (await controller(life)).life > life
    finally:
        await ts.shutdown()


async def test_publishers_and_readers_under_kills_lose_and_mix_nothing() -> None:
    report = await controller_kills.run(kills=4, publishers=2, readers=3, pause_s=1.5, seed=1)
    assert report.faults == []
    assert report.left == 0
    assert report.kills == 4
    assert min(report.put, report.got) > 0
