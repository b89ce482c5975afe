"""Tensors of a mesh as plain arguments of actors' endpoints and of ``spawn``."""

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from skipper.control import Actor, ActorError, ActorMesh, Port, ProcMesh, SupervisionError, current_rank, endpoint
from skipper.tensor_engine import LocalTensorError, MeshMismatchError, OpaqueRef, inspect, remote
from tests.control.conftest import wait_until
from tests.tensor_engine.conftest import PATIENCE_S, Failures


class Taker(Actor):
    """Says what it was given."""

    def __init__(self, start: torch.Tensor | None = None, **words: Any) -> None:
        self.start = None if start is None else start.clone()
        self.words = words
        self.log: list[Any] = []

    @endpoint
    def started(self) -> Any:
        return None if self.start is None else self.start.tolist(), dict(self.words)

    @endpoint
    def take(self, x: torch.Tensor, *, more: dict[str, Any] | None = None) -> Any:
        self.log.append(x.tolist())
        return current_rank().rank, type(x).__name__, x.tolist(), None if more is None else more["y"].tolist()

    @endpoint
    def add(self, x: torch.Tensor, y: float) -> None:
        x += y

    @endpoint
    def logged(self) -> list[Any]:
        return self.log

    @endpoint
    def fail(self, x: torch.Tensor) -> None:
        raise ValueError(f"told to fail with {x.tolist()}")

    @endpoint
    def look(self, ref: Any) -> str:
        return str(ref.value)

    @endpoint
    def watch(self, x: torch.Tensor) -> None:
        self.watched = weakref.ref(x.untyped_storage())

    @endpoint
    def is_there(self) -> bool:
        gc.collect()
        return self.watched() is not None

    @endpoint(explicit_response_port=True)
    def answer(self, port: Port[Any], x: torch.Tensor) -> None:
        port.send(x.tolist())


class AsyncTaker(Actor):
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x.clone()

    @endpoint
    async def take(self, x: torch.Tensor) -> list[float]:
        total: list[float] = (x + self.x).tolist()
        return total


@pytest.fixture
def takers(procs: ProcMesh) -> Iterator[ActorMesh[Taker]]:
    mesh = procs.spawn("takers", Taker)
    yield mesh
    mesh.stop().get(PATIENCE_S)


@pytest.fixture
def x(procs: ProcMesh) -> torch.Tensor:
    with procs.activate():
        result: torch.Tensor = torch.ones(2) + procs.rank_tensor("gpus")
        return result


def test_each_actor_gets_its_own_shard_by_every_adverb(takers: ActorMesh[Taker], x: torch.Tensor) -> None:
    assert takers.take.call(x).get(PATIENCE_S) == [(0, "Tensor", [1, 1], None), (1, "Tensor", [2, 2], None)]
    second = takers.slice(gpus=1)
    assert second.take.call_one(x, more={"y": x * 10}).get(PATIENCE_S) == (0, "Tensor", [2, 2], [20, 20])
    chosen = [takers.take.choose(x).get(PATIENCE_S)[2] for _ in range(2)]
    assert sorted(chosen) == [[1, 1], [2, 2]]
    streamed = [future.get(PATIENCE_S)[2] for future in takers.take.stream(x)]
    assert sorted(streamed) == [[1, 1], [2, 2]]
    takers.take.broadcast(x * 3)
    assert [log[-1] for log in takers.logged.call().get(PATIENCE_S)] == [[3, 3], [6, 6]]


def test_calls_have_their_turn_among_the_operations(takers: ActorMesh[Taker], x: torch.Tensor) -> None:
    takers.add.broadcast(x, 1.0)
    before = takers.take.call(x)
    x.mul_(10)
    after = takers.take.call(x)
    assert [each[2] for each in before.get(PATIENCE_S)] == [[2, 2], [3, 3]]
    assert [each[2] for each in after.get(PATIENCE_S)] == [[20, 20], [30, 30]]
    assert inspect(x, gpus=1, timeout=PATIENCE_S).tolist() == [30, 30]


def test_what_an_actor_was_given_last_is_not_kept_alive(procs: ProcMesh, takers: ActorMesh[Taker]) -> None:
    with procs.activate():
        x = torch.ones(100)
    takers.watch.call(x).get(PATIENCE_S)
    del x
    wait_until(lambda: not any(takers.is_there.call().get(PATIENCE_S)), "the memory is freed")


def test_actors_are_spawned_with_their_shards(procs: ProcMesh, x: torch.Tensor) -> None:
    takers = procs.spawn("started", Taker, x, word="w")
    x.mul_(10)
    assert takers.started.call().get(PATIENCE_S) == [([1, 1], {"word": "w"}), ([2, 2], {"word": "w"})]
    one = procs.slice(gpus=1).spawn("one", Taker, start=x)
    assert one.started.call_one().get(PATIENCE_S) == ([20, 20], {})
    later = procs.spawn("later", AsyncTaker, x)
    assert later.take.call(x).get(PATIENCE_S) == [[20, 20], [40, 40]]
    for mesh in (takers, one, later):
        mesh.stop().get(PATIENCE_S)


def test_objects_on_the_workers_may_be_arguments_too(procs: ProcMesh, takers: ActorMesh[Taker]) -> None:
    with procs.activate():
        ref = remote(make_ref, propagate=make_ref)()
    assert takers.look.call(ref).get(PATIENCE_S) == ["made there"] * 2


def make_ref() -> OpaqueRef:
    return OpaqueRef("made there")


def test_an_error_of_the_endpoint_is_the_callers_and_the_tensors_stay_good(
    takers: ActorMesh[Taker], x: torch.Tensor
) -> None:
    with pytest.raises(ActorError, match="told to fail with"):
        takers.fail.call(x).get(PATIENCE_S)
    assert inspect(x, gpus=1, timeout=PATIENCE_S).tolist() == [2, 2]


def test_an_argument_that_could_not_be_made_is_the_error_of_the_call(procs: ProcMesh, takers: ActorMesh[Taker]) -> None:
    with procs.activate():
        bad = remote(refuse, propagate=lambda: torch.ones(2))()
    with pytest.raises(ActorError, match=r"an argument could not be made.*told to refuse"):
        takers.take.call(bad).get(PATIENCE_S)
    assert takers.logged.call().get(PATIENCE_S) == [[], []]


def refuse() -> torch.Tensor:
    raise ValueError("told to refuse")


def test_what_does_not_fit_is_refused_before_anything_is_sent(
    procs: ProcMesh, takers: ActorMesh[Taker], x: torch.Tensor
) -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        takers.take.call(x, wrong=1)
    with pytest.raises(TypeError, match="answers through a port"):
        takers.answer.call(x)
    with pytest.raises(LocalTensorError, match="a tensor of the script"):
        takers.take.call(x, more={"y": torch.ones(2)})
    with pytest.raises(TypeError, match="cannot be pickled"):
        takers.take.call(x, more={"y": threading.Lock()})
    with procs.slice(gpus=0).activate():
        first = torch.ones(2)
    with pytest.raises(MeshMismatchError, match="take the same slice of both"):
        takers.take.call(first)
    with pytest.raises(MeshMismatchError, match="take the same slice of both"):
        procs.spawn("nowhere", Taker, first)
    assert takers.logged.call().get(PATIENCE_S) == [[], []]


def test_an_actor_that_is_gone_ends_the_call(procs: ProcMesh, x: torch.Tensor, failures: Failures) -> None:
    takers = procs.spawn("gone", Taker)
    takers.stop().get(PATIENCE_S)
    with pytest.raises(SupervisionError):
        takers.take.call(x).get(PATIENCE_S)
    assert inspect(x + 1, gpus=0, timeout=PATIENCE_S).tolist() == [2, 2]
