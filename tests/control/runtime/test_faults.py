"""Every kind of end at every place: the right error reaches the right one within its bound, and nothing is left."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skipper import control
from skipper.control import (
    Actor,
    ActorError,
    ActorMesh,
    FailureKind,
    MeshFailure,
    PayloadError,
    ProcMesh,
    SupervisionError,
    context,
    endpoint,
    this_host,
)
from tests.control.actors import Cleaner, Echo, Manager
from tests.control.conftest import PATIENCE_S, Failures, Script, alive, wait_until

AT_ONCE_S = 5.0
"""Bound on what the OS tells within milliseconds: well below that of the heartbeats, on a busy machine too."""


DEATHS = 12
"""How many processes die in a row; ``python -m tests.control.respawn`` does it as often as it is told to."""


class Stubborn:
    """Unpickles in no process but its own."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __reduce__(self) -> Any:
        return (revive, (self.pid,))


def revive(pid: int) -> Stubborn:
    if os.getpid() != pid:
        raise RuntimeError("lost in translation")
    return Stubborn(pid)


class Maker(Actor):
    @endpoint
    def make(self) -> Stubborn:
        return Stubborn(os.getpid())

    @endpoint
    def take(self, value: Any) -> bool:
        return True


class Owner(Actor):
    """Owns processes and an actor in each; ends as it is told to."""

    @endpoint
    def grow(self) -> tuple[int, list[int], ActorMesh[Any]]:
        self.procs = this_host().spawn_procs({"x": 2}, name="owned")
        self.mesh = self.procs.spawn("owned", Echo)
        return os.getpid(), list(self.mesh.pid.call().get(PATIENCE_S)), self.mesh

    @endpoint
    def end(self, how: str) -> None:
        if how == "raise":
            raise ValueError("the owner raised")
        if how == "abort":
            context().actor_instance.abort("the owner gave up")
        elif how == "exit":
            os._exit(0)
        else:
            signal.raise_signal(signal.Signals[how])


def sockets() -> set[str]:
    """The abstract sockets of jobs on this host."""
    return set(re.findall(r"@(skipper-\S+)", Path("/proc/net/unix").read_text()))


@pytest.fixture(scope="module", autouse=True)
def no_socket_and_no_shared_memory_is_left(leave_nothing_behind: None) -> Iterator[None]:
    control.shutdown()
    before = set(os.listdir("/dev/shm"))
    job = set(sockets())
    yield
    control.shutdown()
    wait_until(lambda: not own(sockets() - job), "the sockets of the job are gone")
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "skipper" in name]


def own(names: set[str]) -> set[str]:
    """Of these sockets those that this process or a child of it has made: other suites may run beside this one."""
    return {name for name in names if any(name.startswith(f"skipper-{job}-") for job in JOBS)}


JOBS: set[str] = set()


@pytest.fixture(autouse=True)
def remember_the_job() -> Iterator[None]:
    yield
    JOBS.add(context().actor_instance.proc_id.partition("-")[0])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "the owner raised"),
        ("abort", "the owner gave up"),
        ("exit", "exited with code 0"),
        ("SIGKILL", "SIGKILL"),
        ("SIGSEGV", "SIGSEGV"),
        ("SIGABRT", "SIGABRT"),
    ],
)
def test_when_an_owner_ends_its_processes_end_and_all_callers_are_told(
    procs: ProcMesh, own_procs: Callable[..., ProcMesh], failures: Failures, how: str, message: str
) -> None:
    owner = own_procs(name="owning").spawn("owner", Owner)
    _, pids, owned = owner.grow.call_one().get(PATIENCE_S)
    third = procs.slice(gpus=0).spawn("third", Echo)
    waiting = third.run.call_one(call_sleep, owned)
    mine = owned.sleep.call(0.3)
    began = time.monotonic()
    owner.end.broadcast(how)
    failure = failures.wait()
    assert (failure.mesh_name, failure.rank) == ("owner", {})
    assert message in failure.report().splitlines()[0]
    wait_until(lambda: not any(map(alive, pids)), "what it owned has ended", timeout=AT_ONCE_S)
    assert time.monotonic() - began < AT_ONCE_S
    with pytest.raises(SupervisionError, match=message):
        owner.grow.call_one().get(PATIENCE_S)
    for future in (waiting, mine):  # which were handled before the end, or not: they end in any case
        with contextlib.suppress(SupervisionError, ActorError):
            future.get(PATIENCE_S)
    with pytest.raises(SupervisionError):
        owned.pid.call().get(PATIENCE_S)
    third.stop().get(PATIENCE_S)


def call_sleep(mesh: ActorMesh[Echo]) -> Any:
    return mesh.sleep.call(0.3).get(PATIENCE_S)


def test_arguments_that_cannot_be_unpickled_are_the_callers_error_and_the_actor_lives(procs: ProcMesh) -> None:
    maker = procs.slice(gpus=0).spawn("maker", Maker)
    with pytest.raises(ActorError, match="lost in translation") as caught:
        maker.take.call_one(Stubborn(os.getpid())).get(PATIENCE_S)
    assert isinstance(caught.value.cause, PayloadError)
    assert maker.take.call_one(1).get(PATIENCE_S)
    maker.stop().get(PATIENCE_S)


def test_results_that_cannot_be_unpickled_are_an_error_where_they_arrive(procs: ProcMesh) -> None:
    makers = procs.spawn("makers", Maker)
    with pytest.raises(PayloadError, match="lost in translation"):
        makers.slice(gpus=0).make.call_one().get(PATIENCE_S)
    with pytest.raises(PayloadError, match="lost in translation"):
        makers.make.call().get(PATIENCE_S)
    for future in makers.make.stream():
        with pytest.raises(PayloadError):
            future.get(PATIENCE_S)
    makers.stop().get(PATIENCE_S)


def test_arguments_of_init_are_checked_before_anything_is_sent(procs: ProcMesh) -> None:
    with pytest.raises(TypeError, match=r"Cleaner\.__init__: missing a required argument: 'name'"):
        procs.spawn("cleaner", Cleaner, "path")
    with pytest.raises(TypeError, match=r"Cleaner\.__init__: got an unexpected keyword argument 'color'"):
        procs.spawn("cleaner", Cleaner, "path", "name", color="red")
    with pytest.raises(PayloadError, match="cannot pickle"):
        procs.spawn("echo", Cleaner, open, (number for number in ()))


def test_arguments_of_init_that_cannot_be_unpickled_are_a_failure_of_the_mesh(
    procs: ProcMesh, failures: Failures
) -> None:
    cleaner = procs.slice(gpus=0).spawn("cleaner", Cleaner, Stubborn(os.getpid()), "name")
    with pytest.raises(SupervisionError, match="lost in translation"):
        cleaner.note.call_one("x").get(PATIENCE_S)
    failure = failures.wait()
    assert (failure.kind, failure.is_recoverable()) == (FailureKind.CONSTRUCTION, False)


class HalfMade(Actor):
    def __init__(self, path: str) -> None:
        self.path = path
        raise RuntimeError("half way")

    def __cleanup__(self, error: Exception | None) -> None:
        Path(self.path).touch()


def test_what_was_never_made_is_not_cleaned_up(procs: ProcMesh, failures: Failures, tmp_path: Path) -> None:
    half = procs.slice(gpus=0).spawn("half", HalfMade, str(tmp_path / "cleaned"))
    with pytest.raises(SupervisionError, match="half way"):
        half.initialized.get(PATIENCE_S)
    half.stop().get(PATIENCE_S)
    assert not (tmp_path / "cleaned").exists()
    failures.wait()


def test_a_cleanup_that_raises_after_a_failure_does_not_hide_that_failure(
    procs: ProcMesh, failures: Failures, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log"
    cleaner = procs.slice(gpus=0).spawn("cleaner", Cleaner, str(log), "a", raises=True)
    cleaner.boom.broadcast()
    failure = failures.wait()
    assert "no reply wanted" in failure.message
    wait_until(lambda: log.exists() and "cleanup a SupervisionError" in log.read_text(), "it cleans up all the same")
    with pytest.raises(SupervisionError, match="no reply wanted"):
        cleaner.note.call_one("late").get(PATIENCE_S)
    assert len(failures) == 1


def test_a_cleanup_of_an_owned_mesh_that_raises_does_not_keep_its_owner_from_ending(
    procs: ProcMesh, tmp_path: Path
) -> None:
    owner = procs.slice(gpus=0).spawn("owner", Cleaner, str(tmp_path / "log"), "owner")
    owner.own_bad.call_one("child").get(PATIENCE_S)
    owner.stop().get(PATIENCE_S)
    assert (tmp_path / "log").read_text().splitlines() == ["cleanup child NoneType", "cleanup owner NoneType"]


def test_supervise_that_is_told_of_many_failures_handles_them_all(procs: ProcMesh) -> None:
    manager = procs.slice(gpus=0).spawn("manager", Manager)
    leaves = manager.grow.call_one(4).get(PATIENCE_S)
    pids = leaves.pid.call().get(PATIENCE_S)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    told: list[MeshFailure] = []

    def is_told_of_all() -> bool:
        told[:] = manager.seen.call_one().get(PATIENCE_S)
        return {failure.rank["x"] for failure in told if failure.rank is not None} == {0, 1, 2, 3}

    wait_until(is_told_of_all, "the manager is told of each death")
    assert manager.grow.call_one(1).get(PATIENCE_S).pid.call().get(PATIENCE_S)
    manager.stop().get(PATIENCE_S)


def test_the_root_that_aborts_exits_with_the_reason(script: Callable[[str], Script]) -> None:
    running = script(
        """
        import os, time
        from skipper.control import Actor, context, endpoint, this_host

        class Worker(Actor):
            @endpoint
            def pid(self):
                return os.getpid()

        worker = this_host().spawn_procs().spawn("worker", Worker)
        print(worker.pid.call_one().get(), flush=True)
        context().actor_instance.abort("the script has had enough")
        time.sleep(30)
        """
    )
    pid = int(running.line())
    code, _, err = running.finish()
    assert code == 1
    assert "the script has had enough" in err.splitlines()[1]
    wait_until(lambda: not alive(pid), "its process has ended", timeout=AT_ONCE_S)


def test_respawning_after_many_deaths_works_at_once(failures: Failures) -> None:
    for _ in range(DEATHS):
        procs = this_host().spawn_procs()
        echo = procs.spawn("echo", Echo)
        assert echo.echo.call_one(1).get(PATIENCE_S) == 1
        with pytest.raises(SupervisionError, match="SIGKILL"):
            echo.die.call_one().get(PATIENCE_S)
    wait_until(lambda: len(failures) == DEATHS, "each death is told of, once")
    assert all(failure.kind is FailureKind.PROCESS for failure in failures)
