"""Epoch words: one 8-byte number per registered buffer, in memory that peers can read.

A handle has the number that the word had when the buffer was registered. Dropping the buffer changes the word, so a
peer that finds another number knows that it has not read or written that buffer. Every process starts at a random
number: an old handle never fits a restarted owner by accident. A later buffer uses a word again, with the next number.
"""

import secrets
import threading
from collections import deque
from dataclasses import dataclass

from skipper.dataplane import memfd
from skipper.dataplane._copy import store_word
from skipper.dataplane.identity import OwnerId

WORD = 8
PAGE_BYTES = 1 << 20  # virtual: the system backs what is used; one page serves 131,072 buffers


@dataclass(frozen=True, slots=True)
class Epoch:
    """The word of one buffer.

    Attributes:
        page: The memory that it is in.
        slot: Its index there.
        value: The number while the buffer is valid.
    """

    page: memfd.Mapping
    slot: int
    value: int

    @property
    def address(self) -> int:
        """Address of the word in the owner."""
        return self.page.address + self.slot * WORD


class EpochTable:
    """All epoch words of one process. Thread-safe; `release` may be called by a finalizer."""

    def __init__(self, owner: OwnerId) -> None:
        self._owner = owner
        self._lock = threading.Lock()
        # The word that was freed first is used first, so that old numbers stay invalid for as long as possible.
        self._free: deque[tuple[memfd.Mapping, int, int]] = deque()
        self._page: memfd.Mapping | None = None
        self._base = 0
        self._next = 0

    def acquire(self) -> Epoch:
        """A word for a new buffer, already set.

        Raises:
            RegistrationError: The system has no memory or file descriptor left.
        """
        with self._lock:
            if self._free:
                page, slot, value = self._free.popleft()
            else:
                page, slot, value = self._unused()
        epoch = Epoch(page, slot, value)
        store_word(epoch.address, value)
        return epoch

    def _unused(self) -> tuple[memfd.Mapping, int, int]:
        """A word that no buffer has had yet, with its first number."""
        page = self._page
        if page is None or (self._next + 1) * WORD > page.nbytes:
            page = self._page = memfd.create(self._owner, PAGE_BYTES)
            self._base = 1 + secrets.randbits(62)
            self._next = 0
        slot = self._next
        self._next += 1
        return page, slot, self._base

    def release(self, epoch: Epoch) -> None:
        """Change the word: from now on every handle with this epoch is invalid. Once per epoch."""
        store_word(epoch.address, epoch.value + 1)
        self._free.append((epoch.page, epoch.slot, epoch.value + 1))
