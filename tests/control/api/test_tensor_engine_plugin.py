"""What control does for a tensor engine without knowing one: find it, and let it run something around an endpoint."""

import importlib.metadata
import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import Distribution
from typing import Any

import pytest

from skipper.control import (
    Actor,
    ActorDefinitionError,
    EngineMissingError,
    Future,
    Port,
    ProcMesh,
    concurrent_endpoint,
    endpoint,
)
from skipper.control.api import tensor_engine_plugin as seam
from skipper.control.model.actor import interface_of
from tests.control.conftest import PATIENCE_S


def like(value: int) -> str:
    return "a like of what it returns"


class Plain(Actor):
    def __init__(self) -> None:
        self.factor = 2

    @endpoint(propagate=like)
    def times(self, value: int, *, add: int = 0) -> int:
        return self.factor * value + add

    @endpoint(explicit_response_port=True)
    def later(self, port: Port[int]) -> None:
        port.send(1)


class Waiting(Actor):
    @concurrent_endpoint(propagate=like)
    async def times(self, value: int) -> int:
        return 3 * value


def around(method: Callable[..., int], prefix: str, *args: Any, **kwargs: Any) -> str:
    return f"{prefix}{method(*args, **kwargs)}"


async def around_waiting(method: Callable[..., Any], prefix: str, *args: Any) -> str:
    return f"{prefix}{await method(*args)}"


class StandIn:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def activate(self, mesh: ProcMesh) -> Any:
        self.asked.append(mesh)
        return nullcontext(mesh)

    def rank_tensor(self, mesh: ProcMesh, axis: str) -> Any:
        self.asked.append((mesh, axis))
        return axis

    def rank_tensors(self, mesh: ProcMesh) -> dict[str, Any]:
        return dict.fromkeys(mesh.extent)

    def rref(self, called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.asked.append((called.spec.name, called.propagate, args, kwargs))
        return "reference"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    engine = StandIn()
    for module in ("skipper.control.api.mesh", "skipper.control.api.endpoint"):
        monkeypatch.setattr(sys.modules[module], "engine", lambda: engine)
    return engine


def test_meshes_ask_the_engine_that_is_installed(procs: ProcMesh, stand_in: StandIn) -> None:
    part = procs.slice(gpus=slice(1, 2))
    with part.activate() as active:
        assert active is part
    assert part.rank_tensor("gpus") == "gpus"
    assert part.rank_tensors() == {"gpus": None}
    assert stand_in.asked == [part, (part, "gpus")]
    assert (part.ranks, part.root) == ((1,), procs)


def test_rref_checks_the_arguments_and_brings_what_the_class_says_of_propagation(
    procs: ProcMesh, stand_in: StandIn
) -> None:
    actors = procs.spawn("plain", Plain)
    assert actors.slice(gpus=0).times.rref(3, add=1) == "reference"
    assert stand_in.asked == [("times", like, (3,), {"add": 1})]
    with pytest.raises(TypeError):
        actors.times.rref()
    with pytest.raises(LookupError, match="does not carry"):
        _ = pickle.loads(pickle.dumps(actors)).times.propagate


def test_something_else_runs_in_place_of_an_endpoint_and_gets_the_method(procs: ProcMesh) -> None:
    actors = procs.spawn("plain", Plain)
    results: Future[Any] = actors.times.wrapped(around).call("twice: ", 4, add=1)
    assert list(results.get(PATIENCE_S)) == ["twice: 9", "twice: 9"]
    waiting = procs.slice(gpus=1).spawn("waiting", Waiting)
    assert waiting.times.wrapped(around_waiting).call_one("thrice: ", 2).get(PATIENCE_S) == "thrice: 6"
    assert waiting.times.propagate is like
    with pytest.raises(TypeError, match="port"):
        actors.later.wrapped(around)


def test_the_actors_that_live_in_a_slice_of_the_processes(procs: ProcMesh) -> None:
    actors = procs.spawn("plain", Plain)
    part = procs.slice(gpus=1)
    assert actors.over(part) == actors.slice(gpus=1)
    assert list(part.members) == list(actors.slice(gpus=1).members) == [procs.root_members[rank] for rank in part.ranks]
    with pytest.raises(ValueError, match="spawned"):
        part.spawn("part", Plain).over(procs)


def test_over_is_a_name_that_meshes_of_actors_have() -> None:
    class Taken(Actor):
        @endpoint
        def over(self) -> None: ...

    with pytest.raises(ActorDefinitionError, match="attribute of that name"):
        interface_of(Taken)


def test_without_an_engine_the_error_says_what_to_install(procs: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    none: list[Distribution] = []
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: none)
    seam.engine.cache_clear()
    with pytest.raises(EngineMissingError, match="skipper-mesh"):
        procs.activate()
    seam.engine.cache_clear()
