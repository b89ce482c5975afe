"""Every stop ends within its bound, whatever the actors do, and `finally`, `__cleanup__` and `atexit` run."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from skipper.control import ActorMesh, Channel, ProcMesh, StopTimeoutError, SupervisionError, endpoint, this_host
from skipper.control.api.actor import Actor
from skipper.control.model.settings import adopt, settings
from skipper.control.runtime import interruption
from tests.control.actors import Echo
from tests.control.conftest import PATIENCE_S, Failures, Output, Script, alive, wait_until
from tests.control.stuck import AsyncStuck, Owner, Stuck, compute
from tests.freezing import freeze

HERE = Path(__file__).parent
BOUND_S = 1.0
SLACK_S = 6.0
"""What a busy machine may add to a bound: much less than what hangs in these tests, which does so for ever."""


@pytest.fixture(scope="module")
def one() -> ProcMesh:
    """A process that the tests share: whoever is given up there leaves its thread behind."""
    return this_host().spawn_procs(name="shared")


@pytest.fixture
def as_before() -> Iterator[None]:
    before = settings()
    yield
    adopt(before)


def begin(mesh: ActorMesh[Any], name: str, *args: Any) -> Any:
    """Have an endpoint run, and come back once it does."""
    port, receiver = Channel.open()
    running = getattr(mesh, name).call(port, *args)
    for _ in range(mesh.extent.nelements):
        receiver.recv().get(PATIENCE_S)
    return running


def stop(mesh: Any, seconds: float = BOUND_S) -> None:
    """Stop it, and see to it that the bound is kept."""
    began = time.monotonic()
    try:
        mesh.stop(seconds).get(seconds + SLACK_S)
    finally:
        assert time.monotonic() - began < seconds + SLACK_S


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("cls", "name"), [(Stuck, "computes"), (Stuck, "waits"), (AsyncStuck, "waits"), (AsyncStuck, "computes")]
)
def test_an_endpoint_that_does_not_end_is_cut_short_and_its_actor_cleans_up(
    one: ProcMesh, tmp_path: Path, cls: type[Actor], name: str
) -> None:
    log = tmp_path / "log"
    stuck: Any = one.spawn("stuck", cls, str(log))
    running = begin(stuck, name)
    with pytest.raises(StopTimeoutError, match=rf"actor stuck.* in shared.*: {name} has been running for .*stuck\.py:"):
        stop(stuck, 2.0)
    assert lines(log) == ["finally", "cleanup"]
    with pytest.raises(SupervisionError, match="stopped"):
        running.get(PATIENCE_S)


@pytest.mark.parametrize("cls", [Stuck, AsyncStuck])
def test_an_actor_whose_thread_cannot_be_interrupted_is_given_up(one: ProcMesh, cls: type[Actor]) -> None:
    stuck: Any = one.spawn("stuck", cls)
    running = begin(stuck, "sleeps")
    behind = stuck.ping.call_one()
    with pytest.raises(StopTimeoutError, match=r"sleeps has been running for .* in sleeps: time\.sleep") as caught:
        stop(stuck)
    assert "thread runs until its process ends" in str(caught.value)
    for future in (running, behind):
        with pytest.raises(SupervisionError, match="stopped"):
            future.get(PATIENCE_S)
    other: Any = one.spawn("other", Stuck)
    assert other.ping.call_one().get(PATIENCE_S) == "pong"  # the process serves on
    stop(other, PATIENCE_S)


@pytest.mark.parametrize(
    ("cls", "hangs"),
    [(Stuck, "init computes"), (Stuck, "init sleeps"), (AsyncStuck, "init computes"), (AsyncStuck, "init sleeps")],
)
def test_an_init_that_does_not_return_ends_no_later_than_the_stop(
    one: ProcMesh, tmp_path: Path, cls: type[Actor], hangs: str
) -> None:
    stuck: Any = one.spawn("stuck", cls, str(tmp_path / "log"), hangs)
    waiting = stuck.initialized
    with pytest.raises(StopTimeoutError, match="__init__ has been running for"):
        stop(stuck)
    with pytest.raises(SupervisionError, match="stopped"):
        waiting.get(PATIENCE_S)
    unwound = ["finally of init"] if hangs == "init computes" else []
    wait_until(lambda: lines(tmp_path / "log") == unwound, "what can be interrupted unwinds, on a loaded machine later")


@pytest.mark.parametrize(
    ("cls", "hangs"), [(Stuck, "cleanup computes"), (Stuck, "cleanup sleeps"), (AsyncStuck, "cleanup waits")]
)
def test_a_cleanup_that_does_not_end_is_named(one: ProcMesh, tmp_path: Path, cls: type[Actor], hangs: str) -> None:
    stuck: Any = one.spawn("stuck", cls, str(tmp_path / "log"), hangs)
    stuck.ping.call_one().get(PATIENCE_S)
    with pytest.raises(StopTimeoutError, match=r"actor stuck.*__cleanup__ has been running for"):
        stop(stuck, 2.0)
    assert lines(tmp_path / "log") == ([] if hangs == "cleanup sleeps" else ["finally of cleanup"])


def test_concurrent_endpoints_that_wait_are_cancelled(one: ProcMesh, tmp_path: Path) -> None:
    log = tmp_path / "log"
    stuck: Any = one.spawn("stuck", AsyncStuck, str(log))
    running = [begin(stuck, "waits_beside") for _ in range(2)]
    with pytest.raises(StopTimeoutError, match="waits_beside has been running"):
        stop(stuck, 2.0)
    assert lines(log) == ["finally", "finally", "cleanup"]
    for future in running:
        with pytest.raises(SupervisionError, match="stopped"):
            future.get(PATIENCE_S)


@pytest.mark.parametrize(("cls", "name"), [(Stuck, "computes"), (AsyncStuck, "waits"), (AsyncStuck, "waits_beside")])
def test_when_processes_stop_their_actors_unwind_and_clean_up_first(
    own_procs: Callable[..., ProcMesh], tmp_path: Path, cls: type[Actor], name: str
) -> None:
    log = tmp_path / "log"
    procs = own_procs()
    begin(procs.spawn("stuck", cls, str(log)), name)
    stop(procs, 2.0)
    assert lines(log) == ["finally", "cleanup"]


@pytest.mark.parametrize("hangs", ["init sleeps", "cleanup sleeps"])
def test_processes_stop_within_the_bound_whatever_hangs(own_procs: Callable[..., ProcMesh], hangs: str) -> None:
    procs = own_procs()
    procs.spawn("stuck", Stuck, "", hangs)
    procs.initialized.get(PATIENCE_S)
    stop(procs)


def test_a_tree_of_owners_ends_within_one_bound_and_the_leaf_is_named(one: ProcMesh, tmp_path: Path) -> None:
    log = tmp_path / "log"
    top: Any = one.spawn("top", Owner, str(log), 3)
    top.ready.call_one().get(PATIENCE_S)
    with pytest.raises(StopTimeoutError, match=r"actor leaf.*__cleanup__ has been running"):
        stop(top, 3.0)
    assert lines(log) == [f"cleanup {depth}" for depth in range(4)]  # what is owned before its owner


def test_workers_whose_owner_is_killed_unwind_when_their_processes_stop(
    own_procs: Callable[..., ProcMesh], tmp_path: Path, failures: Failures
) -> None:
    log = tmp_path / "log"
    procs, owners = own_procs(), own_procs()
    manager: Any = owners.spawn("manager", Manager, procs, str(log))
    running = begin(manager.workers.call_one().get(PATIENCE_S), "computes")
    manager.die.broadcast()
    with pytest.raises(SupervisionError):
        running.get(PATIENCE_S)
    failures.wait()
    stop(procs, 10.0)
    assert lines(log) == ["finally", "cleanup"]


def test_an_owner_has_not_stopped_in_time_if_what_it_owns_does_not_answer(
    own_procs: Callable[..., ProcMesh], tmp_path: Path
) -> None:
    procs = own_procs()
    manager: Any = own_procs().spawn("manager", Manager, procs, str(tmp_path / "log"))
    manager.workers.call_one().get(PATIENCE_S)
    frozen = procs.spawn("echo", Echo).pid.call_one().get(PATIENCE_S)
    freeze(frozen)
    try:
        with pytest.raises(StopTimeoutError, match="workers"):
            stop(manager, 2.0)
    finally:
        os.kill(frozen, signal.SIGCONT)


class Manager(Actor):
    def __init__(self, procs: ProcMesh, path: str) -> None:
        self.mesh = procs.spawn("workers", Stuck, path)

    @endpoint
    def workers(self) -> ActorMesh[Stuck]:
        return self.mesh

    @endpoint
    def die(self) -> None:
        signal.raise_signal(signal.SIGKILL)


def test_what_is_interrupted_leaves_the_links_of_its_process_whole(own_procs: Callable[..., ProcMesh]) -> None:
    procs = own_procs({"gpus": 2})
    other: Any = procs.slice(gpus=1).spawn("other", Stuck)
    callers: list[Any] = [procs.slice(gpus=0).spawn(f"caller{number}", Stuck) for number in range(4)]
    for caller in callers:
        begin(caller, "calls", other)
    stops = [caller.stop(BOUND_S) for caller in callers]
    for ended in stops:
        with pytest.raises(StopTimeoutError):
            ended.get(BOUND_S + SLACK_S)
    last: Any = procs.slice(gpus=0).spawn("last", Caller)
    assert last.ask.call_one(other).get(PATIENCE_S) == "pong"


class Caller(Actor):
    @endpoint
    def ask(self, other: ActorMesh[Stuck]) -> Any:
        return other.ping.call_one().get()


def test_only_code_of_users_is_interrupted() -> None:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, daemon=True)
    thread.start()
    assert thread.ident is not None
    # Not called by one of those that call code of users: left alone.
    assert not interruption.interrupt(thread.ident, KeyboardInterrupt, frozenset())
    assert interruption.stack_of(thread.ident, frozenset()) == []
    gate.set()
    thread.join(PATIENCE_S)
    assert not interruption.interrupt(thread.ident, KeyboardInterrupt, frozenset())  # it has ended


def note_at_exit(path: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write("exit\n")


@pytest.mark.parametrize("preload", [[], ["decimal"]], ids=["executed", "forked"])
def test_a_process_that_is_stopped_ends_as_programs_of_python_do(
    script: Callable[..., Script], tmp_path: Path, preload: list[str]
) -> None:
    log = str(tmp_path / "log")
    running = script(HERE / "tidy_script.py", log, *preload)
    assert running.finish() == (0, "", "")
    assert lines(tmp_path / "log") == ["thread", "finalizer", "atexit of the actor", "atexit of the bootstrap"]
    assert (tmp_path / "log.buffered").read_text() == "buffered"


def leave_no_time_to_say_goodbye() -> None:
    from skipper.control.runtime.procs import ending

    ending.CLOSE_TIMEOUT_S = 0.0


def test_a_process_that_stood_still_while_it_said_goodbye_ends_as_others_do(
    own_procs: Callable[..., ProcMesh], tmp_path: Path
) -> None:
    procs, path = own_procs(bootstrap=leave_no_time_to_say_goodbye), str(tmp_path / "log")
    procs.spawn("stuck", Stuck).begin_at_exit.call_one(lambda: note_at_exit(path)).get(PATIENCE_S)
    procs.stop().get(PATIENCE_S)
    assert lines(tmp_path / "log") == ["exit"]


def test_threads_and_handlers_that_do_not_end_are_named_and_cost_no_more_than_the_bound(
    own_procs: Callable[..., ProcMesh], tmp_path: Path, output: Output
) -> None:
    with_thread, with_handler = own_procs(name="with_thread"), own_procs(name="with_handler")
    path = str(tmp_path / "log")
    threaded: Any = with_thread.spawn("stuck", Stuck)
    threaded.begin_at_exit.call_one(lambda: note_at_exit(path)).get(PATIENCE_S)
    threaded.begin_a_thread.call_one().get(PATIENCE_S)
    handling: Any = with_handler.spawn("stuck", Stuck)
    handling.begin_at_exit.call_one(compute).get(PATIENCE_S)
    stops = [with_thread.stop(4.0), with_handler.stop(4.0)]
    for ended in stops:
        ended.get(4.0 + SLACK_S)
    output.wait_for("process with_thread was ended by force: its threads endless have not ended", on_stderr=True)
    assert lines(tmp_path / "log") == ["exit"]
    output.wait_for("process with_handler was ended by force: its exit handlers have not ended", on_stderr=True)
    assert "in compute" in output.wait_for("in compute", on_stderr=True)


def test_a_script_that_ends_lets_what_waits_in_its_processes_unwind(
    script: Callable[..., Script], tmp_path: Path
) -> None:
    log = str(tmp_path / "log")
    running = script(HERE / "unwinding_script.py", log)
    pid = int(running.line())
    assert running.finish()[0] == 0
    wait_until(lambda: not alive(pid), "nothing is left behind")
    assert lines(tmp_path / "log") == ["finally", "cleanup", "atexit"]


def test_a_negative_bound_is_refused(one: ProcMesh) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        one.spawn("stuck", Stuck).stop(-1.0)
    with pytest.raises(ValueError, match="must not be negative"):
        one.stop(-1.0)


def test_the_interpreter_goes_on_as_before_where_something_was_interrupted_or_was_to_be(
    own_procs: Callable[..., ProcMesh], tmp_path: Path
) -> None:
    """It would look for an exception at each call, and would never get beyond that where calls are traced (3.11)."""
    procs = own_procs()
    procs.spawn("one", Echo).stop().get(PATIENCE_S)
    stuck = procs.spawn("stuck", Stuck, str(tmp_path / "notes"))
    begin(stuck, "computes")
    with pytest.raises(StopTimeoutError):
        stop(stuck)
    assert procs.spawn("echo", Echo).run.call_one(traced).get(PATIENCE_S) == ["call", "line", "return"]


def traced() -> list[str]:
    events: list[str] = []

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        events.append(event)
        return trace

    def work() -> None:
        pass

    sys.settrace(trace)
    work()
    sys.settrace(None)
    return events
