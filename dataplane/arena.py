"""Memory that peers can map, in pieces of any size: large ones are a memfd each, small ones share one.

A block is returned when the last view of it is deleted, and its pages are kept for the next block of that size: copying
into new pages is several times slower than into pages that were used before. In a forked child the arena forgets all
of it, because it would otherwise hand out memory that the parent uses.
"""

import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field

from skipper.dataplane import memfd
from skipper.dataplane._copy import HUGE_PAGE, Block
from skipper.dataplane.identity import OwnerId, page_size

_LARGE = 64 << 20  # from here on a block is a memfd of its own
_CHUNK = 256 << 20  # what smaller blocks share: address space only, the system backs the pages that are used
_ALIGN = 64  # a cache line: adjacent blocks of different owners do not share one
_PAGE_ALIGNED = 64 << 10  # blocks from here on begin and end at a page
HUGE_BLOCK = 2 * HUGE_PAGE  # blocks from here on begin at a huge page, and ask for those that fit into them
_KEEP_BYTES = 1 << 30  # freed memory whose pages stay ready for reuse
_REMOVE = 1 << 20  # beyond that, freed ranges of this size give their pages back
_WASTE = 8  # a kept memfd is reused for a block when at most 1/8 of it stays idle


@dataclass(slots=True)
class _FreeList:
    """A memfd with its free ranges, as sorted (offset, nbytes) that never touch."""

    mapping: memfd.Mapping
    free: list[tuple[int, int]] = field(default_factory=list)

    def take(self, nbytes: int, unit: int) -> int | None:
        """Offset, a multiple of `unit`, of `nbytes` now taken from the first range that has them; or None."""
        for i, (offset, length) in enumerate(self.free):
            begin = -(-offset // unit) * unit
            left = offset + length - begin - nbytes
            if left >= 0:
                around = [(offset, begin - offset), (begin + nbytes, left)]
                self.free[i : i + 1] = [piece for piece in around if piece[1]]
                return begin
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Put a range back and join it with its neighbours."""
        i = bisect_right(self.free, (offset, 0))
        if i < len(self.free) and offset + nbytes == self.free[i][0]:
            nbytes += self.free.pop(i)[1]
        if i > 0 and sum(self.free[i - 1]) == offset:
            offset, before = self.free[i - 1][0], self.free[i - 1][1]
            self.free[i - 1] = (offset, before + nbytes)
        else:
            self.free.insert(i, (offset, nbytes))


class Arena:
    """All shareable memory of one process. Thread-safe."""

    def __init__(self, owner: OwnerId) -> None:
        self._owner = owner
        self._lock = threading.Lock()
        self._by_address: list[tuple[int, memfd.Mapping]] = []
        self._chunks: dict[int, _FreeList] = {}  # by address of the mapping
        self._kept: list[tuple[int, int, memfd.Mapping]] = []  # (nbytes, address, mapping), idle and touched
        self._kept_bytes = 0  # of those, and roughly of the freed ranges of chunks
        # A block may die wherever the garbage collector runs, also below our own lock: its range is queued here and
        # taken in by the next thread that gets the lock.
        self._returned: deque[tuple[memfd.Mapping, int, int]] = deque()
        self._disowned = False

    def disown(self) -> None:
        """In a forked child: never touch this memory again, it is the parent's."""
        self._disowned = True

    def allocate(self, nbytes: int) -> Block:
        """A block of `nbytes` > 0 bytes, aligned to a cache line (large ones to a page).

        Raises:
            RegistrationError: The system has no memory or file descriptor left.
        """
        with self._lock:
            self._collect()
            if nbytes >= _LARGE:
                mapping, offset, taken = self._large(nbytes), 0, 0
            else:
                unit = page_size() if nbytes >= _PAGE_ALIGNED else _ALIGN
                taken = -(-nbytes // unit) * unit
                mapping, offset = self._small(taken, HUGE_PAGE if nbytes >= HUGE_BLOCK else unit)
        if nbytes >= HUGE_BLOCK:
            mapping.memory.advise_huge(offset, nbytes)
        block = Block(mapping.address + offset, nbytes, mapping)
        weakref.finalize(block, self._give_back, mapping, offset, taken).atexit = False
        return block

    def locate(self, address: int, nbytes: int) -> tuple[memfd.Mapping, int] | None:
        """The mapping that holds [address, address + nbytes) and the offset in it; None for memory from elsewhere."""
        with self._lock:
            i = bisect_right(self._by_address, address, key=lambda entry: entry[0]) - 1
            if i < 0:
                return None
            mapping = self._by_address[i][1]
        offset = address - mapping.address
        return (mapping, offset) if offset + nbytes <= mapping.nbytes else None

    def _large(self, nbytes: int) -> memfd.Mapping:
        i = bisect_right(self._kept, (nbytes, 0), key=lambda entry: entry[:2])
        if i < len(self._kept) and self._kept[i][0] - nbytes <= self._kept[i][0] // _WASTE:
            mapping = self._kept.pop(i)[2]
            self._kept_bytes -= mapping.nbytes
            return mapping
        return self._map(nbytes)

    def _small(self, nbytes: int, unit: int) -> tuple[memfd.Mapping, int]:
        for chunk in self._chunks.values():
            offset = chunk.take(nbytes, unit)
            if offset is not None:
                self._kept_bytes = max(0, self._kept_bytes - nbytes)
                return chunk.mapping, offset
        mapping = self._map(_CHUNK)
        chunk = _FreeList(mapping, [(nbytes, mapping.nbytes - nbytes)])
        self._chunks[mapping.address] = chunk
        return mapping, 0

    def _map(self, nbytes: int) -> memfd.Mapping:
        mapping = memfd.create(self._owner, nbytes)
        insort(self._by_address, (mapping.address, mapping), key=lambda entry: entry[0])
        return mapping

    def _give_back(self, mapping: memfd.Mapping, offset: int, taken: int) -> None:
        self._returned.append((mapping, offset, taken))
        if not self._disowned and self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        """Add the returned ranges; the caller holds the lock."""
        while self._returned:
            mapping, offset, taken = self._returned.popleft()
            if taken == 0:
                self._keep(mapping)
                continue
            chunk = self._chunks[mapping.address]
            chunk.give(offset, taken)
            self._kept_bytes += taken
            if chunk.free == [(0, mapping.nbytes)] and len(self._chunks) > 1:
                del self._chunks[mapping.address]
                self._unmap(mapping)
                self._kept_bytes = max(0, self._kept_bytes - mapping.nbytes)
            elif taken >= _REMOVE and self._kept_bytes > _KEEP_BYTES:
                mapping.memory.remove(offset, taken)
                self._kept_bytes -= taken

    def _keep(self, mapping: memfd.Mapping) -> None:
        if self._kept_bytes + mapping.nbytes > _KEEP_BYTES:
            self._unmap(mapping)
        else:
            insort(self._kept, (mapping.nbytes, mapping.address, mapping), key=lambda entry: entry[:2])
            self._kept_bytes += mapping.nbytes

    def _unmap(self, mapping: memfd.Mapping) -> None:
        i = bisect_right(self._by_address, mapping.address, key=lambda entry: entry[0]) - 1
        del self._by_address[i]
        mapping.retire()
