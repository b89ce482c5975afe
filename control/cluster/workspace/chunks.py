"""Content-defined chunking: cuts bytes into chunks at boundaries from their content, and names these by their hashes.

A boundary depends only on the 32 bytes before it, so that an insertion changes the chunks that it touches and leaves
the others unchanged, wherever they move. (The idea is that of LBFS, Muthitacharoen et al., SOSP 2001; the hash is the
gear hash of Ddelta, Xia et al., 2014, computed for all positions at once.)
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SMALLEST = 4 << 10
LARGEST = 64 << 10
"""Limits for the size of a chunk in bytes; the last of a file may be smaller. On average a chunk has 16 KiB more than
the smallest."""

_MASK = np.uint32(((1 << 14) - 1) << 18)  # the high bits: only they depend on the whole window
_WINDOW = 32
_BLOCK = 4 << 20
"""Bytes that are hashed at once: numpy's temporary arrays stay about as large as the cache."""

HASH_NBYTES = 16

Bytes = bytes | bytearray | memoryview | mmap.mmap


@dataclass(frozen=True, slots=True)
class FileChunk:
    """A piece of a file.

    Attributes:
        digest: BLAKE2b of its bytes, `HASH_NBYTES` long.
        nbytes: its size.
    """

    digest: bytes
    nbytes: int


def _random_words() -> NDArray[np.uint32]:
    """A word for each byte value, the same in every process."""
    words = [hashlib.blake2b(bytes([value]), digest_size=4, person=b"skipper gear").digest() for value in range(256)]
    return np.frombuffer(b"".join(words), dtype="<u4").astype(np.uint32)


_WORDS = _random_words()


def digest(data: Bytes) -> bytes:
    """The name of a chunk."""
    return hashlib.blake2b(data, digest_size=HASH_NBYTES).digest()


def cut(data: Bytes) -> Iterator[memoryview]:
    """The chunks of some bytes, in order, as views."""
    view = memoryview(data).cast("B")
    begin = 0
    for candidate in _candidates(view):
        while candidate - begin > LARGEST:
            yield view[begin : begin + LARGEST]
            begin += LARGEST
        if candidate - begin >= SMALLEST:
            yield view[begin:candidate]
            begin = candidate
    while begin < len(view):
        yield view[begin : begin + LARGEST]
        begin += LARGEST


def _candidates(view: memoryview) -> Iterator[int]:
    """Positions where, by the content, a chunk may end."""
    for begin in range(0, len(view), _BLOCK):
        before = min(begin, _WINDOW - 1)
        hashes = _WORDS[np.frombuffer(view[begin - before : begin + _BLOCK], dtype=np.uint8)]
        span = 1
        while span < _WINDOW:  # from a hash of the last `span` bytes to one of twice as many
            hashes[span:] += hashes[:-span] << np.uint32(span)
            span *= 2
        ends = np.flatnonzero((hashes[before:] & _MASK) == 0)
        yield from (ends + (begin + 1)).tolist()
