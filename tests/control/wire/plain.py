"""Messages that can be compared."""

from dataclasses import replace
from typing import TypeVar

from skipper.control.wire.messages import Message

M = TypeVar("M", bound=Message)


def plain(message: M) -> M:
    """A message that has arrived, whose payload is bytes rather than views of a frame."""
    return replace(message, payload=tuple(bytes(segment) for segment in message.payload))  # type: ignore[arg-type]
