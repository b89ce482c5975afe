"""Verbs in one process: its rails, the connections over them, and the threads that wait for completions.

Waiting threads take turns. One leads: it sleeps on the file descriptors of the completion channels without the GIL, and
hands out what completes, while the others sleep. A thread that waits for a result leads by itself. One daemon thread
looks after the runs that nobody waits for, and after all deadlines (see `poll_interval`).
"""

import atexit
import math
import os
import select
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from skipper.dataplane.backends.handshake import WireUpKeys
from skipper.dataplane.backends.verbs.connection import (
    EXPIRED,
    FLUSHED,
    NO_WAY,
    PostedRun,
    SendQueue,
    SoleRun,
    VerbsConnection,
    deadline_of,
    set_deadline,
    tell_failed,
)
from skipper.dataplane.backends.verbs.lock import Mutex
from skipper.dataplane.backends.verbs.poll_interval import PollInterval, lead_from
from skipper.dataplane.backends.verbs.port import VerbsPort
from skipper.dataplane.backends.verbs.posting import Posting
from skipper.dataplane.backends.verbs.rails import Rails
from skipper.dataplane.identity import OwnerId

_SPINS = 8  # looks before a sleep: a short transfer is over before the device could have told
_LEAD_S = 0.05  # a waiting thread hands over after so long, to look at its own timeout
_RETRY_S = 0.005  # between two looks at whether a run that failed is under way again, or over


class VerbsEngine(Posting):
    """Verbs, started. Thread-safe.

    Attributes:
        rails: The ports in use, and what was opened with them.
        lock: Held for all that it does; a thread may take it again.
    """

    def __init__(
        self, ports: Sequence[VerbsPort], options: Mapping[str, Any], owner: OwnerId, wire_up_keys: WireUpKeys
    ) -> None:
        """Open the ports, listen for peers, start the threads.

        Raises:
            BackendUnavailableError: A port cannot be opened, or the address to listen on is taken.
        """
        super().__init__()
        self._pid = os.getpid()
        self.rails = Rails(ports, options, owner, wire_up_keys)
        self._all = self.rails.rails
        self._sleeper = select.poll()  # for whoever leads; unlike select() it takes descriptors of any number
        for rail in self._all:
            self._sleeper.register(rail.completions.events, select.POLLIN)
        self._connections: set[VerbsConnection] = set()
        lock: Any = Mutex()  # that one thread may take twice: a finalizer may run below us
        self.lock = lock
        self._changed = threading.Condition(lock)
        self._interval = PollInterval(lock)
        self._leading = False
        self._closing = False
        self._thread = threading.Thread(target=self._attend, name="dataplane-verbs-client", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def connect(
        self, address: str, token: bytes, wanted: Sequence[int], deadline: float, *, replaces: bytes
    ) -> VerbsConnection:
        """A new connection to an owner, over those of the wanted rails that it has too; see `handshake.dial`.

        Raises:
            OwnerDiedError: Nobody listens there any more.
            TransferError: It cannot be made.
            TransferTimeoutError: The deadline passed.
        """
        connection = self.rails.connect(address, token, wanted, deadline, replaces=replaces)
        with self.lock:
            self._connections.add(connection)
            for queue in connection.queues.values():
                queue.rail.queues[queue.pair.number] = queue
        return connection

    def start(self, run: PostedRun, connection: VerbsConnection) -> bool:
        """Post what there is room for; post the rest, and what follows, as it completes.

        Returns:
            Whether the run is over already; then it is not told to `finish`.
        """
        with self.lock:
            if connection.alive:
                self._starting = run
                self._enter(run, connection)
                for rail in connection.rails:
                    self._reap(self._all[rail])
                self._starting = None
                if not run.over and run.connection is not None:
                    self._runs.add(run)
            else:
                self._fail([run], FLUSHED, None)
            over = run.over
            if not over:
                set_deadline(run)
                self._interval.begun(run)
        self.report()
        return over

    def adopt(self, run: PostedRun, sole: SoleRun, queue: SendQueue) -> None:
        """Put a run in the place of its `SoleRun`; the connection may have failed meanwhile."""
        sole.run = run
        set_deadline(run)
        if queue.in_flight and queue.in_flight[0][0] is sole:
            queue.in_flight[0] = run, queue.in_flight[0][1]
            run.connection, run.outstanding = queue.connection, 1
            self._runs.add(run)
            self._interval.begun(run)

    def lead(self, run: PostedRun) -> None:
        """Drive the engine in this thread until the run is over, but not for long."""
        now = time.monotonic()
        end = now + _LEAD_S
        with self.lock:
            while not run.over and now < end:
                until = min(end, deadline_of(run))
                if run.connection is None:
                    self._changed.wait(_RETRY_S)
                elif until <= now:
                    self._expire(run)
                elif self._leading:
                    self._changed.wait(until - now)
                else:
                    self._sleep(until - now)
                if not run.over:
                    self._report_unlocked()
                    now = time.monotonic()
            if run.over and self._runs:
                self._interval.left_alone()
        self.report()

    def cut(self, connection: VerbsConnection) -> None:
        """Close a connection; what runs on it begins again on another. Idempotent."""
        with self.lock:
            self._break(connection, None, FLUSHED)
        self.report()

    def over(self, run: PostedRun) -> None:
        """Note that a run that failed has been reported."""
        with self.lock:
            run.over = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the threads, close all connections; only for the end of the process. Idempotent."""
        if self._closing or os.getpid() != self._pid:
            return
        self._closing = True
        with self.lock:
            self._interval.call()
        self.rails.stop_listening()
        self._thread.join(1.0)
        with self.lock:
            for connection in self._connections:
                connection.alive = False
                connection.socket.close()
                for queue in connection.queues.values():
                    queue.pair.close()
            self._connections.clear()
        if not self._thread.is_alive():
            self.rails.close()

    def _break(
        self, connection: VerbsConnection, culprit: PostedRun | None, status: int, queue: SendQueue | None = None
    ) -> None:
        """A connection has failed: destroy its queue pairs, so that nothing moves any more, then tell its runs."""
        if not connection.alive:
            return
        connection.alive = False
        if queue is not None and status in NO_WAY:
            connection.failed_rail = queue.rail.index
        self._connections.discard(connection)
        runs: dict[PostedRun, None] = {}
        for each in connection.queues.values():
            del each.rail.queues[each.pair.number]
            each.pair.close()
            each.rail.room += sum(count for _, count in each.in_flight)
            runs.update(dict.fromkeys(run for run, _ in each.in_flight))
            runs.update(dict.fromkeys(each.waiting))
            each.in_flight.clear()
            each.waiting.clear()
            self._feed(each.rail)
        connection.socket.close()
        self._fail([run for run in runs if not run.over], status, culprit)

    def _expire(self, run: PostedRun) -> None:
        """Its deadline has passed. What was posted cannot be called back; only the whole connection can be closed."""
        connection = run.connection
        if connection is not None and connection.alive:
            if run.outstanding:
                self._break(connection, run, EXPIRED)
            else:
                for queue in connection.queues.values():
                    if run in queue.waiting:
                        queue.waiting.remove(run)
                self._fail([run], EXPIRED, run)

    def _expire_until(self, now: float) -> None:
        # Apart from the daemon thread's own function, whose variables would keep the last run and its memory alive.
        for run in [run for run in self._runs if deadline_of(run) <= now]:
            self._expire(run)

    def _fail(self, runs: list[PostedRun], status: int, culprit: PostedRun | None) -> None:
        """Tell runs that their connection is gone, in a thread: what they do then may wait for the owner."""
        for run in runs:
            run.connection = None
            run.outstanding = 0
            self._runs.discard(run)
            set_deadline(run)
        if runs:
            arguments = runs, status, culprit
            thread = threading.Thread(target=tell_failed, args=arguments, name="dataplane-verbs-retry", daemon=True)
            self._finished.append(thread.start)

    def _sleep(self, seconds: float) -> None:
        """Lead: wait for completions without the lock, then hand them out."""
        if not self._found_awake():
            self._leading = True
            self.lock.release()
            try:
                ready = {fd for fd, _ in self._sleeper.poll(max(0.0, seconds) * 1000)}
            finally:
                self.lock.acquire()
                self._leading = False
            for rail in self._all:
                if rail.completions.events in ready:
                    rail.completions.acknowledge()
                    self._reap(rail)
        self._changed.notify_all()

    def _found_awake(self) -> bool:
        """Look a few times, then arm; whether a run is over."""
        for _ in range(_SPINS):
            for rail in self._all:
                self._reap(rail)
            if self._finished:
                return True
        for rail in self._all:
            rail.completions.arm()
        for rail in self._all:
            self._reap(rail)
        return bool(self._finished)

    def _report_unlocked(self) -> None:
        if self._finished:
            self.lock.release()
            try:
                self.report()
            finally:
                self.lock.acquire()

    def _attend(self) -> None:
        """The daemon thread."""
        with self.lock:
            while not self._closing:
                now = time.monotonic()
                self._expire_until(now)
                nearest = min(map(deadline_of, self._runs), default=math.inf) - now
                if self._leading or now < min(map(lead_from, self._runs), default=math.inf):
                    self._interval.rest(nearest, idle=not self._runs)
                else:
                    self._interval.quicken()
                    self._sleep(min(_LEAD_S, nearest))
                self._report_unlocked()
