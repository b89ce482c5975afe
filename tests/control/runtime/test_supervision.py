import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from skipper import control
from skipper.control import ActorError, ActorMesh, FailureKind, MeshFailure, ProcMesh, SupervisionError, this_host
from skipper.control.runtime import current_runtime, supervision
from tests.control.actors import Answerer, AsyncManager, BadConstruction, Cleaner, Echo, Manager
from tests.control.conftest import PATIENCE_S, Failures, Output, alive, wait_until


def test_an_exception_without_a_reply_port_kills_the_actor_and_goes_to_its_owner(
    procs: ProcMesh, failures: Failures
) -> None:
    echoes = procs.spawn("echoes", Echo)
    echoes.slice(gpus=1).fail.broadcast(ValueError("nobody listens"))
    with pytest.raises(SupervisionError, match="nobody listens") as caught:
        echoes.slice(gpus=1).pid.call_one().get(PATIENCE_S)
    assert caught.value.failure is not None
    failure = failures.wait()
    assert (failure.mesh_name, failure.rank, failure.kind) == ("echoes", {"gpus": 1}, FailureKind.EXCEPTION)
    assert "in fail" in failure.details
    assert failure.is_recoverable()
    assert echoes.slice(gpus=0).echo.call_one(1).get(PATIENCE_S) == 1  # the other ranks live


def test_messages_queued_behind_a_fatal_one_all_end(procs: ProcMesh, failures: Failures) -> None:
    echo = procs.slice(gpus=0).spawn("echo", Echo)
    echo.sleep.broadcast(0.2)
    echo.fail.broadcast(ValueError("x"))
    behind = [echo.echo.call_one(number) for number in range(20)]
    for future in behind:
        with pytest.raises(SupervisionError):
            future.get(PATIENCE_S)
    failures.wait()


def test_an_exception_in_init_ends_calls_and_is_a_failure(procs: ProcMesh, failures: Failures) -> None:
    bad = procs.slice(gpus=0).spawn("bad", BadConstruction)
    with pytest.raises(SupervisionError, match="cannot be made"):
        bad.anything.call_one().get(PATIENCE_S)
    failure = failures.wait()
    assert failure.kind is FailureKind.CONSTRUCTION
    assert not failure.is_recoverable()
    assert "cannot be made" in failure.report()


@pytest.mark.parametrize("how", ["kill", "segv", "exit"])
def test_a_dead_process_ends_pending_and_later_calls_at_once(
    own_procs: Callable[..., ProcMesh], failures: Failures, how: str
) -> None:
    echoes = own_procs({"gpus": 2}).spawn("echoes", Echo)
    echoes.pid.call().get(PATIENCE_S)
    victim, other = echoes.slice(gpus=0), echoes.slice(gpus=1)
    began = time.monotonic()
    dying = victim.die.call_one(how)
    behind = [victim.echo.call_one(number) for number in range(10)]
    of_both = echoes.sleep.call(0.01)
    for future in [dying, *behind, of_both]:
        with pytest.raises(SupervisionError, match="is gone"):
            future.get(PATIENCE_S)
    assert time.monotonic() - began < 2
    expected = {"kill": "SIGKILL", "segv": "SIGSEGV", "exit": "exited with code 7"}[how]
    with pytest.raises(SupervisionError, match=expected):
        victim.echo.call_one(1).get(PATIENCE_S)
    assert other.echo.call_one(1).get(PATIENCE_S) == 1
    failure = failures.wait()
    assert (failure.mesh_name, failure.rank, failure.kind) == ("echoes", {"gpus": 0}, FailureKind.PROCESS)
    assert expected in str(failure)


def test_an_explicit_answer_that_died_with_its_process_ends(
    own_procs: Callable[..., ProcMesh], failures: Failures
) -> None:
    procs = own_procs()
    answerer, echo = procs.spawn("answerer", Answerer), procs.spawn("echo", Echo)
    kept = answerer.keep.call_one()
    echo.die.broadcast()
    with pytest.raises(SupervisionError, match="SIGKILL"):
        kept.get(PATIENCE_S)
    failures.wait()


def test_respawning_after_a_death_works_at_once(failures: Failures) -> None:
    for _ in range(3):
        procs = this_host().spawn_procs()
        echo = procs.spawn("echo", Echo)
        with pytest.raises(SupervisionError):
            echo.die.call_one().get(PATIENCE_S)
        procs.stop().get(PATIENCE_S)
    wait_until(lambda: len(failures) == 3, "three failures")


def see_it_end(bootstrap: Callable[[], None], reason: str, failures: Failures) -> None:
    """Start a process, and see that it ends for this reason before it does anything."""
    echo = this_host().spawn_procs(bootstrap=bootstrap).spawn("echo", Echo)
    with pytest.raises(SupervisionError, match=reason):
        echo.pid.call_one().get(PATIENCE_S)
    failures.wait()


def test_a_bootstrap_that_raises_is_the_end_of_the_process(failures: Failures, output: Output) -> None:
    see_it_end(refuse_to_start, "bootstrap raised", failures)
    output.wait_for("RuntimeError: not today", on_stderr=True)


def refuse_to_start() -> None:
    raise RuntimeError("not today")


class Loser(control.Actor):
    """Loses the connection to its launcher."""

    @control.endpoint
    async def lose(self) -> None:
        process = current_runtime.current()
        assert process.me.launcher is not None
        process.loop.call_soon_threadsafe(process.transport.lose, process.me.launcher, "the test has cut it")
        await asyncio.Event().wait()


def test_a_process_that_loses_its_launcher_is_killed_by_it(failures: Failures) -> None:
    loser = this_host().spawn_procs().spawn("loser", Loser)
    with pytest.raises(SupervisionError, match="was killed because the connection was closed"):
        loser.lose.call_one().get(PATIENCE_S)
    failures.wait()


def test_a_process_that_cannot_reach_its_launcher_ends_with_the_reason(failures: Failures, output: Output) -> None:
    see_it_end(lose_the_launcher, "its connection to the process that launched it broke", failures)
    output.wait_for("it has lost its launcher: it could not be reached (as the test wants it)", on_stderr=True)


def lose_the_launcher() -> None:
    from skipper.control.wire.message_stream import Status
    from skipper.control.wire.transport import Transport

    def dial_in_vain(self: Transport, link: Any, *_: Any) -> None:
        self._dial_failed(link, "as the test wants it", Status("UNAVAILABLE"))

    Transport._dial_here = dial_in_vain  # type: ignore[method-assign]


def test_failures_in_numbers_wait_for_the_hook_on_one_thread(procs: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, told, threads = threading.Event(), [], set()

    def hook(failure: MeshFailure) -> None:
        gate.wait(PATIENCE_S)
        told.append(failure.mesh_name)
        threads.add(threading.current_thread())

    monkeypatch.setattr(control, "unhandled_fault_hook", hook)
    monkeypatch.setattr(supervision, "_FOR_MORE_S", PATIENCE_S)
    root = current_runtime.current().root_actor
    assert root is not None
    names = [f"mesh {number}" for number in range(50)]
    for name in names:
        root.owned_failed(MeshFailure(name, name, None, FailureKind.PROCESS, "died"))
    gate.set()
    wait_until(lambda: len(told) == len(names), "the hook is told of all")
    assert told == names
    root.owned_failed(MeshFailure("last", "last", None, FailureKind.PROCESS, "died"))
    wait_until(lambda: told[-1] == "last", "a failure after all of them is told, too")
    assert len(threads) == 1


def test_a_handled_failure_goes_no_further(procs: ProcMesh) -> None:
    manager = procs.slice(gpus=0).spawn("manager", Manager)
    leaves = manager.grow.call_one(2).get(PATIENCE_S)
    pids = leaves.pid.call().get(PATIENCE_S)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(SupervisionError):
        leaves.slice(x=1).sleep.call_one(20).get(PATIENCE_S)
    wait_until(lambda: bool(manager.seen.call_one().get(PATIENCE_S)), "the manager is told")
    (failure,) = manager.seen.call_one().get(PATIENCE_S)
    assert (failure.mesh_name, failure.rank, failure.kind) == ("leaves", {"x": 1}, FailureKind.PROCESS)
    assert manager.context_names.call_one().get(PATIENCE_S) == ["manager"]
    assert leaves.slice(x=0).echo.call_one(1).get(PATIENCE_S) == 1
    manager.stop().get(PATIENCE_S)
    wait_until(lambda: not alive(pids[0]), "what the manager owned has ended with it")


def test_a_sync_actor_supervises_while_it_waits(procs: ProcMesh) -> None:
    manager = procs.slice(gpus=0).spawn("manager", Manager)
    manager.grow.call_one(1).get(PATIENCE_S)
    assert manager.wait_for_leaf_to_die.call_one().get(PATIENCE_S).startswith("SupervisionError")
    wait_until(lambda: len(manager.seen.call_one().get(PATIENCE_S)) == 1, "the failure is supervised")
    manager.stop().get(PATIENCE_S)


def test_an_async_actor_supervises_while_it_waits(procs: ProcMesh) -> None:
    manager = procs.slice(gpus=0).spawn("manager", AsyncManager)
    leaf = manager.grow.call_one(1).get(PATIENCE_S)
    told = manager.wait_to_be_told.call_one()
    leaf.die.broadcast()
    assert told.get(PATIENCE_S) == "manager: leaves"
    manager.stop().get(PATIENCE_S)


@pytest.mark.parametrize(("verdict", "kind"), [(False, FailureKind.OWNED), (KeyError("hm"), FailureKind.EXCEPTION)])
def test_an_unhandled_failure_fails_the_owner_and_reaches_the_root_with_its_cause(
    procs: ProcMesh, failures: Failures, verdict: Any, kind: FailureKind
) -> None:
    manager = procs.slice(gpus=0).spawn("manager", Manager, verdict)
    leaves: ActorMesh[Echo] = manager.grow.call_one(2).get(PATIENCE_S)
    survivor = leaves.slice(x=1).pid.call_one().get(PATIENCE_S)
    leaves.slice(x=0).die.broadcast()
    failure = failures.wait()
    assert (failure.mesh_name, failure.kind) == ("manager", kind)
    first = failure.root_cause()
    assert (first.mesh_name, first.kind) == ("leaves", FailureKind.PROCESS)
    assert failure.report().splitlines()[0] == first.message  # the first error is the headline
    with pytest.raises(SupervisionError):
        manager.seen.call_one().get(PATIENCE_S)
    wait_until(lambda: not alive(survivor), "the owner's other processes end with it")


def test_an_actor_may_abort_itself(procs: ProcMesh, failures: Failures) -> None:
    def abort() -> None:
        control.context().actor_instance.abort("had enough")

    echo = procs.slice(gpus=0).spawn("echo", Echo)
    with pytest.raises(SupervisionError, match="had enough"):
        echo.run.call_one(abort).get(PATIENCE_S)
    assert failures.wait().kind is FailureKind.ABORT


def test_an_actor_may_stop_itself(procs: ProcMesh) -> None:
    def stop() -> None:
        control.context().actor_instance.stop()

    echo = procs.slice(gpus=0).spawn("echo", Echo)
    assert echo.run.call_one(stop).get(PATIENCE_S) is None
    with pytest.raises(SupervisionError, match="stopped"):
        echo.pid.call_one().get(PATIENCE_S)


def test_a_failed_actor_cleans_up_with_the_error(procs: ProcMesh, tmp_path: Any, failures: Failures) -> None:
    log = tmp_path / "log"
    cleaner = procs.slice(gpus=0).spawn("cleaner", Cleaner, str(log), "a")
    cleaner.boom.broadcast()
    failures.wait()
    wait_until(lambda: log.exists() and log.read_text() == "cleanup a SupervisionError\n", "the cleanup")


def test_a_mesh_dies_with_an_owner_in_another_process(own_procs: Callable[..., ProcMesh], failures: Failures) -> None:
    host_procs = own_procs(name="hosting")
    owner_procs = own_procs(name="owning")
    owner = owner_procs.spawn("owner", Echo)
    child = owner.run.call_one(spawn_on, host_procs).get(PATIENCE_S)
    assert child.echo.call_one(1).get(PATIENCE_S) == 1
    owner.die.broadcast()
    with pytest.raises(SupervisionError, match="owner"):
        child.sleep.call_one(5).get(PATIENCE_S)
    assert failures.wait().mesh_name == "owner"


def spawn_on(procs: ProcMesh) -> ActorMesh[Echo]:
    return procs.spawn("child", Echo)


def test_calls_from_a_third_process_to_one_that_is_dead_already_end(
    own_procs: Callable[..., ProcMesh], failures: Failures
) -> None:
    victim = own_procs(name="victim").spawn("victim", Echo)
    third = own_procs(name="third").spawn("third", Echo)
    third.pid.call_one().get(PATIENCE_S)
    with pytest.raises(SupervisionError):
        victim.die.call_one().get(PATIENCE_S)
    with pytest.raises(ActorError, match="SIGKILL") as caught:
        third.run.call_one(call_pid, victim).get(PATIENCE_S)  # which has never talked to the victim
    assert isinstance(caught.value.cause, SupervisionError)
    failures.wait()


def call_pid(mesh: ActorMesh[Echo]) -> Any:
    return mesh.pid.call_one().get(15)


def test_reports_fold_the_way_up_below_the_first_error() -> None:
    first = MeshFailure("leaves", "leaves[0]", None, FailureKind.EXCEPTION, "it broke", "Traceback\nBoom")
    above = MeshFailure("manager", "manager[0]", None, FailureKind.OWNED, "manager did not handle it", cause=first)
    assert above.report().splitlines() == [
        "it broke",
        "  | Traceback",
        "  | Boom",
        "  which no owner below 'manager' handled: manager did not handle it",
    ]
    assert above.is_recoverable()
