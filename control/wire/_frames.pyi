"""Types of `skipper.control.wire._frames`; the words are there."""

from collections.abc import Iterable

from skipper.control.wire.messages import Message

MOST_NBYTES: int

def encode_short(messages: Iterable[Message]) -> bytes | None: ...
def decode_short(frame: bytes) -> list[Message] | None: ...
