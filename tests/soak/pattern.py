"""What bytes must be: a function of the buffer, its version and their place, so that a wrong one can be recognised."""

import numpy as np
from numpy.typing import NDArray

MAX_BYTES = 16 << 20

Bytes = NDArray[np.uint8]

_TABLE = np.random.default_rng(20261121).integers(0, 1 << 64, MAX_BYTES // 8 + 1, np.uint64)
_MASK = (1 << 64) - 1


def content(buffer: int, version: int, begin: int, end: int) -> Bytes:
    """Bytes [begin, end) of a version of a buffer. No two versions, buffers or places have a word in common."""
    first, last = begin // 8, -(-end // 8)
    words = _TABLE[first:last] ^ np.uint64(_mixed(buffer << 32 | version))
    return words.view(np.uint8)[begin - 8 * first : end - 8 * first]


def described(buffer: int, versions: int, offset: int, wanted: Bytes, found: Bytes) -> str:
    """Where the first wrong byte is, and whether it belongs to another version of the buffer.

    Args:
        buffer: Its number.
        versions: How many it has had.
        offset: Of `wanted` and `found` in it.
        wanted: What should have been there.
        found: What was.
    """
    at = int(np.flatnonzero(wanted != found)[0])
    end = min(at + 16, len(found))
    stale = [v for v in range(versions) if (content(buffer, v, offset + at, offset + end) == found[at:end]).all()]
    origin = f"those of version {stale[0]}" if stale else "of no version of it"
    count = int((wanted != found).sum())
    return (
        f"buffer {buffer}, version {versions - 1}: {count} of {len(found)} bytes are wrong from byte {offset + at} on: "
        f"{found[at:end].tobytes().hex()} in place of {wanted[at:end].tobytes().hex()}, {origin}"
    )


def _mixed(number: int) -> int:
    """Splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _MASK
    return number ^ number >> 31
