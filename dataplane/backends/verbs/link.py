"""What a transfer is posted on.

A *link* is a connection to an owner; it has one *lane*, a queue pair, on each rail that both sides have. What is posted
on a lane completes in order, so the oldest chunk is the one that a completion speaks of. *Credits* see to it that
neither a queue pair nor a completion queue ever overflows.
"""

import secrets
import socket
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from skipper.dataplane.backends.verbs.chain import Chunk
from skipper.dataplane.backends.verbs.device import QueuePair

if TYPE_CHECKING:
    from skipper.dataplane.backends.verbs.rails import Connection, Rail

FLUSHED = 5
"""IBV_WC_WR_FLUSH_ERR: the queue pair failed before this request had its turn."""
EXPIRED = -1
"""Ours: the deadline of the run passed."""

NO_WAY = frozenset({2, 12})
"""Statuses of the device that speak of the way rather than of the request: own link down, no answer."""


class Run(Protocol):
    """One start of a transfer, as the engine sees it.

    Attributes:
        timeout: Seconds from its submission.
        deadline: On CLOCK_MONOTONIC; None until somebody needs it.
        attended: Whether a thread is likely to wait for it.
        link: What it is posted on; None while there is none.
        outstanding: Its chunks that are posted and not complete.
        over: Whether it needs nothing any more.
    """

    timeout: float
    deadline: float | None
    attended: bool
    link: "Link | None"
    outstanding: int
    over: bool

    def rails(self) -> Iterable[int]:
        """Those that this phase has chunks for."""

    def next_chunk(self, rail: int) -> Chunk | None:
        """What to post next on a rail in this phase; the same one until `posted`."""

    def posted(self, rail: int) -> None:
        """That chunk was posted."""

    def all_posted(self) -> bool:
        """Whether this phase has no chunk left for any rail."""

    def phase_over(self) -> bool:
        """All chunks of the phase are complete; whether another phase follows. Called with the engine's lock."""

    def finish(self) -> None:
        """It is over: report. Called without the lock; not at all if it was over before `Engine.start` returned."""

    def failed(self, status: int) -> None:
        """Its link is gone: report, or begin again. Called without the lock, in a thread that may wait."""


class Lane:
    """One queue pair of a link.

    Attributes:
        serial: What its completions bear, since a queue pair's number is given again to a later one.
        room: How many more requests it holds.
        in_flight: The runs of what is posted, with the number of requests, oldest first.
        waiting: Runs with chunks that are not posted.
    """

    __slots__ = ("in_flight", "link", "pair", "rail", "room", "serial", "waiting")

    def __init__(self, link: "Link", rail: "Rail", pair: QueuePair) -> None:
        self.link = link
        self.rail = rail
        self.pair = pair
        self.serial = secrets.randbits(63) | 1
        self.room = rail.device.depth
        self.in_flight: deque[tuple[Run, int]] = deque()
        self.waiting: deque[Run] = deque()


class Link:
    """A connection that this process initiated.

    Attributes:
        lanes: By the index of their rail.
        rails: These indices.
        connection: The socket that tells the owner's end.
        name: For the one that replaces it.
        alive: Whether it can be used.
        failed_rail: Which had no way to the owner, and made it fail.
        widen_at: When to try the rails that it lacks; None where it has all of them.
    """

    def __init__(self, connection: "Connection") -> None:
        self.lanes = {rail.index: Lane(self, rail, pair) for rail, pair in connection.pairs}
        self.rails = tuple(self.lanes)
        self.connection: socket.socket = connection.socket
        self.name = connection.name
        self.alive = True
        self.failed_rail: int | None = None
        self.widen_at: float | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is under way on it."""
        return not any(lane.in_flight or lane.waiting for lane in self.lanes.values())


class Sole:
    """Stands for a run that has only one chunk, while the thread that posted it looks whether it is over already.

    Most short transfers are: then no run has to be made for them. See `Run`, which replaces it or has it fail.
    """

    __slots__ = ("attended", "deadline", "link", "outstanding", "over", "run", "timeout")

    def __init__(self) -> None:
        self.timeout = 0.0
        self.deadline: float | None = 0.0
        self.attended = True
        self.link: Link | None = None
        self.outstanding = 1
        self.over = False
        self.run: Run | None = None

    def rails(self) -> Iterable[int]:
        """None: it is posted."""
        return ()

    def next_chunk(self, rail: int) -> Chunk | None:
        """None."""

    def posted(self, rail: int) -> None:
        """Never."""

    def all_posted(self) -> bool:
        """It is."""
        return True

    def phase_over(self) -> bool:
        """It has only one."""
        return False

    def finish(self) -> None:
        """Nobody waits for it."""

    def failed(self, status: int) -> None:
        """See `Run`."""
        if self.run is not None:
            self.run.failed(status)


def deadline_of(run: Run) -> float:
    """Its deadline; infinity while it needs none."""
    return float("inf") if run.deadline is None else run.deadline


def set_deadline(run: Run) -> None:
    """Fix it. Not before somebody needs it: some clocks cost more than the short transfers that never do."""
    if run.deadline is None:
        run.deadline = time.monotonic() + run.timeout


def tell_failed(runs: Iterable[Run], status: int, culprit: Run | None) -> None:
    """Tell runs that their link is gone; the culprit why, the others that they had no turn.

    None waits beyond its own deadline, so told in this order none makes another one late.
    """
    for run in sorted(runs, key=deadline_of):
        run.failed(status if run is culprit else FLUSHED)
