"""Messages between an engine's workers and their trainer that the engine's own calls, without results, cannot carry.

The board is one actor of the trainer's job, in the script's process, where the engine need not be installed. A worker
that reads in the background reports there when it begins and how it ends. The trainer reports there what it has sent
last, for engines that start later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skipper.control import Actor, endpoint, get_or_spawn_controller
from skipper.torchstore.support.blocking import run
from skipper.torchstore.support.deadlines import ask

ASK_S = 30.0
"""Timeout of each call to the board."""

_NAME = "torchstore/engines"
_KEPT_UPDATES = 8


@dataclass(frozen=True)
class LastSend:
    """The last send, for engines that start later.

    Attributes:
        number: The number of sends in this job until now.
        connection: The `TorchStoreInitInfo`, as a dict.
        pieces: The `TorchStoreUpdateInfo` of each piece, as a dict.
        why_gone: Why it can no longer be read; empty if it can.
    """

    number: int
    connection: dict[str, Any]
    pieces: list[dict[str, Any]]
    why_gone: str = ""


@dataclass
class ReaderState:
    """A worker that reads in the background.

    Attributes:
        ended: How it ended: an empty text, or the error. None while it reads.
        answered: The number of the last question that it has answered.
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
        """Record that a worker begins to read."""
        self._updates.setdefault(update, {})[reader] = ReaderState()
        while len(self._updates) > _KEPT_UPDATES:  # of trainers that died
            self._updates.pop(next(iter(self._updates)))

    @endpoint
    def ended(self, update: str, reader: str, failure: str) -> None:
        """Record how a worker's read has ended: everything was read and loaded, or an error."""
        if reader in self._updates.get(update, {}):  # otherwise nobody waits any more
            self._updates[update][reader].ended = failure

    @endpoint
    def answer(self, update: str, reader: str, number: int) -> None:
        """Record that a worker is alive."""
        if reader in self._updates.get(update, {}):
            self._updates[update][reader].answered = number

    @endpoint
    def readers(self, update: str) -> dict[str, ReaderState]:
        """Return the workers of an update."""
        return self._updates.get(update, {})

    @endpoint
    def forget(self, update: str) -> None:
        """Forget an update that has ended."""
        self._updates.pop(update, None)

    @endpoint
    def sent(self, connection: dict[str, Any], pieces: list[dict[str, Any]], why_gone: str) -> None:
        """Record that the trainer has sent a version."""
        self._last = LastSend(1 if self._last is None else self._last.number + 1, connection, pieces, why_gone)

    @endpoint
    def last_send(self) -> LastSend | None:
        """Return the last send, of any trainer."""
        return self._last


def tell(method: str, *arguments: Any) -> Any:
    """Call a method of the board in this process' job.

    Raises:
        ControlError: The job has ended, or the board does not answer.
    """

    async def call() -> Any:
        board = await ask(get_or_spawn_controller(_NAME, EngineBoard), ASK_S)
        return await ask(getattr(board, method).call_one(*arguments), ASK_S)

    return run(call)
