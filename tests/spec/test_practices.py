"""The guide's "Best Practices" and its quick reference: state, typed endpoints, errors as values, testing."""

import time
from typing import Any

import pytest

from skipper.control import Actor, ActorError, ProcMesh, context, endpoint, this_proc

TIMEOUT_S = 20.0
shared: dict[str, int] = {}


class Tally(Actor):
    """State made in `__init__` and changed by its own endpoint alone."""

    def __init__(self) -> None:
        self.count = 0
        self.values: list[int] = []

    @endpoint
    def update(self, value: int) -> int:
        self.count += 1
        self.values.append(value)
        return self.count


class Global(Actor):
    """The bad example: state of the module, which every process has for itself."""

    @endpoint
    def update(self, key: str, value: int) -> int:
        shared[key] = shared.get(key, 0) + value
        return shared[key]


class Batcher(Actor):
    @endpoint
    def process_batch(self, batch_id: int, data: list[float]) -> dict[str, Any]:
        """Square a batch."""
        return {"batch_id": batch_id, "results": self._process(data), "processed_at": time.time()}

    def _process(self, data: list[float]) -> list[float]:
        return [value * value for value in data]


class Resilient(Actor):
    @endpoint
    def risky(self, text: str) -> dict[str, Any]:
        try:
            return {"success": True, "result": int(text)}
        except ValueError as error:
            return {"success": False, "error": str(error)}


class Caching(Actor):
    """Memory made once and used again, and results that are kept."""

    def __init__(self) -> None:
        import torch

        self.buffer = torch.zeros(100, 100)
        self.cache: dict[str, float] = {}
        self.computed = 0

    @endpoint
    def compute(self, input_data: Any) -> tuple[float, int]:
        self.buffer.copy_(input_data)
        result = self._compute(self.buffer)
        if input_data.id in self.cache:
            return self.cache[input_data.id], self.computed
        self.cache[input_data.id] = result
        return result, self.computed

    def _compute(self, buffer: Any) -> float:
        self.computed += 1
        return float(buffer.sum())


class Sum(Actor):
    def __init__(self, param: int) -> None:
        self.param = param

    @endpoint
    def method(self, arg: int) -> int:
        return self.param + arg

    @endpoint
    def total(self) -> int:
        return self.param

    @endpoint
    def add(self, arg: int) -> None:
        self.param += arg

    @endpoint
    def where(self) -> tuple[dict[str, int], Any]:
        here = context()
        rank = here.message_rank
        proc = here.proc
        return rank, proc


def test_each_actor_has_state_of_its_own(row: ProcMesh) -> None:
    tallies = row.spawn("tallies", Tally)
    tallies.slice(gpus=0).update.call_one(5).get(TIMEOUT_S)
    assert tallies.update.call(5).get(TIMEOUT_S) == [2, 1]
    tallies.stop().get(TIMEOUT_S)


def test_state_of_a_module_is_not_shared_between_processes(row: ProcMesh) -> None:
    actors = row.spawn("global", Global)
    actors.slice(gpus=1).update.call_one("key", 1).get(TIMEOUT_S)
    assert actors.update.call("key", 1).get(TIMEOUT_S) == [1, 2]
    assert shared == {}
    actors.stop().get(TIMEOUT_S)


def test_typed_endpoints_take_positional_and_keyword_arguments_and_refuse_others(row: ProcMesh) -> None:
    batcher = row.slice(gpus=0).spawn("batcher", Batcher)
    before = time.time()
    answer = batcher.process_batch.call_one(3, data=[1.0, 2.0]).get(TIMEOUT_S)
    assert (answer["batch_id"], answer["results"]) == (3, [1.0, 4.0])
    assert before <= answer["processed_at"] <= time.time()
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'data'"):
        batcher.process_batch.call_one(3)
    batcher.stop().get(TIMEOUT_S)


def test_expected_errors_are_results_and_unexpected_ones_are_raised_at_the_caller(row: ProcMesh) -> None:
    resilient = row.slice(gpus=0).spawn("resilient", Resilient)
    assert resilient.risky.call_one("7").get(TIMEOUT_S) == {"success": True, "result": 7}
    assert resilient.risky.call_one("x").get(TIMEOUT_S)["success"] is False
    with pytest.raises(ActorError, match="TypeError"):
        resilient.risky.call_one(None).get(TIMEOUT_S)
    assert resilient.risky.call_one("8").get(TIMEOUT_S)["result"] == 8  # it lives on
    resilient.stop().get(TIMEOUT_S)


def test_tensors_with_attributes_travel_to_an_actor_that_reuses_its_memory(row: ProcMesh) -> None:
    import torch

    caching = row.slice(gpus=0).spawn("caching", Caching)
    ones = torch.ones(100, 100)
    ones.id = "ones"  # type: ignore[attr-defined]
    assert caching.compute.call_one(ones).get(60) == (10000.0, 1)
    twos = ones * 2
    twos.id = "ones"  # type: ignore[attr-defined]
    assert caching.compute.call_one(twos).get(TIMEOUT_S) == (10000.0, 2)  # what was kept for that id
    caching.stop().get(TIMEOUT_S)


@pytest.mark.asyncio
async def test_actors_are_tested_with_pytest_asyncio() -> None:
    tally = this_proc().spawn("test_tally", Tally)
    assert await tally.update.call_one(5) == 1
    assert await tally.update.call_one(6) == 2


def test_quick_reference_actor() -> None:
    actor = this_proc().spawn("name", Sum, param=10)
    assert actor.method.call_one(5).get() == 15


def test_quick_reference_mesh_and_context(row: ProcMesh) -> None:
    actors = row.spawn("actors", Sum, param=10)
    assert actors.method.call(5).get() == [15, 15]
    actors.add.broadcast(5)
    assert actors.total.call().get() == [15, 15]
    subset = actors.slice(gpus=slice(0, 1))
    ((rank, proc),) = subset.where.call().get()
    assert (rank, subset.extent) == ({"gpus": 0}, {"gpus": 1})
    assert isinstance(proc, ProcMesh)
    actors.stop().get(TIMEOUT_S)
