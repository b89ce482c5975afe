"""`EngineSession`: the workers of one mesh of processes, and what the script knows about them and their failures."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skipper.control import ActorMesh, Channel, ControlError, Future, ProcMesh
from skipper.control.api.tensor_engine_plugin import engine, failed_unseen
from skipper.control.model.errors import EngineMissingError
from skipper.control.model.future import unheard
from skipper.tensor_engine.errors import EngineClosedError, RemoteError, RespawnedError
from skipper.tensor_engine.script.instruction_stream import MAIN, InstructionStream, IssueOrder, StreamKey, StreamPlace
from skipper.tensor_engine.shared.rendezvous import watch
from skipper.tensor_engine.shared.stacks import Stack, describe
from skipper.tensor_engine.worker.communication import WorkerNumbers, worker_number
from skipper.tensor_engine.worker.heap import Poison
from skipper.tensor_engine.worker.worker import Worker

_log = logging.getLogger("skipper.tensor_engine")

_KEPT = 1000
"""How many failed instructions are remembered one by one; later ones are only counted."""

_FLUSH_S = 0.0002
"""Waiting instructions are sent when none has followed for about this long."""

_QUIET = 20
"""How often the flusher finds nothing to send before it goes to sleep."""

_IDLE_S = 0.1
"""How often the sleeping flusher looks for values to free."""


@dataclass(slots=True)
class _Failure:
    """One failed instruction, on any number of ranks."""

    first: Poison
    stack: Stack | None
    ranks: set[int] = field(default_factory=set)
    is_observed: bool = False

    def is_before(self, reached: Mapping[int, int]) -> bool:
        """Whether its instruction was issued before its instruction stream had reached this number."""
        return self.first.sequence < reached.get(self.first.instruction_stream, 0)


class Failures:
    """The failed instructions of a session. Safe to use from any thread.

    Args:
        stack_of: where the script issued an instruction, by the number of its instruction stream and its own.

    Attributes:
        next_report: the future of the workers' next report.
    """

    def __init__(self, stack_of: Callable[[int, int], Stack | None]) -> None:
        self.next_report: Future[Poison] | None = None
        self._stack_of = stack_of
        self._lock = threading.Lock()
        self._failed: dict[tuple[int, int, int | None], _Failure] = {}
        self._more = 0
        self._settled: dict[int, int] = {}

    def settle(self, reached: Mapping[int, int]) -> None:
        """Count all failures of what was issued so far as seen; reports of them may still come.

        Args:
            reached: the number of the next instruction, by instruction stream.
        """
        with self._lock:
            self._settled.update(reached)
            for failure in self._failed.values():
                failure.is_observed |= failure.is_before(reached)
            self._more = 0

    def add(self, poison: Poison) -> _Failure | None:
        """Note a worker's report; None if it is only counted."""
        key = (poison.instruction_stream, poison.sequence, poison.step)
        with self._lock:
            failure = self._failed.get(key)
            if failure is None:
                if len(self._failed) >= _KEPT:
                    self._more += 1
                    return None
                stack = self._stack_of(poison.instruction_stream, poison.sequence)
                failure = self._failed[key] = _Failure(poison, stack)
                failure.is_observed = failure.is_before(self._settled)
            failure.ranks.add(poison.rank)
            return failure

    def error(self, poison: Poison) -> RemoteError:
        """The error to raise when the script meets poison. The failure then counts as seen."""
        if poison.is_lost:
            return RespawnedError(poison.rank)
        failure = self.add(poison)
        if failure is None:
            return _remote_error(poison, None)
        with self._lock:
            failure.is_observed = True
        return _remote_error(poison, failure.stack)

    def report_unobserved(self) -> None:
        """Log the failures that nobody has seen: the first in full. The script then ends with code 1."""
        with self._lock:
            unseen = [failure for failure in self._failed.values() if not failure.is_observed]
            for failure in unseen:
                failure.is_observed = True
            more, self._more = self._more, 0
        if unseen:
            failed_unseen()
        for index, failure in enumerate(unseen):
            first = failure.first
            if index == 0:
                error = _remote_error(first, failure.stack)
                _log.error(
                    "an operation failed, and nobody saw the error, because nothing that depends on it was fetched: %s",
                    error,
                )
                continue
            ranks = ", ".join(map(str, sorted(failure.ranks)))
            _log.error("%s failed on ranks %s, also unseen: %s", first.operation, ranks, first.summary)
        if more:
            _log.error("%d more reports of failures are not listed", more)


def _remote_error(poison: Poison, stack: Stack | None) -> RemoteError:
    text = describe(stack, poison.step) if stack is not None else ""
    return RemoteError(poison.rank, poison.operation, poison.summary, text, poison.traceback)


class EngineSession:
    """The workers of one root mesh: made by the first `activate` of the mesh, or of a slice.

    Attributes:
        number: unique among all drivers of the same processes, the script and actors.
        procs: the root mesh.
        numbers: of the workers; a new object after each rejoin.
        order: of all instructions; its lock guards the instruction streams and the workers.
        lock: the lock of ``order``.
        instruction_streams: by the ranks and the stream that they are for.
        failures: the failures on the workers.
    """

    def __init__(self, procs: ProcMesh) -> None:
        self.number = secrets.randbits(40)
        self.procs = procs
        self.numbers = WorkerNumbers.first(self.number, procs.size)
        self.order = IssueOrder()
        self.lock = self.order.lock
        self.instruction_streams = self.order.streams
        self.failures = Failures(functools.partial(_stack_of, self.instruction_streams))
        self._workers: dict[StreamKey, ActorMesh[Worker]] = {}
        self._meshes: dict[StreamPlace, ProcMesh] = {}
        self._port, self._receiver = Channel[Poison].open()
        self._listen()
        self.workers(MAIN)
        watch(worker_number(self.number, 0), procs, procs.ranks)
        threading.Thread(
            target=_keep_flushing, args=(weakref.ref(self), self.order.woken), name="tensor-engine", daemon=True
        ).start()

    def workers(self, stream: StreamKey) -> ActorMesh[Worker]:
        """The actors of a stream, one in each process of the root mesh; the first call makes them."""
        with self.lock:
            known = self._workers.get(stream)
            if known is None:
                name = "tensor_engine" if stream == MAIN else f"tensor_engine.{stream.name}"
                arguments = (self.number, stream.number, self._port, self.numbers.by_rank)
                known = self.procs.spawn(name, Worker, *arguments, {})
                self._workers[stream] = known
            return known

    def instruction_stream(self, mesh: ProcMesh, stream: StreamKey = MAIN) -> InstructionStream:
        """The instruction stream for the processes of a mesh, or slice, on a stream."""
        key = (mesh.ranks, stream)
        instruction_stream = self.instruction_streams.get(key)
        if instruction_stream is None:
            with self.lock:
                self.check()
                workers = self.workers(stream).over(mesh.within(self.procs))
                made = InstructionStream(self, self.order, stream, mesh.ranks, workers)
                self._meshes.setdefault(key, mesh)
                instruction_stream = self.instruction_streams.setdefault(key, made)
        return instruction_stream

    def rejoin(self, procs: ProcMesh, lost: Callable[[int, StreamKey], Sequence[int]]) -> tuple[int, ...]:
        """Continue with the processes of another reference to the root mesh. Returns at once.

        Args:
            procs: the root mesh, in which some processes have replaced others.
            lost: called with the rank of each of these and each stream; returns the numbers of the values that were
                there.

        Returns:
            Their ranks.

        Raises:
            EngineClosedError: it has been shut down, or a remaining worker lacks instructions.
        """
        with self.lock:
            self.check()
            before = self.procs.root_members
            places = zip(before, procs.root_members, strict=True)
            ranks = tuple(rank for rank, (old, new) in enumerate(places) if old.id != new.id)
            if not ranks:
                return ()
            for each in self._by_urgency():
                each.send_to_the_rest()
            self.failures.settle({each.number: each.issued for each in self.instruction_streams.values()})
            life = secrets.randbits(40)
            self.procs, self.numbers = procs, self.numbers.renewed(life, ranks)
            for stream, workers in self._workers.items():
                gone = {rank: lost(rank, stream) for rank in ranks}
                arguments = (self.number, stream.number, self._port, self.numbers.by_rank, gone)
                self._workers[stream] = workers.with_successors(procs, *arguments)
            for key, each in self.instruction_streams.items():
                actors = self._workers[each.stream].over(self._meshes[key].within(procs))
                each.rejoin(actors, has_new=not each.members.isdisjoint(ranks))
        watch(worker_number(life, 0), procs, ranks)
        return ranks

    @property
    def is_closed(self) -> bool:
        """Whether it has been shut down."""
        return self.order.is_closed

    def check(self) -> None:
        """Check that it is still open.

        Raises:
            EngineClosedError: it is closed.
        """
        self.order.check()

    def flush(self) -> None:
        """Send everything that waits."""
        with self.lock:
            for each in self._by_urgency():
                each.flush()

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until every worker has run what was issued so far.

        Raises:
            TimeoutError: they did not in time.
            SupervisionError: one is gone.
        """
        with self.lock:
            self.check()
            for each in self._by_urgency():
                each.flush(is_last=True)
            waiting = [workers.sync.call() for workers in self._workers.values()]
        deadline = None if timeout is None else time.monotonic() + timeout
        for future in waiting:
            future.get(None if deadline is None else max(deadline - time.monotonic(), 0))

    def forget_site(self, number: int) -> None:
        """Make all workers forget a site that was evicted from the cache."""
        with self.lock:
            for each in list(self.instruction_streams.values()):
                each.forget_site(number)

    def close(self, timeout: float) -> None:
        """Run what was issued, report the errors that nobody has seen, and stop the workers. May be called again."""
        with self.lock:
            if self.is_closed:
                return
        with contextlib.suppress(ControlError, EngineClosedError, TimeoutError), unheard():
            self.synchronize(timeout)  # control reports workers that are gone or hang
        with self.lock:
            self.order.is_closed = True
            self.order.newest = None
            stopping = [workers.stop() for workers in self._workers.values()]
        self.order.woken.set()
        self.failures.report_unobserved()
        for future in stopping:
            with contextlib.suppress(ControlError, TimeoutError), unheard():  # the worker was gone already
                future.get(timeout)
        self._receiver.close()

    def flush_waiting(self, seen: dict[int, int]) -> bool:
        """For the flusher: send what waits if nothing follows.

        Args:
            seen: how many instructions each instruction stream had at the last look, by its number; updated.

        Returns:
            Whether anything waited.
        """
        waiting = [each for each in list(self.instruction_streams.values()) if each.is_waiting]
        if not waiting:
            return False
        grown = {each.number: each.issued for each in waiting}
        is_busy = any(seen.get(number) != issued for number, issued in grown.items())
        seen.update(grown)
        if is_busy:
            return True  # the script is issuing: the batch becomes full, or has not grown by the next look
        with self.lock:
            for each in self._by_urgency():
                if each.is_waiting and not self.is_closed and each.lost is None:
                    each.flush(is_last=True)
        return True

    def _by_urgency(self) -> list[InstructionStream]:
        """Streams with instructions first, then streams with values to free, which such instructions may still need."""
        return sorted(self.instruction_streams.values(), key=lambda each: not each.count)

    def _listen(self) -> None:
        """Note what the workers report, in the thread in which it arrives."""
        failures, receiver = weakref.ref(self.failures), self._receiver

        def listen() -> None:
            kept = failures()
            if kept is not None:
                # Without a reference the future would be collected, and nothing would be received.
                kept.next_report = receiver.recv()
                kept.next_report.add_done_callback(take)

        def take(future: Future[Poison]) -> None:
            kept = failures()
            with contextlib.suppress(ControlError):  # the channel is closed
                if kept is not None:
                    kept.add(future.get(0))
                    listen()

        listen()


def _keep_flushing(session: weakref.ref[EngineSession], wake: threading.Event) -> None:
    """Send what waits when nothing follows. The thread ends with the session."""
    while True:
        wake.wait(_IDLE_S)
        wake.clear()
        quiet = 0
        seen: dict[int, int] = {}
        while quiet < _QUIET:
            time.sleep(_FLUSH_S)
            here = session()
            if here is None or here.is_closed:
                return
            quiet = 0 if _flush(here, seen) else quiet + 1
            if quiet == _QUIET:
                with here.lock:
                    # From now on an issued instruction wakes this thread. None has been issued since the last look.
                    here.order.is_flushing = any(each.count for each in here.instruction_streams.values())
                    quiet = 0 if here.order.is_flushing else quiet
            del here


def _stack_of(streams: Mapping[Any, InstructionStream], number: int, sequence: int) -> Stack | None:
    """Where the script issued an instruction of the instruction stream with a number, if that is still known."""
    for known in list(streams.values()):
        if known.number == number:
            return known.stack_of(sequence)
    return None


def _flush(session: EngineSession, seen: dict[int, int]) -> bool:
    try:
        return session.flush_waiting(seen)
    except (ControlError, EngineClosedError):
        return False  # the next operation of the script raises the same error


_sessions: dict[int, EngineSession] = {}
_sessions_lock = threading.Lock()


def session_of(procs: ProcMesh) -> EngineSession:
    """The session of the root mesh of these processes; the first call starts its workers."""
    with _sessions_lock:
        session = _sessions.get(procs.uid)
        if session is None or session.is_closed:
            _register_exit()
            with contextlib.suppress(EngineMissingError):
                engine()  # from now on others ask it whether tensors are on meshes
            session = _sessions[procs.uid] = EngineSession(procs.root)
        return session


def known_session(procs: ProcMesh) -> EngineSession | None:
    """The session of the root mesh of these processes, if it is open."""
    session = _sessions.get(procs.uid)
    return None if session is None or session.is_closed else session


def all_sessions() -> list[EngineSession]:
    """The open sessions."""
    return [session for session in list(_sessions.values()) if not session.is_closed]


def home_of(poison: Poison, session: EngineSession) -> EngineSession:
    """The session whose instruction failed: where poison was met, or the one from which `to_mesh` brought it."""
    for known in (session, *all_sessions()):
        if any(each.number == poison.instruction_stream for each in list(known.instruction_streams.values())):
            return known
    return session


def shutdown(*, timeout: float = 10.0) -> None:
    """Shut the engine down: run what was issued, report errors that the script has not seen, stop the workers.

    The processes stay, and `activate` starts the engine again. It runs by itself at the end of the script.

    Args:
        timeout: seconds that the workers of a mesh have to run what was issued.
    """
    sessions = all_sessions()
    if len(sessions) > 1:
        # All of them first: the workers of one session may still have to receive from workers of another.
        for session in sessions:
            with contextlib.suppress(ControlError, EngineClosedError, TimeoutError), unheard():
                session.synchronize(timeout)
    for session in sessions:
        session.close(timeout)
    with _sessions_lock:
        for number in [number for number, session in _sessions.items() if session.is_closed]:
            del _sessions[number]


@functools.cache
def _register_exit() -> None:
    """Run `shutdown` at the end of the script: before that of `control`, which was registered earlier."""
    atexit.register(shutdown)
