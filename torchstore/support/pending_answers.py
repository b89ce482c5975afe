"""Requests that cannot be answered yet: their response ports are kept, and answered when something has happened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skipper.control import Port
from skipper.torchstore.errors import StoreError, StoreTimeoutError


@dataclass(slots=True)
class _Waiter:
    port: Port[Any]
    attempt: Callable[[], Any]
    timer: asyncio.TimerHandle


class PendingAnswers:
    """The requests that wait for an answer. To be used in one event loop."""

    def __init__(self) -> None:
        self._waiters: list[_Waiter] = []

    def answer(
        self, port: Port[Any], attempt: Callable[[], Any], timeout: float, waited_for: Callable[[], str]
    ) -> None:
        """Answer now, or when something has changed, or with a time-out.

        Args:
            port: Where the answer goes.
            attempt: Returns the answer, or None: not yet. What it raises is the answer too.
            timeout: In seconds.
            waited_for: Ends the sentence of the time-out's message; asked when it is needed.
        """
        outcome = _outcome(attempt)
        if outcome is not None:
            _send(port, outcome)
            return

        def expire() -> None:
            self._waiters.remove(waiter)
            _send(port, StoreTimeoutError(f"after {timeout:.3g} s: {waited_for()}"))

        waiter = _Waiter(port, attempt, asyncio.get_running_loop().call_later(timeout, expire))
        self._waiters.append(waiter)

    def wake(self) -> None:
        """Something has changed: answer those whose wait is over."""
        for waiter in list(self._waiters):
            outcome = _outcome(waiter.attempt)
            if outcome is not None:
                self._dismiss(waiter, outcome)

    def dismiss_all(self, error: StoreError) -> None:
        """Nothing will happen any more."""
        for waiter in list(self._waiters):
            self._dismiss(waiter, error)

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
