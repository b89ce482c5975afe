"""One operation over UCX from its submission to its end: who drives it, and what a failure means.

A failed transfer to a living owner is tried once more over a new connection: then the words tell a buffer that was
dropped from a transport that does not work, and a connection that was cut to keep another operation's deadline does no
harm to this one.
"""

import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from dataplane.backends.base import Done, Remote
from dataplane.copying import dropped
from dataplane.errors import OwnerDiedError, TransferError, TransferTimeoutError
from dataplane.memory import Region
from dataplane.operation import Helper

if TYPE_CHECKING:
    from dataplane.backends import _ucp
    from dataplane.backends.ucx import UcxPeer

SPIN_S = 100e-6
"""A round trip over loopback takes some 10 us, waking another thread as long again."""

_EXPIRED = math.inf


class Run:
    """One operation under way: its present batch, and what to do when that is over.

    Whoever claims it drives it: the thread that waits for the result, or the engine's.
    """

    def __init__(
        self,
        peer: "UcxPeer",
        make: "Callable[[], _ucp.Batch]",
        batch: "_ucp.Batch",
        remotes: tuple[Remote, ...],
        pinned: tuple[Region, ...],
        deadline: float,
        done: Done,
    ) -> None:
        self.batch = batch
        self.deadline = deadline
        self._peer = peer
        self._make = make
        self._remotes = remotes
        self._pinned = pinned
        self._done = done
        self._due = deadline
        self._tries = 0
        self._claimed = threading.Lock()
        self._handed_over = False

    def begin(self, *, begun: bool) -> Helper | None:
        """Go on after the submitting thread has done (`begun`) or not done its share."""
        if not begun:
            self._peer.engine.adopt(self)
            return self._help
        self._claimed.acquire()
        if self.batch.result != self._peer.engine.ucp.RUNNING and not self.settle():
            return None
        self._hand_over()
        return None

    def claim(self) -> bool:
        """See `ucx_engine.Driven`: one that nobody has begun, or that was handed over. Only the engine calls it."""
        if self._handed_over:
            self._handed_over = False  # the same run may be queued from before it was claimed: it counts once
            return True
        return self._claimed.acquire(blocking=False)

    def settle(self) -> bool:
        """See `ucx_engine.Driven`."""
        ucp = self._peer.engine.ucp
        result = self.batch.result
        if result == ucp.FINISHED:
            self._done(None)
        elif result == ucp.CHANGED:
            self._done(dropped(self._remotes[self.batch.changed()[0]].handle))
        else:
            return self._settle_failure(result)
        return False

    def expire(self) -> None:
        """See `ucx_engine.Driven`.

        UCX cannot cancel a transfer, but to close the connection by force completes all that is on it.
        """
        self.deadline = _EXPIRED
        self.batch.endpoint.close()

    def _settle_failure(self, status: int) -> bool:
        ucp = self._peer.engine.ucp
        if self.deadline == _EXPIRED:
            message = f"the deadline passed before the transfer with {self._peer.owner} was complete"
            self._done(TransferTimeoutError(message, status=status))
            return False
        cut_by_another = status == ucp.CANCELED
        self.batch.endpoint.close()
        if not cut_by_another and self._peer.wait_for_exit():
            self._done(OwnerDiedError(f"{self._peer.owner} is gone", status=status))
            return False
        self._tries += not cut_by_another
        if self._tries > 1:
            self._done(self._peer.failure(ucp.status_text(status), status))
            return False
        try:
            self.batch = self._make()
        except TransferError as error:
            self._done(error)
            return False
        return True

    def _help(self) -> None:
        """Drive it in the thread that waits for it, if nobody has begun."""
        if not self._claimed.acquire(blocking=False):
            return
        ucp = self._peer.engine.ucp
        if self.batch.advance(SPIN_S, self._due) != ucp.RUNNING and not self.settle():
            return
        self._hand_over()

    def _hand_over(self) -> None:
        self._handed_over = True
        self._peer.engine.adopt(self)
