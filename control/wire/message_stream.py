"""`MessageStream`: one end of a stream of messages of raw bytes between two processes, whatever carries it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

Metadata = tuple[tuple[str, str | bytes], ...]
"""Names that end in ``-bin`` have bytes for values, the others text."""


@dataclass(frozen=True, slots=True)
class Status:
    """How a stream ended: gRPC's name for it, and words."""

    name: str
    details: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.details}" if self.details else self.name


CLOSED = Status("OK")


class User(Protocol):
    """Who has a stream, and is told of everything about it on the stream's thread."""

    def opened(self, metadata: dict[str, Any]) -> None:
        """The other side has answered; on the dialing side only."""

    def received(self, message: bytes) -> bool:
        """A message has come; False where no more are wanted."""

    def sent(self) -> None:
        """The last message is out, and the next may be sent."""

    def ended(self, status: Status) -> None:
        """The stream is over; told once."""


class MessageStream(Protocol):
    """One end of a stream.

    Attributes:
        user: the object that is told what happens; it may be replaced on the stream's thread.
        flows: whether to ask for the next message whatever the user says to the last.
        max_nbytes: of one message.
    """

    user: User
    flows: bool
    max_nbytes: int

    def send(self, message: bytes) -> bool:
        """Send a message; from any thread, one at a time. Does nothing after the end.

        Returns:
            Whether it is out already. If not, the next one may be sent once `User.sent` was called.
        """

    def flush_soon(self, flush: Callable[[], object]) -> bool:
        """Call ``flush()`` in a moment: at the latest when a thread of this process waits. False where nobody will."""

    def receive(self) -> None:
        """Ask for the first message; the others follow."""

    def end(self) -> None:
        """End the stream; from any thread, and as often as one likes."""


class DialingStream(MessageStream, Protocol):
    """The end that dials."""

    def start(self, name: str) -> None:
        """Begin to tell the user; ``name`` is that of the stream's thread, where it has one of its own."""


class DialedStream(MessageStream, Protocol):
    """The end that was dialed.

    Attributes:
        metadata: what the other side said first.
    """

    metadata: dict[str, Any]

    def shown(self) -> list[bytes] | None:
        """PEM: the certificates that the other end has shown to TLS, its own first; None where there is no TLS."""

    def answer(self, metadata: Metadata) -> None:
        """Say the first thing, and ask for the first message."""

    def turn_away(self, name: str, details: str) -> None:
        """End the stream with a status of gRPC's (its name in lower case) and a reason; from any thread."""
