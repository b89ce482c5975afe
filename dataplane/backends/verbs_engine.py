"""Verbs in one process: its rails, the links over them, and whoever waits for what completes.

Waiting threads take turns: one leads, asleep on the file descriptors of the completion channels without the GIL, and
hands out what completes; the others sleep until it has. A thread that waits for a result leads by itself. Runs that
nobody waits for, and all deadlines, are the concern of one daemon thread.
"""

import atexit
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dataplane.backends.verbs_link import EXPIRED, FLUSHED, NO_WAY, Lane, Link, Run, deadline_of, tell_failed
from dataplane.backends.verbs_port import Port
from dataplane.backends.verbs_rails import Rail, Rails
from dataplane.errors import TransferError
from dataplane.identity import OwnerId

_POLL = 64
_GRACE_S = 0.01  # a run that is this old and that nobody waits for is led by the daemon thread
_LEAD_S = 0.05  # a waiting thread hands over after so long, to look at its own timeout
_ACTIVE_S = 0.25  # for so long after the last run, the daemon thread looks by itself instead of being woken


class Engine:
    """Verbs, started. Thread-safe.

    Attributes:
        rails: The ports in use, and what was opened with them.
    """

    def __init__(self, ports: Sequence[Port], options: Mapping[str, Any], owner: OwnerId) -> None:
        """Open the ports, listen for peers, start the threads.

        Raises:
            BackendUnavailableError: A port cannot be opened, or the address to listen on is taken.
        """
        self._pid = os.getpid()
        self.rails = Rails(ports, options, owner)
        self._all = self.rails.rails
        self._sleeper = select.poll()  # for whoever leads; unlike select() it takes descriptors of any number
        for rail in self._all:
            self._sleeper.register(rail.completions.events, select.POLLIN)
        self._links: set[Link] = set()
        self._runs: set[Run] = set()
        self._starting: Run | None = None
        self._finished: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._leading = False
        self._resting = False
        self._closing = False
        self._thread = threading.Thread(target=self._attend, name="dataplane-verbs-client", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def connect(self, address: str, token: bytes, wanted: Sequence[int], deadline: float, *, replaces: bytes) -> Link:
        """A new link to an owner, over those of the wanted rails that it has too; see `verbs_exchange.dial`.

        Raises:
            OwnerDiedError: Nobody listens there any more.
            TransferError: It cannot be made.
            TransferTimeoutError: The deadline passed.
        """
        link = Link(self.rails.connect(address, token, wanted, deadline, replaces=replaces))
        with self._changed:
            self._links.add(link)
            for lane in link.lanes.values():
                lane.rail.lanes[lane.pair.number] = lane
        return link

    def start(self, run: Run, link: Link) -> bool:
        """Post what there is room for; the rest, and what follows, as it completes.

        Returns:
            Whether the run is over already; then it is not told to `finish`.
        """
        with self._changed:
            if link.alive:
                self._starting = run
                self._enter(run, link)
                for rail in link.rails:
                    self._reap(self._all[rail])
                self._starting = None
                if not run.over and run.link is not None:
                    self._runs.add(run)
            else:
                self._fail([run], FLUSHED, None)
            over = run.over
            if not over:
                _set_deadline(run)
                if self._resting or not run.attended:
                    self._changed.notify_all()
        self._report()
        return over

    def lead(self, run: Run) -> None:
        """Drive the engine in this thread until the run is over, but not for long."""
        end = time.monotonic() + _LEAD_S
        with self._changed:
            while not run.over:
                now = time.monotonic()
                if now >= end:
                    break
                until = min(end, deadline_of(run))
                if until <= now:
                    self._expire(run)
                elif self._leading:
                    self._changed.wait(until - now)
                else:
                    self._sleep(until - now)
                self._report_unlocked()
        self._report()

    def cut(self, link: Link) -> None:
        """Close a connection; what runs on it begins again on another. Idempotent."""
        with self._changed:
            self._break(link, None, FLUSHED)
        self._report()

    def over(self, run: Run) -> None:
        """A run that failed has been reported."""
        with self._changed:
            run.over = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the threads, close all connections; only for the end of the process. Idempotent."""
        if self._closing or os.getpid() != self._pid:
            return
        self._closing = True
        with self._changed:
            self._changed.notify_all()
        self.rails.stop_listening()
        self._thread.join(1.0)
        with self._changed:
            for link in self._links:
                link.alive = False
                link.connection.close()
                for lane in link.lanes.values():
                    lane.pair.close()
            self._links.clear()
        if not self._thread.is_alive():
            self.rails.close()

    def _enter(self, run: Run, link: Link) -> None:
        """Post the chunks of its phase, as far as there is room."""
        run.link = link
        for rail in run.rails():
            if link.alive:
                lane = link.lanes[rail]
                lane.waiting.append(run)
                self._pump(lane)

    def _pump(self, lane: Lane) -> None:
        """Post chunks in the order in which their runs came, while there are credits."""
        link, rail = lane.link, lane.rail
        while link.alive and lane.waiting:
            run = lane.waiting[0]
            chunk = run.next_chunk(rail.index)
            if chunk is None:
                lane.waiting.popleft()
                continue
            if chunk.count > lane.room:
                return
            if chunk.count > rail.room:
                rail.starved.append(lane)
                return
            chunk.last.wr_id = lane.serial
            try:
                lane.pair.post(chunk.first)
            except TransferError:
                self._break(link, run, FLUSHED)
                return
            lane.room -= chunk.count
            rail.room -= chunk.count
            lane.in_flight.append((run, chunk.count))
            run.outstanding += 1
            run.posted(rail.index)

    def _reap(self, rail: Rail) -> None:
        """Hand out all completions of a rail that are there."""
        while True:
            found = rail.completions.poll(_POLL)
            for completion in found:
                lane = rail.lanes.get(completion.qp_num)
                # A number is given again to a later queue pair, and requests that do not complete bear no serial.
                if lane is None or completion.wr_id not in (lane.serial, 0):
                    continue
                if completion.status == 0:
                    self._complete(lane)
                else:
                    culprit = lane.in_flight[0][0] if lane.in_flight else None
                    self._break(lane.link, culprit, completion.status, lane)
            if len(found) < _POLL:
                return

    def _complete(self, lane: Lane) -> None:
        run, count = lane.in_flight.popleft()
        lane.room += count
        lane.rail.room += count
        run.outstanding -= 1
        if run.outstanding == 0 and run.all_posted():
            if run.phase_over():
                self._enter(run, lane.link)
            else:
                run.over = True
                self._runs.discard(run)
                if run is not self._starting:
                    self._finished.append(run.finish)
        if lane.waiting:
            self._pump(lane)
        self._feed(lane.rail)

    def _feed(self, rail: Rail) -> None:
        """Post what waited for other lanes' credits."""
        if rail.starved:
            starved, rail.starved = rail.starved, []
            for lane in starved:
                self._pump(lane)

    def _break(self, link: Link, culprit: Run | None, status: int, lane: Lane | None = None) -> None:
        """The link has failed: destroy its queue pairs, so that nothing moves any more, then tell its runs."""
        if not link.alive:
            return
        link.alive = False
        if lane is not None and status in NO_WAY:
            link.failed_rail = lane.rail.index
        self._links.discard(link)
        runs: dict[Run, None] = {}
        for each in link.lanes.values():
            del each.rail.lanes[each.pair.number]
            each.pair.close()
            each.rail.room += sum(count for _, count in each.in_flight)
            runs.update(dict.fromkeys(run for run, _ in each.in_flight))
            runs.update(dict.fromkeys(each.waiting))
            each.in_flight.clear()
            each.waiting.clear()
            self._feed(each.rail)
        link.connection.close()
        self._fail([run for run in runs if not run.over], status, culprit)

    def _expire(self, run: Run) -> None:
        """Its deadline has passed. What was posted cannot be called back; only the whole link can be stopped."""
        link = run.link
        if link is not None and link.alive:
            if run.outstanding:
                self._break(link, run, EXPIRED)
            else:
                for lane in link.lanes.values():
                    if run in lane.waiting:
                        lane.waiting.remove(run)
                self._fail([run], EXPIRED, run)

    def _expire_until(self, now: float) -> None:
        # Apart from the daemon thread's own function, whose variables would keep the last run and its memory alive.
        for run in [run for run in self._runs if deadline_of(run) <= now]:
            self._expire(run)

    def _fail(self, runs: list[Run], status: int, culprit: Run | None) -> None:
        """Tell runs whose link is gone, in a thread: what they do then may wait for the owner."""
        for run in runs:
            run.link = None
            run.outstanding = 0
            self._runs.discard(run)
            _set_deadline(run)
        if runs:
            arguments = runs, status, culprit
            thread = threading.Thread(target=tell_failed, args=arguments, name="dataplane-verbs-retry", daemon=True)
            self._finished.append(thread.start)

    def _sleep(self, seconds: float) -> None:
        """Lead: wait for completions without the lock, then hand them out."""
        for rail in self._all:
            rail.completions.arm()
        for rail in self._all:
            self._reap(rail)
        if self._finished:
            return
        self._leading = True
        self._changed.release()
        try:
            ready = {fd for fd, _ in self._sleeper.poll(max(0.0, seconds) * 1000)}
        finally:
            self._changed.acquire()
            self._leading = False
        for rail in self._all:
            if rail.completions.events in ready:
                rail.completions.acknowledge()
                self._reap(rail)
        self._changed.notify_all()

    def _report(self) -> None:
        """Tell what has finished, without the lock: what is called may submit again."""
        while self._finished:
            try:
                tell = self._finished.popleft()
            except IndexError:  # another thread was quicker
                return
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
                if self._leading or now < min(map(_lead_from, self._runs), default=now + 1):
                    self._changed.wait(_GRACE_S)
                else:
                    self._sleep(min(_LEAD_S, min(map(deadline_of, self._runs)) - now))
                self._report_unlocked()


def _lead_from(run: Run) -> float:
    """When the daemon thread leads a run that no thread waits for."""
    return deadline_of(run) - run.timeout + (_GRACE_S if run.attended else 0.0)


def _set_deadline(run: Run) -> None:
    # Not before somebody needs it: most transfers are over by then, and some clocks cost more than a short transfer.
    if run.deadline is None:
        run.deadline = time.monotonic() + run.timeout
