"""Autograd notices a get into a tensor that it has saved, as it notices torch's own in-place operations."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from skipper import torchstore as ts
from skipper.torchstore.tensors.written import written

pytestmark = pytest.mark.usefixtures("store")

SMALL, LARGE = (3,), (100, 100)  # in a message, and in a volume

NOTICED = pytest.raises(RuntimeError, match="modified by an inplace operation")


def saved_by_autograd(weight: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient needs the weight as it is now."""
    return (weight * torch.ones_like(weight, requires_grad=True)).sum()


async def one(tensor: torch.Tensor) -> None:
    await ts.put("w", torch.ones(tensor.shape))
    await ts.get("w", tensor)


async def several(tensor: torch.Tensor) -> None:
    await ts.put_batch({"w": torch.ones(tensor.shape), "v": torch.ones(tensor.shape)})
    await ts.get_batch({"w": tensor, "v": None})


async def state_dict(tensor: torch.Tensor) -> None:
    await ts.put_state_dict({"w": torch.ones(tensor.shape)}, "m")
    await ts.get_state_dict("m", {"w": tensor})


async def mapped(tensor: torch.Tensor) -> None:
    await ts.put_state_dict({"v": torch.ones(tensor.shape)}, "m")
    await ts.get_state_dict("m", {"w": tensor}, names=lambda name: "v")


async def dequantized(tensor: torch.Tensor) -> None:
    await ts.put_state_dict({"w": torch.ones(tensor.shape)}, "m", transfer_dtype=ts.BlockFP8())
    await ts.get_state_dict("m", {"w": tensor})


async def served(tensor: torch.Tensor) -> None:
    await ts.put_state_dict({"w": torch.ones(tensor.shape)}, "m")
    await ts.get_state_dict("m", {"w": tensor}, serve=True)


@pytest.mark.parametrize("shape", [SMALL, LARGE])
@pytest.mark.parametrize("read", [one, several, state_dict, mapped])
async def test_autograd_notices_a_get_into_what_it_has_saved(
    read: Callable[[torch.Tensor], Awaitable[None]], shape: tuple[int, ...]
) -> None:
    weight = torch.zeros(shape)
    loss = saved_by_autograd(weight)
    await read(weight)
    with NOTICED:
        loss.backward()
    assert torch.equal(weight, torch.ones(shape))
    saved_by_autograd(weight).backward()  # what is saved afterwards is of use


@pytest.mark.parametrize("read", [dequantized, served])
async def test_autograd_notices_values_that_were_quantized_and_copies_that_are_offered(
    read: Callable[[torch.Tensor], Awaitable[None]],
) -> None:
    weight = torch.zeros(LARGE)
    loss = saved_by_autograd(weight)
    await read(weight)
    with NOTICED:
        loss.backward()


async def test_every_replay_of_a_plan_is_noticed() -> None:
    model = torch.nn.Linear(64, 64)
    for _ in range(4):
        await ts.put_state_dict(torch.nn.Linear(64, 64).state_dict(), "m")
        loss = model(torch.ones(1, 64, requires_grad=True)).sum()
        await ts.get_state_dict("m", model.state_dict())
        with NOTICED:
            loss.backward()
    record = ts.last_sync()
    assert record is not None
    assert record.plan_hit


async def test_a_delta_is_noticed() -> None:
    stored, mine = {"w": torch.zeros(300, 300)}, {"w": torch.zeros(300, 300)}
    for number in range(3):
        stored["w"][0, 0] = number
        await ts.put_state_dict(stored, "m", delta=True)
        loss = saved_by_autograd(mine["w"])
        await ts.get_state_dict("m", mine, delta=True)
        with NOTICED:
            loss.backward()
        assert mine["w"][0, 0] == number
    record = ts.last_sync()
    assert record is not None
    assert record.saved_nbytes


async def test_views_and_what_they_are_views_of_count_together() -> None:
    base = torch.zeros(6, 100)
    loss_of_base, loss_of_view = saved_by_autograd(base), saved_by_autograd(base[:2])
    await ts.put("w", torch.ones(2, 100))
    await ts.get("w", base[:2])
    for loss in (loss_of_base, loss_of_view):
        with NOTICED:
            loss.backward()


async def test_what_is_not_read_counts_nothing() -> None:
    mine = {"w": torch.zeros(64, 64), "other": torch.zeros(64, 64)}
    loss = saved_by_autograd(mine["other"])
    await ts.put_state_dict({"w": torch.ones(64, 64)}, "m")
    await ts.get_state_dict("m", mine, strict=False)
    await ts.get_state_dict("m", mine, names=lambda name: "w" if name == "w" else None)
    with pytest.raises(ts.StateDictMismatchError):
        await ts.get_state_dict("m", mine)
    loss.backward()


async def test_a_get_that_is_refused_counts_nothing() -> None:
    weight = torch.zeros(64, 64)
    loss = saved_by_autograd(weight)
    await ts.put("w", torch.ones(64, 64, dtype=torch.float64))
    with pytest.raises(ts.DTypeMismatchError):
        await ts.get("w", weight)
    loss.backward()


async def test_parameters_stay_leaves_and_keep_their_gradients() -> None:
    layer = torch.nn.Linear(64, 64)
    layer(torch.ones(1, 64)).sum().backward()
    weight, gradient = layer.weight, layer.weight.grad
    await ts.put("w", torch.ones(64, 64))
    assert await ts.get("w", weight) is weight
    assert weight.is_leaf
    assert weight.requires_grad
    assert weight.grad is gradient
    assert torch.equal(weight.detach(), torch.ones(64, 64))


async def test_a_result_of_autograd_is_written_as_under_no_grad() -> None:
    makers: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda leaf: leaf * 2,  # has saved nothing of its result
        lambda leaf: leaf.exp(),  # its gradient is the result itself
        lambda leaf: (leaf * 2).unbind()[0],  # one of several views, which torch protects
        lambda leaf: (leaf * 2)[1:],
        lambda leaf: leaf.t(),
    ]
    for make in makers:
        by_store, by_torch = (make(torch.ones(64, 64, requires_grad=True)) for _ in range(2))
        value = torch.full(by_store.shape, 5.0)
        await ts.put("w", value)
        await ts.get("w", by_store)
        with torch.no_grad():
            by_torch.copy_(value)
        assert torch.equal(by_store.detach(), value)
        assert outcome(by_store) == outcome(by_torch)


def outcome(tensor: torch.Tensor) -> str:
    """What torch says to a backward pass."""
    try:
        tensor.sum().backward()
    except RuntimeError as error:
        return str(error).partition(" is at version ")[0]
    return "a gradient"


async def test_inference_tensors_are_filled_in_and_out_of_inference_mode() -> None:
    with torch.inference_mode():
        weight = torch.zeros(64, 64)
        await ts.put("w", torch.ones(64, 64))
        await ts.get("w", weight)
        assert (weight == 1).all()
        weight.zero_()
    await ts.get("w", weight)
    assert (weight == 1).all()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):  # so nothing of it can go stale
        saved_by_autograd(weight)


async def test_puts_are_not_tracked_and_what_is_got_has_no_history() -> None:
    for shape in (SMALL, LARGE):
        leaf = torch.nn.Parameter(torch.ones(shape))
        leaf.register_hook(lambda grad: pytest.fail("a hook has run"))
        for value in (leaf, leaf * 2):
            version = value._version
            await ts.put("w", value)
            await ts.put_state_dict({"w": value}, "m")
            assert value._version == version
            for got in (await ts.get("w"), (await ts.get_state_dict("m"))["w"], await ts.get("m/w")):
                assert type(got) is torch.Tensor
                assert not got.requires_grad
                assert got.grad_fn is None
                assert torch.equal(got, value.detach())


@contextmanager
def alone() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


async def test_a_dtensor_counts_and_so_does_its_local_tensor() -> None:
    with alone() as mesh:
        for shape in (SMALL, LARGE):
            weight = DTensor.from_local(torch.zeros(shape), mesh, [Replicate()], run_check=False)
            whole, local = weight._version, weight.to_local()
            before = local._version
            for read in (one, state_dict, state_dict):
                await read(weight)
                assert weight._version > whole
                assert local._version > before
                whole, before = weight._version, local._version


def test_a_write_that_fails_counts() -> None:
    weight = torch.zeros(3)
    loss = saved_by_autograd(weight)
    with pytest.raises(ZeroDivisionError), written([weight]):
        1 / 0  # noqa: B018
    with NOTICED:
        loss.backward()


def test_what_is_saved_or_used_while_the_bytes_arrive_is_noticed() -> None:
    weight = torch.zeros(3)
    before = saved_by_autograd(weight)
    with written([weight]):
        meanwhile = saved_by_autograd(weight)
        with NOTICED:
            before.backward()
    with NOTICED:
        meanwhile.backward()
