"""The supervision document and the guide's "Error Handling in Meshes": ownership, `__supervise__`, lifecycle, links."""

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skipper.control import (
    Actor,
    ActorMesh,
    Channel,
    FailureKind,
    LinkError,
    MeshFailure,
    Port,
    ProcMesh,
    SupervisionError,
    context,
    endpoint,
    this_host,
)
from tests.control.conftest import Failures, Script, alive, wait_until

TIMEOUT_S = 20.0


class Worker(Actor):
    def __init__(self, path: str = "") -> None:
        self.path = path

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def note(self, text: str) -> None:
        append(self.path, text)

    @endpoint
    def fail(self) -> None:
        raise ValueError("the first error")

    @endpoint
    def exit(self, code: int) -> None:
        os._exit(code)

    @endpoint
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @endpoint
    def begin_to_sleep(self, begun: Port[int], seconds: float) -> None:
        begun.send(os.getpid())
        time.sleep(seconds)

    @endpoint
    def answer_later(self, port: Port[Any]) -> None:
        port.link()
        self.port = port

    @endpoint
    def answer(self, value: Any) -> None:
        self.port.send(value)

    def __cleanup__(self, error: Exception | None) -> None:
        if self.path:
            append(self.path, "worker cleaned up")


class Manager(Actor):
    """Owns what it spawns in `__init__`, logs its failures, and returns what it is told to."""

    def __init__(self, worker_procs: ProcMesh, verdict: Any = None, path: str = "") -> None:
        self.verdict = verdict
        self.path = path
        self.told: list[str] = []
        self.workers = worker_procs.spawn("workers", Worker, path)

    def __supervise__(self, failure: MeshFailure) -> Any:
        logging.getLogger("tests").info("failure encountered: %s", failure)
        self.told.append(str(failure))
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict

    @endpoint
    def get_workers(self) -> ActorMesh[Any]:
        return self.workers

    @endpoint
    def seen(self) -> list[str]:
        return self.told

    @endpoint
    def wait_for_the_dead(self) -> tuple[str, int]:
        """Waits on a channel that nobody will send to, until its supervision has changed its state."""
        _, receiver = Channel.open()
        self.workers.slice(gpus=0).fail.broadcast()
        while not self.told:
            try:
                receiver.recv().get(0.05)
            except TimeoutError:
                continue
        return context().actor_instance.name, len(self.told)

    def __cleanup__(self, error: Exception | None) -> None:
        if self.path:
            append(self.path, "manager cleaned up")


def append(path: str, text: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(text + "\n")


def is_gone(worker: ActorMesh[Any]) -> bool:
    try:
        worker.pid.call_one().get(TIMEOUT_S)
    except SupervisionError:
        return True
    return False


@pytest.fixture
def worker_procs() -> Any:
    mesh = this_host().spawn_procs(per_host={"gpus": 2}, name="worker_procs")
    yield mesh
    mesh.stop().get(TIMEOUT_S)


def managed(row: ProcMesh, worker_procs: ProcMesh, *arguments: Any) -> tuple[ActorMesh[Any], ActorMesh[Any]]:
    manager = row.slice(gpus=0).spawn("manager", Manager, worker_procs, *arguments)
    return manager, manager.get_workers.call_one().get(TIMEOUT_S)


def test_a_failure_that_is_handled_goes_no_further_and_spares_the_other_ranks(
    row: ProcMesh, worker_procs: ProcMesh
) -> None:
    manager, workers = managed(row, worker_procs, True)
    workers.slice(gpus=1).fail.broadcast()
    wait_until(lambda: len(manager.seen.call_one().get(TIMEOUT_S)) == 1, "the manager is told")
    (text,) = manager.seen.call_one().get(TIMEOUT_S)
    assert "ValueError: the first error" in text
    assert "workers{'gpus': 1}" in text  # the name and the rank
    assert workers.slice(gpus=0).pid.call_one().get(TIMEOUT_S) > 0
    manager.stop().get(TIMEOUT_S)


def test_a_failure_that_is_not_handled_fails_the_owner_with_all_it_owns(
    row: ProcMesh, worker_procs: ProcMesh, failures: Failures
) -> None:
    manager, workers = managed(row, worker_procs, None)
    workers.slice(gpus=1).fail.broadcast()
    failure = failures.wait()
    assert (failure.mesh_name, failure.kind) == ("manager", FailureKind.OWNED)
    assert failure.root_cause().mesh_name == "workers"
    wait_until(lambda: is_gone(workers.slice(gpus=0)), "the worker that had done nothing wrong is stopped")
    with pytest.raises(SupervisionError, match="the first error"):
        manager.seen.call_one().get(TIMEOUT_S)


def test_an_exception_in_supervise_is_a_new_event_whose_cause_is_the_old_one(
    row: ProcMesh, worker_procs: ProcMesh, failures: Failures
) -> None:
    _, workers = managed(row, worker_procs, KeyError("cannot cope"))
    workers.slice(gpus=0).fail.broadcast()
    failure = failures.wait()
    assert failure.kind is FailureKind.EXCEPTION
    assert "KeyError" in failure.message
    assert failure.cause is not None
    assert failure.cause.mesh_name == "workers"
    assert "the first error" in failure.report().splitlines()[0]


def test_an_owner_that_waits_is_reached_at_a_safe_point(row: ProcMesh, worker_procs: ProcMesh) -> None:
    manager, _ = managed(row, worker_procs, True)
    assert manager.wait_for_the_dead.call_one().get(TIMEOUT_S) == ("manager", 1)
    manager.stop().get(TIMEOUT_S)


class Impatient(Actor):
    """Waits in `__init__` for a child that dies."""

    def __init__(self) -> None:
        self.told = 0
        child = context().proc.spawn("child", Worker)
        child.fail.broadcast()
        _, receiver = Channel.open()
        while not self.told:
            try:
                receiver.recv().get(0.05)
            except TimeoutError:
                continue

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.told += 1
        return True

    @endpoint
    def seen(self) -> int:
        return self.told


def test_an_actor_that_waits_in_init_supervises_too(row: ProcMesh) -> None:
    impatient = row.slice(gpus=1).spawn("impatient", Impatient)
    assert impatient.seen.call_one().get(TIMEOUT_S) == 1
    impatient.stop().get(TIMEOUT_S)


def test_a_stopped_mesh_takes_nothing_new_drains_the_rest_and_cleans_up_before_its_owner(
    row: ProcMesh, worker_procs: ProcMesh, tmp_path: Any
) -> None:
    path = tmp_path / "log"
    manager, workers = managed(row, worker_procs.slice(gpus=slice(0, 1)), True, str(path))
    one = workers.slice(gpus=0)
    for number in range(5):
        one.note.broadcast(f"note {number}")
    one.pid.call_one().get(TIMEOUT_S)
    manager.stop().get(TIMEOUT_S)
    notes = [f"note {number}" for number in range(5)]
    assert path.read_text().splitlines() == [*notes, "worker cleaned up", "manager cleaned up"]
    with pytest.raises(SupervisionError, match="stopped"):
        one.pid.call_one().get(TIMEOUT_S)  # an error of who uses it, not a failure


def test_a_mesh_does_not_outlive_its_owner_however_that_dies(row: ProcMesh, failures: Failures) -> None:
    owner_procs = this_host().spawn_procs(name="owner_procs")
    worker_procs = this_host().spawn_procs(per_host={"gpus": 2}, name="worker_procs")
    _, workers = managed_on(owner_procs, worker_procs)
    begun, receiver = Channel.open()
    sleeping = workers.begin_to_sleep.call(begun, 3 * TIMEOUT_S)
    assert receiver.recv().get(TIMEOUT_S) != receiver.recv().get(TIMEOUT_S)  # both are in the middle of it
    os.kill(owner_procs.spawn("pid", Worker).pid.call_one().get(TIMEOUT_S), signal.SIGKILL)
    with pytest.raises(SupervisionError):
        sleeping.get(TIMEOUT_S)
    failures.wait()
    again = worker_procs.spawn("workers", Worker)  # the processes were the script's and live on
    assert len(again.pid.call().get(TIMEOUT_S)) == 2
    worker_procs.stop().get(TIMEOUT_S)  # it does not wait for endpoints whose callers have been told already


def managed_on(owner_procs: ProcMesh, worker_procs: ProcMesh) -> tuple[ActorMesh[Any], ActorMesh[Any]]:
    manager = owner_procs.spawn("manager", Manager, worker_procs)
    return manager, manager.get_workers.call_one().get(TIMEOUT_S)


def test_a_process_that_exits_by_itself_is_a_failure_of_its_mesh(failures: Failures) -> None:
    procs = this_host().spawn_procs(name="exiting")
    worker = procs.spawn("worker", Worker)
    worker.exit.broadcast(5)
    with pytest.raises(SupervisionError, match="exited with code 5"):
        worker.sleep.call_one(TIMEOUT_S).get(TIMEOUT_S)
    assert failures.wait().kind is FailureKind.PROCESS


def test_a_receive_from_a_linked_actor_ends_with_it(row: ProcMesh, failures: Failures) -> None:
    worker = row.slice(gpus=1).spawn("worker", Worker)
    port, receiver = Channel.open()
    worker.answer_later.call_one(port).get(TIMEOUT_S)
    worker.answer.call_one("an answer").get(TIMEOUT_S)
    assert receiver.recv().get(TIMEOUT_S) == "an answer"
    waiting = receiver.recv()
    assert receiver.is_alive()
    worker.fail.broadcast()
    with pytest.raises(LinkError, match="the first error"):
        waiting.get(TIMEOUT_S)
    assert not receiver.is_alive()
    failures.wait()


def test_a_script_with_an_unhandled_failure_exits_with_code_1_and_the_first_error_on_top(
    script: Callable[..., Script],
) -> None:
    running = script(Path(__file__).with_name("unhandled_script.py"))
    pid = int(running.line())
    code, _, err = running.finish()
    assert code == 1
    headline, *rest = err.splitlines()[1:]
    assert "workers{'gpus': 1}" in headline
    assert "ValueError: the first error" in headline
    assert any("KeyError: 'a later error'" in line for line in rest)
    wait_until(lambda: not alive(pid), "nothing is left behind")
