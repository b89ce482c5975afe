"""The guide from "Actor Lifecycle" to "Message Ordering": spawning, endpoints, the adverbs, FIFO."""

import asyncio
import os
import threading
from typing import Any

import pytest

from skipper.control import (
    Actor,
    ActorError,
    ActorMesh,
    ProcMesh,
    SupervisionError,
    ValueMesh,
    concurrent_endpoint,
    context,
    endpoint,
    this_host,
    this_proc,
)

TIMEOUT_S = 20.0


class Shelf(Actor):
    """Spawned with positional and keyword arguments, as in "Creation Phase" and "Construction Phase"."""

    def __init__(self, size: int, label: str) -> None:
        self.size = size
        self.label = label
        self.books: list[str] = []
        self.thread = threading.get_ident()

    @endpoint
    def describe(self) -> tuple[int, str, int]:
        return self.size, self.label, len(self.books)

    @endpoint
    def put(self, book: str) -> None:
        self.books.append(book)

    @endpoint
    def titles(self) -> list[str]:
        return self.books

    @endpoint
    def same_thread(self) -> bool:
        return self.thread == threading.get_ident()


class Abacus(Actor):
    """Two operations and a record of them, as in "What are Endpoints?"."""

    def __init__(self) -> None:
        self.record: list[tuple[str, int, int, int]] = []

    @endpoint
    def plus(self, left: int, right: int) -> int:
        self.record.append(("plus", left, right, left + right))
        return left + right

    @endpoint
    def times(self, left: int, right: int) -> int:
        self.record.append(("times", left, right, left * right))
        return left * right

    @endpoint
    def recorded(self) -> list[tuple[str, int, int, int]]:
        return self.record

    @endpoint
    def refuse(self) -> None:
        raise ZeroDivisionError("by nothing")


class Pacer(Actor):
    """Answers when it is let go."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    @concurrent_endpoint
    async def pace(self, tag: str) -> tuple[str, int]:
        await self.gone.wait()
        return tag, context().message_rank.rank

    @endpoint
    async def let_go(self) -> None:
        self.gone.set()


def test_creation_arguments_of_spawn_go_to_init_by_position_and_by_name() -> None:
    shelf = this_proc().spawn("shelf", Shelf, size=42, label="hello")
    assert shelf.describe.call_one().get(TIMEOUT_S) == (42, "hello", 0)
    again = this_proc().spawn("shelf", Shelf, 1, label="again")
    assert again.describe.call_one().get(TIMEOUT_S) == (1, "again", 0)  # state of its own
    assert again.same_thread.call_one().get(TIMEOUT_S)  # as `__init__` had


def test_isolation_what_is_sent_and_what_comes_back_are_copies() -> None:
    shelf = this_proc().spawn("shelf", Shelf, 1, "x")
    shelf.put.call_one("one").get(TIMEOUT_S)
    titles = shelf.titles.call_one().get(TIMEOUT_S)
    titles.append("not on the shelf")
    assert shelf.titles.call_one().get(TIMEOUT_S) == ["one"]


def test_call_one_can_be_waited_for_in_a_thread_and_fails_with_the_exception_of_the_endpoint(row: ProcMesh) -> None:
    for proc in (this_proc(), row.slice(gpus=1)):  # the same API wherever it is
        abacus = proc.spawn("abacus", Abacus)
        assert abacus.plus.call_one(5, 3).get() == 8
        with pytest.raises(ActorError, match="by nothing"):
            abacus.refuse.call_one().get()
        assert abacus.recorded.call_one().get() == [("plus", 5, 3, 8)]


async def test_call_one_can_be_awaited() -> None:
    abacus = this_proc().spawn("abacus", Abacus)
    assert await abacus.plus.call_one(5, 3) == 8
    assert await abacus.times.call_one(right=5, left=3) == 15


def test_call_collects_a_result_of_each_which_prints_as_a_list(
    procs: ProcMesh, capsys: pytest.CaptureFixture[str]
) -> None:
    abaci = procs.spawn("abaci", Abacus)
    results = abaci.plus.call(10, 5).get()
    print(results)
    assert capsys.readouterr().out == "[15, 15, 15, 15]\n"
    assert isinstance(results, ValueMesh)
    assert results.extent == {"hosts": 2, "gpus": 2}
    abaci.stop().get(TIMEOUT_S)


def test_broadcast_returns_nothing_and_is_done_in_its_turn(row: ProcMesh) -> None:
    shelves = row.spawn("shelves", Shelf, 1, "x")
    assert shelves.put.broadcast("late") is None
    assert shelves.titles.call().get(TIMEOUT_S) == [["late"], ["late"]]
    shelves.stop().get(TIMEOUT_S)


async def test_stream_by_async_for_brings_results_as_they_are_ready(procs: ProcMesh) -> None:
    pacers = procs.spawn("pacers", Pacer).flatten("rank")
    order = [3, 1, 0, 2]
    waiting = iter(order)
    pacers.slice(rank=next(waiting)).let_go.broadcast()
    came = []
    async for result in pacers.pace.stream("tag"):
        came.append(result)
        for rank in waiting:
            pacers.slice(rank=rank).let_go.broadcast()
            break
    assert came == [("tag", rank) for rank in order]
    await pacers.stop()


def test_stream_by_for_brings_futures_in_the_same_order(row: ProcMesh) -> None:
    pacers = row.spawn("pacers", Pacer)
    first, second = pacers.pace.stream("tag")
    pacers.slice(gpus=1).let_go.broadcast()
    assert first.get(TIMEOUT_S) == ("tag", 1)
    assert not second.done()
    pacers.slice(gpus=0).let_go.broadcast()
    assert second.get(TIMEOUT_S) == ("tag", 0)
    pacers.stop().get(TIMEOUT_S)


def test_messages_of_one_sender_are_handled_in_the_order_of_the_calls(row: ProcMesh) -> None:
    abacus = row.slice(gpus=0).spawn("abacus", Abacus)
    abacus.plus.call_one(1, 1)
    abacus.times.call_one(2, 2)
    abacus.plus.broadcast(3, 3)
    abacus.times.call(4, 4)
    assert [entry[1] for entry in abacus.recorded.call_one().get(TIMEOUT_S)] == [1, 2, 3, 4]
    abacus.stop().get(TIMEOUT_S)


class Patient(Actor):
    """Notes when it begins and ends, so that overlapping would show."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @endpoint
    async def work(self, name: str) -> list[str]:
        self.log.append(f"{name} begins")
        await asyncio.sleep(0.005)
        self.log.append(f"{name} ends")
        return self.log


def test_messages_are_processed_one_at_a_time_and_the_sender_does_not_wait(row: ProcMesh) -> None:
    patient = row.slice(gpus=0).spawn("patient", Patient)
    futures = [patient.work.call_one(name) for name in "abc"]
    assert not futures[-1].done()
    assert futures[-1].get(TIMEOUT_S) == [f"{name} {what}" for name in "abc" for what in ("begins", "ends")]
    patient.stop().get(TIMEOUT_S)


class Parent(Actor):
    """Spawns a child and notes the end of both."""

    def __init__(self, path: str) -> None:
        self.path = path

    @endpoint
    def bear(self) -> ActorMesh[Any]:
        return context().proc.spawn("child", Child, self.path)

    @endpoint
    def note(self, text: str) -> None:
        append(self.path, text)

    def __cleanup__(self, error: Exception | None) -> None:
        append(self.path, f"parent ends, error: {error}")


class Child(Actor):
    def __init__(self, path: str) -> None:
        self.path = path

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    def __cleanup__(self, error: Exception | None) -> None:
        append(self.path, "child ends")


def append(path: str, text: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(text + "\n")


def test_normal_termination_drains_the_mailbox_then_ends_children_then_cleans_up(row: ProcMesh, tmp_path: Any) -> None:
    path = tmp_path / "log"
    parent = row.slice(gpus=0).spawn("parent", Parent, str(path))
    child = parent.bear.call_one().get(TIMEOUT_S)
    child.pid.call_one().get(TIMEOUT_S)
    parent.note.broadcast("drained")
    parent.stop().get(TIMEOUT_S)
    assert path.read_text().splitlines() == ["drained", "child ends", "parent ends, error: None"]
    with pytest.raises(SupervisionError, match="stopped"):
        parent.note.call_one("late").get(TIMEOUT_S)


def test_an_endpoint_returns_a_distributed_tensor_by_rref() -> None:
    """ "rref() - Distributed Tensor Reference", on processes of its own, for torch is imported there."""
    import torch

    from skipper import tensor_engine

    procs = this_host().spawn_procs({"gpus": 2}, env={"OMP_NUM_THREADS": "1"})
    linear = procs.spawn("linear", LinearActor)
    with procs.activate():
        x = torch.rand(10, 100)
        output = linear.forward.rref(x)
        result = torch.relu(output - 25)
    assert isinstance(result, tensor_engine.Tensor)
    for rank, weights in enumerate(linear.state.call().get(60)):
        expected = torch.relu(tensor_engine.inspect(x, gpus=rank, timeout=60) @ torch.tensor(weights) - 25)
        torch.testing.assert_close(tensor_engine.inspect(result, gpus=rank, timeout=60), expected)
    tensor_engine.shutdown()
    procs.stop().get(TIMEOUT_S)


class LinearActor(Actor):
    """The block's actor, which can also tell its weights."""

    def __init__(self) -> None:
        import torch

        self.weights = torch.rand(100, 100)

    @endpoint(propagate=lambda x: x)
    def forward(self, input: Any) -> Any:
        return input @ self.weights

    @endpoint
    def state(self) -> list[list[float]]:
        weights: list[list[float]] = self.weights.tolist()
        return weights
