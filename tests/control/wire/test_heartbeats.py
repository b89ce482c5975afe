import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from skipper import control
from skipper.control import ActorMesh, FailureKind, SupervisionError, this_host
from skipper.control.model.settings import adopt, settings
from tests.control.actors import Echo, Manager
from tests.control.conftest import PATIENCE_S, Failures, Script, alive, hogs, wait_until

BOUND_S = 3.0
SHORT_S = 0.6
"""For processes that are silent for several times as long."""


@pytest.fixture(autouse=True)
def short_heartbeats() -> Iterator[None]:
    before = settings()
    control.configure(heartbeat_s=BOUND_S)
    yield
    control.shutdown()
    adopt(before)


def seconds_until_known(echo: ActorMesh[Echo], pid: int) -> float:
    """Freeze a process; how long it takes until who waits for it is told."""
    answer = echo.sleep.call_one(PATIENCE_S)
    began = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(SupervisionError, match=r"no sign of life for .* is stopped"):
        answer.get(PATIENCE_S)
    return time.monotonic() - began


def test_a_frozen_process_is_found_within_the_bound_and_killed(failures: Failures) -> None:
    echoes = this_host().spawn_procs({"gpus": 2}).spawn("echoes", Echo)
    pid = echoes.pid.call().get(PATIENCE_S)[0]
    busy = echoes.slice(gpus=1).sleep.call_one(BOUND_S + 1)  # which is not to be taken for frozen
    assert seconds_until_known(echoes.slice(gpus=0), pid) < BOUND_S
    assert not alive(pid)
    failure = failures.wait()
    assert "no sign of life" in failure.message
    assert failure.kind is FailureKind.UNREACHABLE
    assert busy.get(PATIENCE_S) == BOUND_S + 1


def test_processes_that_freeze_at_any_time_are_found_within_the_bound_on_a_busy_machine(failures: Failures) -> None:
    echoes = this_host().spawn_procs({"gpus": 5}).spawn("echoes", Echo)
    pids = echoes.pid.call().get(PATIENCE_S)
    found_s: list[float] = []
    with hogs(8):
        answers = [echoes.slice(gpus=rank).sleep.call_one(PATIENCE_S) for rank in range(5)]
        for pid, answer in zip(pids.values(), answers, strict=True):
            began = time.monotonic()
            answer.add_done_callback(lambda _, began=began: found_s.append(time.monotonic() - began))
            os.kill(pid, signal.SIGSTOP)
            time.sleep(BOUND_S / 20)  # so that the looks and the beats fall at different times
        for answer in answers:
            with pytest.raises(SupervisionError, match="is stopped"):
                answer.get(PATIENCE_S)
    wait_until(lambda: len(found_s) == 5, "all have been told")
    assert max(found_s) < BOUND_S
    assert len(failures) >= 1


def test_a_process_in_which_a_call_keeps_the_interpreter_lock_lives_on() -> None:
    control.configure(heartbeat_s=SHORT_S)
    echoes = this_host().spawn_procs({"gpus": 2}).spawn("echoes", Echo)
    pids = [pid for _, pid in echoes.pid.call().get(PATIENCE_S).items()]
    first, second = echoes.slice(gpus=0), echoes.slice(gpus=1)
    assert second.run.call_one(_ask, first).get(PATIENCE_S) == pids[0]  # so that others hear it, too
    held = first.hold_lock.call_one(4 * SHORT_S)
    meanwhile = first.pid.call_one()
    assert held.get(PATIENCE_S) == pids[0]
    assert meanwhile.get(PATIENCE_S) == pids[0]
    assert second.run.call_one(_ask, first).get(PATIENCE_S) == pids[0]


def _ask(other: ActorMesh[Echo]) -> int:
    return other.pid.call_one().get(PATIENCE_S)


def test_a_process_that_gets_no_cpu_time_lives_on() -> None:
    control.configure(heartbeat_s=SHORT_S, unresponsive_s=2 * SHORT_S)
    echo = this_host().spawn_procs().spawn("echo", Echo)
    pid = echo.pid.call_one().get(PATIENCE_S)
    cpus = os.sched_getaffinity(0)
    threads = [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]
    with hogs(4, min(cpus)):
        for thread in threads:
            os.sched_setaffinity(thread, {min(cpus)})
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        answer = echo.run.call_one(sum, range(5_000_000))
        time.sleep(4 * SHORT_S)  # in which it gets less than a thousandth of the CPU
    for thread in threads:
        os.sched_setaffinity(thread, cpus)
        with suppress(PermissionError):  # one's own processes may be slowed down, but not always be made faster again
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
    answer.get(PATIENCE_S)
    assert echo.pid.call_one().get(PATIENCE_S) == pid


def test_a_process_that_is_alive_and_silent_is_killed_at_the_second_bound(failures: Failures) -> None:
    control.configure(heartbeat_s=SHORT_S, unresponsive_s=2.0)
    echo = this_host().spawn_procs().spawn("echo", Echo)
    pid = echo.pid.call_one().get(PATIENCE_S)
    began = time.monotonic()
    with pytest.raises(SupervisionError, match=r"no sign of life for 2.* not stopped .* holds the interpreter lock"):
        echo.hold_lock.call_one(PATIENCE_S).get(PATIENCE_S)
    assert time.monotonic() - began >= 2.0 - SHORT_S
    assert not alive(pid)
    assert failures.wait().kind is FailureKind.UNREACHABLE


def test_a_frozen_owner_is_killed_with_all_it_owns(failures: Failures) -> None:
    procs = this_host().spawn_procs(name="owning")
    manager = procs.spawn("manager", Manager)
    leaves = manager.grow.call_one(2).get(PATIENCE_S)
    owned = leaves.pid.call().get(PATIENCE_S)
    waiting = leaves.sleep.call(60)
    began = time.monotonic()
    os.kill(procs.spawn("echo", Echo).pid.call_one().get(PATIENCE_S), signal.SIGSTOP)
    with pytest.raises(SupervisionError):
        waiting.get(PATIENCE_S)
    with pytest.raises(SupervisionError, match="no sign of life"):
        manager.seen.call_one().get(PATIENCE_S)
    wait_until(lambda: not any(map(alive, owned)), "what it owned has ended")
    assert time.monotonic() - began < 3 * BOUND_S
    assert {failure.mesh_name for failure in failures} <= {"manager", "echo"}
    assert failures.wait().kind is FailureKind.UNREACHABLE


def test_a_script_that_was_frozen_goes_on_with_its_processes_afterwards(script: Callable[..., Script]) -> None:
    running = script(Path(__file__).with_name("frozen_script.py"))
    worker = int(running.line())
    for pid in (running.process.pid, worker):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3)  # longer than the bound
    os.kill(running.process.pid, signal.SIGCONT)
    assert running.line() == "awake"
    os.kill(worker, signal.SIGCONT)
    assert running.finish() == (0, "True\n", "")


def test_a_script_that_was_frozen_while_processes_start_has_them_afterwards(script: Callable[[str], Script]) -> None:
    running = script(
        """
        from skipper import control
        from skipper.control import Actor, endpoint, this_host

        class Worker(Actor):
            @endpoint
            def works(self):
                return True

        control.configure(connect_timeout_s=2)
        procs = this_host().spawn_procs()
        print("starts", flush=True)
        print(procs.spawn("worker", Worker).works.call_one().get())
        """
    )
    assert running.line() == "starts"
    process = psutil.Process(running.process.pid)
    wait_until(lambda: bool(process.children()), "its process has begun")
    process.suspend()
    time.sleep(4)  # longer than the bound
    process.resume()
    assert running.finish() == (0, "True\n", "")
