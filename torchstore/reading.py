"""What a store's controller does for readers: versions are granted when they are ready, given back, and posted."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from control import Port
from torchstore.batches import BatchGrant
from torchstore.board import Board, pack_answer
from torchstore.granting import grant_all
from torchstore.index import Index
from torchstore.members import KnownRecords
from torchstore.messages import Grant, Selector, Share, UnknownIdError, Wanted
from torchstore.offers import Patience
from torchstore.process import ProcessId
from torchstore.sharing import BatchDesk
from torchstore.versions import History
from torchstore.waiting import WaitingRoom


class Reading:
    """The readers' part of the controller of one store.

    Args:
        index: What there is to read.
        known: The records that clients have sent.
        waiting: Who waits for something.
        process_of: The process of a client; raises where that is none of the store as it is now.
        batches: Leases many versions at once.

    Attributes:
        board: Where small values are posted.
    """

    def __init__(
        self,
        index: Index,
        known: KnownRecords,
        waiting: WaitingRoom,
        process_of: Callable[[int], ProcessId],
        batches: BatchDesk,
    ) -> None:
        self.board = Board()
        self._index = index
        self._known = known
        self._waiting = waiting
        self._process_of = process_of
        self._batches = batches

    def grant(
        self,
        port: Port[Grant | bytes],
        client: int,
        key: str,
        selector: Selector,
        known: tuple[str, ...],
        timeout: float,
    ) -> None:
        """See `StoreController.acquire`."""
        wanted, since = Wanted(key, selector, known), time.monotonic()

        def attempt() -> Grant | bytes | None:
            grants = self._granted((wanted,), client, since)
            if grants is None:
                return None
            (only,) = grants
            if not only.inline:
                return only
            place = self.board.place(key, only.version, only.inline) if selector == Selector() else None
            return pack_answer(only.version, place, only.inline)

        self._waiting.answer(port, attempt, timeout, lambda: self._waited_for((key,)))

    def grant_all(self, port: Port[tuple[Grant, ...]], client: int, wanted: tuple[Wanted, ...], timeout: float) -> None:
        """See `StoreController.acquire_batch`."""
        keys, since = tuple(request.key for request in wanted[:3]), time.monotonic()
        patience = Patience(max((request.patience_s for request in wanted), default=0.0), self._waiting.wake)

        def attempt() -> tuple[Grant, ...] | None:
            return self._granted(wanted, client, since, patience)

        self._waiting.answer(port, attempt, timeout, lambda: self._waited_for(keys))

    def grant_values(self, port: Port[BatchGrant], client: int, keys: tuple[str, ...], timeout: float) -> None:
        """See `StoreController.acquire_values`."""
        since = time.monotonic()

        def attempt() -> BatchGrant | None:
            return self._batches.grant(keys, self._process_of(client), time.monotonic() - since)

        self._waiting.answer(port, attempt, timeout, lambda: f"no versions of {', '.join(map(repr, keys[:3]))}")

    def release(self, leases: tuple[tuple[str, int], ...], batch: int = 0) -> None:
        """Take leases back, and those of a batch."""
        self._batches.release(batch)
        for key, lease in leases:
            self._index.release(key, lease)
        self._waiting.wake()

    def finish(self, key: str, lease: int, share: Share | None, *, failed: bool) -> None:
        """Take a lease back, and what its reader offers to others; see `Offers.finish`."""
        known = None
        if share is not None:
            with suppress(UnknownIdError):  # then it is no offer: the circle goes to the publisher
                manifest, binding = self._known.manifest(share.manifest), self._known.binding(share.binding)
                known = replace(share, manifest=manifest or share.manifest, binding=binding)
        self._index.finish(key, lease, known, failed=failed)
        self._waiting.wake()

    def repost(self, history: History) -> None:
        """Have the board say of a key what a reader would be granted now."""
        if history.key in self.board:
            number, value = history.newest_inline()
            self.board.post(history.key, number, value)

    def _waited_for(self, keys: tuple[str, ...]) -> str:
        reasons = filter(None, map(self._index.waits_for, keys))
        return "; ".join([f"no version of {', '.join(map(repr, keys))} as asked for", *reasons])

    def _granted(
        self, wanted: tuple[Wanted, ...], client: int, since: float, patience: Patience | None = None
    ) -> tuple[Grant, ...] | None:
        return grant_all(self._index, wanted, self._process_of(client), time.monotonic() - since, patience)
