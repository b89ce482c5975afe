"""What an engine's workers and their trainer tell each other past the engine's own calls, which answer nothing.

The board is one actor of the trainer's job, in its script's process, which need not have the engine installed. A worker
that reads in the background says there that it has begun, and how it ended. The trainer says there what it has sent
last, for engines that start later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skipper.control import Actor, endpoint, get_or_spawn_controller
from skipper.torchstore.support.blocking import run
from skipper.torchstore.support.deadlines import ask

ASK_S = 30.0
"""Bound on each question to the board."""

_NAME = "torchstore/engines"
_KEPT_UPDATES = 8


@dataclass(frozen=True)
class LastSend:
    """What engines that come later load.

    Attributes:
        number: How many sends there were in this job.
        connection: A `TorchStoreInitInfo`, as a dict.
        pieces: Each a `TorchStoreUpdateInfo`, as a dict.
        why_gone: Why it cannot be read any more; empty: it can.
    """

    number: int
    connection: dict[str, Any]
    pieces: list[dict[str, Any]]
    why_gone: str = ""


@dataclass
class ReaderState:
    """A worker that reads in the background.

    Attributes:
        ended: How it ended: an empty text, or what went wrong. None: it reads.
        answered: The last question that it has answered.
    """

    ended: str | None = None
    answered: int = 0


class EngineBoard(Actor):
    """The board itself."""

    def __init__(self) -> None:
        self._updates: dict[str, dict[str, ReaderState]] = {}
        self._last: LastSend | None = None

    @endpoint
    def begun(self, update: str, reader: str) -> None:
        """A worker begins to read."""
        self._updates.setdefault(update, {})[reader] = ReaderState()
        while len(self._updates) > _KEPT_UPDATES:  # of trainers that died
            self._updates.pop(next(iter(self._updates)))

    @endpoint
    def ended(self, update: str, reader: str, failure: str) -> None:
        """It has read and loaded everything, or not."""
        if reader in self._updates.get(update, {}):  # else nobody waits any more
            self._updates[update][reader].ended = failure

    @endpoint
    def answer(self, update: str, reader: str, number: int) -> None:
        """It lives."""
        if reader in self._updates.get(update, {}):
            self._updates[update][reader].answered = number

    @endpoint
    def readers(self, update: str) -> dict[str, ReaderState]:
        """Those of an update."""
        return self._updates.get(update, {})

    @endpoint
    def forget(self, update: str) -> None:
        """The update is over."""
        self._updates.pop(update, None)

    @endpoint
    def sent(self, connection: dict[str, Any], pieces: list[dict[str, Any]], why_gone: str) -> None:
        """The trainer has sent a version."""
        self._last = LastSend(1 if self._last is None else self._last.number + 1, connection, pieces, why_gone)

    @endpoint
    def last_send(self) -> LastSend | None:
        """The last one, of whichever trainer."""
        return self._last


def tell(method: str, *arguments: Any) -> Any:
    """Call a method of the board of the job that this process is in.

    Raises:
        ControlError: The job is over, or the board does not answer.
    """

    async def call() -> Any:
        board = await ask(get_or_spawn_controller(_NAME, EngineBoard), ASK_S)
        return await ask(getattr(board, method).call_one(*arguments), ASK_S)

    return run(call)
