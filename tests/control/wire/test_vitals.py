"""What the operating system says of processes that run, are stopped, or have ended."""

import os
import signal
import subprocess
import sys

from skipper.control.wire.vitals import Condition, look_at, own_namespace
from tests.control.conftest import REPOSITORY, hogs, wait_until


def test_what_a_process_goes_through_is_seen() -> None:
    assert look_at(os.getpid()).condition is Condition.ALIVE
    with subprocess.Popen(["sleep", "100"]) as other:
        wait_until(lambda: look_at(other.pid).state == "S", "it sleeps")
        assert look_at(other.pid).condition is Condition.ALIVE
        other.send_signal(signal.SIGSTOP)
        wait_until(lambda: look_at(other.pid).condition is Condition.STOPPED, "it is stopped")
        other.send_signal(signal.SIGCONT)
        wait_until(lambda: look_at(other.pid).condition is Condition.ALIVE, "it goes on")
        other.kill()
        wait_until(lambda: look_at(other.pid).condition is Condition.ENDED, "it is a zombie")
        assert look_at(other.pid).state == "Z"
    assert look_at(other.pid).condition is Condition.ENDED


def test_the_cpu_time_of_a_process_is_counted() -> None:
    before = look_at(os.getpid()).cpu_s
    wait_until(lambda: look_at(os.getpid()).cpu_s > before, "this process has worked")


def test_a_process_that_is_kept_from_running_is_told_from_one_that_waits_for_something_else() -> None:
    with (
        subprocess.Popen(["sleep", "100"]) as asleep,
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"], stdin=subprocess.DEVNULL) as starved,
        hogs(4, cpu := min(os.sched_getaffinity(0))),
    ):
        os.sched_setaffinity(starved.pid, {cpu})
        os.setpriority(os.PRIO_PROCESS, starved.pid, 19)
        wait_until(lambda: look_at(asleep.pid).state == "S", "it sleeps")
        before = look_at(starved.pid), look_at(asleep.pid)
        wait_until(lambda: look_at(starved.pid).is_kept_waiting(before[0]), "it is seen to wait")
        wait_until(lambda: look_at(starved.pid).waited_s(before[0]) > 0.1, "its wait is counted")
        assert not look_at(asleep.pid).is_kept_waiting(before[1])
        assert look_at(asleep.pid).waited_s(before[1]) < 0.1
        starved.kill()
        asleep.kill()


def test_processes_of_the_same_table_have_the_same_namespace() -> None:
    program = "from skipper.control.wire.vitals import own_namespace; print(own_namespace())"
    other = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert own_namespace() == int(other.stdout) != 0
