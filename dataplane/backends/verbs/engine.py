"""Verbs in one process: its rails, the connections over them, and the threads that wait for completions.

Waiting threads take turns. One leads: it sleeps on the file descriptors of the completion channels without the GIL, and
distributes completions, while the others sleep. A thread that waits for a result leads by itself. One daemon thread
drives the runs that no thread waits for, and checks all deadlines.
"""

import atexit
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skipper.dataplane.backends.handshake import WireUpKeys
from skipper.dataplane.backends.verbs.chain import RequestChain
from skipper.dataplane.backends.verbs.connection import (
    EXPIRED,
    FLUSHED,
    NO_WAY,
    PostedRun,
    Rail,
    Rails,
    SendQueue,
    SoleRun,
    VerbsConnection,
    deadline_of,
    set_deadline,
    tell_failed,
)
from skipper.dataplane.backends.verbs.lock import Mutex
from skipper.dataplane.backends.verbs.port import VerbsPort
from skipper.dataplane.errors import TransferError
from skipper.dataplane.identity import OwnerId

_POLL = 64
_GRACE_S = 0.01  # the daemon thread leads a run that is this old and that no thread waits for
_SLOWEST_S = 0.08
_SPINS = 8  # polls before a sleep: a short transfer is over before an event would come
_LEAD_S = 0.05  # after this time a waiting thread hands over, to check its own timeout
_RETRY_S = 0.005  # between two checks whether a failed run is in flight again, or over


class PollInterval:
    """How often the daemon thread polls for runs that no thread waits for. All methods are for holders of the lock.

    Waking the thread for each run would cost the run more than the device. So the thread polls by itself. It polls less
    often the longer other threads do all the work, and rests when nothing happens at all.

    Attributes:
        seconds: To sleep between two polls; infinity until the thread is called.
    """

    def __init__(self, lock: Any) -> None:
        """Begin with short sleeps; the lock must work with conditions."""
        self._called = threading.Condition(lock)
        self.seconds = _GRACE_S
        self._busy = False  # whether a run has begun since the last look

    def begun(self, run: PostedRun) -> None:
        """Note that a run is in flight."""
        self._busy = True
        if self.seconds > _SLOWEST_S or not run.attended or run.timeout < self.seconds:
            self.call()

    def left_alone(self) -> None:
        """Note that a thread that has led for others no longer leads."""
        if self.seconds > _GRACE_S:
            self.call()

    def call(self) -> None:
        """Make the thread poll soon, and often."""
        self.seconds = _GRACE_S
        self._called.notify()

    def quicken(self) -> None:
        """Poll often again: the thread has had something to do."""
        self.seconds = _GRACE_S

    def rest(self, most: float, *, idle: bool) -> None:
        """Sleep until the next poll, or a call, for at most `most` seconds; `idle`: no run is in flight."""
        if idle and not self._busy and self.seconds == _SLOWEST_S:
            self.seconds = math.inf
        self._busy = False
        seconds = min(self.seconds, most)
        if not self._called.wait(None if seconds == math.inf else max(0.0, seconds)):
            self.seconds = min(2 * self.seconds, _SLOWEST_S)


def lead_from(run: PostedRun) -> float:
    """From when on the daemon thread leads a run that no thread waits for."""
    return deadline_of(run) - run.timeout + (_GRACE_S if run.attended else 0.0)


class VerbsEngine:
    """Verbs, started. Thread-safe; methods that post and take completions are for holders of the lock.

    Attributes:
        rails: The ports in use, and everything opened with them.
        lock: Held for all its work; reentrant.
    """

    def __init__(
        self, ports: Sequence[VerbsPort], options: Mapping[str, Any], owner: OwnerId, wire_up_keys: WireUpKeys
    ) -> None:
        """Open the ports, listen for peers, start the threads.

        Raises:
            BackendUnavailableError: A port cannot be opened, or the address to listen on is taken.
        """
        self._pid = os.getpid()
        self.rails = Rails(ports, options, owner, wire_up_keys)
        self._all = self.rails.rails
        self._sleeper = select.poll()  # for the leading thread; unlike select() it takes descriptors of any number
        for rail in self._all:
            self._sleeper.register(rail.completions.events, select.POLLIN)
        self._connections: set[VerbsConnection] = set()
        self._runs: set[PostedRun] = set()  # in flight
        self._starting: PostedRun | None = None  # its thread sees by itself that it is over
        self._finished: deque[Callable[[], None]] = deque()  # to be called without the lock
        lock: Any = Mutex()  # reentrant: a finalizer may run inside of a call
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
        """A new connection to an owner, over the wanted rails that it also has; see `handshake.dial`.

        Raises:
            OwnerDiedError: No process listens there any more.
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
        """Post as many chains as there is room for; post the rest, and later phases, as these complete.

        Returns:
            Whether the run is over already; then its `finish` is not called.
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

    def post_sole(self, queue: SendQueue, chain: RequestChain) -> SoleRun | None:
        """Post the only chain of a run before the run is made, if nothing else is in flight there.

        The caller holds the lock. If the transfer is not over, the caller passes a run to `adopt` before it releases
        the lock. Then it calls `report`.

        Returns:
            The stand-in for the run; None if nothing was posted.
        """
        rail = queue.rail
        if not queue.connection.alive or queue.in_flight or queue.waiting or chain.count > min(queue.room, rail.room):
            return None
        chain.last.wr_id = queue.serial
        try:
            queue.pair.post(chain.first)
        except TransferError:
            return None  # the next attempt raises the error
        sole = SoleRun()
        queue.room -= chain.count
        rail.room -= chain.count
        queue.in_flight.append((sole, chain.count))
        self._starting = sole
        self._reap(rail)
        self._starting = None
        return sole

    def report(self) -> None:
        """Report finished runs, without the lock: the called functions may submit again."""
        while self._finished:
            try:
                tell = self._finished.popleft()
            except IndexError:  # another thread was quicker
                return
            tell()

    def adopt(self, run: PostedRun, sole: SoleRun, queue: SendQueue) -> None:
        """Put a run in place of its `SoleRun`; the connection may have failed in between."""
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
        """Close a connection; its runs begin again on another. Idempotent."""
        with self.lock:
            self._break(connection, None, FLUSHED)
        self.report()

    def over(self, run: PostedRun) -> None:
        """Note that a failed run has been reported."""
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

    def _enter(self, run: PostedRun, connection: VerbsConnection) -> None:
        """Post the chains of a run's phase, as far as there is room."""
        run.connection = connection
        for rail in run.rails():
            if connection.alive:
                queue = connection.queues[rail]
                queue.waiting.append(run)
                self._pump(queue)

    def _pump(self, queue: SendQueue) -> None:
        """Post chains in the order of their runs, while there are credits."""
        connection, rail = queue.connection, queue.rail
        while connection.alive and queue.waiting:
            run = queue.waiting[0]
            chain = run.next_chain(rail.index)
            if chain is None:
                queue.waiting.popleft()
                continue
            if chain.count > queue.room:
                return
            if chain.count > rail.room:
                rail.starved.append(queue)
                return
            chain.last.wr_id = queue.serial
            try:
                queue.pair.post(chain.first)
            except TransferError:
                self._break(connection, run, FLUSHED)
                return
            queue.room -= chain.count
            rail.room -= chain.count
            queue.in_flight.append((run, chain.count))
            run.outstanding += 1
            run.posted(rail.index)

    def _reap(self, rail: Rail) -> None:
        """Distribute all present completions of a rail."""
        while True:
            found = rail.completions.poll(_POLL)
            for completion in found:
                queue = rail.queues.get(completion.qp_num)
                # A later queue pair can get the same number, and requests without completions have no serial.
                if queue is None or completion.wr_id not in (queue.serial, 0):
                    continue
                if completion.status == 0:
                    self._complete(queue)
                else:
                    culprit = queue.in_flight[0][0] if queue.in_flight else None
                    self._break(queue.connection, culprit, completion.status, queue)
            if len(found) < _POLL:
                return

    def _complete(self, queue: SendQueue) -> None:
        run, count = queue.in_flight.popleft()
        queue.room += count
        queue.rail.room += count
        run.outstanding -= 1
        if run.outstanding == 0 and run.all_posted():
            if run.phase_over():
                self._enter(run, queue.connection)
            else:
                run.over = True
                self._runs.discard(run)
                if run is not self._starting:
                    self._finished.append(run.finish)
        if queue.waiting:
            self._pump(queue)
        if queue.rail.starved:
            self._feed(queue.rail)

    def _feed(self, rail: Rail) -> None:
        """Post chains that waited for the credits of other send queues."""
        starved, rail.starved = rail.starved, []
        for queue in starved:
            self._pump(queue)

    def _break(
        self, connection: VerbsConnection, culprit: PostedRun | None, status: int, queue: SendQueue | None = None
    ) -> None:
        """End a failed connection: destroy its queue pairs, so that no data move any more, then tell its runs."""
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
        """End a run whose deadline has passed. Posted requests cannot be revoked, so the whole connection is closed."""
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
        # Not in the daemon thread's own function, whose variables would keep the last run and its memory alive.
        for run in [run for run in self._runs if deadline_of(run) <= now]:
            self._expire(run)

    def _fail(self, runs: list[PostedRun], status: int, culprit: PostedRun | None) -> None:
        """Tell runs that their connection is gone, in a thread: they may then wait for the owner."""
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
        """Lead: wait for completions without the lock, then distribute them."""
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
        """Poll a few times, then arm; returns whether a run is over."""
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
