"""Deltas: what did not change is not moved, what is there afterwards is the version to its last bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from skipper import torchstore as ts
from skipper.torchstore.algebra.layout import Box
from skipper.torchstore.clients.delta_read import _blocks
from skipper.torchstore.tensors.cells import cell_shape, cells, grid_shape, grid_slice, region, whole_cells
from tests.torchstore.tensors.test_cells import boxes
from tests.torchstore.tensors.test_checksums import flip
from tests.torchstore.tensors.test_local_tensors import rank_of

pytestmark = pytest.mark.usefixtures("store")


def model_of(seed: int = 0) -> dict[str, torch.Tensor]:
    """5 MiB; NaNs among the elements."""
    generator = torch.Generator().manual_seed(seed)
    model = {
        "w": torch.randn(1024, 1024, generator=generator),
        "strided": torch.randn(200, 500, generator=generator).t(),
        "experts": torch.randn(3, 130, 100, generator=generator).to(torch.bfloat16),
        "bias": torch.randn(9000, generator=generator),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(1.5),
    }
    model["w"][5, 5] = float("nan")
    return model


def zeros_of(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in model.items()}


def same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)

    return left.keys() == right.keys() and all(torch.equal(raw(left[name]), raw(right[name])) for name in right)


async def sync(model: dict[str, torch.Tensor], mine: dict[str, torch.Tensor], **options: Any) -> ts.SyncRecord:
    """One put and one get of a delta; what the get did."""
    await ts.put_state_dict(model, "m", delta=True, **options)
    await ts.get_state_dict("m", mine, delta=True)
    record = ts.last_sync()
    assert record is not None
    return record


async def test_only_changed_cells_are_read_and_the_result_is_the_version_to_its_last_bit() -> None:
    model = model_of()
    mine, whole = zeros_of(model), sum(tensor.nbytes for tensor in model.values())
    assert (await sync(model, mine)).nbytes == whole
    model["w"][300, 700] += 1
    model["w"][5, 6] = float("nan")
    model["strided"][499, 0] = -0.0
    model["experts"][1, 60:70, 99] = 3
    model["bias"][4096] = 7
    record = await sync(model, mine)
    assert same_bits(mine, model)
    assert record.nbytes + record.saved_nbytes == whole
    assert 0 < record.nbytes < whole / 20
    record = await sync(model, mine)
    assert (record.nbytes, record.segments, record.saved_nbytes) == (0, 0, whole)
    model["scalar"].fill_(2.5)
    record = await sync(model, mine)
    assert same_bits(mine, model)
    assert record.nbytes == 4


async def test_a_zero_that_becomes_negative_has_changed() -> None:
    model = {"w": torch.zeros(640, 640)}
    mine = zeros_of(model)
    await sync(model, mine)
    model["w"][17, 17] = -0.0
    assert (await sync(model, mine)).nbytes == 64 * 64 * 4
    assert same_bits(mine, model)


async def test_many_changes_are_read_by_the_plan_of_the_whole() -> None:
    model = model_of()
    mine = zeros_of(model)
    await sync(model, mine)
    for tensor in model.values():
        tensor += 1
    record = await sync(model, mine)
    assert record.saved_nbytes == 0
    assert same_bits(mine, model)


async def test_a_reader_that_missed_a_version_reads_everything() -> None:
    model = model_of()
    mine, whole = zeros_of(model), sum(tensor.nbytes for tensor in model.values())
    await sync(model, mine)
    model["w"][0, 0] = 1
    await ts.put_state_dict(model, "m", delta=True)  # not read
    model["w"][900, 900] = 1
    assert (await sync(model, mine)).nbytes == whole
    assert same_bits(mine, model)
    model["w"][500, 500] = 1
    assert (await sync(model, mine)).nbytes < whole / 20
    assert same_bits(mine, model)


async def test_a_version_put_without_delta_breaks_the_chain() -> None:
    model = model_of()
    mine, whole = zeros_of(model), sum(tensor.nbytes for tensor in model.values())
    await sync(model, mine)
    await ts.put_state_dict(model, "m")
    for _ in range(2):
        await ts.get_state_dict("m", mine, delta=True)
        record = ts.last_sync()
        assert record is not None
        assert record.nbytes == whole


async def test_other_tensors_and_reads_without_the_promise_are_filled_whole() -> None:
    model = model_of()
    mine, whole = zeros_of(model), sum(tensor.nbytes for tensor in model.values())
    await sync(model, mine)
    model["w"][0, 0] = 1
    other = zeros_of(model)
    assert (await sync(model, other)).nbytes == whole
    assert same_bits(other, model)
    await ts.get_state_dict("m", other)
    model["w"][0, 0] = 2
    assert (await sync(model, other)).nbytes == whole


async def test_a_key_that_was_deleted_and_put_again_is_another_one() -> None:
    model = model_of()
    mine = zeros_of(model)
    await sync(model, mine)
    await (await ts.client()).remote.delete(("m",), missing_ok=False, timeout=20)  # as by another process
    changed = model_of(1)
    assert await ts.put_state_dict(changed, "m", delta=True) == 1
    changed["w"][0, 0] = 5
    await sync(changed, mine)
    assert same_bits(mine, changed)


async def test_after_a_rollback_the_delta_is_not_taken_for_that_of_the_version_before() -> None:
    await ts.initialize(keep_versions=3, store_name="kept")
    try:
        model = model_of()
        mine = zeros_of(model)
        for number in (1, 2, 3):
            model["w"][number, number] = number
            await ts.put_state_dict(model, "m", "kept", delta=True)
        await ts.rollback("m", 2, store_name="kept")
        await ts.get_state_dict("m", mine, store_name="kept", delta=True)
        assert mine["w"][3, 3] != 3
        model["w"][4, 4] = 4
        await ts.put_state_dict(model, "m", "kept", delta=True)
        await ts.get_state_dict("m", mine, store_name="kept", delta=True)
        assert same_bits(mine, model)
    finally:
        await ts.shutdown("kept")


async def test_checksums_prove_the_promise_and_a_broken_one_costs_a_full_read() -> None:
    model = model_of()
    mine, whole = zeros_of(model), sum(tensor.nbytes for tensor in model.values())
    await sync(model, mine, checksum=True)
    model["w"][0, 0] = 1
    assert (await sync(model, mine, checksum=True)).nbytes < whole / 10
    mine["bias"][70] += 1  # a broken promise
    model["w"][0, 0] = 2
    record = await sync(model, mine, checksum=True)
    assert record.nbytes > whole
    assert record.saved_nbytes == 0
    assert same_bits(mine, model)


async def test_a_wrong_byte_in_the_volume_is_still_an_error() -> None:
    model = {"w": torch.zeros(300, 300)}
    mine = zeros_of(model)
    await ts.put("m", 1)
    await ts.delete("m")
    await ts.put_state_dict(model, "m", delta=True, checksum=True)
    await flip("m", 40)
    with pytest.raises(ts.ChecksumError):
        await ts.get_state_dict("m", mine, delta=True)


async def test_shards_are_compared_where_they_are_and_read_across() -> None:
    whole, mine = torch.zeros(600, 500), {"w": torch.zeros(600, 500)}
    remote = (await ts.client()).remote
    ranks = [ts.LocalClient(replace(remote)) for _ in range(2)]  # this process plays both
    for step in range(4):
        whole[298 + step, 130 * step : 130 * step + 3] = step + 1
        for rank, client in enumerate(ranks):
            with rank_of(rank, 2):
                mesh = init_device_mesh("cpu", (2,))
                shard = DTensor.from_local(whole[300 * rank :][:300], mesh, [Shard(0)], run_check=False)
                await client.put_state_dict({"w": shard}, "d", delta=True)
        await ts.get_state_dict("d", mine, delta=True)
        assert torch.equal(mine["w"], whole)
        record = ts.last_sync()
        assert record is not None
        assert (record.saved_nbytes > whole.nbytes / 2) == (step > 0)


async def test_a_delta_is_explained_before_it_is_read() -> None:
    model = model_of()
    mine, whole = zeros_of(model), sum(tensor.nbytes for tensor in model.values())
    await sync(model, mine)
    model["bias"][0] = 9
    await ts.put_state_dict(model, "m", delta=True)
    explanation = await ts.explain("m", mine, delta=True)
    assert (explanation.nbytes, explanation.saved_nbytes) == (4096 * 4, whole - 4096 * 4)
    assert [(link.nbytes, link.parts) for link in explanation.links] == [(4096 * 4, 1)]
    assert "from the previous version" in str(explanation)
    assert (await ts.explain("m", mine)).nbytes == whole


async def values_of(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is stored, read entry by entry into new tensors; no state dict that is held is touched."""
    fresh = zeros_of(model)
    await ts.get_batch({f"m/{name}": tensor for name, tensor in fresh.items()})
    return fresh


@pytest.mark.parametrize("checksum", [False, True])
async def test_changed_cells_of_a_dequantized_tensor_make_it_that_of_a_full_read(checksum: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    model = {name: torch.randn(500, 384, generator=generator) for name in ("frozen", "moving")}
    mine, nbytes = zeros_of(model), 500 * 384 * 2
    for step in range(4):
        model["moving"][70, 70] += 10.0 if step == 2 else 0.1  # once its block's scale changes, so all of its values do
        await ts.put_state_dict(model, "m", transfer_dtype=ts.BlockFP8((64, 64)), delta=True, checksum=checksum)
        await ts.get_state_dict("m", mine, delta=True)
        record = ts.last_sync()
        assert record is not None
        assert (record.saved_nbytes > nbytes * 0.9) == (step > 0)
        assert same_bits(mine, await values_of(model))


@pytest.mark.parametrize("checksum", [False, True])
async def test_only_checksums_prove_the_promise_about_dequantized_tensors(checksum: bool) -> None:
    model = {name: torch.randn(300, 200) for name in ("frozen", "moving")}
    mine = zeros_of(model)
    for step in range(2):
        model["moving"][0, 0] += step
        mine["frozen"] += step  # a broken promise
        await ts.put_state_dict(model, "m", transfer_dtype=ts.BlockFP8(), delta=True, checksum=checksum)
        await ts.get_state_dict("m", mine, delta=True)
    assert same_bits(mine, await values_of(model)) == checksum


async def test_after_a_read_without_the_promise_a_dequantized_tensor_is_read_whole() -> None:
    model = {"w": torch.randn(500, 384)}
    mine, saved = zeros_of(model), []
    for delta in (True, False, True, True, True):
        model["w"][0, 0] += 1
        await ts.put_state_dict(model, "m", transfer_dtype=ts.BlockFP8(), delta=True)
        await ts.get_state_dict("m", mine, delta=delta)
        record = ts.last_sync()
        assert record is not None
        saved.append(record.saved_nbytes > 0)
        assert same_bits(mine, await values_of(model))
    assert saved == [False, False, False, True, True]


async def test_a_delta_goes_through_names() -> None:
    model = {"q": torch.randn(200, 300), "k": torch.randn(100, 300)}
    mine = {"qk": torch.zeros(300, 300)}
    names = {"qk": ts.Stack("q", "k")}.__getitem__
    for step in range(3):
        model["k"][3, 3] += 1
        await ts.put_state_dict(model, "m", transfer_dtype=ts.BlockFP8(), delta=True)
        await ts.get_state_dict("m", mine, delta=True, names=names)
        record = ts.last_sync()
        assert record is not None
        assert (record.saved_nbytes > 0) == (step > 0)
        assert torch.equal(mine["qk"], torch.cat(list((await values_of(model)).values())))


async def test_a_delta_needs_a_copy_to_compare_with_and_tensors_to_be_in() -> None:
    with pytest.raises(ValueError, match="mode='snapshot'"):
        await ts.put_state_dict(model_of(), "m", mode="direct", delta=True)
    with pytest.raises(ValueError, match="user_state_dict"):
        await ts.get_state_dict("m", delta=True)


@settings(max_examples=80)
@given(boxes(), st.data())
def test_the_boxes_of_flagged_cells_are_disjoint_and_just_those(
    case: tuple[tuple[int, ...], Box], data: st.DataObject
) -> None:
    shape, box = case
    cell = cell_shape(shape, 8)
    flags = torch.tensor([data.draw(st.booleans()) for _ in cells(box, cell)], dtype=torch.bool).reshape(
        grid_shape(box, cell)
    )
    start = tuple(data.draw(st.integers(low, low + size - 1)) for low, size in zip(box.offsets, box.shape, strict=True))
    part = Box(start, tuple(low + size - at for low, size, at in zip(box.offsets, box.shape, start, strict=True)))
    _, touched = whole_cells(part, box, cell)
    covered = torch.zeros(shape, dtype=torch.int8)
    for block in _blocks(flags[grid_slice(touched, box, cell)].numpy(), touched, cell):
        region(covered, block.offsets, block.shape).add_(1)
    wanted = torch.zeros(shape, dtype=torch.int8)
    for flag, one in zip(flags.flatten().tolist(), cells(box, cell), strict=True):
        if flag and one.intersect(touched):
            region(wanted, one.offsets, one.shape).fill_(1)
    assert torch.equal(covered, wanted)
