"""What a store's controller does for readers: versions are granted when they are ready, given back, and posted."""

from __future__ import annotations

import time

from skipper.control import Port
from skipper.torchstore.controller.history import History
from skipper.torchstore.controller.peer_read_scheduler import Patience
from skipper.torchstore.controller.recorder import Recorder
from skipper.torchstore.controller.state import Command
from skipper.torchstore.peers.shm_value_board import ValueBoard, pack_answer
from skipper.torchstore.protocol.batches import BatchGrant
from skipper.torchstore.protocol.messages import NEWEST, Grant, Selector, Wanted
from skipper.torchstore.support.pending_answers import PendingAnswers


class Reading:
    """The readers' part of the controller of one store.

    Args:
        recorder: Of the versions, and of the leases on them.
        waiting: The requests that cannot be answered yet.

    Attributes:
        board: Where small values are posted.
    """

    def __init__(self, recorder: Recorder, waiting: PendingAnswers) -> None:
        self.board = ValueBoard()
        self._recorder = recorder
        self._waiting = waiting

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
            is_posted = selector == NEWEST and not self._recorder.keeps_journal  # a board ends with its process
            place = self.board.place(key, only.version, only.inline) if is_posted else None
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
            granted: BatchGrant | None = self._recorder.attempt(
                Command("grant_values", (client, keys)), _is_leased, waited_s=time.monotonic() - since
            )
            return granted

        self._waiting.answer(port, attempt, timeout, lambda: f"no versions of {', '.join(map(repr, keys[:3]))}")

    def repost(self, history: History) -> None:
        """Post on the board what a reader of a key would be granted now."""
        if history.key in self.board:
            number, value = history.newest_inline()
            self.board.post(history.key, number, value)

    def _waited_for(self, keys: tuple[str, ...]) -> str:
        reasons = filter(None, map(self._recorder.state.index.waits_for, keys))
        return "; ".join([f"no version of {', '.join(map(repr, keys))} as asked for", *reasons])

    def _granted(
        self, wanted: tuple[Wanted, ...], client: int, since: float, patience: Patience | None = None
    ) -> tuple[Grant, ...] | None:
        granted: tuple[Grant, ...] | None = self._recorder.attempt(
            Command("grant", (client, wanted)), _are_leased, waited_s=time.monotonic() - since, patience=patience
        )
        return granted


def _are_leased(grants: tuple[Grant, ...] | None) -> bool:
    return any(grant.lease or grant.singles for grant in grants or ())


def _is_leased(grant: BatchGrant | None) -> bool:
    return grant is not None and (bool(grant.lease) or _are_leased(tuple(grant.others.values())))
