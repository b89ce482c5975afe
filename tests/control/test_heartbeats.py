import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

import control
from control import FailureKind, SupervisionError, this_host

from .actors import Echo, Manager
from .conftest import PATIENCE_S, Failures, Script, alive, wait_until

BOUND_S = 3.0
"""Long enough for a machine that is busy with other things to show a sign of life in time."""


@pytest.fixture(autouse=True)
def short_heartbeats() -> Iterator[None]:
    before = control.configure()
    control.configure(heartbeat_s=BOUND_S)
    yield
    control.shutdown()
    control.configure(heartbeat_s=before.heartbeat_s)


def test_a_frozen_process_is_found_within_the_bound_and_killed(failures: Failures) -> None:
    echoes = this_host().spawn_procs({"gpus": 2}).spawn("echoes", Echo)
    pid = echoes.pid.call().get(PATIENCE_S)[0]
    busy = echoes.slice(gpus=1).sleep.call_one(BOUND_S + 1)  # which is not to be taken for frozen
    began = time.monotonic()
    with pytest.raises(SupervisionError, match="no sign of life for 3 s"):
        echoes.slice(gpus=0).freeze.call_one().get(PATIENCE_S)
    assert time.monotonic() - began < 2 * BOUND_S
    assert not alive(pid)
    assert "no sign of life" in failures.wait().message
    assert busy.get(PATIENCE_S) == BOUND_S + 1


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


def test_a_script_that_was_frozen_goes_on_with_its_processes_afterwards(script: Callable[[str], Script]) -> None:
    running = script(
        """
        import os, sys, time
        import control
        from control import Actor, endpoint, this_host

        class Worker(Actor):
            @endpoint
            def pid(self):
                return os.getpid()

        control.configure(heartbeat_s=2)
        worker = this_host().spawn_procs().spawn("worker", Worker)
        pid = worker.pid.call_one().get()
        last = time.monotonic()
        print("ready", flush=True)
        while (now := time.monotonic()) - last < 2:
            last = now
            time.sleep(0.01)
        time.sleep(1)
        print(worker.pid.call_one().get() == pid)
        """
    )
    assert running.line() == "ready"
    os.kill(running.process.pid, signal.SIGSTOP)
    time.sleep(3)  # longer than the bound
    os.kill(running.process.pid, signal.SIGCONT)
    assert running.finish() == (0, "True\n", "")
