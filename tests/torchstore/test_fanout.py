"""Readers that feed readers: the publisher gives one model, and a copy that goes costs nobody more than a read."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchstore as ts
from control import this_proc
from tests.torchstore.fanout import Family, kill
from torchstore.manifest import Mode

ROWS, READERS = 400, 3

pytestmark = pytest.mark.usefixtures("store")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """Readers in processes of their own; the last one is killed by the last test."""
    family = this_proc().spawn("family", Family, READERS, ROWS)
    yield family.spawn.call_one().get(timeout=20)
    family.stop().get(timeout=20)


def model_of(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((ROWS, 1024), float(value)), "b": torch.full((5000,), float(value))}


NBYTES = sum(tensor.nbytes for tensor in model_of(0).values())


@pytest.mark.parametrize("mode", ["snapshot", "direct"])
async def test_the_publisher_feeds_one_of_many_readers(mode: Mode, mesh: Any) -> None:
    model = model_of(0)
    for number in range(1, 5):
        await ts.fence("m")
        for tensor in model.values():
            tensor.fill_(number)
        waiting = mesh.read.call("m", number - 1)
        await ts.put_state_dict(model, "m", mode=mode)
        answers = list(await waiting)
        assert {value for value, _, _ in answers} == {number}
        assert sum(own for _, own, _ in answers) == NBYTES
        assert sum(lent for _, _, lent in answers) == (READERS - 1) * NBYTES
    assert max(await mesh.calls.call()) <= 2


async def test_what_is_lent_is_proved_by_the_publishers_sums(mesh: Any) -> None:
    await ts.put_state_dict(model_of(3), "m", checksum=True)
    for rank in range(READERS):
        value, own, _ = await mesh.slice(gpus=rank).read.call_one("m", 0)
        assert value == 3
        assert own < NBYTES / 50 or rank == 0


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


async def test_a_copy_overwritten_under_a_reader_sends_it_to_the_publisher(mesh: Any) -> None:
    one, other = mesh.slice(gpus=0), mesh.slice(gpus=1)
    await ts.put_state_dict(model_of(3), "m")
    await one.read.call_one("m", 0)
    await other.stop_before_reading.call_one()  # when it has been sent to the copy of the first
    assert (await other.begin.call_one("m", 0)) is True
    await ts.put_state_dict(model_of(4), "m")
    assert (await one.read.call_one("m", 1))[0] == 4  # overwrites its copy
    assert await other.go_on.call_one() == (3, NBYTES, 0)


async def test_a_copy_whose_owner_is_killed_sends_its_reader_to_the_publisher(mesh: Any) -> None:
    victim, other, third = mesh.slice(gpus=READERS - 1), mesh.slice(gpus=0), mesh.slice(gpus=1)
    await ts.put_state_dict(model_of(3), "m")
    assert await victim.read.call_one("m", 0) == (3, NBYTES, 0)
    await other.stop_before_reading.call_one()
    assert (await other.begin.call_one("m", 0)) is True
    await kill(victim)
    assert await other.go_on.call_one() == (3, NBYTES, 0)
    assert await third.read.call_one("m", 0) == (3, 0, NBYTES)  # from the other, which has it now


async def test_names_and_new_tensors_cannot_be_served() -> None:
    with pytest.raises(ValueError, match="serve=True"):
        await ts.get_state_dict("m", serve=True)
    with pytest.raises(ValueError, match="names="):
        await ts.get_state_dict("m", model_of(0), serve=True, names=lambda name: name)
