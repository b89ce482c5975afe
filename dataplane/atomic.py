"""Atomic operations on one 8-byte word of a buffer: what is asked for, and what is given back."""

import asyncio
import enum
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from skipper.dataplane.operation import Operation

WORD_BYTES = 8
"""Size of a word, and its alignment: what RDMA devices and CPUs have in common."""


_MODULUS = 1 << 64
_LOWEST = -(1 << 63)


class AtomicKind(enum.Enum):
    """What is done to the word."""

    FETCH_ADD = 0
    COMPARE_AND_SWAP = 1


@dataclass(frozen=True, slots=True)
class Atomic:
    """One operation on one word, its numbers reduced to [0, 2**64).

    Attributes:
        kind: What is done.
        operand: What is added, or what the word becomes.
        compare: What the word must hold for a swap to take place.
    """

    kind: AtomicKind
    operand: int
    compare: int = 0

    @classmethod
    def fetch_add(cls, value: Any) -> "Atomic":
        """Add modulo 2**64.

        Raises:
            TypeError: `value` is no integer.
            ValueError: It is not in [-2**63, 2**64).
        """
        return cls(AtomicKind.FETCH_ADD, _reduced(value, "value"))

    @classmethod
    def compare_and_swap(cls, expected: Any, desired: Any) -> "Atomic":
        """Set to `desired` where it is `expected`.

        Raises:
            TypeError: One is no integer.
            ValueError: One is not in [-2**63, 2**64).
        """
        return cls(AtomicKind.COMPARE_AND_SWAP, _reduced(desired, "desired"), _reduced(expected, "expected"))


class FetchOperation(Operation):
    """An atomic operation under way: `get()` and `await` give what the word held before it, as in [0, 2**64).

    It takes place once or not at all. Where an error leaves open which of the two, the error says so: the operation is
    never tried again behind the caller's back.

    Attributes:
        previous: For backends: to be set before `part_done(None)`.
    """

    __slots__ = ("previous",)

    def __init__(self, parts: int = 1) -> None:
        super().__init__(parts)
        self.previous = 0

    @classmethod
    def succeeded(cls, previous: int) -> "FetchOperation":
        """One that is over already."""
        operation = cls(0)
        operation.previous = previous
        return operation

    # A caller that treats this as a plain operation ignores what it is given.
    def get(self, timeout: float | None = None) -> int:  # type: ignore[override]
        """Wait until it is over.

        Args:
            timeout: Seconds to wait here; None waits as long as the operation's own timeout lets it run. When it
                passes, the operation goes on.

        Returns:
            What the word held before. A swap has taken place when that is what it expected.

        Raises:
            DataplaneError: As the operation failed; see `dataplane.errors`.
            TransferTimeoutError: This timeout, or the operation's own, passed.
        """
        super().get(timeout)
        return self.previous

    def __await__(self) -> Generator[asyncio.Future[None], None, int]:  # type: ignore[override]
        yield from super().__await__()
        return self.previous


def require_word(offset: Any, nbytes: int, address: int | None) -> int:
    """The offset of an 8-byte word within `nbytes` bytes.

    Args:
        offset: As the caller gave it.
        nbytes: Of the buffer.
        address: Of the buffer's first byte in its owner; None where the owner has dropped it.

    Raises:
        TypeError: The offset is no integer.
        ValueError: The word sticks out, or is not aligned in the owner's memory.
    """
    if isinstance(offset, bool) or not isinstance(offset, (int, np.integer)):
        raise TypeError(f"offset must be an integer number of bytes, not {type(offset).__name__}")
    at = int(offset)
    if at < 0 or at + WORD_BYTES > nbytes:
        raise ValueError(f"bytes [{at}, {at + WORD_BYTES}) are not a word within {nbytes} bytes")
    if address is not None and (address + at) % WORD_BYTES:
        raise ValueError(
            f"the word at offset {at} lies at address {address + at:#x} of its owner, which is no multiple of "
            f"{WORD_BYTES}; atomic operations need it to be"
        )
    return at


def _reduced(value: Any, role: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{role} must be an integer, not {type(value).__name__}")
    number = int(value)
    if not _LOWEST <= number < _MODULUS:
        raise ValueError(f"{role} must be in [-2**63, 2**64), not {number}")
    return number % _MODULUS
