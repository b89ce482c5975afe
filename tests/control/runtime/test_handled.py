"""What counts as handled: who has heard of a failure need not die of it, and what nobody has heard of is not lost."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from skipper.control import Actor, ActorError, ActorMesh, FailureKind, MeshFailure, ProcMesh, SupervisionError, endpoint
from skipper.control.model.errors import names_of
from skipper.control.model.future import Future, Promise
from skipper.control.runtime import faults
from skipper.control.runtime.faults import Faults
from tests.control.actors import Answerer, Echo
from tests.control.conftest import PATIENCE_S, REPOSITORY, Failures, Script, alive, wait_until

# What a failure leaves behind in the process that it has reached


def failure_of(name: str, cause: MeshFailure | None = None, source: str = "") -> MeshFailure:
    return MeshFailure(name, f"{name}@here", None, FailureKind.PROCESS, f"{name} died", "", cause, source=source)


def raiser(error: BaseException) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Failures that wait for a listener, judged without a grace, beside those of the tests' own job."""
    monkeypatch.setattr(faults, "GRACE_S", 0.05)
    monkeypatch.setattr(faults, "_LOOK_S", 0.02)

    class Ledger(Faults):
        def __init__(self) -> None:
            self.unheard: list[str] = []
            self.awaited: set[str] = set()
            super().__init__(
                lambda ids: bool(self.awaited & set(ids)), lambda failure: self.unheard.append(failure.mesh_name)
            )

    ledger = Ledger()
    yield ledger
    ledger.close()


def ended_in(ledger: Faults, error: Exception, *members: str) -> Future[Any]:
    future: Promise[Any] = Promise()
    future.settle_by(raiser(error))
    ledger.failed(future, lambda: frozenset(members))
    return future


def test_what_nobody_hears_of_is_told_once_its_grace_is_over(ledger: Any) -> None:
    ledger.entrust(failure_of("a"))
    ledger.entrust(failure_of("a"))
    wait_until(lambda: ledger.unheard == ["a"], "the verdict")
    assert ledger.close() == []


def test_what_was_heard_of_before_it_came_is_not_told(ledger: Any) -> None:
    child = failure_of("child", source="process 1")
    error = RuntimeError("a step failed")
    error.__cause__ = SupervisionError("gone", child)
    ledger.heard(ended_in(ledger, error), error)
    ledger.entrust(failure_of("another mesh of the process", source="process 1"))
    ledger.entrust(failure_of("owner", cause=child))
    ledger.entrust(failure_of("b"))
    wait_until(lambda: ledger.unheard == ["b"], "the verdict on the other")


def test_what_is_heard_of_in_the_grace_is_not_told(ledger: Any) -> None:
    ledger.entrust(failure_of("a"))
    ledger.hear("a@here")
    ledger.entrust(failure_of("b"))
    wait_until(lambda: ledger.unheard == ["b"], "the verdict on the other")


def test_a_future_that_holds_the_error_holds_the_verdict_until_it_is_forgotten(ledger: Any) -> None:
    future = ended_in(ledger, SupervisionError("gone", failure_of("a")))
    ledger.entrust(failure_of("a"))
    ledger.entrust(failure_of("b"))
    wait_until(lambda: ledger.unheard == ["b"], "the verdict on the other")
    del future
    gc.collect()
    wait_until(lambda: ledger.unheard == ["b", "a"], "the verdict once nobody can ask any more")


def test_an_answer_that_is_still_owed_holds_the_verdict(ledger: Any) -> None:
    ledger.awaited.add("a@here")
    ledger.entrust(failure_of("a"))
    ledger.entrust(failure_of("b"))
    wait_until(lambda: ledger.unheard == ["b"], "the verdict on the other")
    ledger.awaited.clear()
    wait_until(lambda: ledger.unheard == ["b", "a"], "the verdict")


def test_of_members_that_fail_together_the_error_of_their_call_tells(ledger: Any) -> None:
    error = SupervisionError("gone", failure_of("a"))
    call = ended_in(ledger, error, "a@here", "b@here")
    ledger.entrust(failure_of("b"))
    ledger.heard(call, error)
    ledger.entrust(failure_of("a"))
    ledger.entrust(failure_of("c"))
    wait_until(lambda: ledger.unheard == ["c"], "the verdict on the stranger")


def test_what_is_unheard_of_at_the_end_is_left_over(ledger: Any) -> None:
    future = ended_in(ledger, SupervisionError("gone", failure_of("a")))
    ledger.entrust(failure_of("a"))
    assert [failure.mesh_name for failure in ledger.close()] == ["a"]
    ledger.entrust(failure_of("b"))
    assert ledger.close() == []
    assert future.done()


def test_errors_that_come_of_an_end_are_known_by_name() -> None:
    assert {"SupervisionError", "LinkError", "ReplicaLostError", "SessionLostError"} <= set(names_of(SupervisionError))


# What ends an actor


class Leaver(Actor):
    """Raises what is no `Exception`."""

    @endpoint
    async def leave(self, error: BaseException) -> None:
        raise error

    @endpoint
    async def cancel(self) -> None:
        task = asyncio.create_task(asyncio.sleep(60))
        task.cancel()
        await task

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value


def leave_with(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit("enough")], ids=repr)
def test_what_is_no_exception_kills_the_actor_of_a_caller_who_waits(
    procs: ProcMesh, failures: Failures, error: BaseException
) -> None:
    plain, concurrent = procs.slice(gpus=0).spawn("plain", Echo), procs.slice(gpus=1).spawn("async", Leaver)
    for call, later in (
        (plain.run.call_one(leave_with, error), plain.echo),
        (concurrent.leave.call_one(error), concurrent.echo),
    ):
        with pytest.raises(SupervisionError, match=type(error).__name__) as caught:
            call.get(PATIENCE_S)
        assert caught.value.failure is not None
        assert caught.value.failure.exception == type(error).__name__
        with pytest.raises(SupervisionError):
            later.call_one(1).get(PATIENCE_S)
    wait_until(lambda: len(failures) == 2, "their owner is told of both")
    assert {failure.kind for failure in failures} == {FailureKind.EXCEPTION}


def test_a_task_that_is_cancelled_in_an_endpoint_is_its_callers_error(procs: ProcMesh) -> None:
    leaver = procs.slice(gpus=0).spawn("leaver", Leaver)
    with pytest.raises(ActorError, match="CancelledError"):
        leaver.cancel.call_one().get(PATIENCE_S)
    assert leaver.echo.call_one(1).get(PATIENCE_S) == 1
    leaver.stop().get(PATIENCE_S)


def test_an_endpoint_with_a_port_that_raises_kills_its_actor(procs: ProcMesh, failures: Failures) -> None:
    answerer = procs.slice(gpus=0).spawn("answerer", Answerer)
    with pytest.raises(SupervisionError, match="before answering"):
        answerer.raises.call_one().get(PATIENCE_S)
    with pytest.raises(SupervisionError, match="before answering"):
        answerer.has_kept.call_one().get(PATIENCE_S)
    assert failures.wait().kind is FailureKind.EXCEPTION


class Retrier(Actor):
    """Asks again and again for what has ended, until its `__supervise__` has run."""

    def __init__(self) -> None:
        self.told = 0

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.told += 1
        return True

    @endpoint
    def retry(self, procs: ProcMesh) -> bool:
        dead = procs.spawn("dead", Echo)
        ended = dead.die.call_one()
        while not self.told:
            try:
                ended.get(PATIENCE_S)
            except SupervisionError:
                continue
        return True


class AsyncRetrier(Actor):
    """The same, in an event loop."""

    def __init__(self) -> None:
        self.told = 0

    async def __supervise__(self, failure: MeshFailure) -> bool:
        self.told += 1
        return True

    @endpoint
    async def retry(self, procs: ProcMesh) -> bool:
        dead = procs.spawn("dead", Echo)
        ended = dead.die.call_one()
        while not self.told:
            try:
                await ended
            except SupervisionError:
                continue
        return True


@pytest.mark.parametrize("cls", [Retrier, AsyncRetrier])
def test_an_actor_supervises_though_it_tries_again_and_again_on_what_has_ended(
    procs: ProcMesh, own_procs: Callable[..., ProcMesh], failures: Failures, cls: type[Actor]
) -> None:
    retrier: ActorMesh[Any] = procs.slice(gpus=0).spawn("retrier", cls)
    assert retrier.retry.call_one(own_procs()).get(PATIENCE_S)
    retrier.stop().get(PATIENCE_S)


class Objector(Actor):
    """Raises when it is told of a failure."""

    def __supervise__(self, failure: MeshFailure) -> bool:
        raise LookupError("I have no spare")

    @endpoint
    def lose(self, procs: ProcMesh) -> None:
        procs.spawn("dead", Echo).die.broadcast()

    @endpoint
    def ping(self) -> None:
        """Nothing."""


def test_the_error_says_what_supervise_has_raised(
    procs: ProcMesh, own_procs: Callable[..., ProcMesh], failures: Failures
) -> None:
    objector = procs.slice(gpus=0).spawn("objector", Objector)
    objector.lose.call_one(own_procs()).get(PATIENCE_S)
    failures.wait()
    with pytest.raises(SupervisionError, match=r"actor dead died.*__supervise__ raised LookupError: I have no spare"):
        objector.ping.call_one().get(PATIENCE_S)


# Scripts

STORY = """
import asyncio, atexit, os, queue, signal, sys, threading, time
from skipper import control
from skipper.control import Actor, SupervisionError, endpoint, this_host

class Bad(Actor):
    def __init__(self):
        raise ValueError("cannot be made")
    @endpoint
    def ping(self):
        pass

class Worker(Actor):
    @endpoint
    def fail(self):
        raise ValueError("nobody listens")
    @endpoint
    def pid(self):
        return os.getpid()

def spawn_bad():
    return this_host().spawn_procs().spawn("bad", Bad)
"""
END = """
atexit.register(lambda: print("atexit"))
print("buffered", end=" ")
try:
    {wait}
finally:
    print("finally")
"""


def test_a_failure_that_the_script_caught_kills_nobody(script: Callable[[str], Script]) -> None:
    running = script(
        STORY
        + """
bad = spawn_bad()
for _ in range(2):
    try:
        bad.ping.call_one().get()
    except SupervisionError as error:
        print("caught", "cannot be made" in str(error))
time.sleep(2.5)  # longer than any grace
print("went on")
"""
    )
    assert running.finish() == (0, "caught True\ncaught True\nwent on\n", "")


def test_a_process_that_cannot_start_is_heard_of_where_the_script_waits_for_it(script: Callable[[str], Script]) -> None:
    running = script(
        STORY
        + """
def refuse():
    os._exit(5)
procs = this_host().spawn_procs(bootstrap=refuse)
try:
    procs.initialized.get()
except SupervisionError as error:
    print("caught", error.failure.kind.value)
time.sleep(2.5)
"""
    )
    assert running.finish()[:2] == (0, "caught process\n")


def test_a_failure_that_a_subscription_brings_is_heard_of(script: Callable[[str], Script]) -> None:
    running = script(
        STORY
        + """
worker = this_host().spawn_procs().spawn("worker", Worker)
receiver = control.subscribe(worker)
worker.fail.broadcast()
print(receiver.recv().get().exception)
time.sleep(2.5)
"""
    )
    assert running.finish() == (0, "ValueError\n", "")


def test_a_script_whose_threads_outlive_its_main_one_ends_too(script: Callable[[str], Script]) -> None:
    code, out, err = script(
        STORY
        + """
atexit.register(lambda: print("atexit"))
spawn_bad()
threading.Thread(target=time.sleep, args=(60,)).start()
"""
    ).finish()
    assert (code, out) == (1, "atexit\n")
    assert err.startswith("control: unhandled failure, exiting with code 1\n")


def test_a_process_that_dies_is_handled_with_the_first_error_whatever_it_has_of_meshes(
    script: Callable[[str], Script],
) -> None:
    running = script(
        STORY
        + """
procs = this_host().spawn_procs({"gpus": 2})
first, second = procs.spawn("first", Worker), procs.spawn("second", Worker)
pids = first.pid.call().get()
second.pid.call().get()
for pid in pids:
    os.kill(pid, signal.SIGKILL)
try:
    while True:
        first.pid.call().get()
except SupervisionError:
    print("caught")
time.sleep(2.5)
"""
    )
    assert running.finish() == (0, "caught\n", "")


def test_a_death_that_an_actor_handles_does_not_end_the_script_whose_process_it_was(
    script: Callable[[str], Script],
) -> None:
    running = script(
        STORY
        + """
class Guard(Actor):
    def __init__(self, procs):
        self.told = 0
        self.worker = procs.spawn("worker", Worker)
        os.kill(self.worker.pid.call_one().get(), signal.SIGKILL)
    def __supervise__(self, failure):
        self.told += 1
        return True
    @endpoint
    def how_often(self):
        return self.told

guard = this_host().spawn_procs(name="guard").spawn("guard", Guard, this_host().spawn_procs(name="guarded"))
while not guard.how_often.call_one().get():
    time.sleep(0.01)
time.sleep(2.5)
"""
    )
    assert running.finish() == (0, "", "")


@pytest.mark.parametrize(
    "wait",
    [
        "time.sleep(60)",
        "queue.Queue().get()",
        "control.Future().get()",
        "asyncio.run(asyncio.sleep(60))",
        "__import__('uvloop').run(asyncio.sleep(60))",
        "__import__('subprocess').run(['sleep', '60'])",
    ],
)
def test_what_nobody_hears_of_interrupts_the_main_thread_and_python_ends_as_ever(
    script: Callable[[str], Script], wait: str
) -> None:
    code, out, err = script(STORY + "spawn_bad()\n" + END.format(wait=wait)).finish()
    assert (code, out) == (1, "buffered finally\natexit\n")
    lines = err.splitlines()
    assert lines[0] == "control: unhandled failure, exiting with code 1"
    assert lines[1].endswith("__init__ raised ValueError: cannot be made")
    assert "Traceback" not in lines[-1]


def test_a_script_in_the_background_of_a_shell_ends_likewise(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(STORY + "spawn_bad()\n" + END.format(wait="time.sleep(60)"))
    shell = f"trap '' INT; {sys.executable} {path} & wait $!"
    done = subprocess.run(
        ["sh", "-c", shell],
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "buffered finally\natexit\n")


def test_a_main_thread_that_cannot_be_interrupted_is_left_behind_within_the_bound(
    script: Callable[[str], Script],
) -> None:
    running = script(
        STORY
        + """
import ctypes
control.configure(fault_exit_s=0.5)
pid = this_host().spawn_procs(name="bystander").spawn("worker", Worker).pid.call_one().get()
print(pid, flush=True)
spawn_bad()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN + 8])  # as a call that goes on after a signal
ctypes.CDLL(None).sleep(60)
"""
    )
    pid = int(running.line())
    code, _, err = running.finish()
    assert code == 1
    assert err.startswith("control: unhandled failure, exiting with code 1\n")
    assert "control: the main thread has not ended within 0.5 s" in err
    wait_until(lambda: not alive(pid), "the processes end")


def test_a_runtime_that_was_started_on_another_thread_still_ends_the_main_one(script: Callable[[str], Script]) -> None:
    text = """
thread = threading.Thread(target=spawn_bad)
thread.start()
thread.join()
"""
    busy = "[time.sleep(0.02) for _ in range(3000)]"
    code, out, err = script(STORY + text + END.format(wait=busy)).finish()
    assert (code, out) == (1, "buffered finally\natexit\n")
    assert err.startswith("control: unhandled failure, exiting with code 1\n")


def test_a_code_that_catches_everything_does_not_hide_the_failure(script: Callable[[str], Script]) -> None:
    text = """
spawn_bad()
try:
    time.sleep(60)
except BaseException as error:
    print(type(error).__name__, error.code)
"""
    code, out, _ = script(STORY + text).finish()
    assert (code, out) == (1, "SystemExit 1\n")


@pytest.mark.parametrize(
    "failing",
    [
        "this_host().spawn_procs().spawn('worker', Worker).fail.broadcast()",
        "spawn_bad()",
        "kept = spawn_bad().ping.call_one(); control.context()",
        "spawn_bad(); control.shutdown(); print('went on')",
        pytest.param(
            "control.context(); atexit.register(lambda: this_host().spawn_procs().spawn('w', Worker).fail.broadcast())",
            marks=pytest.mark.skipif(
                sys.version_info[:2] == (3, 12), reason="Python 3.12 starts no threads at its end"
            ),
        ),
    ],
)
def test_a_script_that_ends_before_a_failure_is_known_does_not_end_well(
    script: Callable[[str], Script], failing: str
) -> None:
    code, out, err = script(STORY + "control.configure(exit_grace_s=10)\n" + failing).finish()
    assert code == 1
    assert out == ("went on\n" if "went on" in failing else "")
    assert err.startswith("control: unhandled failure, exiting with code 1\n")
    assert "ValueError" in err


def test_an_orderly_end_stays_one_though_actors_speak_to_some_that_are_stopped(script: Callable[[str], Script]) -> None:
    running = script(
        STORY
        + """
class Caller(Actor):
    @endpoint
    def call_for_ever(self, worker, port):
        port.send(None)
        while True:
            worker.pid.call_one().get()
            worker.pid.broadcast()

control.configure(exit_grace_s=10)
worker = this_host().spawn_procs().spawn("worker", Worker)
caller = this_host().spawn_procs().spawn("caller", Caller)
port, receiver = control.Channel.open()
caller.call_for_ever.broadcast(worker, port)
receiver.recv().get()
"""
    )
    assert running.finish() == (0, "", "")


@pytest.mark.parametrize(("leaves", "code"), [("raise SystemExit(7)", 7), ("sys.exit('words')", 1), ("1 / 0", 1)])
def test_a_hook_of_the_users_is_told_at_once_and_may_end_the_script_in_good_order(
    script: Callable[[str], Script], leaves: str, code: int
) -> None:
    text = f"""
def hook(failure):
    print("told of", failure.mesh_name)
    {leaves}
control.unhandled_fault_hook = hook
this_host().spawn_procs().spawn("worker", Worker).fail.broadcast()
"""
    got, out, _ = script(STORY + text + END.format(wait="time.sleep(60)")).finish()
    assert (got, out.splitlines()[-2:]) == (code, [out.splitlines()[-2], "atexit"])
    assert "told of worker" in out
    assert "finally" in out


def test_a_hook_that_calls_the_one_by_default_does_not_end_a_script_that_hears_of_it(
    script: Callable[[str], Script],
) -> None:
    running = script(
        STORY
        + """
by_default = control.unhandled_fault_hook
told = threading.Event()
def hook(failure):
    by_default(failure)
    told.set()
control.unhandled_fault_hook = hook
bad = spawn_bad()
assert told.wait(10)
try:
    bad.ping.call_one().get()
except SupervisionError:
    print("caught")
time.sleep(2.5)
"""
    )
    assert running.finish() == (0, "caught\n", "")


# A prompt, a notebook, pytest


def run(*command: str, text: str = "", cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": f"{REPOSITORY}:{cwd}", "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *command],
        input=text,
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_prompt_gets_the_failure_where_its_users_code_runs_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "story.py").write_text(STORY)
    lines = """
        from story import *
        bad = spawn_bad()
        time.sleep(60)
        try: bad.ping.call_one().get()
        except SupervisionError: print("caught")

        print("still", "here")
    """
    done = run("-i", "-q", text=textwrap.dedent(lines), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "caught\nstill here\n")
    assert "skipper.control.model.errors.SupervisionError: control: unhandled failure" in done.stderr
    assert "ValueError: cannot be made" in done.stderr


def test_an_idle_prompt_is_told_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "story.py").write_text(STORY)
    with subprocess.Popen(
        [sys.executable, "-i", "-q"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": f"{REPOSITORY}:{tmp_path}", "PATH": "/usr/bin:/bin"},
    ) as prompt:
        assert prompt.stdin is not None
        assert prompt.stderr is not None
        prompt.stdin.write("from story import *\nbad = spawn_bad()\n")
        prompt.stdin.flush()
        seen = ""
        while "cannot be made" not in seen:
            line = prompt.stderr.readline()
            assert line
            seen += line
        out, _ = prompt.communicate("print('still', 'here')\n", timeout=PATIENCE_S)
    assert (prompt.returncode, out) == (0, "still here\n")
    assert "Traceback" not in seen.split("cannot be made")[0]


def _cell(source: str) -> dict[str, Any]:
    return {"cell_type": "code", "source": source, "metadata": {}, "outputs": [], "execution_count": None}


def test_a_cell_of_a_notebook_gets_the_failure_and_the_kernel_goes_on(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    cells = [
        STORY.replace(
            "from skipper import control\n",
            f"sys.path.insert(0, {str(REPOSITORY / 'src')!r})\nfrom skipper import control\n",
        ),
        "try:\n    spawn_bad().ping.call_one().get()\nexcept SupervisionError:\n    print('caught')",
        "bad = spawn_bad()\ntime.sleep(60)",
        "try:\n    await bad.ping.call_one()\nexcept SupervisionError:\n    print('caught again')",
        "bad = spawn_bad()\nawait asyncio.sleep(3)\nprint('was not interrupted')",
        "print('still here')",
    ]
    notebook: NotebookNode = nbformat.reads(
        json.dumps({"cells": [_cell(source) for source in cells], "metadata": {}, "nbformat": 4, "nbformat_minor": 4}),
        as_version=4,
    )
    client = NotebookClient(
        notebook,
        timeout=60,
        kernel_name="python3",
        allow_errors=True,
        resources={"metadata": {"path": elsewhere}},
    )
    client.execute(env={**os.environ, "PYTEST_CURRENT_TEST": ""})
    outputs = [cell.outputs for cell in notebook.cells]
    printed = ["".join(one.text for one in each if one.get("name") == "stdout") for each in outputs]
    assert printed == ["", "caught\n", "", "caught again\n", "was not interrupted\n", "still here\n"]
    (error,) = [one for one in outputs[2] if one.output_type == "error"]
    assert error.ename == "SupervisionError"
    assert "cannot be made" in error.evalue
    assert not [one for each in (outputs[:2], outputs[3:]) for cell in each for one in cell if "ename" in one]


def test_under_pytest_the_test_fails_that_runs_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "story.py").write_text(STORY)
    (tmp_path / "test_story.py").write_text(
        textwrap.dedent("""
            import pytest
            from story import *

            def test_catches():
                with pytest.raises(SupervisionError, match="cannot be made"):
                    spawn_bad().ping.call_one().get()

            def test_waits_for_something_else():
                spawn_bad()
                time.sleep(60)

            @pytest.fixture
            def closed():
                yield
                print("the fixture has ended")

            def test_leaves_it_behind(closed):
                spawn_bad()

            def test_is_innocent():
                time.sleep(3)

            def test_is_the_last():
                pass
        """)
    )
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-s", cwd=tmp_path)
    assert "1 failed, 4 passed" in done.stdout, done.stdout + done.stderr
    assert "FAILED test_story.py::test_waits_for_something_else" in done.stdout
    assert "SupervisionError: control: unhandled failure" in done.stdout
    assert "the fixture has ended" in done.stdout
    assert "RuntimeWarning: control: unhandled failure" in done.stdout
    assert done.returncode == 1


def test_a_run_of_pytest_ends_as_its_tests_do_and_is_told_what_failed_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "story.py").write_text(STORY)
    lines = """
        from story import *
        def test_leaves_it_behind():
            control.configure(exit_grace_s=10)
            this_host().spawn_procs().spawn("worker", Worker).fail.broadcast()
    """
    (tmp_path / "test_story.py").write_text(textwrap.dedent(lines))
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout + done.stderr
    assert "control: unhandled failure" in done.stderr
    assert "ValueError: nobody listens" in done.stderr


def test_the_signal_is_nobody_elses() -> None:
    from skipper.control.runtime import script_exit
    from skipper.control.runtime.procs import stack_file

    assert script_exit.SIGNAL != stack_file.SIGNAL
    assert script_exit.SIGNAL <= signal.SIGRTMAX
