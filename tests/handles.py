"""Handles as a test takes them apart, and as a peer that knows the secret but is wrong would make them."""

from skipper.dataplane import handle as handles
from skipper.dataplane import process
from skipper.dataplane.handle import Handle


def parsed(raw: bytes) -> tuple[Handle, int, int]:
    """A handle with its offset and length, whose proof must be good."""
    card, sealed = handles.split(raw)
    return handles.parse(card, process.current().keys.open(card, sealed))


def proved(card: bytes, body: bytes) -> bytes:
    """These halves as a handle with a good proof."""
    return handles.join(card, process.current().keys.seal(card, body))


def proved_handle(handle: Handle, offset: int, nbytes: int) -> bytes:
    """A handle of such a registration with a good proof."""
    return proved(handle.card.encoded, handle.body(offset, nbytes))
