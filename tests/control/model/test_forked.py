"""A forked copy of a process of a job is no part of it: it leaves where its code returns, and speaks for nobody."""

import asyncio
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skipper import dataplane
from skipper.control import (
    Actor,
    Channel,
    ForkedProcessError,
    ProcMesh,
    concurrent_endpoint,
    context,
    endpoint,
    this_host,
)
from tests.control.actors import Echo
from tests.control.conftest import PATIENCE_S, Output, Script


def status_of(pid: int) -> int:
    """How a child has ended, as `subprocess` counts."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def outcome_of(call: Callable[[], object]) -> str:
    """What a call does in a forked copy of this process: the type and the text of its error, or its value."""
    theirs, ours = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            result = f"returned {call()}"
        except BaseException as error:  # noqa: BLE001
            result = f"{type(error).__name__}: {error}"
        os.write(ours, result.encode())
        os._exit(0)
    os.close(ours)
    with open(theirs) as said:
        text = said.read()
    assert status_of(pid) == 0
    return text


class Forker(Actor):
    """Its endpoints go on in two processes."""

    def __init__(self, *, in_init: bool = False) -> None:
        self.pid = os.getpid()
        self.child = os.fork() if in_init else 0

    @endpoint
    def fork(self, how: str = "return") -> int:
        if pid := os.fork():
            return status_of(pid)
        print(f"in the copy: {how}")
        if how == "exit":
            sys.exit(3)
        if how == "exit with a word":
            sys.exit("a last word")
        if how == "raise":
            raise ValueError("of the copy")
        return -1

    @endpoint
    def is_original(self) -> bool:
        return self.pid == os.getpid()

    @endpoint
    def init_child(self) -> int:
        return status_of(self.child)

    @endpoint
    def tell(self) -> None:
        os.fork()

    @endpoint(explicit_response_port=True)
    def by_port(self, port: Any) -> None:
        if pid := os.fork():
            port.send(status_of(pid))


class AsyncForker(Actor):
    """The same, in an event loop."""

    @endpoint
    async def fork(self, how: str) -> int:
        return self._fork(how)

    @concurrent_endpoint
    async def beside(self, how: str) -> int:
        await asyncio.sleep(0)
        return self._fork(how)

    def _fork(self, how: str) -> int:
        if pid := os.fork():
            return status_of(pid)
        if how == "exit":
            sys.exit(3)
        if how == "raise":
            raise ValueError("of the copy")
        return -1


@pytest.fixture(scope="module")
def forker(procs: ProcMesh) -> Any:
    return procs.slice(gpus=0).spawn("forker", Forker)


@pytest.fixture(scope="module")
def echo(procs: ProcMesh) -> Any:
    return procs.slice(gpus=0).spawn("echo", Echo)


ENDS = [("return", 0), ("exit", 3), ("raise", 1)]


@pytest.mark.parametrize(("how", "status"), [*ENDS, ("exit with a word", 1)])
def test_a_copy_ends_as_python_does_and_its_original_answers_once(
    own_procs: Callable[..., ProcMesh], output: Output, how: str, status: int
) -> None:
    procs = own_procs()
    forker = procs.spawn("forker", Forker)
    assert forker.fork.call_one(how).get(PATIENCE_S) == status
    assert forker.is_original.call_one().get(PATIENCE_S)
    procs.stop().get(PATIENCE_S)
    assert output.wait_for(f"in the copy: {how}\n").count("in the copy") == 1
    last = {"raise": "ValueError: of the copy", "exit with a word": "a last word\n"}
    if how in last:
        output.wait_for(last[how], on_stderr=True)
    assert not any(word in output.err for key, word in last.items() if key != how)
    assert "fork_posix" not in output.err  # gRPC's warning


@pytest.mark.parametrize(("how", "status"), ENDS)
@pytest.mark.parametrize("method", ["fork", "beside"])
def test_so_does_that_of_an_async_actor(procs: ProcMesh, method: str, how: str, status: int) -> None:
    forker = procs.slice(gpus=1).spawn("forker", AsyncForker)
    assert getattr(forker, method).call_one(how).get(PATIENCE_S) == status


def test_so_it_does_in_init(procs: ProcMesh) -> None:
    forker = procs.slice(gpus=0).spawn("forker_in_init", Forker, in_init=True)
    assert forker.init_child.call_one().get(PATIENCE_S) == 0
    assert forker.is_original.call_one().get(PATIENCE_S)


def test_so_it_does_where_nobody_waits_for_a_reply(forker: Any) -> None:
    forker.tell.broadcast()
    assert forker.by_port.call_one().get(PATIENCE_S) == 0
    assert forker.is_original.call_one().get(PATIENCE_S)


def test_so_it_does_in_the_bootstrap(own_procs: Callable[..., ProcMesh]) -> None:
    def bootstrap() -> None:
        if pid := os.fork():
            assert status_of(pid) == 0

    echo = own_procs(bootstrap=bootstrap).spawn("echo", Echo)
    assert echo.echo.call_one("alive").get(PATIENCE_S) == "alive"


def calls_of_a_copy(pids: Any) -> dict[str, str]:
    """What parts of the interface do in a copy of an actor's process."""
    pending = pids.spawn("beside", Echo).echo.call_one(1)
    done = pids.spawn("done", Echo).echo.call_one(1)
    done.get(PATIENCE_S)
    port, receiver = Channel.open()
    other = pids.spawn("other", Echo)

    async def wait() -> Any:
        return await Channel.open()[1].recv()

    return {
        "call": outcome_of(lambda: other.echo.call_one(1)),
        "cast": outcome_of(lambda: other.echo.call(1)),
        "broadcast": outcome_of(lambda: other.echo.broadcast(1)),
        "spawn": outcome_of(lambda: this_host().spawn_procs()),
        "receive": outcome_of(lambda: receiver.recv().get()),
        "await": outcome_of(lambda: asyncio.run(wait())),
        "send": outcome_of(lambda: port.send(1)),
        "fetched": outcome_of(done.get),
        "context": outcome_of(lambda: context().actor_instance.name),
        "pending": pending.get(PATIENCE_S) and "",
    }


def test_what_a_copy_cannot_do_is_a_clear_error(procs: ProcMesh, echo: Any) -> None:
    said = echo.run.call_one(calls_of_a_copy, procs.slice(gpus=1)).get(PATIENCE_S)
    for part in ("call", "cast", "broadcast", "spawn", "receive", "await", "send"):
        assert said[part].startswith("ForkedProcessError: this process (pid "), (part, said[part])
        assert "was forked from procs{'gpus': 0} (pid " in said[part]
    assert said["fetched"] == "returned 1"
    assert said["context"] == "returned echo"


def use_the_data_plane() -> tuple[str, str, str]:
    import numpy as np

    memory, there = dataplane.empty_array(4, np.int64), np.zeros(4, dtype=np.int64)
    memory[:] = range(4)
    buffer = dataplane.RDMABuffer(memory)
    handle = pickle.dumps(buffer)

    def read() -> Any:
        pickle.loads(handle).read_into(there).get(PATIENCE_S)
        return there.tolist()

    own = outcome_of(lambda: buffer.read_into(there).get(PATIENCE_S))
    return outcome_of(buffer.drop), own, outcome_of(read)


def test_a_copy_reads_buffers_that_it_has_been_sent_and_drops_none(echo: Any) -> None:
    dropped, own, sent = echo.run.call_one(use_the_data_plane).get(PATIENCE_S)
    assert dropped.startswith("DataplaneError: only its owner, ")
    assert own.startswith("DataplaneError: this buffer belongs to ")
    assert sent == "returned [0, 1, 2, 3]"


def square(number: int) -> int:
    return number * number


def use_multiprocessing() -> tuple[list[int], list[int], int | None]:
    fork = multiprocessing.get_context("fork")
    queue: Any = fork.Queue()
    process = fork.Process(target=lambda: (queue.put(7), sys.exit(4)))
    process.start()
    got = queue.get(timeout=PATIENCE_S)
    process.join(PATIENCE_S)
    with fork.Pool(2) as pool:
        squares = pool.map(square, range(4))
    return squares, [got], process.exitcode


def test_multiprocessing_works_in_an_actor(echo: Any) -> None:
    assert echo.run.call_one(use_multiprocessing).get(PATIENCE_S) == ([0, 1, 4, 9], [7], 4)


def test_a_copy_of_the_script_gets_the_error_too_and_may_do_anything_else(script: Callable[..., Script]) -> None:
    running = script(Path(__file__).with_name("forking_script.py"))
    assert running.finish() == (0, "0 0\nTrue\nsaid\n6 0\n", "")


def test_before_the_first_use_a_copy_is_a_process_like_any_other(script: Callable[[str], Script]) -> None:
    running = script("""
        import os, sys
        from skipper.control import Actor, endpoint, this_host

        class Worker(Actor):
            @endpoint
            def parent(self):
                return os.getpid() != sys.argv

        if pid := os.fork():
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        else:
            print(this_host().spawn_procs().spawn("w", Worker).parent.call_one().get(20), flush=True)
    """)
    assert running.finish() == (0, "True\n0\n", "")


def test_the_error_is_one_of_the_tree() -> None:
    assert issubclass(ForkedProcessError, RuntimeError)
    assert traceback.format_exception_only(ForkedProcessError("x")) == [
        "skipper.control.model.errors.ForkedProcessError: x\n"
    ]
