"""Large segments of payloads: they are copied into memory that others can read, and read from there one-sidedly.

The only file of this package that knows `dataplane`, which is imported with the first large segment. What is sent is a
descriptor. The receiver reads the bytes when it unpacks the payload, on the thread that wants the value, and then gives
the loan back; so it does with a payload that is dropped unread. The loans of a process that is lost are over.

The sender posts the descriptor first and copies then, a block at a time, and counts in front of the bytes how many are
there: a receiver that has nothing else to do reads behind it. So the two copies of a large value take little more time
than one, and a block is read while it is in the cache. The call returns once all is copied, as if it had been before.
"""

from __future__ import annotations

import itertools
import pickle
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from control.errors import PayloadError
from control.wire.warm import Warm

if TYPE_CHECKING:
    from dataplane import RDMABuffer

BULK_NBYTES = 256 << 10
"""Segments from this size on are lent rather than sent."""

FETCH_TIMEOUT_S = 60.0

_BLOCK_NBYTES = 2 << 20
"""So much is copied before the receiver hears of it."""

_FRONT_NBYTES = 64
"""In front of the bytes: the count of those that are there, in the first eight, and nothing that would share a cache
line with it."""

_LOOK_AGAIN_S = 50e-6
"""How long a receiver that has caught up leaves the sender alone."""

_COUNT = struct.Struct("<Q")
_HEADER = struct.Struct("<QQ?")
"""The number of the loan, the size of the segment in bytes, and whether it is a ``bytes`` object."""

_warm = Warm()
"""Where what is read here is put."""


class Outgoing:
    """A segment to be lent: a copy in memory that the others of this host map, so that their reading is a copy, too.

    Lending ``bytes`` as they are would save a copy, and lose more: reading what is not mapped goes through the kernel,
    page by page. Who sends a segment has to `complete` it before what it is a copy of may change.
    """

    __slots__ = (
        *("__weakref__", "descriptor"),
        *("_buffer", "_holders", "_is_bytes", "_lock", "_memory", "_nbytes", "_source"),
    )

    def __init__(self, source: bytes | memoryview) -> None:
        import dataplane

        self._nbytes = len(source)
        self._is_bytes = isinstance(source, bytes)
        self._source: memoryview | None = memoryview(source).cast("B")
        self._memory = dataplane.empty_array(_FRONT_NBYTES + self._nbytes, "u1")
        self._memory[:_FRONT_NBYTES] = 0
        self._lock = threading.Lock()
        self._buffer: RDMABuffer | None = None
        self._holders: Counter[str] = Counter()
        self.descriptor = b""
        """What is sent in its place, as long as it is lent."""

    def __len__(self) -> int:
        return self._nbytes

    def complete(self) -> None:
        """Copy what has not been copied yet, telling a receiver as it goes."""
        with self._lock:
            source, self._source = self._source, None
            if source is None:
                return
            try:
                self._copy(source)
            except BaseException:  # an interrupt: nobody may wait for the rest
                self._take_back()
                raise

    def fetch(self) -> bytes | bytearray:
        """The segment for a receiver in this very process, in memory of its own."""
        self.complete()
        content = self._memory[_FRONT_NBYTES:]
        return content.tobytes() if self._is_bytes else bytearray(content)

    def _copy(self, source: memoryview) -> None:
        import numpy as np

        there, count = np.frombuffer(source, "u1"), self._memory[: _COUNT.size].view("<u8")
        content = self._memory[_FRONT_NBYTES:]
        done = 0
        while done < self._nbytes:
            end = min(done + _BLOCK_NBYTES, self._nbytes)
            content[done:end] = there[done:end]  # without the interpreter lock
            count[0] = done = end

    def _lend(self, number: int) -> None:
        from dataplane import RDMABuffer

        self._buffer = RDMABuffer(self._memory, writable=False)
        self.descriptor = _HEADER.pack(number, self._nbytes, self._is_bytes) + pickle.dumps(self._buffer, protocol=5)

    def _take_back(self) -> None:
        buffer, self._buffer, self.descriptor = self._buffer, None, b""
        if buffer is not None:
            buffer.drop()


class Incoming:
    """A segment that another process has lent to this one.

    Args:
        descriptor: what `Outgoing.descriptor` was there.
        give_back: called once with the number of the loan.

    Raises:
        struct.error: this is no descriptor.
        ValueError: it describes more than memory can hold.
    """

    __slots__ = ("_buffer", "_give_back", "_is_bytes", "_nbytes", "_number")

    def __init__(self, descriptor: bytes, give_back: Callable[[int], None]) -> None:
        self._give_back: Callable[[int], None] | None = None
        self._number, self._nbytes, self._is_bytes = _HEADER.unpack_from(descriptor)
        if self._nbytes > sys.maxsize:
            raise ValueError(f"a segment of {self._nbytes} bytes")
        self._buffer = descriptor[_HEADER.size :]
        self._give_back = give_back

    def __len__(self) -> int:
        return int(self._nbytes)

    def fetch(self) -> bytes | bytearray:
        """Read the segment, and give it back; once.

        Raises:
            PayloadError: it cannot be read any more.
        """
        from dataplane import DataplaneError

        if self._give_back is None:
            raise PayloadError("this value has been read before, and its memory was given back then")
        try:
            buffer: RDMABuffer = pickle.loads(self._buffer)
            value, memory = _warm.allocate(self._nbytes, is_bytes=self._is_bytes)
            _follow(buffer, memory)
        except (DataplaneError, ValueError) as error:
            raise PayloadError(f"{self._nbytes} bytes of a message could not be read: {error}") from error
        finally:
            self._end()
        return value

    def _end(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(self._number)

    def __del__(self) -> None:
        self._end()


class Loans:
    """The segments of this process that others may still read. Safe to use from any thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._lent: dict[int, Outgoing] = {}
        self._number_of: dict[Outgoing, int] = {}

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self, segments: Iterable[object], process_id: str) -> None:
        """Lend the large ones among these segments to a process that is about to get their descriptors.

        Raises:
            PayloadError: the memory cannot be made readable for others.
        """
        for segment in segments:
            if type(segment) is Outgoing:
                self._lend(segment, process_id)

    def complete(self, segments: Iterable[object]) -> None:
        """See to it that what these segments are copies of may change: what has been lent, or is delivered here."""
        for segment in segments:
            if type(segment) is Outgoing:
                segment.complete()

    def _lend(self, segment: Outgoing, process_id: str) -> None:
        from dataplane import DataplaneError

        with self._lock:
            if segment not in self._number_of:
                number = next(self._numbers)
                try:
                    segment._lend(number)
                except DataplaneError as error:
                    raise PayloadError(f"{len(segment)} bytes cannot be lent to {process_id}: {error}") from error
                self._lent[number] = segment
                self._number_of[segment] = number
            segment._holders[process_id] += 1

    def give_back(self, number: int, process_id: str) -> None:
        """Take note that a process has read a segment, or never will."""
        with self._lock:
            segment = self._lent.get(number)
            if segment is not None:
                segment._holders[process_id] -= 1
                self._end_if_done(number, segment)

    def forget(self, process_id: str) -> None:
        """End the loans of a process that is gone."""
        with self._lock:
            for number, segment in list(self._lent.items()):
                segment._holders.pop(process_id, None)
                self._end_if_done(number, segment)

    def clear(self) -> None:
        """End all loans."""
        with self._lock:
            for number, segment in list(self._lent.items()):
                segment._holders.clear()
                self._end_if_done(number, segment)

    def _end_if_done(self, number: int, segment: Outgoing) -> None:
        if not +segment._holders:  # those with a positive count
            del self._lent[number], self._number_of[segment]
            segment._take_back()


def _follow(buffer: RDMABuffer, memory: memoryview) -> None:
    """Read a segment into ``memory`` as its bytes come to be there.

    Raises:
        DataplaneError: it cannot be read, or its owner stands still.
    """
    from dataplane import TransferTimeoutError

    count = bytearray(_COUNT.size)
    deadline = time.monotonic() + FETCH_TIMEOUT_S
    done, nbytes = 0, len(memory)
    while done < nbytes:
        buffer.at(0, _COUNT.size).read_into(count, timeout=FETCH_TIMEOUT_S).get()
        (there,) = _COUNT.unpack(count)
        if there > done:
            part = buffer.at(_FRONT_NBYTES + done, there - done)
            part.read_into(memory[done:there], timeout=FETCH_TIMEOUT_S).get()
            done = there
        elif time.monotonic() > deadline:
            raise TransferTimeoutError(f"{done} of {nbytes} bytes were there after {FETCH_TIMEOUT_S:g} s")
        else:
            time.sleep(_LOOK_AGAIN_S)
