"""What other files show on two workers, on four: each rank against the same computation in this process."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from skipper.control import Actor, ProcMesh, endpoint
from skipper.tensor_engine import (
    OpaqueModule,
    RemoteError,
    Stream,
    call_on_shard_and_fetch,
    compile,
    fetch_shard,
    grad_function,
    no_mesh,
    remote,
)
from skipper.tensor_engine.script import random
from skipper.tensor_engine.script.session import session_of

from . import user_functions as functions
from .conftest import PATIENCE_S

HERE = "tests.tensor_engine.user_functions"
SIZE = 4


@pytest.fixture
def line(four: ProcMesh) -> Iterator[ProcMesh]:
    """The four workers along one axis, active during the test."""
    mesh = four.flatten("gpus")
    with mesh.activate():
        yield mesh


def at(tensor: torch.Tensor) -> list[torch.Tensor]:
    fetched = [fetch_shard(tensor.detach(), gpus=rank) for rank in range(SIZE)]
    return [each.get(PATIENCE_S) for each in fetched]


def ranked(mesh: ProcMesh, *shape: int) -> torch.Tensor:
    numbers = torch.cos(torch.arange(torch.Size(shape).numel(), dtype=torch.float32)).reshape(shape)
    return numbers * (mesh.rank_tensor("gpus") + 1)


def assert_ranks(found: torch.Tensor, wanted: Callable[[torch.Tensor], torch.Tensor], *given: torch.Tensor) -> None:
    shards = [at(each) for each in (found, *given)]
    with no_mesh():
        for one, *local in zip(*shards, strict=True):
            torch.testing.assert_close(one, wanted(*local))


def test_operations_and_gradients(line: ProcMesh) -> None:
    x, y = ranked(line, 3, 4), ranked(line, 4, 2)

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        z = x * 2
        z[0].mul_(3)
        ((z @ y).relu().sum() + z.t()[1].exp().mean()).backward()
        assert x.grad is not None
        return x.grad

    assert_ranks(program(x, y), program, x, y)


def test_remote_functions_and_their_state(line: ProcMesh) -> None:
    x = ranked(line, 3)
    remote(functions.reset)()
    remote(functions.count_calls, propagate="cached")(x)
    assert_ranks(remote(functions.count_calls, propagate="cached")(x), lambda x: x + 2, x)
    sums = [call_on_shard_and_fetch(torch.sum, x, shard={"gpus": rank}) for rank in range(SIZE)]
    for found, local in zip(sums, at(x), strict=True):
        assert found.get(PATIENCE_S).item() == pytest.approx(local.sum().item())


def test_failures_of_some_ranks(line: ProcMesh) -> None:
    x = ranked(line, 3)
    bad = x.index_select(0, 2 * line.rank_tensor("gpus").view(1)) + 1  # elements 4 and 6 are not there
    for rank in range(SIZE):
        coming = fetch_shard(bad, gpus=rank)
        if rank < 2:
            assert coming.get(PATIENCE_S).shape == (1,)
            continue
        with pytest.raises(RemoteError, match="index out of range") as caught:
            coming.get(PATIENCE_S)
        assert caught.value.rank == rank


class Layer(Actor):
    """Has a weight."""

    def __init__(self) -> None:
        self.weight = 1.0

    @endpoint(propagate=lambda x: x)
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    @endpoint
    def grow(self) -> None:
        self.weight += 1


def test_endpoints_of_actors_in_order_with_messages(line: ProcMesh) -> None:
    layer = line.spawn("layer_of_four", Layer)
    x = ranked(line, 3)
    before = layer.scaled.rref(x)
    layer.grow.broadcast()
    assert_ranks(before + 10 * layer.scaled.rref(x), lambda x: 21 * x, x)
    layer.stop().get(PATIENCE_S)


def test_streams_that_lend_each_other_tensors_with_their_gradients(line: ProcMesh) -> None:
    side = Stream("side of four")
    x, held = ranked(line, 3).requires_grad_(), ranked(line, 3)
    before = held.clone()
    with side.borrow(x.sin()) as y, side.borrow(held, mutable=True) as z:
        y.square().sum().backward()
        z += y.detach().reduce("gpus")  # type: ignore[attr-defined]
    assert x.grad is not None
    assert_ranks(x.grad, lambda x: 2 * x.sin() * x.cos(), x)
    with no_mesh():
        total = torch.stack([each.sin() for each in at(x)]).sum(0)
    assert_ranks(held, lambda before: before + total, before)


def test_random_numbers(line: ProcMesh) -> None:
    state = random.get_state()
    random.manual_seed(5)
    drawn = torch.rand(4)
    random.set_state(state)
    with no_mesh():
        for rank, found in enumerate(at(drawn)):
            torch.testing.assert_close(found, torch.rand(4, generator=torch.Generator().manual_seed(5 + rank)))


def test_modules_that_live_there_and_functions_with_their_own_backward(line: ProcMesh) -> None:
    @grad_function
    def doubled(x: torch.Tensor) -> Any:
        return x * 2, lambda grad: grad * 2

    module = OpaqueModule(f"{HERE}.Scaled", 3, 2)
    x = ranked(line, 4, 3).requires_grad_()
    module(doubled(x), scale=2.0).square().sum().backward()
    assert x.grad is not None

    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        functions.Scaled(3, 2)(x * 2, scale=2.0).square().sum().backward()
        assert x.grad is not None
        return x.grad

    assert_ranks(x.grad, gradient, x)

    def weights(x: torch.Tensor) -> torch.Tensor:
        layer = functions.Scaled(3, 2)
        layer(x * 2, scale=2.0).square().sum().backward()
        assert layer.linear.weight.grad is not None
        return layer.linear.weight.grad

    weight = dict(module.named_parameters())["linear.weight"]
    assert weight.grad is not None
    assert_ranks(weight.grad, weights, x)


def test_a_compiled_training_step_is_that_of_the_whole_batch_in_one_process(line: ProcMesh) -> None:
    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                numbers = torch.arange(parameter.numel(), dtype=torch.float32)
                parameter.copy_(torch.sin(numbers + index).reshape(parameter.shape))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = start()

    @compile
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad.reduce_("gpus", "avg")  # type: ignore[union-attr]
        optimizer.step()
        return loss.detach().reduce("gpus", "avg")  # type: ignore[attr-defined, no-any-return]

    batches = [ranked(line, 2, 4) + shift for shift in range(5)]
    losses = [step(x) for x in batches]
    whole = [torch.cat(at(x)) for x in batches]
    instruction_stream = session_of(line).instruction_stream(line)
    before = instruction_stream.issued
    step(batches[0])
    assert instruction_stream.issued == before + 1
    with no_mesh():
        alone, plain = start()
        for x, found in zip(whole, losses, strict=True):
            plain.zero_grad()
            loss = alone(x).square().mean()
            loss.backward()
            plain.step()
            for each in at(found):
                torch.testing.assert_close(each, loss.detach())
