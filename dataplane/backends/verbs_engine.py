"""Verbs in one process: the device, one completion queue for all connections, and whoever waits for it.

A *link* is a connected queue pair; what is posted on it completes in order, so the oldest chunk is the one that a
completion speaks of. *Credits* see to it that neither a queue pair nor the completion queue ever overflows.

Waiting threads take turns: one leads, asleep on the file descriptor of the completion channel without the GIL, and
hands out what completes; the others sleep until it has. A thread that waits for a result leads by itself. Runs that
nobody waits for, and all deadlines, are the concern of one daemon thread.
"""

import atexit
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from dataplane.backends.verbs_chain import Chunk
from dataplane.backends.verbs_completions import Completions
from dataplane.backends.verbs_device import Device, Port, QueuePair, pyverbs
from dataplane.backends.verbs_exchange import TOKEN_BYTES, Pair, Server, bind, dial
from dataplane.backends.verbs_memory import MemoryCache, WordRoom
from dataplane.errors import TransferError
from dataplane.identity import OwnerId

FLUSHED = 5
"""IBV_WC_WR_FLUSH_ERR: the queue pair failed before this request had its turn."""
EXPIRED = -1
"""Ours: the deadline of the run passed."""
UNATTENDED = 0.0
"""When a run was `born` that no thread will wait for: so long ago that the daemon thread leads it at once."""

_POLL = 64
_GRACE_S = 0.01  # a run that is this old and that nobody waits for is led by the daemon thread
_LEAD_S = 0.05  # a waiting thread hands over after so long, to look at its own timeout
_ACTIVE_S = 0.25  # for so long after the last run, the daemon thread looks by itself instead of being woken


class Run(Protocol):
    """One start of a transfer, as the engine sees it.

    Attributes:
        deadline: On CLOCK_MONOTONIC.
        link: What it is posted on; None while there is none.
        outstanding: Its chunks that are posted and not complete.
        over: Whether it needs nothing any more.
        born: When it was submitted; or `UNATTENDED`.
    """

    deadline: float
    link: "Link | None"
    outstanding: int
    over: bool
    born: float

    def next_chunk(self) -> Chunk | None:
        """What to post next in this phase; the same one until `posted`."""

    def posted(self) -> None:
        """The chunk was posted."""

    def phase_over(self) -> bool:
        """All chunks of the phase are complete; whether another phase follows. Called with the engine's lock."""

    def finish(self) -> None:
        """It is over and well: report. Called without the lock."""

    def failed(self, status: int) -> None:
        """Its link is gone: report, or begin again. Called without the lock, in a thread of its own."""


class Link:
    """A connection that this process initiated."""

    def __init__(self, pair: QueuePair, connection: socket.socket, depth: int) -> None:
        self.pair = pair
        self.connection = connection
        self.serial = secrets.randbits(63) | 1
        self.room = depth
        self.alive = True
        self.in_flight: deque[tuple[Run, int]] = deque()
        self.waiting: deque[Run] = deque()


class Engine:
    """Verbs, started. Thread-safe."""

    def __init__(self, port: Port, options: Mapping[str, Any], owner: OwnerId) -> None:
        """Open the device, listen for peers, start both threads.

        Raises:
            BackendUnavailableError: It refuses, or the address to listen on is taken.
        """
        self.device = device = Device(port, options)
        self._pid = os.getpid()
        self._completions = Completions(device)
        self._passive = pyverbs("cq").CQ(device.context, 1)  # peers' requests complete at the peers
        self._room = device.completions
        self.memory = MemoryCache(device)
        self.words = WordRoom(device)
        self._links: dict[int, Link] = {}
        self._runs: set[Run] = set()
        self._finished: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self._leading = False
        self._resting = False
        self._closing = False
        self.token = secrets.token_bytes(TOKEN_BYTES)
        listener, self.address = bind(options.get("listen"), f"skipper-verbs-{owner.token:016x}")
        self._server = Server(listener, self.token, self._passive_pair)
        self._thread = threading.Thread(target=self._attend, name="dataplane-verbs-client", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def connect(self, address: str, token: bytes, deadline: float) -> Link:
        """A new connection to an owner.

        Raises:
            OwnerDiedError: Nobody listens there any more.
            TransferError: It cannot be made.
            TransferTimeoutError: The deadline passed.
        """
        pair = self.device.queue_pair(self._completions.queue, depth=self.device.depth)
        try:
            connection, theirs = dial(address, token, pair.endpoint, deadline)
            try:
                pair.connect(theirs)
            except TransferError:
                connection.close()
                raise
        except BaseException:
            pair.close()
            raise
        link = Link(pair, connection, self.device.depth)
        with self._changed:
            self._links[pair.number] = link
        return link

    def start(self, run: Run, link: Link) -> None:
        """Post what there is room for; the rest, and what follows, as it completes."""
        with self._changed:
            self._runs.add(run)
            if link.alive:
                run.link = link
                link.waiting.append(run)
                self._pump(link)
                self._reap()
            else:
                self._fail(run, FLUSHED)
            if not run.over and (self._resting or run.born == UNATTENDED):
                self._changed.notify_all()
        self._report()

    def lead(self, run: Run) -> None:
        """Drive the engine in this thread until the run is over, but not for long."""
        end = time.monotonic() + _LEAD_S
        with self._changed:
            while not run.over:
                now = time.monotonic()
                if now >= end:
                    break
                if run.deadline <= now:
                    self._expire(run)
                elif self._leading:
                    self._changed.wait(min(end, run.deadline) - now)
                else:
                    self._sleep(min(end, run.deadline) - now)
                self._report_unlocked()
        self._report()

    def cut(self, link: Link) -> None:
        """Close a connection; what runs on it begins again on another. Idempotent."""
        with self._changed:
            self._break(link, None, FLUSHED)
        self._report()

    def close(self) -> None:
        """Stop the threads, close all connections; only for the end of the process. Idempotent."""
        if self._closing or os.getpid() != self._pid:
            return
        self._closing = True
        with self._changed:
            self._changed.notify_all()
        self._server.close()
        self._thread.join(1.0)
        with self._changed:
            for link in list(self._links.values()):
                link.alive = False
                link.connection.close()
                link.pair.close()
            self._links.clear()
        if not self._thread.is_alive():
            self.device.close()

    def _passive_pair(self) -> Pair:
        return self.device.queue_pair(self._passive, depth=1)

    def _pump(self, link: Link) -> None:
        """Post chunks in the order in which their runs came, while there are credits."""
        while link.alive and link.waiting:
            run = link.waiting[0]
            chunk = run.next_chunk()
            if chunk is None:
                link.waiting.popleft()
                continue
            if chunk.count > min(link.room, self._room):
                return
            chunk.last.wr_id = link.serial
            try:
                link.pair.post(chunk.first)
            except TransferError:
                self._break(link, run, FLUSHED)
                return
            link.room -= chunk.count
            self._room -= chunk.count
            link.in_flight.append((run, chunk.count))
            run.outstanding += 1
            run.posted()

    def _reap(self) -> None:
        """Hand out all completions that are there."""
        while True:
            found = self._completions.poll(_POLL)
            for completion in found:
                link = self._links.get(completion.qp_num)
                # A number is given again to a later queue pair, and requests that do not complete bear no serial.
                if link is None or completion.wr_id not in (link.serial, 0):
                    continue
                if completion.status == 0:
                    self._complete(link)
                else:
                    self._break(link, link.in_flight[0][0] if link.in_flight else None, completion.status)
            if len(found) < _POLL:
                return

    def _complete(self, link: Link) -> None:
        run, count = link.in_flight.popleft()
        link.room += count
        self._room += count
        run.outstanding -= 1
        if run.outstanding == 0 and run.next_chunk() is None:
            if run.phase_over():
                link.waiting.append(run)
            else:
                self._end(run, run.finish)
        self._pump(link)

    def _break(self, link: Link, culprit: Run | None, status: int) -> None:
        """The link has failed: destroy its queue pair, so that nothing moves any more, then tell its runs."""
        if not link.alive:
            return
        link.alive = False
        del self._links[link.pair.number]
        link.pair.close()
        link.connection.close()
        self._room += sum(count for _, count in link.in_flight)
        for run in {run: None for run, _ in link.in_flight} | dict.fromkeys(link.waiting):
            self._fail(run, status if run is culprit else FLUSHED)
        link.in_flight.clear()
        link.waiting.clear()

    def _expire(self, run: Run) -> None:
        """Its deadline has passed. What was posted cannot be called back; only the whole queue pair can be stopped."""
        link = run.link
        if link is not None and link.alive:
            if run.outstanding:
                self._break(link, run, EXPIRED)
            else:
                link.waiting.remove(run)
                self._fail(run, EXPIRED)

    def _expire_until(self, now: float) -> None:
        # Apart from the daemon thread's own function, whose variables would keep the last run and its memory alive.
        for run in [run for run in self._runs if run.deadline <= now]:
            self._expire(run)

    def _fail(self, run: Run, status: int) -> None:
        run.link = None
        run.outstanding = 0
        self._runs.discard(run)
        # What follows may wait for the owner: not here.
        thread = threading.Thread(target=run.failed, args=(status,), name="dataplane-verbs-retry", daemon=True)
        self._finished.append(thread.start)

    def _end(self, run: Run, report: Callable[[], None]) -> None:
        run.over = True
        self._runs.discard(run)
        self._finished.append(report)

    def over(self, run: Run) -> None:
        """A run that failed has been reported."""
        with self._changed:
            run.over = True
            self._changed.notify_all()

    def _sleep(self, seconds: float) -> None:
        """Lead: wait for completions without the lock, then hand them out."""
        self._completions.arm()
        self._reap()
        if self._finished:
            return
        self._leading = True
        self._changed.release()
        try:
            ready = self._completions.wait(seconds)
        finally:
            self._changed.acquire()
            self._leading = False
        if ready:
            self._completions.acknowledge()
        self._reap()
        self._changed.notify_all()

    def _report(self) -> None:
        """Tell what has finished, without the lock: what is called may submit again."""
        with self._changed:
            finished, self._finished = self._finished, []
        for tell in finished:
            tell()

    def _report_unlocked(self) -> None:
        if self._finished:
            self._changed.release()
            try:
                self._report()
            finally:
                self._changed.acquire()

    def _attend(self) -> None:
        """The daemon thread."""
        idle_since = time.monotonic()
        with self._changed:
            while not self._closing:
                now = time.monotonic()
                if not self._runs:
                    self._resting = now - idle_since > _ACTIVE_S
                    self._changed.wait(None if self._resting else _GRACE_S)
                    self._resting = False
                    continue
                idle_since = now
                self._expire_until(now)
                if self._leading or now - min((run.born for run in self._runs), default=now) < _GRACE_S:
                    self._changed.wait(_GRACE_S)
                else:
                    self._sleep(min(_LEAD_S, max(0.0, min(run.deadline for run in self._runs) - now)))
                self._report_unlocked()
