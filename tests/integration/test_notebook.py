"""A script that is a notebook: a kernel of Jupyter, whose main thread runs an event loop and is interrupted."""

import json
import os
import queue
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import psutil
import pytest
from jupyter_client import BlockingKernelClient, KernelManager

from tests.control.conftest import PATIENCE_S, alive, wait_until
from tests.integration.notebooks import as_users_have_it, clean, execute
from tests.preloading import plainly

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
LOSS = re.compile(r"\d\.\d{4}")  # differs in the last places from processor to processor


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def shown(cell: nbformat.NotebookNode) -> str:
    return LOSS.sub("#", json.dumps(cell, sort_keys=True))


def test_the_notebook_gives_what_is_written_in_it_and_leaves_no_process() -> None:
    before = children()
    written = nbformat.read(NOTEBOOK, as_version=4)
    ran = execute(NOTEBOOK)
    assert [shown(cell) for cell in ran.cells] == [shown(cell) for cell in written.cells]
    assert clean(written) == written
    wait_until(lambda: not [child for child in children() - before if alive(child.pid)], "all processes end")


class Kernel:
    """A kernel, and what it says."""

    def __init__(self) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(NOTEBOOK.parent), env=plainly(as_users_have_it()))
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE_S)

    def begin(self, code: str) -> str:
        """Run a cell; the number of the request is returned at once."""
        return self.client.execute(code)

    def said(self, request: str, *, until: Callable[[dict], bool]) -> str:
        """What the cell says up to a message: its output, result or error."""
        text, deadline = "", time.monotonic() + PATIENCE_S
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                raise AssertionError(f"no answer within {PATIENCE_S} s; so far: {text}") from None
            content = message["content"]
            if content.get("name") == "stderr":
                continue
            text += content.get("text", "") + content.get("data", {}).get("text/plain", "") + content.get("ename", "")
            if message["parent_header"].get("msg_id") == request and until(message):
                return text

    def run(self, code: str) -> str:
        """What a cell says."""
        return self.finish(self.begin(code))

    def finish(self, request: str) -> str:
        """What a cell says to its end."""
        return self.said(request, until=lambda message: message["content"].get("execution_state") == "idle")

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()
        self.manager.context.destroy()


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    yield kernel
    kernel.close()


MESH = """
import threading
from skipper.control import Actor, endpoint, this_host

class Sleeper(Actor):
    @endpoint
    def sleep(self):
        print("asleep", flush=True)
        threading.Event().wait(2.0)
        return "awake"

    @endpoint
    def say(self):
        return "first"

procs = this_host().spawn_procs({"gpus": 2})
sleepers = procs.spawn("sleepers", Sleeper)
[member.id for member in procs.members] == [member.id for member in sleepers.members]
"""


def test_cells_wait_in_both_ways_and_workers_print_into_the_notebook(kernel: Kernel) -> None:
    assert kernel.run(MESH) == "True"
    assert kernel.run("sleepers.say.call().get()") == "['first', 'first']"
    assert kernel.run("await sleepers.say.call()") == "['first', 'first']"
    assert kernel.run("[value async for value in sleepers.say.stream()]") == "['first', 'first']"


def test_an_interrupt_ends_the_wait_and_nothing_else(kernel: Kernel) -> None:
    waiting = kernel.begin("future = sleepers.sleep.call()\nfuture.get()")
    kernel.said(waiting, until=lambda message: "asleep" in message["content"].get("text", ""))
    kernel.manager.interrupt_kernel()
    assert "KeyboardInterrupt" in kernel.finish(waiting)
    assert kernel.run("future.get()") == "['awake', 'awake']"
    awaiting = kernel.begin("future = sleepers.sleep.call()\nawait future")
    kernel.said(awaiting, until=lambda message: "asleep" in message["content"].get("text", ""))
    kernel.manager.interrupt_kernel()
    assert re.search("KeyboardInterrupt|CancelledError", kernel.finish(awaiting))
    assert kernel.run("sleepers.say.call().get()") == "['first', 'first']"


def test_a_class_that_is_edited_is_spawned_with_its_new_code(kernel: Kernel) -> None:
    edited = """
    class Sleeper(Actor):
        @endpoint
        def say(self):
            return "second"

    sleepers.stop().get()
    sleepers = procs.spawn("sleepers", Sleeper)
    sleepers.say.call().get()
    """
    assert kernel.run(edited.replace("\n    ", "\n").lstrip()) == "['second', 'second']"


def test_a_kernel_that_is_restarted_has_ended_its_mesh(kernel: Kernel) -> None:
    pids = kernel.run("import psutil\n[child.pid for child in psutil.Process().children(recursive=True)]")
    workers = [int(pid) for pid in re.findall(r"\d+", pids)]
    assert len(workers) >= 2
    kernel.manager.restart_kernel()
    kernel.client.wait_for_ready(timeout=PATIENCE_S)
    wait_until(lambda: not any(map(alive, workers)), "the processes of the mesh end")
    assert kernel.run("'procs' in globals()") == "False"
    assert os.getpid() not in workers
