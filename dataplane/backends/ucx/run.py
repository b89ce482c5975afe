"""One operation over UCX from its submission to its end: who drives it, and what a failure means.

A failed copy to a living owner is tried once more over new connections. Then the words distinguish a dropped buffer
from a broken transport, and a connection that was cut for another operation's deadline does not harm this one. An
atomic operation is tried again only if UCX has not got it yet.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from skipper.dataplane.backends.base import Done, Remote
from skipper.dataplane.backends.ucx.connections import OwnerConnections
from skipper.dataplane.backends.ucx.engine import ClientWorker
from skipper.dataplane.copying import dropped
from skipper.dataplane.errors import OwnerDiedError, TransferError, TransferTimeoutError
from skipper.dataplane.operation import FetchOperation, Helper
from skipper.dataplane.regions import Region

if TYPE_CHECKING:
    from skipper.dataplane.backends.ucx import _ucp

SPIN_S = 100e-6
"""A round trip over loopback takes about 10 us, and waking another thread takes as long."""

_EXPIRED = math.inf

Batches = Sequence[tuple[ClientWorker, "_ucp.Batch"]]
"""The batches of one operation, each with the client worker that carries it."""


class UcxRun:
    """One operation in flight: its present batches, and what to do when all of them are over."""

    def __init__(
        self,
        owner: OwnerConnections,
        make: Callable[[], Batches],
        remotes: tuple[Remote, ...],
        pinned: tuple[Region, ...],
        deadline: float,
        done: Done,
    ) -> None:
        self.deadline = deadline
        self.expired = False
        self.lost = False
        self._owner = owner
        self._make = make
        self._remotes = remotes
        self._pinned = pinned
        self._done = done
        self._tries = 0
        self._lock = threading.Lock()
        self._parts: list[RunPart] = []
        self._left = 0

    def begin(self, batches: Batches, *, begun: bool) -> Helper | None:
        """Begin these batches. If `begun`, the submitting thread has already advanced the only one."""
        self._take(batches)
        if begun:
            self._parts[0].go_on()
            return None
        for part in self._parts:
            part.client.adopt(part)
        return self._help

    def owner_lost(self) -> bool:
        """Whether the kernel knows that the owner is gone; operations in flight then fail for that reason."""
        self.lost = self.lost or not self._owner.usable()
        return self.lost

    def cut(self, batch: "_ucp.Batch") -> None:
        """End the connection of one of the batches, and so the batch."""
        self._owner.cut(batch.endpoint)

    def part_over(self) -> None:
        """Note that one of the batches is over."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._conclude()

    def _take(self, batches: Batches) -> None:
        self._parts = [RunPart(self, client, batch) for client, batch in batches]
        self._left = len(self._parts)

    def _help(self) -> None:
        """Make the waiting thread drive the parts that no other thread has begun."""
        for part in self._parts:
            part.help()

    def _conclude(self) -> None:
        ucp = self._owner.engine.ucp
        results = [part.batch.result for part in self._parts]
        changed = [part.batch for part in self._parts if part.batch.result == ucp.CHANGED]
        if changed:
            self._done(dropped(self._remotes[changed[0].changed()[0]].handle))
        elif all(result == ucp.FINISHED for result in results):
            self._succeed()
        elif ucp.NOT_ALLOWED in results:
            message = "its owner has registered no such memory for this operation: the owner did not make this handle"
            refused = [part.batch for part in self._parts if part.batch.result == ucp.NOT_ALLOWED]
            self._done(TransferError(f"{self._remotes[refused[0].changed()[0]].handle} was refused: {message}"))
        else:
            self._fail([result for result in results if result < 0])

    def _succeed(self) -> None:
        self._done(None)

    def _fail(self, statuses: list[int]) -> None:
        ucp = self._owner.engine.ucp
        own = [status for status in statuses if status != ucp.CANCELED]
        status = own[0] if own else statuses[0]
        # If UCX itself has given up a connection, this process has not cut it, whatever the status says.
        alone = any(part.batch.endpoint.failed for part in self._parts)
        if self.expired or time.monotonic() >= self.deadline:
            message = f"the deadline passed before the transfer with {self._owner.owner} was complete"
            self._done(TransferTimeoutError(message + self._fate(), status=status))
            return
        for part in self._parts:
            if part.batch.result < 0:
                self.cut(part.batch)
        if self.lost or ((own or alone) and self._owner.wait_for_exit()):
            self._done(OwnerDiedError(f"{self._owner.owner} is gone", status=status))
            return
        self._tries += bool(own or alone)  # a cut for the deadline of another operation says nothing about this one
        if self._tries > 1 or self._fate():
            self._done(self._owner.failure(ucp.status_text(status) + self._fate(), status))
            return
        if self._owner.asks_first:
            # Connecting may wait for the owner, and this thread may be checking the deadlines of others.
            threading.Thread(target=self._try_again, name="dataplane-ucx-retry", daemon=True).start()
        else:
            self._try_again()

    def _try_again(self) -> None:
        try:
            batches = self._make()
        except TransferError as error:
            self._done(error)
            return
        self._take(batches)
        for part in self._parts:
            part.client.adopt(part)

    def _fate(self) -> str:
        """The text in messages about an operation that must not be repeated."""
        return ""


class UcxAtomicRun(UcxRun):
    """One atomic operation: UCX never gets it twice."""

    operation: FetchOperation

    def _succeed(self) -> None:
        self.operation.previous = self._parts[0].batch.previous
        self._done(None)

    def _fate(self) -> str:
        return "; the atomic operation may or may not have taken place" if self._parts[0].batch.sent else ""


class RunPart:
    """The part of a run on one client worker. The thread that claims it drives it: a waiting one, or the worker's."""

    __slots__ = ("_claimed", "_handed_over", "_run", "batch", "client", "deadline")

    def __init__(self, run: UcxRun, client: ClientWorker, batch: "_ucp.Batch") -> None:
        self.client = client
        self.batch = batch
        self.deadline = run.deadline
        self._run = run
        self._claimed = threading.Lock()
        self._handed_over = False

    def claim(self) -> bool:
        """See `engine.Driven`: true for a part that no thread has begun, or that was handed over."""
        if self._handed_over:
            self._handed_over = False  # it may also have been queued before it was claimed: it counts once
            return True
        return self._claimed.acquire(blocking=False)

    def help(self) -> None:
        """Drive it in the calling thread while that needs no sleep, if no other thread has begun."""
        if self._claimed.acquire(blocking=False):
            self.batch.advance(SPIN_S, self.deadline)
            self._settle_or_hand_over()

    def go_on(self) -> None:
        """Claim it for the calling thread, which has advanced it already; then settle it or hand it over."""
        self._claimed.acquire()
        self._settle_or_hand_over()

    def settle(self) -> None:
        """See `engine.Driven`."""
        self._run.part_over()

    def look(self) -> None:
        """See `engine.Driven`. UCX may try a device for as long as it is told to before it reports a failure."""
        if self._run.owner_lost():
            self._run.cut(self.batch)

    def expire(self) -> None:
        """See `engine.Driven`.

        UCX cannot cancel a transfer, but closing the connection by force completes everything on it.
        """
        self.deadline = _EXPIRED
        self._run.expired = True
        self._run.cut(self.batch)

    def _settle_or_hand_over(self) -> None:
        if self.batch.result != self.client.running:
            self.settle()
            return
        self._handed_over = True
        self.client.adopt(self)
