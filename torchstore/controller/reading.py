"""The readers' part of a store's controller: versions are granted when they are ready, given back, and posted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skipper.control import Port
from skipper.torchstore.controller.history import History
from skipper.torchstore.controller.peer_read_scheduler import Patience
from skipper.torchstore.controller.recorder import Recorder
from skipper.torchstore.controller.state import Command
from skipper.torchstore.errors import StoreError, StoreTimeoutError
from skipper.torchstore.peers.shm_value_board import ValueBoard, pack_answer
from skipper.torchstore.protocol.batches import BatchGrant
from skipper.torchstore.protocol.messages import NEWEST, Grant, Selector, Wanted


@dataclass(slots=True)
class _Waiter:
    port: Port[Any]
    attempt: Callable[[], Any]
    waited_for: Callable[[], str]
    since: float
    timer: asyncio.TimerHandle


class PendingAnswers:
    """The requests that wait for an answer. For one event loop."""

    def __init__(self) -> None:
        self._waiters: list[_Waiter] = []

    def answer(
        self, port: Port[Any], attempt: Callable[[], Any], timeout: float, waited_for: Callable[[], str]
    ) -> None:
        """Answer now, or after a change, or with a time-out.

        ``attempt`` returns the answer, or None: not yet; an exception is an answer, too. ``waited_for`` ends the
        message of the time-out.
        """
        outcome = _outcome(attempt)
        if outcome is not None:
            _send(port, outcome)
            return

        def expire() -> None:
            self._waiters.remove(waiter)
            _send(port, StoreTimeoutError(f"after {timeout:.3g} s: {waited_for()}"))

        timer = asyncio.get_running_loop().call_later(timeout, expire)
        waiter = _Waiter(port, attempt, waited_for, time.monotonic(), timer)
        self._waiters.append(waiter)

    def wake(self) -> None:
        """After a change: answer the requests whose wait is over."""
        for waiter in list(self._waiters):
            outcome = _outcome(waiter.attempt)
            if outcome is not None:
                self._dismiss(waiter, outcome)

    def dismiss_all(self, error: StoreError) -> None:
        """Answer all with an error: nothing will happen any more."""
        for waiter in list(self._waiters):
            self._dismiss(waiter, error)

    def waiting(self) -> list[tuple[str, str, float]]:
        """The waiting clients, why each has no answer yet, and for how many seconds, longest first; from any thread."""
        now = time.monotonic()
        return [(each.port.receiver, each.waited_for(), round(now - each.since, 1)) for each in list(self._waiters)]

    def _dismiss(self, waiter: _Waiter, outcome: Any) -> None:
        self._waiters.remove(waiter)
        waiter.timer.cancel()
        _send(waiter.port, outcome)


def _outcome(attempt: Callable[[], Any]) -> Any:
    try:
        return attempt()
    except Exception as error:  # noqa: BLE001  (raised further, it would end the controller and not just this wait)
        return error


def _send(port: Port[Any], outcome: Any) -> None:
    if isinstance(outcome, Exception):
        port.exception(outcome)
    else:
        port.send(outcome)


class Reading:
    """The readers' part of the controller of one store.

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
        """Post on the board what a reader of a key would get now."""
        if history.key in self.board:
            number, value = history.newest_inline()
            self.board.post(history.key, number, value)

    def _waited_for(self, keys: tuple[str, ...]) -> str:
        reasons = filter(None, map(self._recorder.state.index.waits_for, keys))
        return "; ".join([f"the requested version of {', '.join(map(repr, keys))}", *reasons])

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
