"""``put_state_dict(None, key, direct_rdma=True)``: what was put last, as it is now."""

import gc
import weakref
from typing import Any

import pytest
import torch

from skipper import torchstore as ts


@pytest.fixture(autouse=True)
def _store(store: None) -> None:
    """All tests here use the default store."""


async def test_none_puts_the_same_tensors_again_as_they_are_now(peers: Any) -> None:
    model = torch.nn.Linear(64, 64)
    assert await ts.put_state_dict(model.state_dict(), "m", direct_rdma=True) == 1
    first = await peers.slice(gpus=0).get.call_one("m/weight")
    with torch.no_grad():
        model.weight.add_(1)
    assert await ts.put_state_dict(None, "m", direct_rdma=True) == 2
    second = await peers.slice(gpus=0).get.call_one("m/weight")
    assert torch.allclose(second, first + 1)
    assert torch.equal(second, model.weight)


async def test_none_converts_as_the_put_before_did() -> None:
    tensor = torch.full((64, 64), 1.5)
    await ts.put_state_dict({"w": tensor}, "m", "default", True, torch.bfloat16)
    tensor.fill_(2.5)
    await ts.put_state_dict(None, "m", direct_rdma=True)
    got = (await ts.get_state_dict("m", direct_rdma=True))["w"]
    assert got.dtype == torch.bfloat16
    assert set(got.flatten().tolist()) == {2.5}


@pytest.mark.parametrize("before", ["nothing", "a snapshot", "deleted"])
async def test_none_is_refused_where_there_is_nothing_to_put_again(before: str) -> None:
    state = {"w": torch.ones(64, 64)}
    if before == "deleted":
        await ts.put_state_dict(state, "m", direct_rdma=True)
        await ts.delete("m")
    elif before == "a snapshot":
        await ts.put_state_dict(state, "m", direct_rdma=True)
        await ts.put_state_dict(state, "m")
    with pytest.raises(ValueError, match=r"'m': None repeats .* in direct mode, and this process has put none"):
        await ts.put_state_dict(None, "m", direct_rdma=True)


async def test_none_is_for_direct_mode_alone() -> None:
    with pytest.raises(ValueError, match="'m': a state dict is needed"):
        await ts.put_state_dict(None, "m")


async def test_with_a_transfer_dtype_the_tensors_are_their_owners_to_free() -> None:
    gathered = {"w": torch.ones(64, 64), "nested": {"v": torch.ones(8)}}
    memory = [weakref.ref(tensor.untyped_storage()) for tensor in (gathered["w"], gathered["nested"]["v"])]
    await ts.put_state_dict(gathered, "m", mode="direct", transfer_dtype=torch.bfloat16)
    del gathered
    gc.collect()
    assert [ref() for ref in memory] == [None, None]
    assert (await ts.get_state_dict("m"))["w"].sum() == 64 * 64  # the converted copy is there
    with pytest.raises(ValueError, match="'m': the memory of 'w', which was put last, has been freed"):
        await ts.put_state_dict(None, "m", direct_rdma=True)


async def test_with_a_transfer_dtype_none_finds_parameters_by_their_memory() -> None:
    model = torch.nn.Linear(64, 64)
    conjugate = torch.ones(4, dtype=torch.complex64).conj()
    model.register_buffer("lazy", conjugate)
    state: dict[str, Any] = {"model": model.state_dict(), "columns": model.weight.detach().t()[3:5], "step": 7}
    await ts.put_state_dict(state, "m", mode="direct", transfer_dtype=torch.bfloat16)
    del state, conjugate
    gc.collect()
    with torch.no_grad():
        model.weight.add_(1)
    assert await ts.put_state_dict(None, "m", direct_rdma=True) == 2
    got = await ts.get_state_dict("m")
    expected = model.weight.detach().bfloat16()
    assert torch.equal(got["model"]["weight"], expected)
    assert torch.equal(got["columns"], expected.t()[3:5])
    assert torch.equal(got["model"]["lazy"], torch.ones(4, dtype=torch.complex64))
    assert got["step"] == 7


async def test_none_reads_no_memory_that_was_shrunk() -> None:
    tensor = torch.ones(64, 64)
    await ts.put_state_dict({"w": tensor}, "m", mode="direct", transfer_dtype=torch.bfloat16)
    tensor.untyped_storage().resize_(0)  # as FSDP does between two forwards
    with pytest.raises(ValueError, match="has been freed"):
        await ts.put_state_dict(None, "m", direct_rdma=True)
    tensor.untyped_storage().resize_(tensor.nbytes)
    tensor.fill_(3)
    await ts.put_state_dict(None, "m", direct_rdma=True)
    assert (await ts.get_state_dict("m"))["w"][0, 0] == 3
