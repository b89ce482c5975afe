"""Readers that feed readers: the publisher gives one model, and a copy that goes costs nobody more than a read."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from skipper import torchstore as ts
from skipper.control import ActorError, this_proc
from skipper.torchstore.algebra.manifest import Mode
from tests.torchstore.fanout import Family, frozen, kill

ROWS, READERS = 400, 3  # and one more process: it reads over TCP, and publishes until it is killed

pytestmark = pytest.mark.usefixtures("store")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """Processes, of which the last tests kill one after the other."""
    family = this_proc().spawn("family", Family, READERS + 1, ROWS)
    yield family.spawn.call_one().get(timeout=20)
    family.stop().get(timeout=20)


def model_of(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((ROWS, 1024), float(value)), "b": torch.full((5000,), float(value))}


NBYTES = sum(tensor.nbytes for tensor in model_of(0).values())


@pytest.mark.parametrize("mode", ["snapshot", "direct"])
async def test_the_publisher_feeds_one_of_many_readers(mode: Mode, mesh: Any) -> None:
    model, readers = model_of(0), mesh.slice(gpus=slice(READERS))
    for number in range(1, 5):
        await ts.fence("m")
        for tensor in model.values():
            tensor.fill_(number)
        waiting = readers.read.call("m", number - 1)
        await ts.put_state_dict(model, "m", mode=mode)
        answers = list(await waiting)
        assert {value for value, _, _ in answers} == {number}
        assert sum(own for _, own, _ in answers) == NBYTES
        assert sum(lent for _, _, lent in answers) == (READERS - 1) * NBYTES
    assert max(await readers.calls.call()) <= 2


async def test_what_is_lent_is_proved_by_the_publishers_sums(mesh: Any) -> None:
    await ts.put_state_dict(model_of(3), "m", checksum=True)
    for rank in range(READERS):
        value, own, _ = await mesh.slice(gpus=rank).read.call_one("m", 0)
        assert value == 3
        assert own < NBYTES / 50 or rank == 0


@pytest.mark.parametrize("checksum", [False, True])
async def test_what_was_dequantized_is_lent_unless_sums_have_to_prove_it(checksum: bool, mesh: Any) -> None:
    readers = mesh.slice(gpus=slice(READERS))
    for number, value in enumerate((448.0, 224.0)):  # of which a block's scale makes itself again
        waiting = readers.read.call("m", number)
        await ts.put_state_dict(model_of(value), "m", transfer_dtype=ts.BlockFP8(), checksum=checksum)
        answers = list(await waiting)
        assert {found for found, _, _ in answers} == {value}
        assert sum(lent for _, _, lent in answers) == (0 if checksum else (READERS - 1) * NBYTES)
        feeds = sum(own > 0 for _, own, _ in answers)
        assert feeds == (READERS if checksum else 1)


async def test_a_delta_after_another_readers_copy_of_dequantized_values_is_what_was_published(mesh: Any) -> None:
    model, mine = model_of(448), model_of(0)
    await ts.put_state_dict(model, "m", transfer_dtype=ts.BlockFP8(), delta=True)
    await mesh.slice(gpus=0).read.call_one("m", 0)
    await ts.get_state_dict("m", mine, serve=True, delta=True)
    model["w"][0, :128] = 224
    await ts.put_state_dict(model, "m", transfer_dtype=ts.BlockFP8(), delta=True)
    await ts.get_state_dict("m", mine, serve=True, delta=True)
    torch.testing.assert_close(mine, model, rtol=0, atol=0)


async def test_a_reader_with_other_boxes_is_fed_by_the_publisher(mesh: Any) -> None:
    await ts.put_state_dict(model_of(3), "m")
    await mesh.slice(gpus=0).read.call_one("m", 0)
    mine = {"w": torch.zeros(ROWS, 1024)}
    await ts.get_state_dict("m", mine, strict=False, serve=True)
    record = ts.last_sync()
    assert record is not None
    assert record.lent_nbytes == 0
    assert bool((mine["w"] == 3).all())


async def test_a_copy_that_its_owner_takes_back_by_a_fence_is_not_read(mesh: Any) -> None:
    one, other = mesh.slice(gpus=0), mesh.slice(gpus=1)
    await ts.put_state_dict(model_of(3), "m")
    await one.read.call_one("m", 0)
    await one.scribble.call_one(8)
    assert await other.read.call_one("m", 0) == (3, NBYTES, 0)


@pytest.mark.parametrize("seals", [True, False])
async def test_a_copy_overwritten_under_a_reader_sends_it_to_the_publisher(mesh: Any, seals: bool) -> None:
    one, other = mesh.slice(gpus=0), mesh.slice(gpus=1)
    await ts.put_state_dict(model_of(3), "m")
    await one.read.call_one("m", 0)
    await other.stop_before_reading.call_one(seals)  # when it has been sent to the copy of the first
    assert (await other.begin.call_one("m", 0)) is True
    await ts.put_state_dict(model_of(4), "m")
    assert (await one.read.call_one("m", 1))[0] == 4  # overwrites its copy
    assert await other.go_on.call_one() == (3, NBYTES, 0)


async def test_names_and_layouts_decide_who_can_feed_whom(mesh: Any) -> None:
    stored = {name: torch.randn(16, 8) for name in "ab"}
    half = stored["a"].nbytes
    for like in ("plain", "sharded"):
        await ts.put_state_dict(stored, "f")
        for reader, rank in enumerate((0, 0, 1) if like == "plain" else (0, 0)):
            got, own, fed, lent = await mesh.slice(gpus=reader).read_fused.call_one(rank, like, reader)
            assert torch.equal(got, torch.cat([tensor.chunk(2)[rank] for tensor in stored.values()]))
            assert own == reader
            assert (fed, lent) == ((0, half) if reader == 1 else (half, 0))


async def test_a_tensor_that_is_not_stored_is_not_taken_from_a_copy(mesh: Any) -> None:
    await ts.put_state_dict({"a": torch.randn(16, 8)}, "f")
    assert await mesh.slice(gpus=0).read_beside.call_one(1) == (1, 0)
    assert await mesh.slice(gpus=1).read_beside.call_one(2) == (2, 16 * 8 * 4)


async def test_a_reader_that_is_stuck_holds_up_the_others_of_its_kind_for_part_of_their_time(mesh: Any) -> None:
    stuck, other = mesh.slice(gpus=0), mesh.slice(gpus=1)
    await ts.put_state_dict(model_of(4), "m")
    await stuck.stop_before_reading.call_one()
    assert (await stuck.begin.call_one("m", 0)) is True
    assert await other.read.call_one("m", 0, timeout=4) == (4, NBYTES, 0)
    assert await stuck.go_on.call_one() == (4, NBYTES, 0)


async def test_a_frozen_copy_is_read_or_gone_round(mesh: Any) -> None:
    one, other = mesh.slice(gpus=0), mesh.slice(gpus=1)
    await ts.put_state_dict(model_of(5), "m")
    await one.read.call_one("m", 0)
    async with frozen(one):
        value, fed, lent = await other.read.call_one("m", 0)
    assert (value, fed + lent) == (5, NBYTES)
    await ts.put_state_dict(model_of(6), "m")
    assert (await one.read.call_one("m", 1))[0] == 6


async def test_a_frozen_owner_that_has_to_take_part_is_given_up_within_the_bound(mesh: Any) -> None:
    one, other = mesh.slice(gpus=0), mesh.slice(gpus=READERS)
    await other.use_transport.call_one("posix,self")  # over which nothing is read without the owner's help
    await ts.put_state_dict(model_of(5), "m")
    await one.read.call_one("m", 0)
    await other.stop_before_reading.call_one()
    assert (await other.begin.call_one("m", 0, 4.0)) is True
    async with frozen(one):
        assert await other.go_on.call_one() == (5, NBYTES, 0)
    assert (await one.read.call_one("m", 0))[:2] == (5, 0)  # and now the other has it to lend


async def test_a_copy_whose_owner_is_killed_sends_its_reader_to_the_publisher(mesh: Any) -> None:
    victim, other, third = mesh.slice(gpus=2), mesh.slice(gpus=0), mesh.slice(gpus=1)
    await ts.put_state_dict(model_of(3), "m")
    assert await victim.read.call_one("m", 0) == (3, NBYTES, 0)
    await other.stop_before_reading.call_one()
    assert (await other.begin.call_one("m", 0)) is True
    await kill(victim)
    assert await other.go_on.call_one() == (3, NBYTES, 0)
    assert await third.read.call_one("m", 0) == (3, 0, NBYTES)  # from the other, which has it now


async def test_a_reader_whose_lender_and_publisher_are_killed_is_told_who_is_lost(mesh: Any) -> None:
    publisher, lender, reader = mesh.slice(gpus=READERS), mesh.slice(gpus=1), mesh.slice(gpus=0)
    await publisher.publish.call_one("d", 7)
    assert await lender.read.call_one("d", 0) == (7, NBYTES, 0)
    await reader.stop_before_reading.call_one(seals=False)
    assert (await reader.begin.call_one("d", 0)) is True
    for process in (publisher, lender):
        await kill(process)
    with pytest.raises(ActorError, match="PublisherLostError"):
        await reader.go_on.call_one()


async def test_new_tensors_and_none_at_all_cannot_be_served() -> None:
    with pytest.raises(ValueError, match="user_state_dict"):
        await ts.get_state_dict("m", serve=True)
    with pytest.raises(ValueError, match="the destination has none"):
        await ts.get_state_dict("m", {"step": 0}, serve=True)
