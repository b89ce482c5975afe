"""Bytes that UCX has packed for peers, as a handle carries them: with their length and a checksum.

UCX takes such bytes without a length and believes what they say. The handle's own proof keeps strangers out. The
checksum keeps out what a peer itself has cut short or damaged before it proved the handle.

    u16 length, CRC-32 of the bytes, the bytes
"""

import struct
import zlib

from skipper.dataplane.errors import DescriptorError

_HEAD = struct.Struct("<HI")
# As `ucp_rkey_pack` of UCX 1.11 to 1.22 writes it: the map of memory domains, the type of memory, then for each domain
# a length of one byte and as many bytes; more may follow.
_KEY = struct.Struct("<QB")


def pack(*parts: bytes) -> bytes:
    """One after the other."""
    return b"".join([_HEAD.pack(len(part), zlib.crc32(part)) + part for part in parts])


def unpack(packed: bytes, count: int) -> list[bytes]:
    """The parts, of which there must be `count`.

    Raises:
        DescriptorError: They are cut short or damaged.
    """
    parts = []
    at = 0
    for _ in range(count):
        if len(packed) - at < _HEAD.size:
            raise DescriptorError(_DAMAGED)
        length, checksum = _HEAD.unpack_from(packed, at)
        at += _HEAD.size
        part = packed[at : at + length]
        if len(part) < length or zlib.crc32(part) != checksum:
            raise DescriptorError(_DAMAGED)
        parts.append(part)
        at += length
    if at != len(packed):
        raise DescriptorError(_DAMAGED)
    return parts


def require_key(key: bytes) -> None:
    """Check that a packed key is as long as it says. For a key without a domain UCX emulates each access.

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
