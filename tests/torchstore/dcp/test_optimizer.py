"""A whole training state, AdamW's included, goes through the store to another mesh, and training goes on."""

from typing import Any

import pytest
import torch

from tests.torchstore.dcp.conftest import same_everywhere

pytestmark = pytest.mark.usefixtures("store")


async def first(results: Any) -> Any:
    return next(iter((await results).values()))


async def test_an_optimizer_under_fsdp_is_read_on_a_mesh_of_fsdp_and_tensor_parallelism(two: Any, four: Any) -> None:
    await two.train.call(0, 3)
    await two.put.call("state")
    expected = await first(two.whole.call())
    await four.train.call(50, 2)  # there is something to be overwritten
    await four.get.call("state")
    assert same_everywhere(await four.whole.call(), expected)
    assert torch.equal(expected["optim.state.first.weight.step"], torch.tensor(3.0))

    before = await first(two.train.call(3, 4))
    beside = await first(four.train.call(3, 4))
    torch.testing.assert_close(beside, before)  # sums in another order


async def test_training_goes_on_as_if_nothing_had_happened(two: Any, four: Any) -> None:
    await two.train.call(0, 3)
    await two.put.call("state")
    await four.get.call("state")
    expected = await first(two.train.call(3, 4))
    await four.put.call("back")
    await two.train.call(70, 2)
    await two.get.call("back")
    assert await first(two.train.call(3, 4)) == expected  # bit for bit: by way of another mesh and back
