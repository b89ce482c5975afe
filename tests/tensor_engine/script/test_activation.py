"""Which mesh is active where: in tasks that take turns, in threads, in generators and in forked children."""

import asyncio
import os
from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from skipper.control import ProcMesh
from skipper.tensor_engine import Stream, Tensor, get_active_mesh, get_active_stream, inspect, no_mesh
from skipper.tensor_engine.script import activation
from tests.tensor_engine.conftest import PATIENCE_S


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = _get_current_dispatch_mode_stack()
    yield
    assert _get_current_dispatch_mode_stack() == before
    assert activation.current() is None
    assert type(torch.ones(1)) is torch.Tensor


def where() -> ProcMesh | None:
    """The mesh on which tensors are made here."""
    made = torch.ones(1)
    assert (activation.current() is not None) == isinstance(made, Tensor)
    return made.mesh if isinstance(made, Tensor) else None


async def test_tasks_that_take_turns_have_each_its_own_mesh(procs: ProcMesh) -> None:
    first, second = procs.slice(gpus=0), procs.slice(gpus=1)
    turns = [asyncio.Event() for _ in range(6)]

    async def until(turn: int) -> None:
        turns[turn - 1].set()
        await asyncio.wait_for(turns[turn].wait(), PATIENCE_S)

    async def one() -> None:
        with first.activate():
            assert where() == first
            await until(1)
            assert where() == first
            with no_mesh():
                await until(3)
                assert where() is None
            assert where() == first
        assert where() is None  # while the other's has not ended, which began later
        await until(5)
        assert where() is None

    async def other() -> None:
        assert where() is None  # while the first one's holds
        with second.activate():
            assert where() == second
            await until(2)
            assert where() == second
            await until(4)
            assert where() == second
        assert where() is None
        turns[5].set()

    async def beside() -> None:
        for turn in turns:
            await asyncio.wait_for(turn.wait(), PATIENCE_S)
            assert where() is None

    await asyncio.gather(one(), other(), beside())
    with procs.activate():  # whatever ended in whichever order
        assert where() == procs


async def test_a_task_has_the_mesh_of_where_it_was_made_until_that_block_ends(procs: ProcMesh) -> None:
    ended, has_looked = asyncio.Event(), asyncio.Event()

    async def inner() -> None:
        assert where() == procs
        with procs.slice(gpus=1).activate():
            assert where() == procs.slice(gpus=1)
        has_looked.set()
        await asyncio.wait_for(ended.wait(), PATIENCE_S)
        assert where() is None
        with procs.activate():
            assert where() == procs

    with procs.activate():
        task = asyncio.create_task(inner())
        await asyncio.wait_for(has_looked.wait(), PATIENCE_S)
    ended.set()
    await task


async def test_a_thread_has_no_mesh_of_the_task_that_waits_for_it(procs: ProcMesh) -> None:
    def elsewhere() -> None:
        assert where() is None
        with procs.slice(gpus=1).activate():
            assert where() == procs.slice(gpus=1)
        assert where() is None

    with procs.activate():
        await asyncio.to_thread(elsewhere)
        assert where() == procs


async def test_streams_are_those_of_their_tasks(procs: ProcMesh) -> None:
    stream, entered, looked = Stream("beside"), asyncio.Event(), asyncio.Event()

    async def on_it() -> None:
        with stream.activate():
            assert torch.ones(1).stream == stream  # type: ignore[attr-defined]
            entered.set()
            await asyncio.wait_for(looked.wait(), PATIENCE_S)
            assert get_active_stream() == stream

    with procs.activate():
        main = get_active_stream()
        task = asyncio.create_task(on_it())
        await asyncio.wait_for(entered.wait(), PATIENCE_S)
        assert get_active_stream() == main
        assert torch.ones(1).stream == main  # type: ignore[attr-defined]
        looked.set()
        await task


def test_blocks_of_generators_may_end_in_any_order(procs: ProcMesh) -> None:
    def block(mesh: ProcMesh) -> Iterator[None]:
        with mesh.activate():
            yield

    first, second = block(procs.slice(gpus=0)), block(procs.slice(gpus=1))
    next(first)
    next(second)
    first.close()
    assert where() == procs.slice(gpus=1)
    second.close()
    assert where() is None


class Counting(TorchDispatchMode):
    """A mode of the user's."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_users_stays_when_the_block_below_it_ends(procs: ProcMesh) -> None:
    def block() -> Iterator[None]:
        with procs.activate():
            yield

    below = block()
    next(below)
    with Counting() as counting:
        assert where() == procs
        below.close()
        seen = counting.seen
        assert where() is None
        assert counting.seen > seen


def test_a_forked_child_has_no_mesh(procs: ProcMesh) -> None:
    with procs.activate():
        get_active_mesh()
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                is_local = type(torch.ones(2) + 1) is torch.Tensor and activation.current() is None
                os.write(writing, b"local" if is_local else b"on the mesh")
            finally:
                os._exit(0)
        os.close(writing)
        with open(reading, "rb") as said:
            assert said.read() == b"local"
        os.waitpid(child, 0)
        assert inspect(torch.ones(2), timeout=PATIENCE_S).tolist() == [1, 1]
