"""Tensors on the workers' GPUs, against the same in the script.

Each test runs with one worker for each GPU, which reduce by NCCL where there are several, and with two workers that
share the first GPU, which reduce by way of the host.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from skipper.control import Actor, ProcMesh, endpoint, this_host
from skipper.tensor_engine import Stream, compile, fetch_shard, inspect, remote
from skipper.tensor_engine.script import random
from skipper.tensor_engine.script.session import session_of
from tests.gpu.gates import needs_nccl

from .conftest import PATIENCE_S

pytestmark = needs_nccl()


@pytest.fixture(scope="module", params=["one each", "two on one"])
def workers(request: pytest.FixtureRequest) -> Iterator[ProcMesh]:
    """One for each GPU, but no more than two; or two on the first."""
    if request.param == "one each":
        size, env = min(torch.cuda.device_count(), 2), {}
    else:
        size, env = 2, {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}
    mesh = this_host().spawn_procs({"gpus": size}, name="with_gpus", env=env)
    yield mesh
    session_of(mesh).close(PATIENCE_S)
    mesh.stop().get(PATIENCE_S)


def shards(tensor: torch.Tensor, mesh: ProcMesh) -> list[torch.Tensor]:
    fetched = [fetch_shard(tensor.detach(), gpus=rank) for rank in range(mesh.size)]
    return [each.get(PATIENCE_S) for each in fetched]


def ranked(mesh: ProcMesh, *shape: int) -> torch.Tensor:
    with mesh.activate():
        numbers = torch.arange(torch.Size(shape).numel(), device="cuda", dtype=torch.float32).reshape(shape)
        return torch.cos(numbers) * (mesh.rank_tensor("gpus") + 1)


def test_each_worker_has_a_gpu_of_its_own_and_the_script_sees_one(workers: ProcMesh) -> None:
    x = ranked(workers, 3, 4)
    assert x.device == torch.device("cuda:0")
    for rank, found in enumerate(shards(x, workers)):
        assert found.device.type == "cpu"
        torch.testing.assert_close(found, torch.cos(torch.arange(12.0)).reshape(3, 4) * (rank + 1))
    devices = remote(lambda x: torch.tensor([x.device.index]), propagate=lambda x: torch.empty(1, dtype=torch.int64))
    there = torch.cuda.device_count()
    assert [each.item() for each in shards(devices(x), workers)] in ([0] * workers.size, list(range(min(there, 2))))


def test_large_tensors_come_whole(workers: ProcMesh) -> None:
    x = ranked(workers, 1 << 10, 1 << 10)
    for rank, found in enumerate(shards(x.t(), workers)):
        wanted = torch.cos(torch.arange(float(1 << 20))).reshape(1 << 10, 1 << 10).t() * (rank + 1)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("n", [4, 1 << 18])
def test_reductions_and_moves(workers: ProcMesh, n: int) -> None:
    x = ranked(workers, n)
    plain = shards(x, workers)
    total = torch.stack(plain).sum(0)
    for found in shards(x.reduce("gpus"), workers):  # type: ignore[attr-defined]
        torch.testing.assert_close(found, total)
    for found in shards(x.reduce("gpus", "stack"), workers):  # type: ignore[attr-defined]
        torch.testing.assert_close(found, torch.stack(plain))
    scattered = shards(x.reduce("gpus", scatter=True), workers)  # type: ignore[attr-defined]
    torch.testing.assert_close(torch.cat(scattered), total)
    last = x.slice_mesh(gpus=workers.size - 1).to_mesh(workers)  # type: ignore[attr-defined]
    for found in shards(last, workers):
        torch.testing.assert_close(found, plain[-1])


def test_a_compiled_training_step_gives_the_weights_of_a_run_in_the_script(workers: ProcMesh) -> None:
    def train(mesh: ProcMesh | None) -> list[torch.Tensor]:
        with torch.no_grad():
            model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).cuda()
            for index, parameter in enumerate(model.parameters()):
                numbers = torch.arange(parameter.numel(), device="cuda", dtype=torch.float32)
                parameter.copy_(torch.sin(numbers + index).reshape(parameter.shape))
            x = torch.cos(torch.arange(24.0, device="cuda")).reshape(6, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            for parameter in model.parameters():
                if mesh is not None:
                    parameter.grad.reduce_("gpus", "avg")  # type: ignore[union-attr]
            optimizer.step()

        run = step if mesh is None else compile(step)
        for _ in range(5):
            run()
        return [parameter.detach() for parameter in model.parameters()]

    with workers.activate():
        there = train(workers)
    for found, wanted in zip(there, train(None), strict=True):
        for each in shards(found, workers):
            torch.testing.assert_close(each, wanted.cpu())


def test_streams_lend_each_other_what_is_still_being_computed(workers: ProcMesh) -> None:
    side = Stream("side of a GPU")
    with workers.activate():
        x = torch.eye(2048, device="cuda")
        for _ in range(20):
            x = x @ x
    with side.borrow(x, mutable=True) as y:
        for _ in range(20):
            y.copy_(y @ y)
        y.add_(1)
    for found in shards((x - 1).sum(), workers):
        assert found.item() == 2048


class Doubler(Actor):
    """Computes in a thread of its own."""

    @endpoint(propagate=lambda x: x)
    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + torch.zeros(1, device="cuda")


def test_actors_get_what_is_still_being_computed_and_stay_on_the_gpu(workers: ProcMesh) -> None:
    actors = workers.spawn("doubler", Doubler)
    side = Stream("side of actors")
    with workers.activate(), side.activate():
        x = torch.eye(2048, device="cuda")
        for _ in range(10):
            x = x @ x
        doubled: Any = x
        for _ in range(3):
            doubled = actors.double.rref(doubled)
    for found in shards(doubled.sum(), workers):
        assert found.item() == 8 * 2048
    actors.stop().get(PATIENCE_S)


def test_generators_of_gpus_are_seeded_and_their_states_kept(workers: ProcMesh) -> None:
    with workers.activate():
        random.manual_seed(7)
        first = torch.rand(5, device="cuda")
        state = random.get_state("cuda")
        second = torch.rand(5, device="cuda")
        random.set_state(state, "cuda")
        again = torch.rand(5, device="cuda")
    generator = torch.Generator("cuda").manual_seed(7)
    torch.testing.assert_close(inspect(first), torch.rand(5, device="cuda", generator=generator).cpu())
    for one, other in zip(shards(second, workers), shards(again, workers), strict=True):
        torch.testing.assert_close(one, other)
