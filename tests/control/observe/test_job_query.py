"""Questions to all processes, while some are lost, many ask at once, and those who ask are killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from skipper.control import ActorError, ActorMesh, ProcMesh, ServedJob, this_host
from skipper.control.observe import job_status
from skipper.control.observe.job_query import survey
from skipper.control.runtime import current_runtime
from tests.control.actors import Echo
from tests.control.conftest import PATIENCE_S, REPOSITORY, Failures, wait_until
from tests.freezing import freeze


def test_what_cannot_be_asked_is_an_error_at_once(echoes: ActorMesh[Echo]) -> None:
    begun = time.monotonic()
    with pytest.raises(ActorError, match="KeyError: 'nonsense'"):
        survey(current_runtime.current(), "nonsense", timeout=PATIENCE_S)
    assert time.monotonic() - begun < PATIENCE_S / 2


def open_ports() -> int:
    """How many answers the script waits for."""
    ports = current_runtime.current().ports
    return len(ports._open) + len(ports._owed)


def test_nobody_waits_for_a_process_that_dies_meanwhile(failures: Failures) -> None:
    echo = this_host().spawn_procs(name="doomed").spawn("doomed", Echo)
    pid = echo.pid.call_one().get(PATIENCE_S)
    freeze(pid)
    before = open_ports()
    found: list[str] = []

    def ask() -> None:
        found.extend(p.problem for p in job_status(timeout=PATIENCE_S * 3).processes if p.name == "doomed")

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: open_ports() >= before + 2, "the question has been passed on")
    os.kill(pid, signal.SIGKILL)
    asking.join(PATIENCE_S)
    assert not asking.is_alive()
    assert "SIGKILL" in found[0]
    failures.wait()


def test_a_process_that_has_not_come_up_yet_is_starting(own_procs: Callable[..., ProcMesh]) -> None:
    slow = own_procs(name="slow", bootstrap=lambda: time.sleep(1.5))
    states = [process.state for process in job_status(timeout=0.4).processes if process.name == "slow"]
    assert states == ["starting"]
    slow.initialized.get(PATIENCE_S)
    assert [process.state for process in job_status().processes if process.name == "slow"] == ["up"]


def test_many_may_ask_at_once_and_nothing_is_left_of_it(echoes: ActorMesh[Echo]) -> None:
    job_status(timeout=PATIENCE_S)
    ports, threads = open_ports(), threading.active_count()
    found: list[bool] = []
    asking = [
        threading.Thread(target=lambda: found.append(job_status(timeout=PATIENCE_S).is_healthy)) for _ in range(20)
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert found == [True] * 20
    wait_until(lambda: threading.active_count() <= threads, "the threads of the surveys have ended")
    assert open_ports() == ports


def test_those_who_look_may_be_killed_at_any_time(served: ServedJob, echoes: ActorMesh[Echo]) -> None:
    command = [
        sys.executable,
        "-m",
        "skipper.cli.main",
        "status",
        "--job",
        str(served.path),
        "--watch",
        "0.01",
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline()
        watching.kill()
    assert len(echoes.pid.call().get(PATIENCE_S)) == 2
    wait_until(lambda: current_runtime.current().transport.connected() == 2, "the visitor's link is gone")
    status = job_status()
    assert status.is_healthy
    assert not any(
        "visitor" in death.who for process in status.processes if process.report for death in process.report.deaths
    )
    assert served.members() == ()
