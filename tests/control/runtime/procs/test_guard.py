"""No process outlives the job: not those either that actors have made, nor theirs."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from skipper import control
from skipper.control import ProcMesh, SupervisionError
from skipper.control.model.settings import adopt, settings
from skipper.control.runtime.procs import guards
from skipper.control.runtime.procs.guard import WATCHER
from skipper.control.runtime.procs.guards import Guards
from skipper.control.runtime.procs.inheritance import Surroundings
from tests.control.actors import Echo
from tests.control.conftest import PATIENCE_S, Failures, Script, alive, wait_until
from tests.control.families import Family

Spawn = Callable[..., ProcMesh]


@pytest.fixture(params=[(), ("statistics",)], ids=["executed", "forked"], autouse=True)
def preload(request: pytest.FixtureRequest) -> Iterator[tuple[str, ...]]:
    before = settings()
    control.shutdown()
    control.configure(preload=request.param)
    yield request.param
    control.shutdown()
    adopt(before)


def family_of(procs: ProcMesh) -> tuple[int, list[int]]:
    worker, pids = procs.spawn("family", Family).make.call_one().get(PATIENCE_S)
    assert all(map(alive, pids))
    return worker, pids


def left(pids: list[int]) -> list[int]:
    return [pid for pid in pids if alive(pid)]


def parent_of(pid: int) -> psutil.Process:
    parent = psutil.Process(pid).parent()
    assert parent is not None
    return parent


def watcher_and_guard() -> tuple[psutil.Process, psutil.Process]:
    (watcher,) = (one for one in psutil.Process().children() if one.name() == WATCHER.decode())
    (guard,) = watcher.children()
    return watcher, guard


def test_what_actors_have_made_lives_as_long_as_their_process_and_no_longer(own_procs: Spawn) -> None:
    procs = own_procs()
    family = procs.spawn("family", Family)
    _, pids = family.make.call_one().get(PATIENCE_S)
    family.stop().get(PATIENCE_S)
    assert all(map(alive, pids))
    procs.stop().get(PATIENCE_S)
    assert left(pids) == []  # at once


def test_it_ends_with_a_process_that_is_killed(own_procs: Spawn, failures: Failures) -> None:
    worker, pids = family_of(own_procs())
    os.kill(worker, signal.SIGKILL)
    assert f"pid {worker} was killed by signal 9" in failures.wait().message
    wait_until(lambda: not left(pids), f"the end of {pids}")


def test_it_does_not_end_with_another_process(own_procs: Spawn, failures: Failures) -> None:
    procs = own_procs({"gpus": 2})
    _, pids = family_of(procs.slice(gpus=0))
    other, _ = family_of(procs.slice(gpus=1))
    os.kill(other, signal.SIGKILL)
    failures.wait()
    assert all(map(alive, pids))


def test_it_ends_where_keeper_and_worker_are_killed_together(own_procs: Spawn, failures: Failures) -> None:
    worker, pids = family_of(own_procs())
    parent_of(worker).kill()  # and the worker with it, by the kernel
    assert "was killed together with its parent" in failures.wait().message
    wait_until(lambda: not left([worker, *pids]), f"the end of {pids}")


def test_it_ends_with_who_has_started_the_keeper(own_procs: Spawn, failures: Failures) -> None:
    worker, pids = family_of(own_procs())
    starter = parent_of(parent_of(worker).pid)
    starter.kill()
    message = failures.wait().message
    assert f"pid {worker} was killed with the" in message
    assert f"(pid {starter.pid})" in message
    wait_until(lambda: not left([worker, *pids]), f"the end of {pids}")
    assert own_procs().spawn("echo", Echo).pid.call_one().get(PATIENCE_S) not in (worker, *pids)  # there is another one


@pytest.mark.parametrize("frozen", [False, True])
def test_a_guard_goes_on_without_its_watcher(own_procs: Spawn, frozen: bool) -> None:
    worker, pids = family_of(own_procs())
    watcher, guard = watcher_and_guard()
    if frozen:
        watcher.suspend()
    else:
        watcher.kill()
    assert own_procs().spawn("echo", Echo).pid.call_one().get(PATIENCE_S) not in (worker, *pids)
    control.shutdown()
    wait_until(lambda: not left([worker, *pids, guard.pid, watcher.pid]), "all of them end")


def test_processes_are_of_the_session_and_the_group_of_the_script(own_procs: Spawn) -> None:
    """Those of another session get less of the processors, and a terminal does not know them."""
    worker = own_procs().spawn("echo", Echo).pid.call_one().get(PATIENCE_S)
    line = [worker, parent_of(worker).pid, parent_of(parent_of(worker).pid).pid]
    assert [(os.getsid(pid), os.getpgid(pid)) for pid in line] == [(os.getsid(0), os.getpgrp())] * 3


def test_nobody_waits_for_a_guard_or_a_keeper_that_is_frozen(
    own_procs: Spawn, failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guards, "REPORT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(guards, "ANSWER_TIMEOUT_S", 0.2)
    procs = own_procs()
    worker = procs.spawn("echo", Echo).pid.call_one().get(PATIENCE_S)
    keeper = parent_of(worker)
    keeper.suspend()
    os.kill(worker, signal.SIGKILL)
    assert "how is not known" in failures.wait().message
    procs.stop().get(PATIENCE_S)
    watcher, guard = watcher_and_guard()
    guard.suspend()
    assert own_procs().spawn("echo", Echo).pid.call_one().get(PATIENCE_S) != worker
    control.shutdown()
    wait_until(lambda: not left([keeper.pid, guard.pid, watcher.pid]), "all of them end")


def test_who_has_lost_its_parent_and_ends_is_buried(own_procs: Spawn) -> None:
    family = own_procs().spawn("family", Family)
    orphan = family.forget.call_one().get(PATIENCE_S)
    wait_until(lambda: not psutil.pid_exists(orphan), "nothing of it is left")
    assert not family.has_children.call_one().get(PATIENCE_S)  # it was never this process' own


def test_how_a_process_ends_is_known_before_its_offspring_has(own_procs: Spawn, failures: Failures) -> None:
    procs = own_procs()
    family_of(procs)
    with pytest.raises(SupervisionError, match="exited with code 5"):
        procs.spawn("echo", Echo).run.call_one(os._exit, 5).get(PATIENCE_S)
    failures.wait()


FAMILY = Path(__file__).with_name("family_script.py")


def of_script(started: Script) -> list[int]:
    pids = [int(word) for word in started.line().split()]
    assert all(map(alive, pids))
    below = psutil.Process(started.process.pid).children(recursive=True)
    assert set(pids) <= {process.pid for process in below}
    return [process.pid for process in below]


def test_it_ends_with_the_script(script: Callable[..., Script], preload: tuple[str, ...]) -> None:
    started = script(FAMILY, *preload)
    pids = of_script(started)
    assert started.process.stdin is not None
    started.process.stdin.write("\n")
    started.process.stdin.flush()
    code, _, err = started.finish()
    assert (code, err) == (0, "")
    assert left(pids) == []


@pytest.mark.parametrize("how", ["alone", "with its group", "with everything frozen"])
def test_it_ends_with_a_script_that_is_killed(
    script: Callable[..., Script], preload: tuple[str, ...], how: str
) -> None:
    started = script(FAMILY, *preload)
    pids = of_script(started)
    if how == "with everything frozen":
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    if how == "with its group":
        os.killpg(started.process.pid, signal.SIGKILL)
    started.process.kill()
    started.process.wait(PATIENCE_S)
    wait_until(lambda: not left(pids), f"the end of {pids}")


def test_the_end_of_a_process_harms_nobody_in_the_group_of_the_script(
    script: Callable[[str], Script], preload: tuple[str, ...]
) -> None:
    """As it would if the kernel found that group orphaned by it, with somebody in it who is stopped: SIGHUP to all."""
    started = script(f"""
        import os, signal, subprocess
        from skipper.control import configure, this_host
        from tests.control.actors import Echo

        os.setsid()
        stopped = subprocess.Popen(["sleep", "600"])
        stopped.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
        configure(preload={preload!r})
        procs = this_host().spawn_procs()
        procs.spawn("echo", Echo).pid.call_one().get(20)
        procs.stop().get(20)
        stopped.kill()
        print("alive")
    """)
    assert started.finish() == (0, "alive\n", "")


def test_it_ends_with_a_process_of_a_process(own_procs: Spawn, failures: Failures) -> None:
    def nest() -> Any:
        return control.this_host().spawn_procs().spawn("family", Family).make.call_one().get(PATIENCE_S)

    echo = own_procs().spawn("echo", Echo)
    inner, pids = echo.run.call_one(nest).get(PATIENCE_S)
    os.kill(echo.pid.call_one().get(PATIENCE_S), signal.SIGKILL)
    failures.wait()
    wait_until(lambda: not left([inner, *pids]), f"the end of {pids}")


def test_processes_that_are_spawned_first_and_at_once_have_one_guard_that_ends() -> None:
    for _ in range(3):
        together = threading.Barrier(4)

        def spawn() -> None:
            together.wait(PATIENCE_S)  # noqa: B023  (of this turn: the threads end in it)
            control.this_host().spawn_procs().initialized.get(PATIENCE_S)

        threads = [threading.Thread(target=spawn) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        watcher_and_guard()
        control.shutdown()
        assert [one for one in psutil.Process().children() if one.name() == WATCHER.decode()] == []


def test_what_cannot_be_executed_is_told() -> None:
    hurry = os.eventfd(0)
    starter = Guards(hurry)
    try:
        with Surroundings.now({}, ()) as surroundings:
            with pytest.raises(FileNotFoundError):
                starter.start(["/nowhere"], surroundings, (), PATIENCE_S)
            started = starter.start(["/bin/sleep", "600"], surroundings, (), PATIENCE_S)
        assert alive(started.pid)
    finally:
        starter.close()
        os.close(hurry)
    assert not alive(started.pid)
    started.close()


def test_a_script_without_an_output_may_spawn(script: Callable[[str], Script], preload: tuple[str, ...]) -> None:
    started = script(f"""
        import os, sys
        from skipper.control import configure, this_host
        from tests.control.actors import Echo

        configure(preload={preload!r})
        os.close(1)
        print(this_host().spawn_procs().spawn("echo", Echo).echo.call_one("alive").get(20), file=sys.stderr)
    """)
    assert started.finish() == (0, "", "alive\n")


def test_attributes_of_the_script_that_have_changed_are_those_of_new_processes(own_procs: Spawn) -> None:
    before = os.umask(0o027)
    try:
        assert own_procs().spawn("echo", Echo).run.call_one(os.umask, 0).get(PATIENCE_S) == 0o027
    finally:
        os.umask(before)
    assert own_procs().spawn("echo", Echo).run.call_one(os.umask, 0).get(PATIENCE_S) == before
