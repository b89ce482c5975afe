"""Block-FP8: against plain torch, block by block; any boundary at the reader, whole blocks at the publisher."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from skipper import torchstore as ts
from skipper.torchstore.algebra.manifest import Mode
from skipper.torchstore.tensors.quantization import quantize
from tests.torchstore.tensors.test_local_tensors import rank_of

pytestmark = pytest.mark.usefixtures("store")

FP8 = torch.float8_e4m3fn
MODES: list[Mode] = ["snapshot", "direct"]


def reference(weight: torch.Tensor, block: tuple[int, int] = (128, 128)) -> tuple[torch.Tensor, torch.Tensor]:
    """The quantized matrix and its scales, one block at a time."""
    rows, columns = (-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    scales = torch.empty(rows, columns)
    quantized = torch.empty(weight.shape, dtype=FP8)
    for row in range(rows):
        for column in range(columns):
            here = slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1])
            peak = weight[here].float().abs().max()
            scales[row, column] = peak / 448 if peak else 1.0
            quantized[here] = (weight[here].float() / scales[row, column]).to(FP8)
    return quantized, scales


def values(quantized: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] = (128, 128)) -> torch.Tensor:
    rows, columns = quantized.shape
    spread = scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return quantized.float() * spread


def weight_of(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Values of many magnitudes, with a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= torch.exp2(torch.randint(-12, 12, (rows, 1), generator=generator))
    weight[:128, :128] = 0
    return weight


def bits_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (1, 1000), (257, 129)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_is_quantized_as_block_by_block(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = weight_of(*shape).to(dtype)
    quantized, scales = reference(weight)
    out, found = torch.empty(shape, dtype=FP8), torch.empty_like(scales)
    quantize(ts.BlockFP8(), weight, out, found)
    assert bits_equal(out, quantized)
    assert torch.equal(found, scales)


def test_a_value_comes_back_within_the_stated_error() -> None:
    weight = weight_of(500, 400)
    quantized, scales = reference(weight)
    spread = scales.repeat_interleave(128, 0)[:500].repeat_interleave(128, 1)[:, :400]
    error = (values(quantized, scales) - weight).abs()
    bound = torch.maximum(weight.abs() / 16, spread / 1024)
    assert bool((error <= bound * (1 + 1e-5)).all())
    assert bool((error > bound / 2).any())  # the bound says something


@pytest.mark.parametrize("mode", MODES)
async def test_readers_take_the_bits_and_the_scales_or_the_values(mode: Mode) -> None:
    model: dict[str, Any] = {
        "a": {"weight": weight_of(300, 260), "bias": torch.randn(300)},
        "n": torch.arange(9),
        "s": 1,
    }
    for seed in (1, 2, 3):
        model["a"]["weight"].copy_(weight_of(300, 260, seed))
        await ts.put_state_dict(model, "m", mode=mode, transfer_dtype=ts.BlockFP8())
        quantized, scales = reference(model["a"]["weight"])
        stored = await ts.get_state_dict("m")
        assert bits_equal(stored["a"]["weight"], quantized)
        assert torch.equal(stored["a"]["weight_scale_inv"], scales)
        assert torch.equal(stored["a"]["bias"], model["a"]["bias"])
        for dtype in (torch.float32, torch.bfloat16):
            mine: dict[str, Any] = {
                "a": {"weight": torch.zeros(300, 260, dtype=dtype), "bias": torch.zeros(300)},
                "n": torch.zeros(9).long(),
                "s": 0,
            }
            filled = await ts.get_state_dict("m", mine)
            assert torch.equal(mine["a"]["weight"], values(quantized, scales).to(dtype))
            assert (filled["s"], set(filled["a"])) == (1, {"weight", "bias"})


async def test_a_warm_sync_into_values_replays_its_plan() -> None:
    model, mine = {"w": torch.zeros(256, 256)}, {"w": torch.zeros(256, 256)}
    for number in range(1, 5):
        model["w"].fill_(number)
        await ts.put_state_dict(model, "m", transfer_dtype=ts.BlockFP8(), checksum=True)
        await ts.get_state_dict("m", mine)
        assert bool((mine["w"] == number).all())
    record = ts.last_sync()
    assert record is not None
    assert record.plan_hit
    assert record.nbytes < model["w"].nbytes / 3


@pytest.mark.parametrize("strict", [True, False])
async def test_values_and_scales_can_be_asked_for_together(strict: bool) -> None:
    weight = weight_of(300, 260)
    await ts.put_state_dict({"w": weight}, "m", transfer_dtype=ts.BlockFP8())
    quantized, scales = reference(weight)
    mine = {"w": torch.zeros(300, 260), "w_scale_inv": torch.zeros(3, 3)}
    await ts.get_state_dict("m", mine, strict=strict)
    assert torch.equal(mine["w"], values(quantized, scales))
    assert torch.equal(mine["w_scale_inv"], scales)


@pytest.mark.parametrize("mode", MODES)
async def test_one_entry_gives_what_the_state_dict_gives(mode: Mode) -> None:
    weight = weight_of(300, 260)
    await ts.put_state_dict({"w": weight}, "m", mode=mode, transfer_dtype=ts.BlockFP8(), checksum=True)
    bits = await ts.get_state_dict("m")
    assert bits_equal(await ts.get("m/w"), bits["w"])
    assert bits_equal(await ts.get("m/w_scale_inv"), bits["w_scale_inv"])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        whole = {"w": torch.zeros(300, 260, dtype=dtype)}
        await ts.get_state_dict("m", whole)
        one, columns = torch.zeros(300, 260, dtype=dtype), torch.zeros(260, 300, dtype=dtype).T
        part = torch.zeros(150, 33, dtype=dtype)
        corner = ts.TensorSlice((70, 120), (), (300, 260), (150, 33), ())
        assert await ts.get("m/w", one) is one
        await ts.get_batch({"m/w": columns})
        await ts.get("m/w", part, corner)
        assert bits_equal(one, whole["w"])
        assert torch.equal(columns, whole["w"])
        assert torch.equal(part, whole["w"][70:220, 120:153])
    bits_of_part = await ts.get("m/w", tensor_slice_spec=corner)
    assert bits_equal(bits_of_part, bits["w"][70:220, 120:153])


async def test_one_shard_of_one_entry_can_cut_blocks() -> None:
    weight = weight_of(300, 260)
    await ts.put_state_dict({"w": weight}, "m", transfer_dtype=ts.BlockFP8())
    expected = values(*reference(weight))
    with rank_of(1, 3):
        mesh = init_device_mesh("cpu", (3,))
        mine = DTensor.from_local(
            torch.zeros(300, 87), mesh, [Shard(1)], run_check=False, shape=(300, 260), stride=(260, 1)
        )
        await ts.get("m/w", mine)
        assert torch.equal(mine.to_local(), expected[:, 87:174])


async def test_a_value_without_scales_is_not_taken_for_a_quantized_one() -> None:
    await ts.put_state_dict({"w": torch.ones(9, 9).to(FP8)}, "m")
    with pytest.raises(ts.DTypeMismatchError):
        await ts.get("m/w", torch.zeros(9, 9))


@pytest.mark.parametrize("placements", [(Shard(0), Shard(1)), (Shard(1), Replicate()), (Shard(1), Shard(1))])
async def test_destinations_that_cut_blocks_get_the_right_values(placements: tuple[Any, ...]) -> None:
    weight = weight_of(300, 260)
    await ts.put_state_dict({"w": weight}, "m", transfer_dtype=ts.BlockFP8(), checksum=True)
    expected = values(*reference(weight))
    for rank in (0, 5):
        with rank_of(rank, 6):
            mesh = init_device_mesh("cpu", (3, 2))
            full = DTensor.from_local(expected, mesh, [Replicate(), Replicate()], run_check=False)
            wanted = full.redistribute(mesh, placements).to_local().contiguous()
            mine = DTensor.from_local(
                torch.zeros_like(wanted), mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride()
            )
            await ts.get_state_dict("m", {"w": mine})
            assert torch.equal(mine.to_local(), wanted)


async def test_shards_of_whole_blocks_are_quantized_where_they_are() -> None:
    whole = weight_of(95, 150)  # 32, 32 and 31 rows
    for rank in (0, 1, 2):
        with rank_of(rank, 3):
            local, mesh = whole[32 * rank :][:32], init_device_mesh("cpu", (3,))
            shard = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
            await ts.put_state_dict({"w": shard}, "m", transfer_dtype=ts.BlockFP8((32, 64)))
    quantized, scales = reference(whole, (32, 64))
    stored = await ts.get_state_dict("m")
    assert bits_equal(stored["w"], quantized)
    assert torch.equal(stored["w_scale_inv"], scales)


async def test_a_shard_that_cuts_blocks_is_refused_before_anything_is_put() -> None:
    with rank_of(1, 2):
        shard = DTensor.from_local(torch.ones(100, 260), init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
        with pytest.raises(ts.BlockAlignmentError, match=r"m/w.*offsets \(100, 0\).*\(128, 128\)"):
            await ts.put_state_dict({"w": shard}, "m", transfer_dtype=ts.BlockFP8())
        assert not await ts.exists("m")
        await ts.put_state_dict({"w": shard}, "m", transfer_dtype=ts.BlockFP8((50, 130)))


async def test_only_selected_matrices_are_quantized() -> None:
    blocks = ts.BlockFP8(select=lambda name: name != "head")
    weight = weight_of(200, 130)
    await ts.put_state_dict({"w": weight, "head": weight, "cube": torch.zeros(3, 3, 3)}, "m", transfer_dtype=blocks)
    stored = await ts.get_state_dict("m")
    assert {name: tensor.dtype for name, tensor in stored.items()} == {
        "w": FP8,
        "w_scale_inv": torch.float32,
        "head": torch.float32,
        "cube": torch.float32,
    }
    assert torch.equal(stored["head"], weight)


async def test_a_name_that_the_scales_would_take_is_refused() -> None:
    with pytest.raises(ts.MismatchError, match="w_scale_inv"):
        await ts.put_state_dict(
            {"w": torch.ones(9, 9), "w_scale_inv": torch.ones(1)}, "m", transfer_dtype=ts.BlockFP8()
        )


@pytest.mark.parametrize("options", [{"dtype": torch.int8}, {"block": (0, 128)}, {"block": (128,)}])
def test_impossible_blocks_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="transfer_dtype"):
        ts.BlockFP8(**options)


async def test_stacked_experts_are_quantized_one_by_one() -> None:
    experts = torch.stack([weight_of(300, 200, seed) for seed in range(3)])
    kind = ts.BlockFP8(experts=lambda name: name == "experts")
    await ts.put_state_dict({"experts": experts, "conv": torch.ones(3, 1, 4)}, "m", transfer_dtype=kind)
    stored, mine = await ts.get_state_dict("m"), {"experts": torch.zeros(3, 300, 200)}
    assert (stored["experts_scale_inv"].shape, stored["conv"].dtype) == ((3, 3, 2), torch.float32)
    await ts.get_state_dict("m", mine, strict=False)
    for number, expert in enumerate(experts):
        quantized, scales = reference(expert)
        assert bits_equal(stored["experts"][number], quantized)
        assert torch.equal(stored["experts_scale_inv"][number], scales)
        assert torch.equal(mine["experts"][number], values(quantized, scales))
