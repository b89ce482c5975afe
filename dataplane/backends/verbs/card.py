"""The verbs part of a handle, as bytes and as objects."""

import struct
from dataclasses import dataclass
from functools import lru_cache

from skipper.dataplane.backends.base import Remote
from skipper.dataplane.backends.handshake import TOKEN_BYTES, is_target
from skipper.dataplane.backends.verbs.device import Atomics
from skipper.dataplane.backends.verbs.port import MOST_PORTS
from skipper.dataplane.epochs import PAGE_BYTES, WORD
from skipper.dataplane.errors import DescriptorError
from skipper.dataplane.handle import ADDRESSES, VERBS, Card, Handle

_CARD = struct.Struct(f"<{TOKEN_BYTES}sQBB")  # then a key per rail, then the address as text
_BODY = struct.Struct("<Q")  # then a key per rail
_KEY = struct.Struct("<I")
_DAMAGED = "this buffer handle has a damaged section for verbs"


@dataclass(frozen=True, slots=True)
class Rkeys:
    """Remote keys of a registration, one per rail: for the memory, and for its epoch page."""

    memory: tuple[int, ...]
    page: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VerbsCard:
    """The verbs section of a card.

    Attributes:
        token: Identifies the owner.
        page: Where the epoch page begins.
        page_keys: Its keys, one per rail of the owner.
        atomics: What atomic operations on the owner's memory are atomic with.
        address: Where it listens.
    """

    token: bytes
    page: int
    page_keys: tuple[int, ...]
    atomics: Atomics
    address: str

    def pack(self) -> bytes:
        """The section."""
        head = _CARD.pack(self.token, self.page, self.atomics, len(self.page_keys))
        return head + _pack_keys(self.page_keys) + self.address.encode("ascii")


def pack_body(begin: int, keys: tuple[int, ...]) -> bytes:
    """The section of a registration: the address of its first byte in requests, and its keys."""
    return _BODY.pack(begin) + _pack_keys(keys)


@lru_cache(maxsize=1024)
def parse_section(section: bytes) -> VerbsCard:
    """How to reach the owner of a card.

    Raises:
        DescriptorError: The section is damaged.
    """
    if len(section) < _CARD.size:
        raise DescriptorError(_DAMAGED)
    token, page, atomics, rails = _CARD.unpack_from(section)
    end = _CARD.size + rails * _KEY.size
    text = section[end:]
    address = text.decode("ascii") if text.isascii() else ""
    if not is_target(address):
        raise DescriptorError(_DAMAGED)
    if not 0 < rails <= MOST_PORTS or atomics not in Atomics._value2member_map_ or page + PAGE_BYTES > ADDRESSES:
        raise DescriptorError(_DAMAGED)
    return VerbsCard(token, page, _unpack_keys(section[_CARD.size : end]), Atomics(atomics), address)


def verbs_card_of(card: Card) -> VerbsCard:
    """The verbs section of a card that has one.

    Raises:
        DescriptorError: It is damaged.
    """
    return parse_section(card.sections[VERBS])


def remote_of(handle: Handle) -> Remote:
    """A registration to reach over verbs.

    Raises:
        DescriptorError: The handle's section is damaged, or its numbers contradict each other.
    """
    contact, section = verbs_card_of(handle.card), handle.sections[VERBS]
    if (handle.slot + 1) * WORD > PAGE_BYTES:
        raise DescriptorError(f"the handle of {handle} reaches beyond the owner's memory")
    if len(section) != _BODY.size + len(contact.page_keys) * _KEY.size:
        raise DescriptorError(_DAMAGED)
    (begin,) = _BODY.unpack_from(section)
    if begin + handle.total > ADDRESSES:
        raise DescriptorError(_DAMAGED)
    keys = Rkeys(_unpack_keys(section[_BODY.size :]), contact.page_keys)
    return Remote(handle, begin, contact.page + handle.slot * WORD, keys)


def _pack_keys(keys: tuple[int, ...]) -> bytes:
    return b"".join(map(_KEY.pack, keys))


def _unpack_keys(raw: bytes) -> tuple[int, ...]:
    return tuple(key for (key,) in _KEY.iter_unpack(raw))
