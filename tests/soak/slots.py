"""What the soak knows of each buffer: what it holds, and what has been done to it."""

import itertools
import threading
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skipper.dataplane import RDMABuffer
from tests.soak.owners import Owner, OwnerGoneError
from tests.soak.pattern import Bytes, content

_numbers = itertools.count(1)


class Held:
    """One registration of a buffer, from `make` to its end.

    Attributes:
        number: Of the buffer; no other one has it.
        life: Of the owner it belongs to.
        handle: As a reader has it.
        nbytes: Its length.
        shadow: What it must hold.
        words: The same as 8-byte words.
        versions: How many contents were written or begun.
        drop_begun: When somebody began to drop it.
        drop_done: When the owner had dropped it.
        doubtful: Whether a write of unknown fate makes its content unknown.
    """

    def __init__(self, owner: Owner, nbytes: int) -> None:
        """Register it.

        Raises:
            OwnerGoneError: There is no such process at the moment.
        """
        self.number = next(_numbers)
        raw, self.life = owner.register(self.number, nbytes)
        self.owner = owner
        self.handle = RDMABuffer.deserialize(raw)
        self.nbytes = nbytes
        padded: NDArray[np.uint8] = np.zeros(-(-nbytes // 8) * 8, np.uint8)
        self.shadow: Bytes = padded[:nbytes]
        self.shadow[:] = content(self.number, 0, 0, nbytes)
        self.words: NDArray[np.uint64] = padded[: nbytes // 8 * 8].view(np.uint64)
        self.versions = 1
        self.drop_begun: float | None = None
        self.drop_done: float | None = None
        self.doubtful = False

    def drop(self) -> None:
        """Let the owner drop it, once."""
        if self.drop_begun is None:
            self.drop_begun = time.monotonic()
            if self.owner.drop(self.number, self.life):
                self.drop_done = time.monotonic()


class Slot:
    """A place for one buffer after the other, of the same size and owner; one worker's own."""

    def __init__(self, owner: Owner, nbytes: int) -> None:
        self.owner = owner
        self.nbytes = nbytes
        self.held = Held(owner, nbytes)
        self._lock = threading.Lock()

    def drop(self) -> None:
        """Drop what it holds; whoever uses it finds out."""
        with self._lock:
            self.held.drop()

    def renew(self, old: Held) -> bool:
        """Put another buffer in place of `old`; whether the owner was there to make one."""
        with self._lock:
            if self.held is not old:
                return True
            try:
                old.drop()
                self.held = Held(self.owner, self.nbytes)
            except OwnerGoneError:
                return False
            return True


@dataclass
class Count:
    """How often a shared word was added to, while it was in one registration."""

    held: Held
    begun: int = 0
    confirmed: int = 0

    def __post_init__(self) -> None:
        self.first = int(self.held.words[0])
        self.seen: set[int] = set()


class Counter:
    """A word that all workers add one to. Thread-safe."""

    def __init__(self, owner: Owner) -> None:
        self.slot = Slot(owner, 64)
        self._lock = threading.Lock()
        self.count = Count(self.slot.held)

    def begin(self) -> tuple[Count, int]:
        """Before an addition: the present count, and what is confirmed so far."""
        with self._lock:
            if self.count.held is not self.slot.held:
                self.count = Count(self.slot.held)
            self.count.begun += 1
            return self.count, self.count.confirmed

    def confirm(self, count: Count, confirmed_before: int, previous: int) -> str | None:
        """After one that succeeded: what is wrong with what it gave."""
        with self._lock:
            number = (previous - count.first) % (1 << 64)
            count.confirmed += 1
            if number in count.seen:
                return f"two additions to one word both found {number}: one of them is lost"
            count.seen.add(number)
            if not confirmed_before <= number < count.begun:
                return f"an addition found {number}, with {confirmed_before} done before it and {count.begun} begun"
            return None

    def audit(self) -> str | None:
        """While nobody adds: whether the word holds what was added, give or take what nobody can know."""
        count = self.count
        held = count.held
        if held is not self.slot.held or held.drop_begun is not None or held.life.killed_at is not None:
            return None
        number = (held.handle.fetch_add(0).get() - count.first) % (1 << 64)
        if not count.confirmed <= number <= count.begun:
            return f"a word was added to {count.confirmed} times for sure, {count.begun} at most, and holds {number}"
        return None
