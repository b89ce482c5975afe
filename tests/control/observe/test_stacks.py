"""Stacks of processes that answer, that hold the interpreter lock, and that are stopped."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skipper.control import ActorMesh, ServedJob, this_host
from skipper.control.model.future import Promise
from skipper.control.observe import ProcessStacks, job_stacks, stacks
from tests.control.actors import AsyncEcho, Echo
from tests.control.conftest import PATIENCE_S, Failures, Script, wait_until
from tests.control.observe.conftest import Skipper, hold_the_lock


@pytest.fixture
def hung(echoes: ActorMesh[Echo], tmp_path: Path) -> Iterator[int]:
    """The pid of rank 0, of which no thread can run any Python code until the test is over."""
    fifo = tmp_path / "hung"
    os.mkfifo(fifo)
    echo = echoes.slice(gpus=0)
    pid = echo.pid.call_one().get(PATIENCE_S)
    future = echo.run.call_one(hold_the_lock, str(fifo))
    wait_until(lambda: "hold_the_lock" in stacks.look(pid), "it holds the lock")
    wait_until(lambda: named(job_stacks(timeout=0.3), "workers{'gpus': 0}").problem != "", "nothing else runs there")
    yield pid
    fifo.write_text("x")
    future.get(PATIENCE_S)


def named(found: list[ProcessStacks], name: str) -> ProcessStacks:
    (stacks,) = [stacks for stacks in found if stacks.name == name]
    return stacks


def test_a_process_tells_where_its_actors_are(blocked: ActorMesh[Echo]) -> None:
    stacks = named(job_stacks(timeout=PATIENCE_S), "workers{'gpus': 1}")
    (thread,) = [thread for thread in stacks.threads if thread.actor == "echoes{'gpus': 1}"]
    functions = [frame.function for frame in thread.users_frames]
    assert functions[0] == "block_on"
    assert functions[-1] == "Echo.run"
    assert thread.users_frames[0].code == "said = os.read(pipe, 100)"
    assert thread.doing.startswith("run for ")
    assert (stacks.problem, stacks.text) == ("", "")


def test_who_waits_for_a_future_is_shown_from_get_on(served: ServedJob) -> None:
    never: Promise[None] = Promise()
    waiting = threading.Thread(target=lambda: never.get(), name="waiting", daemon=True)
    waiting.start()
    try:
        wait_until(lambda: _functions("waiting")[:1] == ["Future.get"], "it waits")
        assert len(_functions("waiting")) == 2  # and the line that has called it
    finally:
        never.set_result(None)
        waiting.join()


def _functions(thread_name: str) -> list[str]:
    """The frames of a thread of the script, as they are shown."""
    (thread,) = [thread for thread in job_stacks(timeout=PATIENCE_S)[0].threads if thread.name == thread_name]
    return [frame.function for frame in thread.users_frames]


def test_the_script_is_among_them(echoes: ActorMesh[Echo]) -> None:
    script, *_ = job_stacks(timeout=PATIENCE_S)
    assert script.pid == os.getpid()
    (main,) = [thread for thread in script.threads if thread.name == "MainThread"]
    assert "test_the_script_is_among_them" in [frame.function for frame in main.frames]


def test_coroutines_that_wait_are_shown_with_those_that_they_wait_for(failures: Failures) -> None:
    mesh = this_host().spawn_procs(name="waiting").spawn("async", AsyncEcho)
    mesh.initialized.get(PATIENCE_S)
    mesh.wait_for.broadcast(60)
    waits: list[list[str]] = []
    while not waits:
        found = named(job_stacks(timeout=PATIENCE_S), "waiting")
        chains = [[frame.function for frame in thread.users_frames] for thread in found.threads]
        waits = [chain for chain in chains if "AsyncEcho.wait_for" in chain]
    assert waits == [["sleep", "AsyncEcho.wait_for"]]
    assert found.pid is not None
    os.kill(found.pid, signal.SIGKILL)  # a stop would wait
    failures.wait()


def test_a_process_that_holds_the_interpreter_lock_is_seen_from_outside(hung: int) -> None:
    stacks = named(job_stacks(timeout=1.0), "workers{'gpus': 0}")
    assert (stacks.pid, list(stacks.threads)) == (hung, [])
    assert "no answer within" in stacks.problem
    assert "hold_the_lock" in stacks.text


def test_it_writes_its_stacks_itself_where_there_is_no_py_spy(hung: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "py_spy", lambda: None)
    for _ in range(2):  # what is written a second time stands behind the first
        text = stacks.look(hung)
        assert "py-spy is not installed, so it wrote this itself" in text
        assert text.count("in hold_the_lock") == 1


def test_it_writes_its_stacks_itself_where_py_spy_is_not_permitted(
    hung: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused = tmp_path / "py-spy"
    refused.write_text("#!/bin/sh\necho 'Error: Permission Denied: try again with sudo' >&2\nexit 1\n")
    refused.chmod(0o700)
    monkeypatch.setattr(stacks, "py_spy", lambda: str(refused))
    text = stacks.look(hung)
    assert "py-spy failed (Error: Permission Denied: try again with sudo), so it wrote this itself" in text
    assert "in hold_the_lock" in text


def test_a_stopped_process_is_said_to_be_stopped(frozen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = named(job_stacks(timeout=0.8), "workers{'gpus': 0}").text
    assert text.startswith("it is stopped by a signal")
    monkeypatch.setattr(stacks, "py_spy", lambda: None)
    assert stacks.look(frozen).endswith("it handles no signal while it is stopped")


def test_a_process_that_is_not_prepared_is_not_sent_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "py_spy", lambda: None)
    with subprocess.Popen(["sleep", "60"]) as stranger:
        try:
            assert "it has not been prepared to write its stacks" in stacks.look(stranger.pid)
            assert stranger.poll() is None
        finally:
            stranger.kill()
    assert stacks.look(stranger.pid) == f"there is no process {stranger.pid}"


def test_the_command_shows_who_is_meant(skipper: Skipper, here: Skipper, blocked: ActorMesh[Echo]) -> None:
    done = skipper("stacks", "echoes:1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("workers{'gpus': 1} (pid ")
    assert "block_on" in done.stdout
    assert "workers{'gpus': 0}" not in done.stdout
    shown = json.loads(here("stacks", "workers", "--json").stdout)
    assert [stacks["name"] for stacks in shown] == ["workers{'gpus': 0}", "workers{'gpus': 1}"]
    unknown = here("stacks", "nobody")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert unknown.stderr.startswith("no process or mesh is called nobody; there are: script (pid ")


def test_the_command_shows_the_same_stacks_once(here: Skipper, echoes: ActorMesh[Echo]) -> None:
    echoes.pid.call().get(PATIENCE_S)
    done = here("stacks", "echoes")
    assert "2 alike: workers{'gpus': 0} (pid " in done.stdout
    assert "SyncExecutor._run" not in done.stdout
    assert "SyncExecutor._run" in here("stacks", "echoes", "--all").stdout


def test_a_script_that_hangs_is_seen_from_the_command(
    skipper: Skipper, script: Callable[[str], Script], runtime_folder: Path
) -> None:
    running = script(
        f"""
        import ctypes, os
        os.environ["XDG_RUNTIME_DIR"] = {str(runtime_folder)!r}
        from skipper import control
        def hang():
            ctypes.PyDLL(None).sleep(60)
        control.serve_job("hung")
        control.this_host().spawn_procs(name="below").initialized.get(20)
        print("hangs", flush=True)
        hang()
        """
    )
    assert running.line() == "hangs"
    done = skipper("stacks", "--timeout", "0.5", job="hung")
    assert done.returncode == 1
    assert "the script does not answer" in done.stdout
    assert f"(pid {running.process.pid})" in done.stdout
    assert "hang" in done.stdout
    assert "below" in done.stdout


def test_a_frozen_script_that_as_many_wait_for_as_can_is_said_to_be_one(
    skipper: Skipper, script: Callable[[str], Script], runtime_folder: Path
) -> None:
    running = script(
        f"""
        import os, sys
        os.environ["XDG_RUNTIME_DIR"] = {str(runtime_folder)!r}
        from skipper import control
        from skipper.control.runtime import current_runtime as job
        control.serve_job("full")
        print(job.current().me.id, flush=True)
        sys.stdin.read()
        """
    )
    address = f"\0skipper-{running.line()}"
    running.process.send_signal(signal.SIGSTOP)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(address)
        done = skipper("stacks", "--timeout", "0.5", job="full")
        running.process.send_signal(signal.SIGCONT)
    assert done.returncode == 3, "the job cannot be reached"
    assert "the script is frozen" in done.stderr
    assert "Traceback" not in done.stderr
