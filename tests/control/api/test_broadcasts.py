"""Broadcasts that cannot be delivered: who broadcasts without waiting answers for it."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skipper.control import Actor, ActorMesh, FailureKind, ProcMesh, SupervisionError, endpoint
from tests.control.actors import Echo, Manager, Recorder
from tests.control.conftest import PATIENCE_S, Failures, Script, wait_until


def note(mesh: ActorMesh[Any], value: Any = 1) -> None:
    mesh.echo.broadcast(value)


class CannotArrive:
    """Is pickled here and cannot be unpickled anywhere else."""

    def __reduce__(self) -> Any:
        return (refuse_elsewhere, (os.getpid(),))


def refuse_elsewhere(pid: int) -> None:
    if os.getpid() != pid:
        raise RuntimeError("only at home")


class Gatherer(Actor):
    """Broadcasts to the mesh that it owns, whatever has become of it."""

    @endpoint
    def grow(self, procs: ProcMesh) -> ActorMesh[Any]:
        self.mesh = procs.spawn("grown", Echo)
        return self.mesh

    @endpoint
    def shout(self) -> None:
        self.mesh.echo.broadcast(1)

    def __supervise__(self, failure: Any) -> bool:
        return True


def test_a_broadcast_to_a_stopped_actor_fails_its_sender_and_nobody_else(procs: ProcMesh, failures: Failures) -> None:
    echo = procs.slice(gpus=0).spawn("echo", Echo)
    sender, bystander = procs.spawn("sender", Echo), procs.slice(gpus=1).spawn("bystander", Echo)
    echo.stop().get(PATIENCE_S)
    sender.slice(gpus=1).run.call_one(note, echo).get(PATIENCE_S)
    failure = failures.wait()
    assert (failure.mesh_name, failure.rank, failure.kind) == ("sender", {"gpus": 1}, FailureKind.UNDELIVERED)
    assert "a broadcast to echo was not delivered" in failure.message
    with pytest.raises(SupervisionError, match="not delivered"):
        sender.slice(gpus=1).pid.call_one().get(PATIENCE_S)
    assert bystander.echo.call_one(1).get(PATIENCE_S) == 1
    assert sender.slice(gpus=0).echo.call_one(1).get(PATIENCE_S) == 1
    bystander.stop().get(PATIENCE_S)


def test_a_broadcast_to_a_dead_process_fails_its_sender_with_that_death_as_the_cause(
    procs: ProcMesh, own_procs: Callable[..., ProcMesh], failures: Failures
) -> None:
    manager = procs.slice(gpus=0).spawn("manager", Manager)
    leaves = manager.grow.call_one(1).get(PATIENCE_S)
    os.kill(leaves.pid.call().get(PATIENCE_S)[0], signal.SIGKILL)
    wait_until(lambda: bool(manager.seen.call_one().get(PATIENCE_S)), "the owner handles the death")
    sender = procs.slice(gpus=1).spawn("sender", Echo)
    with pytest.raises(SupervisionError):
        leaves.slice(x=0).pid.call_one().get(PATIENCE_S)
    sender.run.broadcast(note, leaves.slice(x=0))
    failure = failures.wait()
    assert (failure.mesh_name, failure.kind) == ("sender", FailureKind.UNDELIVERED)
    assert failure.root_cause().mesh_name == "leaves"
    assert "SIGKILL" in failure.report().splitlines()[0]
    manager.stop().get(PATIENCE_S)


def test_the_script_is_told_of_its_own_undelivered_broadcast(procs: ProcMesh, failures: Failures) -> None:
    echo = procs.slice(gpus=0).spawn("echo", Echo)
    echo.stop().get(PATIENCE_S)
    echo.echo.broadcast(1)
    failure = failures.wait()
    assert (failure.mesh_name, failure.kind) == ("root", FailureKind.UNDELIVERED)


def test_an_owner_that_handles_a_failure_may_broadcast_to_what_is_left(
    procs: ProcMesh, own_procs: Callable[..., ProcMesh], failures: Failures
) -> None:
    gatherer = procs.slice(gpus=0).spawn("gatherer", Gatherer)
    grown_on = own_procs({"gpus": 2}, name="grown on")
    grown = gatherer.grow.call_one(grown_on).get(PATIENCE_S)
    grown.slice(gpus=0).fail.broadcast(ValueError("nobody waits"))
    with pytest.raises(SupervisionError):
        grown.slice(gpus=0).pid.call_one().get(PATIENCE_S)
    for _ in range(3):
        gatherer.shout.call_one().get(PATIENCE_S)
    assert grown.slice(gpus=1).echo.call_one(1).get(PATIENCE_S) == 1
    assert not failures
    gatherer.stop().get(PATIENCE_S)


def test_what_is_said_while_the_script_ends_does_not_spoil_its_end(script: Callable[..., Script]) -> None:
    running = script(Path(__file__).with_name("talking_script.py"))
    code, out, err = running.finish()
    assert (code, out) == (0, "ended\n")
    assert err.startswith("[hanging] actor hanging{} in procs did not end within")  # and nothing is said of the worker
    assert not any(word in err for word in ("worker", "failure", "Traceback"))


def test_arguments_that_cannot_be_unpickled_are_the_fault_of_the_sender(procs: ProcMesh, failures: Failures) -> None:
    recorder = procs.slice(gpus=0).spawn("recorder", Recorder)
    recorder.note.broadcast(CannotArrive())
    failure = failures.wait()
    assert (failure.mesh_name, failure.kind) == ("root", FailureKind.UNDELIVERED)
    assert "RuntimeError: only at home" in failure.message
    assert recorder.everything.call_one().get(PATIENCE_S) == []  # the actor lives
    recorder.stop().get(PATIENCE_S)
