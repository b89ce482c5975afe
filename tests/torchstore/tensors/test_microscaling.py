"""MXFP8 and NVFP4: against the formats as their specifications state them, element by element, in exact arithmetic."""

import math
from bisect import bisect_left
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from skipper import torchstore as ts
from skipper.torchstore.algebra.manifest import Mode
from skipper.torchstore.tensors.quantization import Quantization, dequantize, quantize
from tests.torchstore.tensors.test_local_tensors import rank_of

MODES: list[Mode] = ["snapshot", "direct"]
E8M0, E4M3, FP4 = torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.float4_e2m1fn_x2


def number_of(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """What a code of a small IEEE-like format without infinities stands for; E4M3's 0x7F and 0xFF are NaN."""
    bias = 2 ** (exponent_bits - 1) - 1
    sign = -1 if code >> (exponent_bits + mantissa_bits) else 1
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    if (exponent_bits, exponent, mantissa) == (4, 15, 7):
        return math.nan
    if exponent == 0:
        return sign * float(mantissa) * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


E4M3_NUMBERS = [number_of(code, 4, 3) for code in range(127)]  # magnitudes
E2M1_NUMBERS = [number_of(code, 2, 1) for code in range(8)]


def nearest(value: float, numbers: list[float]) -> int:
    """The code of the nearest of these magnitudes, the even one of two; the largest beyond it."""
    exact, above = Fraction(abs(value)), bisect_left(numbers, abs(value))
    near = range(max(above - 1, 0), min(above + 1, len(numbers)))
    return min(near, key=lambda code: (abs(Fraction(numbers[code]) - exact), code % 2))


def mxfp8_block(values: list[float], rounding: str) -> tuple[list[int], int]:
    """The codes of one block, and that of its scale: section 6.3 of the specification."""
    if not all(map(math.isfinite, values)):
        return [], 255
    peak = max(map(abs, values))
    if peak == 0:
        exponent = 0
    else:
        exponent = math.frexp(peak)[1] - 1 - 8
        if rounding == "ceil" and Fraction(peak) > 448 * Fraction(2) ** exponent:
            exponent += 1
        exponent = max(exponent, -127)
    scaled = [Fraction(value) / Fraction(2) ** exponent for value in values]
    codes = [
        nearest(float(value), E4M3_NUMBERS) | (0x80 if math.copysign(1, v) < 0 else 0)
        for value, v in zip(scaled, values, strict=True)
    ]
    return codes, exponent + 127


def f32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).float())


def nvfp4_tensor_scale(peak: float) -> float:
    return f32(peak / 2688) or 1.0


def nvfp4_block(values: list[float], whole: float) -> tuple[list[int], int]:
    """The codes of one block, and that of its scale; products and quotients rounded to float32 as they are written."""
    peak = max(map(abs, values))
    scale = f32(peak / f32(6 * whole))
    code = nearest(max(scale, 2.0**-9), E4M3_NUMBERS)
    factor = f32(E4M3_NUMBERS[code] * whole)
    codes = [nearest(f32(value / factor), E2M1_NUMBERS) | (8 if math.copysign(1, value) < 0 else 0) for value in values]
    return codes, code


def weight_of(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Values of many magnitudes, with blocks of zeros, and peaks that are powers of two or lie beside them."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= torch.exp2(torch.randint(-12, 12, (rows, 1), generator=generator))
    weight[0] = 0
    weight[1 % rows, :16] = -0.0
    weight[2 % rows, 0] = 2.0**9
    weight[3 % rows, -1] = math.nextafter(2.0**9, 0)
    return weight


def quantized(kind: Quantization, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    rows, columns = weight.shape
    elements = torch.empty(rows, columns // kind.packed, dtype=kind.dtype)
    scales = torch.empty(rows, -(-columns // kind.block[1]), dtype=kind.scale_dtype)
    whole = kind.tensor_scale("w", weight)
    quantize(kind, weight, elements, scales, whole)
    return elements, scales, whole


def reference(kind: Quantization, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Codes of the elements (one a byte) and of the scales, and the scale of the tensor."""
    wide = weight.double().tolist()
    step = kind.block[1]
    whole = nvfp4_tensor_scale(float(weight.float().abs().max()))
    elements, scales = [], []
    for row in wide:
        codes: list[int] = []
        line = []
        for start in range(0, len(row), step):
            block = row[start : start + step]
            found, scale = (
                mxfp8_block(block, kind.rounding) if isinstance(kind, ts.MXFP8) else nvfp4_block(block, whole)
            )
            codes += found
            line.append(scale)
        elements.append(codes)
        scales.append(line)
    return torch.tensor(elements, dtype=torch.uint8), torch.tensor(scales, dtype=torch.uint8), whole


def codes_of(kind: Quantization, elements: torch.Tensor) -> torch.Tensor:
    """One element a byte."""
    found = elements.view(torch.uint8)
    return found if kind.packed == 1 else torch.stack((found & 15, found >> 4), -1).flatten(1)


def values_of(kind: Quantization, weight: torch.Tensor) -> torch.Tensor:
    """What comes back of a matrix, by tables of the numbers that codes stand for."""
    elements, scales, whole = reference(kind, weight)
    if isinstance(kind, ts.MXFP8):
        table = torch.tensor([number_of(code, 4, 3) for code in range(256)])
        factors = torch.exp2(scales.double() - 127).float()
    else:
        table = torch.tensor([number_of(code, 2, 1) for code in range(16)])
        factors = torch.tensor([number_of(code, 4, 3) for code in range(256)])[scales.int()] * whole
    spread = factors.repeat_interleave(kind.block[1], 1)[:, : weight.shape[1]]
    return table[elements.int()] * spread


def bits_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


KINDS = [ts.MXFP8(), ts.MXFP8(rounding="ceil"), ts.NVFP4()]


@pytest.mark.parametrize("kind", KINDS, ids=["floor", "ceil", "nvfp4"])
@pytest.mark.parametrize("shape", [(5, 64), (40, 200), (1, 30), (33, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_is_quantized_as_the_format_says(
    kind: Quantization, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = weight_of(*shape).to(dtype)
    elements, scales, whole = quantized(kind, weight)
    expected, expected_scales, expected_whole = reference(kind, weight)
    assert torch.equal(scales.view(torch.uint8), expected_scales)
    assert torch.equal(codes_of(kind, elements), expected)
    assert whole is None or float(whole) == expected_whole
    back = torch.empty(shape)
    dequantize(type(kind), kind.block, elements, scales, whole, (0, 0), back)
    assert torch.equal(back, values_of(kind, weight))


def test_every_code_of_e2m1_stands_for_itself_and_is_taken_up_to_halfway() -> None:
    kind = ts.NVFP4(peaks={"w": 2688.0})  # the tensor's scale is 1
    numbers = [*E2M1_NUMBERS, *(-number for number in E2M1_NUMBERS)]
    rows = torch.tensor([[number, *numbers[1:8], *numbers[9:], 6.0] for number in numbers])  # the peak is 6: scale 1
    elements, scales, whole = quantized(kind, rows)
    assert whole is not None
    assert float(whole) == 1
    assert bool((scales.float() == 1).all())
    assert codes_of(kind, elements)[:, 0].tolist() == list(range(16))
    every = torch.arange(256, dtype=torch.uint8).view(16, 16)  # every byte: every pair of codes
    decoded = ts.NVFP4.decode(every.view(FP4))
    assert torch.equal(decoded[:, 0::2], torch.tensor(numbers)[(every & 15).int()])
    assert torch.equal(decoded[:, 1::2], torch.tensor(numbers)[(every >> 4).int()])
    assert torch.equal(torch.signbit(decoded[:, 0::2]), (every & 8).bool())
    for code in range(7):
        low, high = E2M1_NUMBERS[code], E2M1_NUMBERS[code + 1]
        middle = (low + high) / 2
        around = torch.tensor([[math.nextafter(middle, -9), middle, math.nextafter(middle, 9), 6.0]]).float()
        around[0, 0] = torch.nextafter(torch.tensor(middle), torch.tensor(-9.0))
        around[0, 2] = torch.nextafter(torch.tensor(middle), torch.tensor(9.0))
        even = code if code % 2 == 0 else code + 1
        for sign in (1, -1):
            found = codes_of(kind, quantized(kind, sign * around)[0])[0, :3] & 7
            assert found.tolist() == [code, even, code + 1]


def test_every_code_of_e4m3_stands_for_itself_as_an_element_and_as_a_scale() -> None:
    kind = ts.MXFP8()
    numbers = torch.tensor([number_of(code, 4, 3) for code in range(256) if code & 127 != 127])
    padded = torch.stack((numbers, torch.full_like(numbers, 448.0)), 1)  # 256 <= peak < 512: the scale is 1
    elements, scales, _ = quantized(kind, padded)
    assert bool((scales.view(torch.uint8) == 127).all())
    assert elements.view(torch.uint8)[:, 0].tolist() == [code for code in range(256) if code & 127 != 127]
    assert torch.equal(ts.MXFP8.decode(elements)[:, 0], numbers)
    for code in range(1, 127):  # as scales of NVFP4, whose least one is 2**-9
        block = torch.tensor([[6 * E4M3_NUMBERS[code], 0.0]])
        scale = quantized(ts.NVFP4(peaks={"w": 2688.0}), block)[1]
        assert scale.view(torch.uint8).tolist() == [[code]]


def test_every_power_of_two_of_e8m0_is_a_factor() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    factors = ts.MXFP8.factors(codes.view(E8M0), None)
    assert factors[:255].double().tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert bool(factors[255].isnan())


def test_the_least_and_the_largest_numbers_have_scales() -> None:
    tiny, huge = 2.0**-149, 2.0**127
    weight = torch.tensor([[tiny] * 32, [huge] * 32, [2.0**-119] * 32])
    _, scales, _ = quantized(ts.MXFP8(), weight)
    assert scales.view(torch.uint8).tolist() == [[0], [127 + 127 - 8], [0]]
    for kind in KINDS:
        elements, scales, whole = quantized(kind, weight)
        back = torch.empty(weight.shape)
        dequantize(type(kind), kind.block, elements, scales, whole, (0, 0), back)
        assert bool(back.isfinite().all())


@pytest.mark.parametrize("kind", KINDS, ids=["floor", "ceil", "nvfp4"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_block_with_what_is_no_number_comes_back_as_nan_and_no_other_does(kind: Quantization, bad: float) -> None:
    weight = weight_of(4, 96)
    clean = values_of(kind, weight)
    step = kind.block[1]
    # Not in the block with the peak: it stays what it is.
    weight[0, step + 3] = bad
    elements, scales, whole = quantized(kind, weight)
    back = torch.empty(weight.shape)
    dequantize(type(kind), kind.block, elements, scales, whole, (0, 0), back)
    assert bool(back[0, step : 2 * step].isnan().all())
    back[0, step : 2 * step] = clean[0, step : 2 * step]
    assert torch.equal(back, clean)


def test_the_rounding_of_the_scale_cuts_off_an_eighth_or_nothing() -> None:
    weight = torch.full((1, 32), 511.0)
    floor, ceil = (values_of(kind, weight) for kind in KINDS[:2])
    assert floor[0, 0] == 448
    assert ceil[0, 0] == 512


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS, ids=["floor", "ceil", "nvfp4"])
async def test_readers_take_the_bits_and_the_scales_or_the_values(kind: Quantization, mode: Mode) -> None:
    model: dict[str, Any] = {"a": {"weight": weight_of(33, 96), "bias": torch.randn(33)}, "n": torch.arange(9), "s": 1}
    for seed in (1, 2, 3):
        model["a"]["weight"].copy_(weight_of(33, 96, seed) * 2.0**seed)
        await ts.put_state_dict(model, "m", mode=mode, transfer_dtype=kind, checksum=True)
        elements, scales, whole = reference(kind, model["a"]["weight"])
        stored = await ts.get_state_dict("m")
        names = {"weight", "bias", "weight_scale"} | ({"weight_scale_2"} if kind.tensor_suffix else set())
        assert set(stored["a"]) == names
        assert stored["a"]["weight"].dtype is kind.dtype
        assert torch.equal(codes_of(kind, stored["a"]["weight"]), elements)
        assert torch.equal(stored["a"]["weight_scale"].view(torch.uint8), scales)
        assert not kind.tensor_suffix or float(stored["a"]["weight_scale_2"]) == whole
        for dtype in (torch.float32, torch.bfloat16):
            mine: dict[str, Any] = {
                "a": {"weight": torch.zeros(33, 96, dtype=dtype), "bias": torch.zeros(33)},
                "n": torch.zeros(9).long(),
                "s": 0,
            }
            filled = await ts.get_state_dict("m", mine)
            assert torch.equal(mine["a"]["weight"], values_of(kind, model["a"]["weight"]).to(dtype))
            assert (filled["s"], set(filled["a"])) == (1, {"weight", "bias"})


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("mode", MODES)
async def test_a_peak_that_changes_does_not_take_new_memory(mode: Mode) -> None:
    weight, mine = torch.ones(64, 64), {"w": torch.zeros(64, 64)}
    for number in range(1, 5):
        weight.fill_(number)
        kind = ts.NVFP4(peaks=ts.peaks_of({"w": weight}))
        await ts.put_state_dict({"w": weight}, "m", mode=mode, transfer_dtype=kind)
        await ts.get_state_dict("m", mine)
        assert torch.equal(mine["w"], weight)
    record = ts.last_sync()
    assert record is not None
    assert record.plan_hit


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("kind", [ts.MXFP8(scale_dtype=torch.uint8), ts.NVFP4(dtype=torch.uint8)], ids=["mx", "nv"])
async def test_an_engine_that_declares_bytes_gets_bytes(kind: Quantization) -> None:
    weight = weight_of(33, 96)
    await ts.put_state_dict({"w": weight}, "m", transfer_dtype=kind)
    elements, scales, _ = reference(kind, weight)
    declared = {
        "w": torch.empty(33, 96 // kind.packed, dtype=kind.dtype),
        "w_scale": torch.empty(33, 96 // kind.block[1], dtype=kind.scale_dtype),
    }
    await ts.get_state_dict("m", declared, strict=False)
    assert torch.equal(codes_of(kind, declared["w"]), elements)
    assert torch.equal(declared["w_scale"].view(torch.uint8), scales)


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("kind", KINDS, ids=["floor", "ceil", "nvfp4"])
async def test_one_entry_and_any_part_of_it_give_what_the_state_dict_gives(kind: Quantization) -> None:
    weight = weight_of(33, 96)
    await ts.put_state_dict({"w": weight, "tied": weight}, "m", transfer_dtype=kind)
    expected = values_of(kind, weight)
    whole, columns = torch.zeros(33, 96), torch.zeros(96, 33).T
    assert torch.equal(await ts.get("m/w", whole), expected)
    assert torch.equal(await ts.get("m/tied", columns), expected)
    for start, width in ((17, 40), (1, 1), (31, 2), (95, 1)):
        part = torch.zeros(5, width)
        await ts.get("m/w", part, ts.TensorSlice((7, start), (), (33, 96), (5, width), ()))
        assert torch.equal(part, expected[7:12, start : start + width])
    fused = {"both": torch.zeros(38, 96, dtype=torch.bfloat16)}
    await ts.get_state_dict("m", fused, names=lambda _: ts.Stack("w", ts.Part("tied", 10, 15)), strict=False)
    assert torch.equal(fused["both"], torch.cat((expected, expected[10:15])).bfloat16())


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("kind", KINDS, ids=["floor", "ceil", "nvfp4"])
@pytest.mark.parametrize("placements", [(Shard(0), Shard(1)), (Shard(1), Replicate()), (Shard(1), Shard(1))])
async def test_destinations_that_cut_blocks_and_bytes_get_the_right_values(
    kind: Quantization, placements: tuple[Any, ...]
) -> None:
    weight = weight_of(33, 130)
    await ts.put_state_dict({"w": weight}, "m", transfer_dtype=kind, checksum=True)
    expected = values_of(kind, weight)
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


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("kind", KINDS, ids=["floor", "ceil", "nvfp4"])
@pytest.mark.parametrize("dim", [0, 1])
async def test_shards_of_whole_blocks_are_quantized_where_they_are(kind: Quantization, dim: int) -> None:
    whole = weight_of(30, 192)
    if isinstance(kind, ts.NVFP4):
        kind = ts.NVFP4(peaks=ts.peaks_of({"w": whole}))
    for rank in (0, 1, 2):
        with rank_of(rank, 3):
            local = whole.chunk(3, dim)[rank].contiguous()
            mesh = init_device_mesh("cpu", (3,))
            shard = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
            await ts.put_state_dict({"w": shard}, "m", transfer_dtype=kind)
    elements, scales, tensor_scale = reference(kind, whole)
    stored = await ts.get_state_dict("m")
    assert torch.equal(codes_of(kind, stored["w"]), elements)
    assert torch.equal(stored["w_scale"].view(torch.uint8), scales)
    assert not kind.tensor_suffix or float(stored["w_scale_2"]) == tensor_scale
    mine = torch.zeros(30, 192)
    await ts.get("m/w", mine)
    assert torch.equal(mine, values_of(kind, whole))


def experts_of(seed: int = 0) -> torch.Tensor:
    """A stack of matrices whose peaks differ."""
    return torch.stack([weight_of(30, 192, seed + number) * 4.0**number for number in range(4)])


def stacked(kind: Quantization, **options: Any) -> Any:
    return replace(kind, experts=lambda name: "experts" in name, **options)  # type: ignore[type-var]


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS, ids=["floor", "ceil", "nvfp4"])
async def test_stacked_experts_are_quantized_one_by_one(kind: Quantization, mode: Mode) -> None:
    model = {"experts": experts_of(), "conv": torch.randn(4, 1, 3)}
    mine = {"experts": torch.zeros(4, 30, 192), "conv": torch.zeros(4, 1, 3)}
    for seed in (1, 2):
        model["experts"].copy_(experts_of(seed))
        await ts.put_state_dict(model, "m", mode=mode, transfer_dtype=stacked(kind), checksum=True)
        stored = await ts.get_state_dict("m")
        assert torch.equal(stored["conv"], model["conv"])
        assert stored["experts"].dtype is kind.dtype
        for number, expert in enumerate(model["experts"]):
            elements, scales, whole = reference(kind, expert)
            assert torch.equal(codes_of(kind, stored["experts"][number]), elements)
            assert torch.equal(stored["experts_scale"][number].view(torch.uint8), scales)
            assert not kind.tensor_suffix or float(stored["experts_scale_2"][number]) == whole
        await ts.get_state_dict("m", mine)
        expected = torch.stack([values_of(kind, expert) for expert in model["experts"]])
        assert torch.equal(mine["experts"], expected)
        part = torch.zeros(2, 7, 33)
        await ts.get("m/experts", part, ts.TensorSlice((1, 5, 31), (), (4, 30, 192), (2, 7, 33), ()))
        assert torch.equal(part, expected[1:3, 5:12, 31:64])


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("kind", KINDS, ids=["floor", "ceil", "nvfp4"])
@pytest.mark.parametrize("dim", [0, 1, 2])
async def test_experts_that_lie_in_several_processes_come_together(kind: Quantization, dim: int) -> None:
    """Each rank has some experts, and knows their peaks; or a part of each, and is given the peaks."""
    whole = experts_of()
    peaks = ts.peaks_of({"experts": whole, "conv": torch.ones(2, 2, 2)}, experts=lambda name: name == "experts")
    assert peaks == {"experts": tuple(float(expert.abs().max()) for expert in whole)}
    options = {"peaks": peaks} if isinstance(kind, ts.NVFP4) and dim else {}
    for rank in (0, 1):
        with rank_of(rank, 2):
            mesh = init_device_mesh("cpu", (2,))
            local = whole.chunk(2, dim)[rank].contiguous()
            shard = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
            await ts.put_state_dict({"experts": shard}, "m", transfer_dtype=stacked(kind, **options))
    expected = torch.stack([values_of(kind, expert) for expert in whole])
    for place in (0, 1, 2):
        with rank_of(1, 2):
            mesh = init_device_mesh("cpu", (2,))
            wanted = expected.chunk(2, place)[1].contiguous()
            mine = DTensor.from_local(
                torch.zeros_like(wanted),
                mesh,
                [Shard(place)],
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
            await ts.get_state_dict("m", {"experts": mine})
            assert torch.equal(mine.to_local(), wanted)


@pytest.mark.usefixtures("store")
async def test_shards_that_cut_a_block_or_need_a_peak_are_refused_before_anything_is_put() -> None:
    with rank_of(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        cut = DTensor.from_local(torch.ones(8, 24), mesh, [Shard(1)], run_check=False)
        with pytest.raises(ts.BlockAlignmentError, match=r"m/w.*offsets \(0, 24\).*\(1, 32\)"):
            await ts.put_state_dict({"w": cut}, "m", transfer_dtype=ts.MXFP8())
        rows = DTensor.from_local(torch.ones(8, 32), mesh, [Shard(0)], run_check=False)
        with pytest.raises(ts.BlockAlignmentError, match="peaks_of"):
            await ts.put_state_dict({"w": rows}, "m", transfer_dtype=ts.NVFP4())
        parts = DTensor.from_local(torch.ones(4, 8, 32), mesh, [Shard(1)], run_check=False)
        with pytest.raises(ts.BlockAlignmentError, match="peaks_of"):
            await ts.put_state_dict({"experts": parts}, "m", transfer_dtype=stacked(ts.NVFP4()))
    with pytest.raises(ts.LayoutMismatchError, match="select="):
        await ts.put_state_dict({"w": torch.ones(8, 33)}, "m", transfer_dtype=ts.NVFP4())
    assert not await ts.exists("m")


@pytest.mark.usefixtures("store")
async def test_a_destination_of_another_shape_is_refused() -> None:
    await ts.put_state_dict({"w": torch.ones(8, 64)}, "m", transfer_dtype=ts.NVFP4())
    for shape in ((8, 32), (8, 63), (7, 64)):
        with pytest.raises(ts.LayoutMismatchError, match=r"\(8, 64\)"):
            await ts.get("m/w", torch.zeros(shape))


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("kind", KINDS[1:], ids=["mxfp8", "nvfp4"])
async def test_deltas_of_quantized_tensors_read_what_has_changed(kind: Quantization) -> None:
    weight = torch.ones(512, 512)
    mine = {"w": torch.zeros(512, 512)}
    for number in range(3):
        weight[number] = 2.0**-number
        await ts.put_state_dict({"w": weight}, "m", transfer_dtype=kind, delta=True)
        await ts.get_state_dict("m", mine, delta=True)
        assert torch.equal(mine["w"], weight)
    record = ts.last_sync()
    assert record is not None
    assert record.saved_nbytes > record.nbytes


@pytest.mark.parametrize(
    ("kind", "options"),
    [(ts.MXFP8, {"rounding": "even"}), (ts.MXFP8, {"scale_dtype": torch.int8}), (ts.NVFP4, {"dtype": torch.int8})],
)
def test_impossible_formats_are_refused(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="transfer_dtype"):
        kind(**options)
