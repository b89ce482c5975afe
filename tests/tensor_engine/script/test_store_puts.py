"""Tensors of a mesh of the tensor engine, put by the script."""

import copy
import functools
import gc
import os
import signal
import threading
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from skipper import torchstore as ts
from skipper.control import Actor, ProcMesh, SupervisionError, endpoint, this_host
from skipper.control.api import tensor_engine_plugin
from skipper.tensor_engine import (
    CompileError,
    MeshMismatchError,
    Stream,
    StreamMismatchError,
    call_on_shard_and_fetch,
    compile,
    inspect,
    rejoin,
    restore,
    to_mesh,
)
from skipper.tensor_engine.script import session
from skipper.torchstore import sync
from skipper.torchstore.clients import mesh_publishers
from tests.control.conftest import wait_until
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


@pytest.mark.parametrize("mode", ["snapshot", "direct"])
def test_the_ranks_certify_what_they_put_as_the_script_would(four: ProcMesh, mesh: DeviceMesh, mode: Any) -> None:
    whole = torch.randn(70, 300)
    with four.activate():
        placed = {"w": cut(mesh, whole, four), "all": four.place(whole[0])}
    sync.put_state_dict({**placed, "script": whole[1]}, KEY, mode=mode, certify=True)
    certificate = sync.certificate(KEY)
    sync.put_state_dict({"w": whole, "all": whole[0], "script": whole[1]}, "whole", certify=True)
    assert certificate.root == sync.certificate("whole").root
    assert sync.prove(sync.get_state_dict(KEY), certificate).covered == 1


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
    sync.fence(KEY)
    with pytest.raises(ValueError, match="direct mode only"):
        sync.put_state_dict(None, KEY)


def publishers_of(mesh: ProcMesh) -> Any:
    return mesh_publishers._actors.get(tuple(member.id for member in mesh.members))


def test_the_actors_are_spawned_once(four: ProcMesh, mesh: DeviceMesh) -> None:
    weight = cut(mesh, torch.arange(8.0), four)
    sync.put("first", weight)
    actors = publishers_of(four)
    sync.put("second", weight)
    assert publishers_of(four) is actors


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
        (
            lambda whole, plain: sync.put_state_dict({"x": whole, "y": print, "z": threading.Lock()}, "x"),
            ts.KindMismatchError,
            "x/z",
        ),
        (
            lambda whole, plain: sync.put_state_dict({"x": whole, "y": torch.eye(2).to_sparse()}, "x"),
            ts.KindMismatchError,
            "x/y",
        ),
        (lambda whole, plain: sync.put_state_dict({"a.b": whole, "a": {"b": plain}}, "x"), ValueError, "both named"),
        (lambda whole, plain: sync.put_state_dict({"x": whole}, "x", delta=True, copies=2), ValueError, "copies"),
        (lambda whole, plain: sync.put_state_dict({"x": whole}, "x", copies=2), ts.StrategyError, "volumes"),
        (lambda whole, plain: sync.put_state_dict({"x": whole}, "x", timeout=0), ValueError, "timeout"),
        (lambda whole, plain: sync.put_batch({"x": whole, "y": torch.ones(2)}), ts.KindMismatchError, "put_state_dict"),
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

    with four.activate(), pytest.raises(CompileError, match="outside of the compiled"):
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


@pytest.mark.parametrize("mode", ["snapshot", "direct"])
def test_tensors_of_several_meshes_and_of_the_script_are_one_version(
    four: ProcMesh, procs: ProcMesh, mesh: DeviceMesh, mode: Any
) -> None:
    with procs.activate():
        other = init_device_mesh("cpu", (2,), mesh_dim_names=("gpus",))
        head = distribute_tensor(torch.arange(8.0).reshape(2, 4), other, [Shard(1)])
    stages = [cut(mesh, torch.arange(8.0), four), {"head": head, "of the script": torch.ones(3)}]
    state: dict[Any, Any] = {"stages": stages, "steps": (torch.tensor(3), 4), "lr": 0.1}
    for version in (1, 2):
        assert sync.put_state_dict(state if version == 1 or mode == "snapshot" else None, KEY, mode=mode) == version
        stored = sync.get_state_dict(KEY)
        torch.testing.assert_close(stored["stages"][0], torch.arange(8.0) * version)
        torch.testing.assert_close(stored["stages"][1]["head"], torch.arange(8.0).reshape(2, 4) * version)
        torch.testing.assert_close(stored["stages"][1]["of the script"], torch.ones(3) * version)
        assert (stored["steps"], stored["lr"]) == ((torch.tensor(3), 4), 0.1)
        sync.wait_for_readers(KEY)
        sync.fence(KEY)
        for each in (stages[0], head, stages[1]["of the script"]):  # type: ignore[index]
            each.mul_(2)
        inspect(head), inspect(stages[0])  # type: ignore[arg-type]
    if mode == "direct":  # the ranks of both meshes, and the script, have taken it back
        with pytest.raises(ts.StoreTimeoutError):
            sync.get_state_dict(KEY, timeout=0.2)


def test_tensors_of_two_streams_are_refused(four: ProcMesh, mesh: DeviceMesh) -> None:
    side = Stream("side")
    with four.activate(), side.activate():
        there = torch.ones(3)
    with pytest.raises(StreamMismatchError, match="'there'"):
        sync.put_state_dict({"whole": cut(mesh, torch.arange(8.0), four), "there": there}, KEY)
    assert sync.keys() == []


def test_any_mapping_is_looked_into(four: ProcMesh, mesh: DeviceMesh) -> None:
    sync.put_state_dict(UserDict({"model": UserDict({"w": cut(mesh, torch.arange(8.0), four)})}), KEY)
    torch.testing.assert_close(sync.get_state_dict(KEY)["model"]["w"], torch.arange(8.0))


def test_the_engine_is_asked_as_soon_as_it_has_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_engine_plugin, "engine", functools.cache(tensor_engine_plugin.engine.__wrapped__))
    monkeypatch.setattr(session, "engine", tensor_engine_plugin.engine)
    assert not tensor_engine_plugin.is_at_work()
    alone = this_host().spawn_procs()
    sync.put("x", to_mesh(torch.arange(3.0), alone))  # no mesh has ever been active
    torch.testing.assert_close(sync.get("x"), torch.arange(3.0))
    tensor_engine_plugin.engine.cache_clear()
    alone.stop().get(PATIENCE_S)


_watched: list[Any] = []
"""On a worker."""


def watch(tensor: torch.Tensor) -> None:
    _watched[:] = [weakref.ref(tensor.untyped_storage())]


def is_there() -> bool:
    gc.collect()
    return _watched[0]() is not None


def wait_until_it_is_gone(four: ProcMesh) -> None:
    def is_gone() -> bool:
        gc.collect()
        with four.activate():
            there: bool = call_on_shard_and_fetch(is_there, shard={"dp": 1, "tp": 0}).get(PATIENCE_S)
        return not there

    wait_until(is_gone, "the memory is freed", timeout=20)


def test_the_actors_keep_no_tensor_alive(four: ProcMesh, mesh: DeviceMesh) -> None:
    weight = cut(mesh, torch.arange(4096.0), four)
    call_on_shard_and_fetch(watch, weight.to_local(), shard={"dp": 1, "tp": 0}).get(PATIENCE_S)
    for _ in range(3):  # what comes again the store would keep
        sync.put_state_dict({"weight": weight}, KEY)
    sync.put("weight", weight)
    del weight
    wait_until_it_is_gone(four)


def test_what_is_put_in_direct_mode_is_kept_until_it_is_deleted(four: ProcMesh, mesh: DeviceMesh) -> None:
    weight = cut(mesh, torch.arange(4096.0), four)
    call_on_shard_and_fetch(watch, weight.to_local(), shard={"dp": 1, "tp": 0}).get(PATIENCE_S)
    sync.put_state_dict({"weight": weight}, KEY, mode="direct")
    del weight
    torch.testing.assert_close(sync.get_state_dict(KEY)["weight"], torch.arange(4096.0))
    sync.delete(KEY)
    wait_until_it_is_gone(four)


def test_a_store_that_is_made_anew_has_the_same_actors(four: ProcMesh, mesh: DeviceMesh) -> None:
    weight = cut(mesh, torch.arange(8.0), four)
    for _ in range(2):
        sync.initialize(4, ts.LocalRankStrategy(), "another")
        assert sync.put_state_dict({"weight": weight, "here": torch.ones(2)}, KEY, "another") == 1
        torch.testing.assert_close(sync.get_state_dict(KEY, store_name="another")["weight"], torch.arange(8.0))
        sync.shutdown("another")


class Reader(Actor):
    @endpoint
    async def read(self, state_dict: dict[str, Any]) -> None:
        await ts.get_state_dict(KEY, state_dict)


def test_an_actor_reads_into_tensors_of_a_mesh_and_the_script_is_told_to_have_one(
    four: ProcMesh, mesh: DeviceMesh
) -> None:
    sync.put_state_dict({"w": torch.arange(8.0)}, KEY)
    mine = cut(mesh, torch.zeros(8), four)
    reads: list[Callable[[], object]] = [
        lambda: sync.get_state_dict(KEY, {"w": mine}),
        lambda: sync.explain(KEY, {"w": mine}),
        lambda: sync.get(f"{KEY}/w", mine),
        lambda: sync.get_batch({f"{KEY}/w": mine}),
    ]
    for read in reads:
        with pytest.raises(ts.KindMismatchError, match="endpoint of an actor on that mesh"):
            read()
    four.spawn("reader", Reader).read.call({"w": mine}).get(PATIENCE_S)
    torch.testing.assert_close(inspect(mine.full_tensor()), torch.arange(8.0))


def test_a_rank_that_is_killed_in_the_middle_is_told_and_its_successor_puts(failures: Failures) -> None:
    replicas = this_host().spawn_procs({"dp": 2})
    with replicas.activate():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        same = torch.arange(8.0)
        cut_up = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
        victim = call_on_shard_and_fetch(os.getpid, shard={"dp": 1}).get(PATIENCE_S)
    sync.put_state_dict({"same": same, "cut": cut_up}, KEY)
    os.kill(victim, signal.SIGSTOP)
    told: list[SupervisionError] = []

    def put() -> None:
        try:
            sync.put_state_dict({"same": same, "cut": cut_up}, KEY, timeout=PATIENCE_S)
        except SupervisionError as error:
            told.append(error)

    thread = threading.Thread(target=put)
    thread.start()
    try:
        wait_until(lambda: has_part_of(2), "the share of the other rank")
    finally:
        os.kill(victim, signal.SIGKILL)
        thread.join(PATIENCE_S)
    assert len(told) == 1
    assert sync.versions(KEY) == (1,)
    failures.wait()
    replicas = replicas.with_successors({position: this_host().spawn_procs() for position in replicas.lost()})
    rejoin(replicas)
    restore(same, "dp")
    assert sync.put_state_dict({"same": same}, KEY, verify_replicas=True) == 3
    torch.testing.assert_close(sync.get_state_dict(KEY)["same"], torch.arange(8.0))
    replicas.stop().get(PATIENCE_S)


def has_part_of(version: int) -> bool:
    """Whether some share of a version has come, and not all."""
    try:
        sync.get_state_dict(KEY, version=version, timeout=PATIENCE_S)
    except ts.PartiallyPublishedError:
        return True
    except ts.KeyNotFoundError:
        return False
    raise AssertionError("it is whole")
