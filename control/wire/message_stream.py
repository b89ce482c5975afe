"""`MessageStream`: one end of a stream of messages of raw bytes between two processes, on any transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

Metadata = tuple[tuple[str, str | bytes], ...]
"""Names that end in ``-bin`` have bytes for values, the others text."""


@dataclass(frozen=True, slots=True)
class Status:
    """How a stream ended: gRPC's name for it, and a text."""

    name: str
    details: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.details}" if self.details else self.name


CLOSED = Status("OK")


class User(Protocol):
    """The user of a stream; gets all its events on the stream's thread."""

    def opened(self, metadata: dict[str, Any]) -> None:
        """The other side has answered; only on the dialing side."""

    def received(self, message: bytes) -> bool:
        """A message has come; return False if no more are wanted."""

    def sent(self) -> None:
        """The last message is sent, and the next may follow."""

    def ended(self, status: Status) -> None:
        """The stream is over; called once."""


class MessageStream(Protocol):
    """One end of a stream.

    Attributes:
        user: the object that gets the events; it may be replaced on the stream's thread.
        flows: whether to ask for the next message whatever the user returns for the last.
        max_nbytes: of one message.
    """

    user: User
    flows: bool
    max_nbytes: int

    def send(self, message: bytes) -> bool:
        """Send a message; from any thread, one at a time. Does nothing after the end.

        Returns:
            Whether it is sent already. If not, the next one may be sent once `User.sent` was called.
        """

    def flush_soon(self, flush: Callable[[], object]) -> bool:
        """Call ``flush()`` soon, at the latest when a thread of this process waits; False if it will not be called."""

    def receive(self) -> None:
        """Ask for the first message; the others follow."""

    def end(self) -> None:
        """End the stream; from any thread. It may be called again."""


class DialingStream(MessageStream, Protocol):
    """The end that dials."""

    def start(self, name: str) -> None:
        """Begin to report to the user; ``name``: of the stream's thread, if it has one of its own."""


class DialedStream(MessageStream, Protocol):
    """The end that was dialed.

    Attributes:
        metadata: what the other side said first.
    """

    metadata: dict[str, Any]

    def shown(self) -> list[bytes] | None:
        """PEM: the certificates that the other end has shown to TLS, its own first; None without TLS."""

    def answer(self, metadata: Metadata) -> None:
        """Send the metadata, and ask for the first message."""

    def turn_away(self, name: str, details: str) -> None:
        """End the stream with a gRPC status (its name in lower case) and a reason; from any thread."""
