"""Tensors of a mesh of the tensor engine, put by the script."""

import copy
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from skipper import torchstore as ts
from skipper.control import ProcMesh, SupervisionError, this_host
from skipper.tensor_engine import CompileError, MeshMismatchError, call_on_shard_and_fetch, compile, inspect
from skipper.torchstore import sync
from skipper.torchstore.clients import mesh_publishers
from tests.tensor_engine.conftest import PATIENCE_S, Failures

KEY = "policy"


@pytest.fixture(scope="module", autouse=True)
def _store(end_the_job: None) -> Iterator[None]:
    sync.initialize()
    yield
    sync.shutdown()


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    yield
    sync.delete_batch(sync.keys())


@pytest.fixture(scope="module")
def mesh(four: ProcMesh) -> DeviceMesh:
    """Of all four."""
    with four.activate():
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def cut(mesh: DeviceMesh, whole: torch.Tensor, four: ProcMesh) -> DTensor:
    return distribute_tensor(four.place(whole), mesh, [Shard(0), Replicate()])


@pytest.mark.parametrize("mode", ["snapshot", "direct"])
def test_a_model_on_a_mesh_is_put_as_it_is_at_this_point(four: ProcMesh, mesh: DeviceMesh, mode: Any) -> None:
    local = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    model = fully_shard(four.place(copy.deepcopy(local)), mesh=mesh["dp"])
    for step in range(1, 4):
        assert sync.put_state_dict({"model": model.state_dict(), "step": step}, KEY, mode=mode) == step
        if mode == "direct":
            assert_stored(local, step)
            sync.fence(KEY)
        for each in (model, local):
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.mul_(2)
        if mode == "snapshot":  # after what the script has changed behind the put
            assert_stored(local, step, times=0.5)


def assert_stored(local: torch.nn.Module, step: int, times: float = 1.0) -> None:
    stored = sync.get_state_dict(KEY)
    assert stored["step"] == step
    parameters = {name for name, _ in local.named_parameters()}
    expected = {name: each * times if name in parameters else each for name, each in local.state_dict().items()}
    torch.testing.assert_close(stored["model"], expected)


async def test_with_an_event_loop(four: ProcMesh, mesh: DeviceMesh) -> None:
    weight = cut(mesh, torch.arange(8.0), four)
    assert await ts.put_state_dict({"weight": weight}, KEY, transfer_dtype=torch.bfloat16) == 1
    assert (await ts.get_state_dict(KEY))["weight"].dtype == torch.bfloat16
    await ts.put("weight", weight * 2)
    torch.testing.assert_close(await ts.get("weight"), 2 * torch.arange(8.0))


def test_what_was_put_in_direct_mode_is_put_again(four: ProcMesh, mesh: DeviceMesh) -> None:
    weight = cut(mesh, torch.arange(8.0), four)
    sync.put_state_dict({"weight": weight}, KEY, mode="direct", transfer_dtype=torch.float32)
    weight.mul_(3)
    inspect(weight)
    sync.wait_for_readers(KEY)
    assert sync.put_state_dict(None, KEY, mode="direct") == 2
    torch.testing.assert_close(sync.get_state_dict(KEY)["weight"], 3 * torch.arange(8.0))
    sync.put_state_dict({"weight": torch.ones(2)}, KEY)  # by this process: its own fence again
    assert not mesh_publishers.is_of_mesh(KEY, "default")
    sync.fence(KEY)


def test_the_actors_are_spawned_once(four: ProcMesh, mesh: DeviceMesh) -> None:
    weight = cut(mesh, torch.arange(8.0), four)
    sync.put("first", weight)
    actors = dict(mesh_publishers._publishers)
    sync.put("second", weight)
    assert mesh_publishers._publishers == actors


def test_of_one_rank_and_of_ranks_that_are_compared(four: ProcMesh) -> None:
    same = four.place(torch.arange(3.0))
    sync.put_state_dict({"same": same.slice_mesh(dp=0, tp=1)}, KEY)  # type: ignore[attr-defined]
    sync.put_state_dict({"same": same}, KEY, verify_replicas=True)
    torch.testing.assert_close(sync.get_state_dict(KEY)["same"], torch.arange(3.0))
    different = same + four.rank_tensor("tp")
    with pytest.raises(ts.ReplicaMismatchError):
        sync.put_state_dict({"same": different}, KEY, verify_replicas=True)


def misfits() -> list[tuple[Callable[[DTensor, torch.Tensor], Any], type[Exception], str]]:
    """What cannot be put, and the error for it."""
    return [
        (lambda whole, plain: sync.put("x", plain), ts.UnsupportedPlacementError, "DTensor"),
        (lambda whole, plain: sync.put_state_dict({"x": plain}, "x"), ts.UnsupportedPlacementError, "slice_mesh"),
        (lambda whole, plain: sync.put("x", whole, publisher=(0, 2)), TypeError, "publisher="),
        (lambda whole, plain: sync.put_state_dict({"x": whole}, "x", publisher=(0, 2)), TypeError, "publisher="),
        (lambda whole, plain: sync.put_state_dict({"x": whole, "y": torch.ones(2)}, "x"), ValueError, "script"),
        (lambda whole, plain: sync.put_state_dict({"x": whole}, "x", mode="late"), ValueError, "mode is"),  # type: ignore[arg-type]
        (
            lambda whole, plain: sync.put_state_dict({"x": whole, "y": plain.slice_mesh(dp=0)}, "x"),  # type: ignore[attr-defined]
            MeshMismatchError,
            "mesh",
        ),
    ]


@pytest.mark.parametrize(("attempt", "error", "words"), misfits(), ids=range(len(misfits())))
def test_what_does_not_fit_is_refused_before_anything_is_put(
    four: ProcMesh,
    mesh: DeviceMesh,
    attempt: Callable[[DTensor, torch.Tensor], Any],
    error: type[Exception],
    words: str,
) -> None:
    with pytest.raises(error, match=words):
        attempt(cut(mesh, torch.arange(8.0), four), four.place(torch.ones(2)))
    assert sync.keys() == []


def test_within_a_compiled_function_it_is_refused(four: ProcMesh, mesh: DeviceMesh) -> None:
    weight = cut(mesh, torch.arange(8.0), four)

    @compile
    def step() -> torch.Tensor:
        sync.put("weight", weight)
        return weight.to_local() * 2

    with four.activate(), pytest.raises(CompileError, match="beside the compiled"):
        step()
    assert sync.keys() == []


def test_what_fails_on_the_ranks_is_told_as_always(four: ProcMesh, mesh: DeviceMesh) -> None:
    weight = cut(mesh, torch.arange(8.0), four)
    sync.put("weight", weight, version=3)
    with pytest.raises(ts.VersionExistsError):
        sync.put("weight", weight, version=3)
    sync.put("weight", weight)
    assert sync.get_meta("weight").version == 4


def test_of_a_mesh_with_a_dead_rank_nothing_is_put(failures: Failures) -> None:
    procs = this_host().spawn_procs({"dp": 2})
    with procs.activate():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        weight = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
        victim = call_on_shard_and_fetch(os.getpid, shard={"dp": 1}).get(PATIENCE_S)
    sync.put("weight", weight)
    os.kill(victim, signal.SIGKILL)
    failures.wait()
    with pytest.raises(SupervisionError):
        sync.put("weight", weight, timeout=PATIENCE_S)
    torch.testing.assert_close(sync.get("weight"), torch.arange(8.0))  # the version before
    procs.stop().get(PATIENCE_S)
