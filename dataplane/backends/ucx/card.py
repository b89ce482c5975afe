"""The UCX part of a handle's card: how to reach the owner's worker, and its page of epoch words."""

import os
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from skipper.dataplane.backends.ucx.admission import Contact
from skipper.dataplane.epochs import PAGE_BYTES
from skipper.dataplane.errors import DescriptorError
from skipper.dataplane.handle import ADDRESSES, UCX, Card, unpack_section

HEAD = struct.Struct(
    "<QI"
)  # the page's address and descriptor; then, by `pack_parts`, its key, the contact, the worker
_PART = struct.Struct("<HI")  # length, CRC-32; then the bytes
# The format of `ucp_rkey_pack` in UCX 1.11 to 1.22: the map of memory domains, the type of memory, then for each domain
# a length of one byte and as many bytes; more may follow.
_KEY = struct.Struct("<QB")
_MARKED = struct.Struct("<4sII3H")
_MARK = b"ucx "
_MIXED_SINCE = (1, 22, 0)
"""Within a host 1.18.1 and 1.22.0 have no transport in common. If 1.22.0 connects to an owner with 1.18.1, an assertion
of UCX ends the owner. The versions between have not been tried."""
_SIZE = re.compile(r"(\d+)([kmg]?)b?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SENDS, _TAKES = "TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE"


@dataclass(frozen=True, slots=True)
class UcxCard:
    """The UCX section of a card.

    Attributes:
        page_address: Where the page of epoch words begins in the owner.
        page_fd: Its descriptor there.
        page_key: Its packed key.
        contact: Where to ask before connecting over TCP; None if UCX does not listen on TCP.
        worker: Address of the owner's worker, with its `Traits`.
    """

    page_address: int
    page_fd: int
    page_key: bytes
    contact: Contact | None
    worker: bytes

    def pack(self) -> bytes:
        """The section."""
        contact = b"" if self.contact is None else self.contact.pack()
        return HEAD.pack(self.page_address, self.page_fd) + pack_parts(self.page_key, contact, self.worker)

    @classmethod
    def of(cls, card: Card) -> Self:
        """The UCX section of a card that has one.

        Raises:
            DescriptorError: It is damaged.
        """
        section = card.sections[UCX]
        page_address, page_fd = unpack_section(HEAD, section, "UCX")
        if page_address + PAGE_BYTES > ADDRESSES:
            raise DescriptorError(
                f"this buffer handle is damaged: its epoch page is at {page_address:#x}, where no memory can be"
            )
        key, contact, worker = unpack_parts(section[HEAD.size :], 3)
        require_key(key)
        if not worker:
            raise DescriptorError("this buffer handle has a damaged section for UCX")
        return cls(page_address, page_fd, key, Contact.parse(contact), worker)


def pack_parts(*parts: bytes) -> bytes:
    """Bytes that UCX has packed for peers, concatenated, each with its length and a checksum.

    UCX takes such bytes without a length and trusts their content. The handle's own proof keeps unknown peers out. The
    checksum detects bytes that a peer itself has cut short or damaged before it proved the handle.
    """
    return b"".join([_PART.pack(len(part), zlib.crc32(part)) + part for part in parts])


def unpack_parts(packed: bytes, count: int) -> list[bytes]:
    """The parts, of which there must be `count`.

    Raises:
        DescriptorError: They are cut short or damaged.
    """
    parts = []
    at = 0
    for _ in range(count):
        if len(packed) - at < _PART.size:
            raise DescriptorError(_DAMAGED)
        length, checksum = _PART.unpack_from(packed, at)
        at += _PART.size
        part = packed[at : at + length]
        if len(part) < length or zlib.crc32(part) != checksum:
            raise DescriptorError(_DAMAGED)
        parts.append(part)
        at += length
    if at != len(packed):
        raise DescriptorError(_DAMAGED)
    return parts


def require_key(key: bytes) -> None:
    """Check that a packed key has the length that it states. For a key without a domain UCX emulates each access.

    Raises:
        DescriptorError: It is cut short.
    """
    at = _KEY.size
    if len(key) < at:
        raise DescriptorError(_DAMAGED)
    domains: int = _KEY.unpack_from(key)[0]
    for _ in range(domains.bit_count()):
        if at >= len(key):
            raise DescriptorError(_DAMAGED)
        at += 1 + key[at]
    if at > len(key):
        raise DescriptorError(_DAMAGED)


_DAMAGED = "this buffer handle has a damaged section for UCX"
_UNKNOWN = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Traits:
    """What peers need to know about the UCX of a process and UCX does not tell them. So handles carry it.

    Attributes:
        sends: Bytes of the largest piece that it sends over TCP; 0 if unknown. UCX ends a process that gets a larger
            piece than it takes.
        takes: Bytes of the largest piece that it can take; 0 if unknown.
        version: Of its library; zeros if unknown.
    """

    sends: int
    takes: int
    version: tuple[int, int, int]

    @classmethod
    def of(cls, chosen: Mapping[str, str], version: tuple[int, int, int]) -> Self:
        """The traits of this process, from the options that are set in code and in the environment."""
        sends, takes = (_size(chosen.get(name) or os.environ.get(f"UCX_{name}", "")) for name in (_SENDS, _TAKES))
        return cls(sends, takes, version)

    @classmethod
    def after(cls, address: bytes) -> Self:
        """Read what `pack` has appended to a worker's address, if anything."""
        if len(address) >= _MARKED.size:
            mark, sends, takes, major, minor, patch = _MARKED.unpack_from(address, len(address) - _MARKED.size)
            if mark == _MARK:
                return cls(sends, takes, (major, minor, patch))
        return cls(0, 0, _UNKNOWN)

    def pack(self) -> bytes:
        """As bytes to append to the worker's address; UCX itself knows where the address ends."""
        return _MARKED.pack(_MARK, self.sends, self.takes, *self.version)

    def mismatch(self, peer: "Traits") -> str | None:
        """Why the two cannot talk within a host; None if they can, as far as is known."""
        versions = (self.version, peer.version)
        if self.version == peer.version or _UNKNOWN in versions or min(versions) >= _MIXED_SINCE:
            return None
        here, there = (".".join(map(str, version)) for version in versions)
        return (
            f"it has loaded UCX {there}, and this process {here}, which have no transport within a host in common. A "
            "process in which MPI, or torch, has loaded a UCX uses that one. See that all processes find the same: by "
            "LD_LIBRARY_PATH, or by dataplane.configure(ucx_library=...)"
        )

    def obstacle(self, peer: "Traits") -> str | None:
        """Why the two cannot talk over TCP; None if they can, as far as is known."""
        ways = (self.sends, peer.takes, "here", "there"), (peer.sends, self.takes, "there", "here")
        for sends, takes, one, other in ways:
            if 0 < takes < sends:
                return (
                    f"{_SENDS} is {sends} bytes {one} and {_TAKES} {takes} {other}, where a larger piece would end the "
                    "process; set both to the same wherever one talks to the other (dataplane.configure(ucx={...}))"
                )
        return None


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    size = int(found[1]) * _UNITS[found[2].lower()] if found else 0
    return size if size < 1 << 32 else 0
