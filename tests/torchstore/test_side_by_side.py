"""Features that meet: entries put by themselves, batches, refusals, copies, direct mode and deaths, two at a time."""

import asyncio
import contextlib

import pytest
import torch
import torch.distributed.checkpoint as dcp

from skipper import torchstore as ts
from skipper.torchstore.algebra.manifest import Binding
from skipper.torchstore.clients.membership import Membership, PutCounts
from skipper.torchstore.controller.history import History
from skipper.torchstore.controller.index import Index
from skipper.torchstore.controller.ledger import Ledger
from skipper.torchstore.controller.members import Members
from skipper.torchstore.dcp import StoreReader, StoreWriter
from skipper.torchstore.errors import OutOfStepError
from skipper.torchstore.protocol.messages import Published, StaleClientError
from skipper.torchstore.protocol.origin import Origin, Turn
from skipper.torchstore.support.process import this_process
from tests.torchstore.controller.test_history import process, shard

LARGE = 1 << 20


async def volume_nbytes() -> int:
    remote = (await ts.client()).remote
    _, nbytes = await next(iter(remote.info.volumes.values())).usage.call_one()
    return int(nbytes)


def whole(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((LARGE,), value), "w": torch.full((LARGE,), value)}


@pytest.mark.usefixtures("store")
async def test_a_state_dict_is_never_read_with_an_entry_of_another_version() -> None:
    await ts.put_state_dict(whole(1), "m")

    async def write() -> None:
        for number in range(2, 60):
            await ts.put("m/w", torch.full((LARGE,), number - 0.5))
            await ts.put_state_dict(whole(number), "m")

    writing = asyncio.ensure_future(write())
    seen = set()
    while not writing.done():
        state = await ts.get_state_dict("m")
        seen.add((state["a"][0].item(), state["w"][0].item()))
    await writing
    assert {entry - number for number, entry in seen} <= {0.0, 0.5}


@pytest.mark.usefixtures("store")
async def test_a_batch_that_is_refused_leaves_no_lease_behind() -> None:
    for key in ("x", "y"):
        await ts.put_state_dict(whole(1), key)
    await ts.delete("y/a")
    held = []
    for number in range(4):
        with pytest.raises(ts.KeyNotFoundError, match="y/a"):
            await ts.get_batch(["x/a", "y"])
        await ts.put_state_dict(whole(number), "x")
        held.append(await volume_nbytes())
    assert len(set(held[1:])) == 1


@pytest.mark.usefixtures("store")
async def test_batches_leave_the_memory_of_other_puts_to_those() -> None:
    held = []
    for number in range(6):
        await ts.put_state_dict(whole(number), "m")
        await ts.get_state_dict("m")
        await ts.put_batch({f"{number}/{name}": torch.ones(9000) for name in "ab"})
        await ts.delete_batch([f"{number}/{name}" for name in "ab"])
        held.append(len((await ts.client()).publisher.snapshots.arenas._all))
    assert held[-1] <= 2


@pytest.mark.usefixtures("store")
async def test_what_was_published_directly_again_stays_registered() -> None:
    weights = {"w": torch.ones(LARGE)}
    await ts.put_state_dict(weights, "m", mode="direct")
    remote = (await ts.client()).remote
    await remote.delete(("m",), missing_ok=False, timeout=60)  # by somebody else: this publisher is not told
    await ts.put_state_dict(weights, "m", mode="direct")
    assert torch.equal((await ts.get_state_dict("m"))["w"], weights["w"])


@pytest.mark.usefixtures("store")
async def test_a_rollback_takes_the_place_of_entries_put_since() -> None:
    for number in (1, 2):
        await ts.put_state_dict(whole(number), "m", keep=3)
    await ts.put("m/w", torch.full((LARGE,), 2.5))
    await ts.rollback("m", 1)
    assert (await ts.get_state_dict("m"))["w"][0] == 1


@pytest.mark.usefixtures("store")
async def test_two_entries_of_one_memory_are_refused_also_if_one_was_put_by_itself() -> None:
    weight = torch.zeros(LARGE)
    await ts.put_state_dict({"a": weight, "b": weight}, "m")
    await ts.put("m/a", torch.ones(LARGE))
    mine = torch.zeros(LARGE)
    with pytest.raises(ts.DestinationOverlapError):
        await ts.get_state_dict("m", {"a": mine, "b": mine})


@pytest.mark.usefixtures("store")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
async def test_dcp_counts_its_writes_and_reads_no_entry_that_was_put_since() -> None:
    loaded = {"w": torch.zeros(LARGE)}
    await asyncio.to_thread(dcp.save, {"w": torch.ones(LARGE)}, storage_writer=StoreWriter("ck"))
    before = loaded["w"]._version
    await asyncio.to_thread(dcp.load, loaded, storage_reader=StoreReader("ck"))
    assert loaded["w"]._version > before
    await ts.put("ck/w", torch.zeros(LARGE))
    with pytest.raises(dcp.api.CheckpointException, match="put again by itself"):
        await asyncio.to_thread(dcp.load, loaded, storage_reader=StoreReader("ck"))
    await asyncio.to_thread(dcp.load, loaded, storage_reader=StoreReader("ck", version=1))


def test_a_share_that_was_refused_anywhere_tells_so_with_the_next() -> None:
    sequences, member = PutCounts(), Membership(Origin("group", 1, 2))
    for refused, error in enumerate((ts.ShareMismatchError("k", "other"), ts.LateShareError("k", 1, 2, 2, "gone"))):
        turn = sequences.next("k", member, None, alone=False)
        assert (turn.number, turn.refused) == (refused + 1, refused)
        sequences.failed("k", member, turn, error)
    turn = sequences.next("k", member, None, alone=False)
    assert (turn.number, turn.refused) == (3, 2)
    sequences.failed("k", member, turn, OutOfStepError("k", "ahead"))
    with pytest.raises(OutOfStepError, match="say which version"):
        sequences.next("k", member, None, alone=False)
    assert sequences.next("k", member, 7, alone=False).refused is None
    sequences.settled("k", member, Published(7, True, 9))
    assert sequences.next("k", member, None, alone=False) == Turn(member.origin, turn.session, 10, False, 0)


def test_nothing_is_taken_from_a_process_that_has_died() -> None:
    members = Members("s")
    number = members.welcome(process(0))
    members.process_died(process(0))
    with pytest.raises(StaleClientError):
        members.process_of(number)


def test_all_copies_of_a_refused_share_are_idle_again() -> None:
    idle: list[str] = []
    index = Index(lambda _writer, binding: idle.append(binding.id), lambda _: None, lambda _: None)
    index.contribute("k", shard(0), None)
    index.contribute("k", shard(1), None)
    copy = Binding("copy", "snapshot", "v1", ())
    refused = shard(0, step=2, binding="first")
    refused = type(refused)(**{name: getattr(refused, name) for name in refused.__slots__} | {"copies": (copy,)})
    with contextlib.suppress(ts.VersionExistsError):
        index.contribute("k", refused, 1)
    assert {"first", "copy"} <= set(idle)


def test_a_number_that_is_agreed_on_ends_the_version_before() -> None:
    history = History("k")
    number = history.reserve()
    history.contribute(shard(0), number)
    assert history.staging
    history.reserve()
    assert not history.staging


def test_memory_that_is_published_again_is_not_told_of_as_retired() -> None:
    ledger = Ledger(lambda _volume, _arena: None)
    direct = Binding("memory", "direct", "", ())
    me = this_process()
    ledger.idle(me, direct)
    ledger.in_use(direct)
    assert ledger.take_retired(me) == ()
