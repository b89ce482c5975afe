"""Endpoints of actors that take and return tensors of a mesh, in order with the actor's ordinary messages."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from skipper.control import Actor, ActorMesh, ProcMesh, context, current_rank, endpoint
from skipper.tensor_engine import LocalTensorError, MeshMismatchError, NoActiveMeshError, RemoteError, inspect
from tests.tensor_engine.conftest import PATIENCE_S, Failures


class Layer(Actor):
    """Has a weight and a log of what it was called for."""

    def __init__(self) -> None:
        self.weight = torch.full((3, 2), float(current_rank().rank + 1), requires_grad=True)
        self.log: list[str] = []

    @endpoint(propagate=lambda x: x.new_empty(x.shape[0], 2))
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append("forward")
        return x @ self.weight

    @endpoint
    def scale(self, factor: float) -> None:
        self.log.append(f"scale {factor}")
        with torch.no_grad():
            self.weight.mul_(factor)

    @endpoint
    def logged(self) -> list[str]:
        return self.log

    @endpoint
    def note(self, x: torch.Tensor, words: dict[str, Any]) -> None:
        self.log.append(f"{words['first']} {x.sum().item()}")

    @endpoint(propagate="inspect")
    def positive(self, x: torch.Tensor) -> dict[str, Any]:
        self.log.append("positive")
        return {"found": x[x > 0], "of": len(x)}

    @endpoint(propagate="cached")
    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @endpoint(propagate="mocked")
    def mocked(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @endpoint(propagate=lambda x: x)
    def fail_on(self, x: torch.Tensor) -> torch.Tensor:
        if x[0] == 1:
            raise ValueError("told to fail")
        return x

    @endpoint(propagate=lambda x: x)
    def leave(self, x: torch.Tensor) -> torch.Tensor:
        raise SystemExit("told to leave")

    @endpoint(propagate=lambda x: x)
    def end(self, x: torch.Tensor) -> torch.Tensor:
        context().actor_instance.abort("told to end")
        threading.Event().wait(0.5)  # busy for so long, while its end is known already
        return x


class AsyncLayer(Actor):
    """The same with a loop."""

    @endpoint(propagate=lambda x, *, by: x)
    async def multiply(self, x: torch.Tensor, *, by: float) -> torch.Tensor:
        return x * by


@pytest.fixture
def layer(procs: ProcMesh) -> Iterator[ActorMesh[Layer]]:
    mesh = procs.spawn("layer", Layer)
    yield mesh
    mesh.stop().get(PATIENCE_S)


@pytest.fixture
def x(procs: ProcMesh) -> torch.Tensor:
    with procs.activate():
        result: torch.Tensor = torch.ones(4, 3) + procs.rank_tensor("gpus")
        return result


def at(tensor: torch.Tensor) -> list[Any]:
    return [inspect(tensor, gpus=rank, timeout=PATIENCE_S).tolist() for rank in range(2)]


def test_an_endpoint_gets_the_local_tensors_and_its_result_is_one_of_the_mesh(
    procs: ProcMesh, layer: ActorMesh[Layer], x: torch.Tensor
) -> None:
    output = layer.forward.rref(x)
    assert output.shape == (4, 2)
    assert not output.requires_grad
    assert at((output + 1)[0]) == [[4, 4], [13, 13]]


def test_calls_are_in_order_with_ordinary_messages(procs: ProcMesh, layer: ActorMesh[Layer], x: torch.Tensor) -> None:
    outputs = [layer.forward.rref(x)]
    layer.scale.broadcast(2.0)
    outputs.append(layer.forward.rref(x))
    layer.note.rref(x[0], {"first": "sum"})
    before = layer.logged.call()
    outputs.append(layer.forward.rref(x + 1))
    assert [at(output[0, :1]) for output in outputs] == [[[3], [12]], [[6], [24]], [[12], [36]]]
    assert list(before.get(PATIENCE_S)) == [["forward", "scale 2.0", "forward", f"sum {n}.0"] for n in (3, 6)]


def test_results_can_be_asked_for(procs: ProcMesh, layer: ActorMesh[Layer]) -> None:
    with procs.activate():
        x = torch.tensor([1.0, -2.0, 3.0])
    result = layer.positive.rref(x)
    assert result["of"] == 3
    assert at(result["found"]) == [[1, 3]] * 2
    for _ in range(3):
        assert at(layer.double.rref(x)) == [[2, -4, 6]] * 2
    with pytest.raises(ValueError, match="needs its actor"):
        layer.mocked.rref(x)


def test_async_actors_and_slices(procs: ProcMesh, x: torch.Tensor) -> None:
    actors = procs.spawn("async_layer", AsyncLayer)
    assert at(actors.multiply.rref(x[0], by=3.0)) == [[3] * 3, [6] * 3]
    second = procs.slice(gpus=1)
    with second.activate():
        y = torch.ones(2)
    assert inspect(actors.slice(gpus=1).multiply.rref(y, by=0.5), timeout=PATIENCE_S).tolist() == [0.5, 0.5]
    with pytest.raises(MeshMismatchError, match="same slice of both"):
        actors.multiply.rref(y, by=0.5)
    actors.stop().get(PATIENCE_S)


def test_a_failure_of_the_method_poisons_its_result_and_the_actor_lives(
    procs: ProcMesh, layer: ActorMesh[Layer], x: torch.Tensor
) -> None:
    bad = layer.fail_on.rref(x[0])  # this line is to blame
    after = layer.forward.rref(bad.reshape(1, 3))
    for poisoned in (bad, after):
        with pytest.raises(RemoteError, match="told to fail") as caught:
            inspect(poisoned, timeout=PATIENCE_S)
        assert (caught.value.rank, caught.value.operation) == (0, "layer.fail_on")
        assert "this line is to blame" in caught.value.script_stack
        assert "in fail_on" in caught.value.worker_stack
    assert inspect(after, gpus=1, timeout=PATIENCE_S).tolist() == [[12, 12]]
    assert list(layer.logged.call().get(PATIENCE_S)) == [[], ["forward"]]
    assert at(layer.forward.rref(x)[0]) == [[3, 3], [12, 12]]


def test_an_actor_that_ends_is_a_failure_of_its_mesh_and_the_workers_go_on(
    procs: ProcMesh, x: torch.Tensor, failures: Failures
) -> None:
    actors = procs.spawn("mortal", Layer)
    with pytest.raises(RemoteError, match="has ended with SystemExit: told to leave"):
        inspect(actors.leave.rref(x), timeout=PATIENCE_S)
    results = [actors.end.rref(x), actors.forward.rref(x)]
    for result in results:
        with pytest.raises(RemoteError, match="'mortal' of this process has ended"):
            inspect(result, timeout=PATIENCE_S)
    assert at(x[0] + 1) == [[2] * 3, [3] * 3]
    stopped = procs.spawn("stopped", Layer)
    stopped.stop().get(PATIENCE_S)
    with pytest.raises(RemoteError, match="has ended"):
        inspect(stopped.forward.rref(x), gpus=1, timeout=PATIENCE_S)
    assert failures


def test_misuse_is_refused_at_the_line(
    procs: ProcMesh, four: ProcMesh, layer: ActorMesh[Layer], x: torch.Tensor
) -> None:
    with pytest.raises(TypeError):
        layer.forward.rref(x, x)
    with pytest.raises(LocalTensorError):
        layer.forward.rref(torch.ones(4, 3))
    with pytest.raises(NoActiveMeshError):
        layer.scale.rref(2.0)
    with four.activate():
        other = torch.ones(4, 3)
        with pytest.raises(MeshMismatchError):
            layer.scale.rref(2.0)
    with pytest.raises(MeshMismatchError):
        layer.forward.rref(other)
    with procs.activate():
        assert layer.scale.rref(2.0) is None
    assert at(layer.forward.rref(x)[0]) == [[6, 6], [24, 24]]
