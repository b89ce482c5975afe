"""A slow actor slows its senders, and nobody else."""

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from skipper import control
from skipper.control import Actor, ActorMesh, BackpressureError, ProcMesh, context, endpoint
from skipper.control.model.settings import adopt, settings
from skipper.control.runtime import current_runtime as runtime
from tests.control.conftest import PATIENCE_S, alive, wait_until

LIMIT = 256
LIMIT_NBYTES = 16 << 20


class Slow(Actor):
    """Stands still until its gate opens; the gate is a file."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @endpoint
    def wait_for(self, path: str) -> None:
        while True:
            with open(path, encoding="utf-8") as gate:
                if gate.read():
                    return

    @endpoint
    def note(self, number: int, ballast: bytes = b"") -> None:
        self.seen.append(number)

    @endpoint
    def everything(self) -> list[int]:
        return self.seen

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def flood(self, other: ActorMesh[Any], count: int) -> str:
        try:
            for number in range(count):
                other.note.broadcast(number)
        except BackpressureError as error:
            return str(error)
        return "no error"

    @endpoint
    def flood_itself(self) -> str:
        me = context().actor_instance
        mesh = next(mesh for mesh in control_meshes if mesh.uid == me._state.uid)
        return Slow.flood(self, mesh, 10 * LIMIT)

    @endpoint
    def meet(self, mesh: ActorMesh[Any]) -> None:
        control_meshes.append(mesh)


control_meshes: list[ActorMesh[Any]] = []


@pytest.fixture(scope="module", autouse=True)
def small_limits() -> Iterator[None]:
    before = settings()
    control.configure(max_unhandled=LIMIT, max_unhandled_nbytes=LIMIT_NBYTES, send_timeout_s=0.3)
    yield
    adopt(before)


@pytest.fixture
def gate(tmp_path: Any) -> Iterator[Any]:
    path = tmp_path / "gate"
    path.write_text("")
    yield path
    path.write_text("open")


def slow_actor(procs: ProcMesh, gate: Any) -> ActorMesh[Any]:
    slow = procs.slice(gpus=0).spawn("slow", Slow)
    slow.everything.call_one().get(PATIENCE_S)
    slow.wait_for.broadcast(str(gate))
    return slow


def fill(slow: ActorMesh[Any]) -> tuple[int, str]:
    """How many messages the actor takes, and the error for the one behind them."""
    for number in range(2 * LIMIT):
        try:
            slow.note.broadcast(number)
        except BackpressureError as error:
            return number, str(error)
    raise AssertionError("there was no limit")


def test_what_exceeds_the_limit_is_an_error_and_is_not_sent(procs: ProcMesh, gate: Any) -> None:
    slow = slow_actor(procs, gate)
    ports = set(runtime.current().ports._open)
    sent, error = fill(slow)
    assert "within 0.3 s" in error
    assert f"{LIMIT} messages" in error
    assert LIMIT - 64 <= sent <= LIMIT  # what came before may not have been credited yet
    for adverb in (slow.note.call_one, slow.note.call, slow.note.stream, slow.note.choose):
        with pytest.raises(BackpressureError):
            adverb(0)
    assert set(runtime.current().ports._open) == ports  # neither left open nor closed for later broadcasts
    gate.write_text("open")
    assert patiently(slow.everything.call_one).get(PATIENCE_S) == list(range(sent))


def patiently(call: Callable[[], Any]) -> Any:
    """The result of a call that may find no room yet."""
    results: list[Any] = []

    def succeeds() -> bool:
        try:
            results.append(call())
        except BackpressureError:
            return False
        return True

    wait_until(succeeds, "room in the mailbox")
    return results[0]


def test_others_are_not_held_up_not_even_in_the_same_process(procs: ProcMesh, gate: Any) -> None:
    slow = slow_actor(procs, gate)
    other = procs.slice(gpus=0).spawn("other", Slow)
    fill(slow)
    for number in range(4 * LIMIT):
        patiently(partial(other.note.broadcast, number))
    assert other.everything.call_one().get(PATIENCE_S) == list(range(4 * LIMIT))
    neighbour = procs.slice(gpus=1).spawn("neighbour", Slow)
    assert "within 0.3 s" in neighbour.flood.call_one(slow, 2 * LIMIT).get(PATIENCE_S)  # a limit of its own


def test_the_limit_counts_bytes_too(procs: ProcMesh, gate: Any) -> None:
    slow = slow_actor(procs, gate)
    half = bytes(LIMIT_NBYTES // 2)
    slow.note.broadcast(0, half)
    slow.note.broadcast(1, half)
    with pytest.raises(BackpressureError):
        slow.note.broadcast(2, half)
    gate.write_text("open")
    larger_than_the_limit = bytes(2 * LIMIT_NBYTES)
    patiently(lambda: slow.note.call_one(3, larger_than_the_limit)).get(PATIENCE_S)
    assert patiently(slow.everything.call_one).get(PATIENCE_S) == [0, 1, 3]


def test_a_sender_goes_on_as_soon_as_there_is_room_and_nothing_is_lost_or_reordered(procs: ProcMesh) -> None:
    quick = procs.slice(gpus=0).spawn("quick", Slow)
    for number in range(40 * LIMIT):
        patiently(partial(quick.note.broadcast, number))
    assert quick.everything.call_one().get(PATIENCE_S) == list(range(40 * LIMIT))


def test_an_actor_that_floods_itself_gets_the_error_at_once(procs: ProcMesh) -> None:
    itself = procs.slice(gpus=1).spawn("itself", Slow)
    itself.meet.call_one(itself).get(PATIENCE_S)
    assert "will not do so while this thread waits" in itself.flood_itself.call_one().get(PATIENCE_S)
    assert patiently(itself.everything.call_one).get(PATIENCE_S)


def test_a_callback_on_the_thread_that_brings_credit_gets_the_error_at_once(procs: ProcMesh, gate: Any) -> None:
    slow = slow_actor(procs, gate)
    other = procs.slice(gpus=0).spawn("other", Slow)
    other_gate = gate.with_name("other")
    other_gate.write_text("")
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    runtime.current().flow._timeout_s = 10 * PATIENCE_S
    try:
        waits = other.wait_for.call_one(str(other_gate))
        waits.add_done_callback(lambda _: told.put(fill(slow)[1]))
        other_gate.write_text("open")
        assert "will not do so while this thread waits" in told.get(timeout=PATIENCE_S)
    finally:
        runtime.current().flow._timeout_s = 0.3


def test_a_sender_that_waits_is_released_when_the_process_dies(own_procs: Any, gate: Any, failures: Any) -> None:
    procs = own_procs({"gpus": 1})
    pid = procs.spawn("asked", Slow).pid.call_one().get(PATIENCE_S)
    slow = slow_actor(procs, gate)
    runtime.current().flow._timeout_s = PATIENCE_S
    done = threading.Event()

    def send() -> None:
        for number in range(2 * LIMIT):
            slow.note.broadcast(number)
        done.set()

    try:
        threading.Thread(target=send).start()
        flow = runtime.current().flow
        wait_until(lambda: any(window._waiting for window in flow._windows.values()), "a sender that waits")
        os.kill(pid, signal.SIGKILL)
        assert done.wait(PATIENCE_S / 2)
        assert not alive(pid)
    finally:
        runtime.current().flow._timeout_s = 0.3
    failures.wait()
