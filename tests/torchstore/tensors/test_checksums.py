"""Checksums: what arrives is proved, and one wrong bit is found, named and blamed on nobody else."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from skipper import torchstore as ts
from skipper.torchstore.algebra.manifest import Mode
from tests.torchstore.tensors.test_local_tensors import rank_of

pytestmark = pytest.mark.usefixtures("store")

MODES: list[Mode] = ["snapshot", "direct"]


def model_of(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(300, 200, generator=generator).to(torch.bfloat16),
        "strided": torch.randn(130, 300, generator=generator)[:, ::3],
        "odd": torch.randn(77, 13, generator=generator).to(torch.bfloat16),
        "experts": torch.randn(3, 70, 65, generator=generator),
        "flags": torch.rand(9001, generator=generator) > 0.5,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 5),
        "step": seed,
    }


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], value) if isinstance(value, torch.Tensor) else left[name] == value
        for name, value in right.items()
    )


async def flip(key: str, offset: int) -> None:
    """Change one bit of a stored version where it lies: in the memory of the volume."""
    publisher = (await ts.client()).publisher
    (arena,) = [arena for arena in publisher.snapshots.arenas._all.values() if arena.key == key]
    byte = torch.zeros(1, dtype=torch.uint8)
    buffer = arena.binding.buffers[0].at(offset, 1)
    await buffer.read_into(byte)
    byte ^= 16
    await buffer.write_from(byte)


@pytest.mark.parametrize("mode", MODES)
async def test_what_arrives_is_proved_by_the_sums_of_what_was_put(mode: Mode) -> None:
    for seed in (1, 2, 3):
        model = model_of(seed)
        await ts.put_state_dict(model, "m", mode=mode, checksum=True)
        assert same(await ts.get_state_dict("m"), model)
        record = ts.last_sync()
        assert record is not None
        assert record.verify_s > 0


async def test_one_wrong_bit_in_the_memory_of_the_volume_is_named() -> None:
    model = {"a": torch.ones(64, 64), "w": torch.zeros(200, 300)}
    version = await ts.put_state_dict(model, "m", checksum=True)
    # "w" lies behind "a"; the element is (130, 70), in the cell from (128, 64) on.
    await flip("m", 64 * 64 * 4 + (130 * 300 + 70) * 4)
    with pytest.raises(ts.ChecksumError, match=r"m/w.*offsets \(128, 64\), shape \(64, 64\)") as caught:
        await ts.get_state_dict("m")
    assert (caught.value.key, caught.value.version, caught.value.wrong) == ("m/w", version, 1)
    assert caught.value.box == ((128, 64), (64, 64))
    assert torch.equal(await ts.get("m/a"), model["a"])


async def test_without_checksums_a_wrong_bit_arrives() -> None:
    await ts.put_state_dict({"w": torch.zeros(200, 300)}, "m")
    await flip("m", 1)
    assert bool((await ts.get_state_dict("m"))["w"].any())


@pytest.mark.parametrize(
    ("offsets", "shape"), [((0, 0), (64, 300)), ((100, 0), (30, 300)), ((0, 65), (200, 3)), ((70, 70), (128, 230))]
)
async def test_a_part_is_proved_to_its_last_element(offsets: tuple[int, int], shape: tuple[int, int]) -> None:
    """Each time one bit within the part is wrong, and once one beside it."""
    whole = torch.arange(60000.0).reshape(200, 300)
    part = ts.TensorSlice(offsets=offsets, global_shape=(200, 300), local_shape=shape)
    rows, columns = range(offsets[0], offsets[0] + shape[0]), range(offsets[1], offsets[1] + shape[1])
    for row, column in ((rows[0], columns[0]), (rows[-1], columns[-1]), (rows[0], columns[-1])):
        await ts.put("w", whole, checksum=True)
        assert torch.equal(
            await ts.get("w", tensor_slice_spec=part), whole[rows[0] :, columns[0] :][: shape[0], : shape[1]]
        )
        await flip("w", (row * 300 + column) * 4)
        with pytest.raises(ts.ChecksumError, match="'w'"):
            await ts.get("w", tensor_slice_spec=part)
        await ts.delete("w")


async def test_in_direct_mode_a_change_without_a_fence_is_found() -> None:
    model = {"w": ts.share_memory_(torch.nn.Linear(100, 100)).weight.detach()}
    await ts.put_state_dict(model, "m", mode="direct", checksum=True)
    await ts.get_state_dict("m", {"w": torch.zeros(100, 100)})
    model["w"][70, 3] += 1
    with pytest.raises(ts.ChecksumError, match=r"m/w"):
        await ts.get_state_dict("m", {"w": torch.zeros(100, 100)})


async def test_large_objects_are_proved_too() -> None:
    await ts.put("o", "x" * 20_000, checksum=True)
    assert await ts.get("o") == "x" * 20_000
    await flip("o", 10_000)
    with pytest.raises(ts.ChecksumError):
        await ts.get("o")


async def test_a_whole_store_can_take_checksums() -> None:
    await ts.initialize(store_name="summed", checksum=True)
    try:
        await ts.put("w", torch.zeros(100, 100), "summed")
        await ts.put("plain", torch.zeros(100, 100), "summed", checksum=False)
        for key, wanted in (("w", True), ("plain", False)):
            await ts.get(key, store_name="summed")
            record = ts.last_sync("summed")
            assert record is not None
            assert (record.nbytes > 40_000) == wanted
    finally:
        await ts.shutdown("summed")


async def test_the_sums_are_counted_and_explained() -> None:
    await ts.put_state_dict({"w": torch.zeros(640, 640)}, "m", checksum=True)
    explanation = await ts.explain("m", {"w": torch.zeros(640, 640)})
    assert explanation.proof_nbytes == 10 * 10 * 8
    assert "checksums" in str(explanation)


@pytest.mark.parametrize("mode", MODES)
async def test_warm_reads_replay_plan_and_proof(mode: Mode) -> None:
    model, mine = {"w": torch.zeros(300, 300)}, {"w": torch.zeros(300, 300)}
    for number in range(1, 6):
        await ts.fence("m")
        model["w"].fill_(number)
        await ts.put_state_dict(model, "m", mode=mode, checksum=True)
        await ts.get_state_dict("m", mine)
        assert bool((mine["w"] == number).all())
    record = ts.last_sync()
    assert record is not None
    assert record.plan_hit


async def test_shards_of_several_publishers_are_proved_together() -> None:
    whole = torch.arange(30000.0).reshape(600, 50)
    for rank in (0, 1):
        with rank_of(rank, 2):
            local = whole[300 * rank :][:300]
            shard = DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
            await ts.put_state_dict({"w": shard}, "d", checksum=True)
    assert torch.equal((await ts.get_state_dict("d"))["w"], whole)
    part = ts.TensorSlice(offsets=(250, 7), global_shape=(600, 50), local_shape=(100, 11))
    assert torch.equal(await ts.get("d/w", tensor_slice_spec=part), whole[250:350, 7:18])
