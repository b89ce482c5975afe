"""Tensors that change their dtype on the way."""

from typing import Any

import pytest
import torch

from skipper import torchstore as ts
from skipper.torchstore.algebra.manifest import Mode
from tests.torchstore.actors import make_model

pytestmark = pytest.mark.usefixtures("store")

BFLOAT16 = torch.bfloat16


def model_of(seed: int) -> dict[str, Any]:
    """Weights that bfloat16 rounds, and tensors that it does not concern."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(300, 200, generator=generator)
    return {
        "w": weight,
        "tied": weight,
        "half": torch.randn(500, generator=generator).to(BFLOAT16),
        "strided": torch.randn(100, 400, generator=generator)[:, ::2],
        "count": torch.arange(1000) + seed,
        "empty": torch.empty(0, 5),
        "step": seed,
    }


def expected(model: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.to(BFLOAT16) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in model.items()
    }


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype
        if isinstance(right[name], torch.Tensor)
        else left[name] == right[name]
        for name in right
    )


@pytest.mark.parametrize("mode", ["snapshot", "direct"])
async def test_floating_point_tensors_arrive_in_the_dtype_of_the_transfer(mode: Mode) -> None:
    model = model_of(1)
    for seed in (1, 2, 3):
        for name, value in model_of(seed).items():
            if isinstance(value, torch.Tensor):
                model[name].copy_(value)
        model["step"] = seed
        await ts.put_state_dict(model, "m", mode=mode, transfer_dtype=BFLOAT16)
        assert same(await ts.get_state_dict("m"), expected(model))
    assert (await ts.get_meta("m")).tensors["w"].torch_dtype is BFLOAT16


async def test_in_direct_mode_the_tensors_are_free_when_the_put_returns() -> None:
    model = {"w": torch.ones(400, 400)}
    await ts.put_state_dict(model, "m", mode="direct", transfer_dtype=BFLOAT16)
    model["w"].zero_()
    assert bool((await ts.get_state_dict("m"))["w"].all())


async def test_a_direct_put_waits_for_those_who_read_the_last_copies(peers: Any) -> None:
    model = {"w": torch.ones(400, 400)}
    await ts.put_state_dict(model, "m", mode="direct", transfer_dtype=BFLOAT16)
    await peers.slice(gpus=0).lease.call_one("m")
    with pytest.raises(ts.StoreTimeoutError, match="still being read"):
        await ts.put_state_dict(model, "m", mode="direct", transfer_dtype=BFLOAT16, timeout=0.2)


async def test_the_copies_are_made_once_and_the_plans_stay() -> None:
    model, mine = make_model(share=False), {n: t.to(BFLOAT16) for n, t in make_model(share=False).items()}
    hits = []
    for _ in range(4):
        await ts.put_state_dict(model, "m", mode="direct", transfer_dtype=BFLOAT16)
        await ts.get_state_dict("m", mine)
        record = ts.last_sync()
        assert record is not None
        hits.append(record.plan_hit)
    assert hits == [False, True, True, True]
    assert all(torch.equal(mine[name], tensor.to(BFLOAT16)) for name, tensor in model.items())


async def test_readers_in_the_original_dtype_are_told() -> None:
    model = make_model(share=False)
    await ts.put_state_dict(model, "m", transfer_dtype=BFLOAT16)
    with pytest.raises(ts.DTypeMismatchError, match="bfloat16"):
        await ts.get_state_dict("m", model)


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", TypeError), (torch.int8, ValueError)])
async def test_only_floating_point_dtypes_can_be_asked_for(dtype: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="transfer_dtype"):
        await ts.put_state_dict(make_model(share=False), "m", transfer_dtype=dtype)


@pytest.mark.parametrize("mode", ["snapshot", "direct"])
async def test_shards_of_a_dtensor_are_converted_where_they_are(mode: Mode, peers: Any) -> None:
    for rank in (0, 1):
        await peers.slice(gpus=rank).put_fake_shard.call_one("d", rank, 2, rank + 5, mode=mode, transfer_dtype=BFLOAT16)
    whole = (await ts.get_state_dict("d"))["w"]
    assert (whole.dtype, whole.shape) == (BFLOAT16, (600, 50))
    assert torch.equal(whole, torch.tensor([5, 6], dtype=BFLOAT16).repeat_interleave(300)[:, None].expand(600, 50))
