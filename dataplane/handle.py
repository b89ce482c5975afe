"""Handles as bytes: a compact, versioned format of our own. Reading one never runs code and never touches memory.

A handle is a *card*, which says who owns the memory and is the same for (nearly) all buffers of a process, and a *body*
for one buffer. Both end with sections, one per backend that may be used: its number, its length, its own bytes. Apart
they let a message with thousands of handles carry the card once, and the reader parse it once.

    handle  b"SKb2", length of card u16, card, body, proof
    card    host u64, pid u32, started u64, token u64, token of the epoch page u64, sections
    body    slot u32, epoch u64, base u64, total u64, offset u64, nbytes u64, flags u8, kind u8, device u16, sections
    section number u8, length u16, bytes

All numbers are little-endian. The proof (see `keys`) is over every byte of card and body: a handle that was altered, or
that another job made, is not parsed. A peer with a valid proof may still be wrong, so every number is checked. A handle
gives access to the memory: send it over authenticated channels only.
"""

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from skipper.dataplane.errors import DescriptorError
from skipper.dataplane.identity import OwnerId
from skipper.dataplane.regions import MemoryKind

SHM = 1
UCX = 2
VERBS = 3
CUDA_IPC = 4

Sections = tuple[bytes, bytes]

_MAGIC = b"SKb2"
_START = struct.Struct("<4sH")
_CARD = struct.Struct("<QIQQQ")
_BODY = struct.Struct("<IQQQQQBBH")
_SECTION = struct.Struct("<BH")
_WRITABLE = 1
_MAX_SECTION = 0xFFFF
ADDRESSES = 1 << 63
"""No process has memory from this address on, and requests with signed addresses could not name it."""


@dataclass(frozen=True, slots=True)
class Card:
    """The owner's half of a handle; `encoded` is its form as bytes."""

    owner: OwnerId
    page_token: int
    sections: dict[int, bytes]
    encoded: bytes

    @classmethod
    def make(cls, owner: OwnerId, page_token: int, sections: dict[int, bytes]) -> "Card":
        """A card with its encoding."""
        head = _CARD.pack(owner.host, owner.pid, owner.started, owner.token, page_token)
        return cls(owner, page_token, sections, head + _encode_sections(sections))


@dataclass(frozen=True, slots=True)
class Handle:
    """One registration of an owner.

    Attributes:
        card: The card of its owner.
        slot: Index of its epoch word in the owner's page.
        epoch: The word's number while the registration is valid.
        base: Address of the first byte in the owner.
        total: Registered bytes.
        writable: Whether peers may write.
        kind: Host or device memory.
        device: Index of the device.
        sections: What the backends need, by number.
    """

    card: Card
    slot: int
    epoch: int
    base: int
    total: int
    writable: bool
    kind: MemoryKind
    device: int
    sections: dict[int, bytes]

    def __str__(self) -> str:
        return f"buffer {self.slot} ({self.total} bytes) of {self.card.owner}"

    def body(self, offset: int, nbytes: int) -> bytes:
        """The second half of a handle of bytes [offset, offset + nbytes) of the registration, without proof."""
        flags = _WRITABLE if self.writable else 0
        head = _BODY.pack(self.slot, self.epoch, self.base, self.total, offset, nbytes, flags, self.kind, self.device)
        return head + _encode_sections(self.sections)


def join(card: bytes, body: bytes) -> bytes:
    """A whole handle from its halves."""
    return _START.pack(_MAGIC, len(card)) + card + body


def split(raw: bytes) -> tuple[bytes, bytes]:
    """The halves of a whole handle, whose proof has not been verified yet.

    Raises:
        DescriptorError: It is not one.
    """
    if len(raw) < _START.size or raw[: len(_MAGIC)] != _MAGIC:
        raise DescriptorError("these bytes are not a buffer handle, or not of this version of Skipper")
    body = _START.size + _START.unpack_from(raw)[1]
    if body > len(raw):
        raise DescriptorError("this buffer handle is cut short")
    return raw[_START.size : body], raw[body:]


def parse(card: bytes, body: bytes) -> tuple[Handle, int, int]:
    """A handle whose proof is valid, with its (offset, nbytes).

    Raises:
        DescriptorError: The halves are cut short, or their numbers contradict each other.
    """
    if len(body) < _BODY.size:
        raise DescriptorError("this buffer handle is cut short")
    slot, epoch, base, total, offset, nbytes, flags, kind, device = _BODY.unpack_from(body)
    if not 0 < nbytes <= total or offset > total - nbytes or base + total > ADDRESSES:
        raise DescriptorError(f"this buffer handle names bytes [{offset}, {offset + nbytes}) of {total}")
    if flags & ~_WRITABLE or kind not in MemoryKind._value2member_map_:
        raise DescriptorError(f"this buffer handle has unknown flags {flags:#x} or memory kind {kind}")
    sections = _parse_sections(body, _BODY.size)
    handle = Handle(parse_card(card), slot, epoch, base, total, bool(flags), MemoryKind(kind), device, sections)
    return handle, offset, nbytes


@lru_cache(maxsize=4096)
def parse_card(card: bytes) -> Card:
    """The owner's half; the same object for the same bytes.

    Raises:
        DescriptorError: It is cut short or holds impossible numbers.
    """
    if len(card) < _CARD.size:
        raise DescriptorError("this buffer handle is cut short")
    host, pid, started, token, page_token = _CARD.unpack_from(card)
    if not 0 < pid <= 0x7FFFFFFF:
        raise DescriptorError(f"this buffer handle names process {pid}")
    return Card(OwnerId(host, pid, started, token), page_token, _parse_sections(card, _CARD.size), card)


def unpack_section(layout: struct.Struct, section: bytes, what: str) -> tuple[Any, ...]:
    """The values at the start of a backend's section.

    Raises:
        DescriptorError: It is shorter than that.
    """
    if len(section) < layout.size:
        raise DescriptorError(f"this buffer handle has a damaged section for {what}")
    return layout.unpack_from(section)


def _encode_sections(sections: dict[int, bytes]) -> bytes:
    parts = []
    for number, content in sections.items():
        if len(content) > _MAX_SECTION:
            raise DescriptorError(f"section {number} of a handle has {len(content)} bytes; {_MAX_SECTION} are possible")
        parts.append(_SECTION.pack(number, len(content)) + content)
    return b"".join(parts)


def _parse_sections(raw: bytes, at: int) -> dict[int, bytes]:
    sections: dict[int, bytes] = {}
    end = len(raw)
    while at < end:
        if end - at < _SECTION.size:
            raise DescriptorError("this buffer handle is cut short")
        number, length = _SECTION.unpack_from(raw, at)
        at += _SECTION.size
        if length > end - at or number in sections:
            raise DescriptorError("this buffer handle has a section that is cut short or there twice")
        sections[number] = raw[at : at + length]
        at += length
    return sections
