"""Large segments of payloads: they are lent, and the receiver reads them one-sidedly.

The sender sends a descriptor. The receiver reads the bytes when it unpacks the payload, on the thread that needs the
value, and then gives the loan back; it also gives back the loans of a payload that is dropped unread. The loans of a
lost process end. Only this file and `readv` know the details; the first large segment imports `dataplane`.

There are two ways. ``bytes``, which cannot change, stay in place: the receiver reads them there, in one copy, and the
sender keeps them until the loan is given back. Everything else is copied into memory that others can map, before the
call returns: memory that may change, segments so large that reading through the kernel is slower, and segments for a
process that cannot read this one's memory. The sender does not know the last point in advance: each descriptor has a
seal to look for, and the receiver reports whether it found the seal. So the first loan to a process is always a copy.

For a copy, the sender first posts the descriptor and then copies, a block at a time. A counter before the bytes says
how many are there, and an idle receiver reads right behind it. So the two copies of a large value take little more time
than one.
"""

from __future__ import annotations

import itertools
import os
import pickle
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from skipper.control.model.errors import PayloadError
from skipper.control.wire import readv
from skipper.control.wire.buffer_pool import BufferPool

if TYPE_CHECKING:
    from skipper.dataplane import RDMABuffer, Traffic

BULK_NBYTES = 256 << 10
"""Segments from this size on are lent rather than sent."""

FETCH_TIMEOUT_S = 60.0

_BLOCK_NBYTES = 4 << 20
"""The copied part that is visible to the receiver grows by this much at a time."""

_IN_PLACE_NBYTES = 2 << 20
"""Up to this size, reading through the kernel costs less than two copies."""

_STREAM_NBYTES = 8 << 20
"""From this size on, both copies bypass the cache, which is too small for what they read and write."""

_FRONT_NBYTES = 64
"""The space before the bytes: the first eight are the count of bytes that are there; nothing else shares their cache
line."""

_LOOK_AGAIN_S = 50e-6
"""How long a receiver that has caught up waits before its next look."""

_COUNT = struct.Struct("<Q")
_HEADER = struct.Struct(f"<QQ?IQQ{readv.SEAL_NBYTES}s")
"""The number of the loan, the size of the segment in bytes, and whether it is a ``bytes`` object; the lender's process,
the addresses of the segment and the seal in it, and the seal. The pickled buffer with the copy follows, if there is
one."""

_buffers = BufferPool()
"""The memory for segments that are read here."""


class Outgoing:
    """A segment to lend. The sender must `complete` it before its source may change."""

    __slots__ = (
        *("__weakref__", "descriptor"),
        *("_buffer", "_holders", "_is_bytes", "_is_fixed", "_lock", "_memory", "_nbytes", "_seal", "_source"),
    )

    def __init__(self, source: bytes | memoryview) -> None:
        self._nbytes = len(source)
        self._is_bytes = isinstance(source, bytes)
        self._source: memoryview | None = memoryview(source).cast("B")
        self._is_fixed = _is_fixed(self._source)
        self._memory: Any = None
        self._lock = threading.Lock()
        self._seal: readv.MemorySeal | None = None
        self._buffer: RDMABuffer | None = None
        self._holders: Counter[str] = Counter()
        self.descriptor = b""
        """What is sent in its place, while it is lent."""

    def __len__(self) -> int:
        return self._nbytes

    def complete(self) -> None:
        """Copy the rest, unless nobody needs a copy; a receiver sees the progress."""
        with self._lock:
            source = self._source
            if source is None or (self._is_fixed and self._memory is None):
                return
            self._source = None
            try:
                self._copy(source)
            except BaseException:  # an interrupt: no receiver may wait for the rest
                self._take_back()
                raise

    def fetch(self) -> bytes | bytearray:
        """The segment for a receiver in this process, in memory of its own or memory that cannot change."""
        self.complete()
        source = self._source
        content: Any = self._memory[_FRONT_NBYTES:] if source is None else source.obj if self._is_bytes else source
        return bytes(content) if self._is_bytes else bytearray(content)

    def _copy(self, source: memoryview) -> None:
        import numpy as np

        from skipper import dataplane

        self._allocate()
        there, count = np.frombuffer(source, "u1"), self._memory[: _COUNT.size].view("<u8")
        content = self._memory[_FRONT_NBYTES:]
        done = 0
        while done < self._nbytes:
            end = min(done + _BLOCK_NBYTES, self._nbytes)
            dataplane.memcpy(content[done:end], there[done:end], stream=self._nbytes >= _STREAM_NBYTES)
            count[0] = done = end

    def _allocate(self) -> None:
        if self._memory is None:
            from skipper import dataplane

            memory = dataplane.empty_array(_FRONT_NBYTES + self._nbytes, "u1")
            memory[:_FRONT_NBYTES] = 0
            self._memory = memory

    def _lend(self, number: int, *, in_place: bool) -> None:
        """Make a descriptor for one more process, which may be able to read it in place."""
        in_place = in_place and self._is_fixed and self._memory is None and self._nbytes <= _IN_PLACE_NBYTES
        if self._seal is not None and (self._buffer is not None or in_place):
            return
        seal, source, pickled, address = self._seal or readv.MemorySeal(), self._source, b"", 0
        if source is not None and in_place:
            address = readv.address_of(source)
        else:
            from skipper.dataplane import RDMABuffer

            self._allocate()
            self._buffer = RDMABuffer(self._memory, writable=False)
            pickled = pickle.dumps(self._buffer, protocol=5)
        self._seal = seal
        facts = (number, self._nbytes, self._is_bytes, os.getpid(), address, seal.address, seal.content)
        self.descriptor = _HEADER.pack(*facts) + pickled

    def _take_back(self) -> None:
        buffer, self._buffer, self.descriptor = self._buffer, None, b""
        seal, self._seal = self._seal, None
        if seal is not None:
            seal.destroy()
        if buffer is not None:
            buffer.drop()


class Incoming:
    """A segment that another process has lent to this one.

    Args:
        descriptor: the lender's `Outgoing.descriptor`.
        give_back: called once with the number of the loan, and whether the lender's memory was found readable.

    Raises:
        struct.error: this is not a descriptor.
        ValueError: it describes more than memory can hold.
    """

    __slots__ = (
        "_address",
        "_buffer",
        "_give_back",
        "_is_bytes",
        "_is_readable",
        "_nbytes",
        "_number",
        "_pid",
        "_seal",
    )

    def __init__(self, descriptor: bytes, give_back: Callable[[int, bool], None]) -> None:
        self._give_back: Callable[[int, bool], None] | None = None
        self._is_readable = False
        self._number, self._nbytes, self._is_bytes, self._pid, self._address, *seal = _HEADER.unpack_from(descriptor)
        self._seal: tuple[int, bytes] = (seal[0], seal[1])
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
        from skipper.dataplane import DataplaneError

        if self._give_back is None:
            raise PayloadError("this value was already read, and its memory was released")
        try:
            value, memory = _buffers.allocate(self._nbytes, is_bytes=self._is_bytes)
            if self._buffer:
                self._is_readable = readv.is_whole(self._pid, *self._seal)
                _follow(pickle.loads(self._buffer), memory)
            else:
                readv.read(self._pid, self._address, memory)
                self._is_readable = readv.is_whole(self._pid, *self._seal)
                if not self._is_readable:
                    raise ValueError("the process that sent them has released them")
        except (DataplaneError, OSError, ValueError) as error:
            raise PayloadError(f"{self._nbytes} bytes of a message could not be read: {error}") from error
        finally:
            self._end()
        return value

    def _end(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(self._number, self._is_readable)

    def __del__(self) -> None:
        self._end()


class Loans:
    """The segments of this process that others may still read. Safe to use from any thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._lent: dict[int, Outgoing] = {}
        self._number_of: dict[Outgoing, int] = {}
        self._readers: set[str] = set()
        """Processes that have read memory of this one in place."""

    def __len__(self) -> int:
        return len(self._lent)

    def outstanding(self) -> tuple[int, int]:
        """How many segments are lent, and their size in bytes."""
        lent = list(self._lent.values())
        return len(lent), sum(map(len, lent))

    def lend(self, segments: Iterable[object], process_id: str) -> None:
        """Lend the large ones among these segments to a process that will get their descriptors.

        Raises:
            PayloadError: the memory cannot be made readable for others.
        """
        for segment in segments:
            if type(segment) is Outgoing:
                self._lend(segment, process_id)

    def complete(self, segments: Iterable[object]) -> None:
        """Copy as needed so that the sources of these segments, lent or delivered in this process, may change."""
        for segment in segments:
            if type(segment) is Outgoing:
                segment.complete()

    def _lend(self, segment: Outgoing, process_id: str) -> None:
        from skipper.dataplane import DataplaneError

        with self._lock:
            number = self._number_of.get(segment) or next(self._numbers)
            try:
                segment._lend(number, in_place=process_id in self._readers)
            except DataplaneError as error:
                raise PayloadError(f"{len(segment)} bytes cannot be lent to {process_id}: {error}") from error
            self._lent[number] = segment
            self._number_of[segment] = number
            segment._holders[process_id] += 1

    def give_back(self, number: int, process_id: str, *, is_readable: bool) -> None:
        """Note that a process has read a segment, or never will, and whether it can read this process' memory."""
        with self._lock:
            segment = self._lent.get(number)
            if segment is not None:
                (self._readers.add if is_readable else self._readers.discard)(process_id)
                segment._holders[process_id] -= 1
                self._end_if_done(number, segment)

    def forget(self, process_id: str) -> None:
        """End the loans of a process that is gone."""
        with self._lock:
            self._readers.discard(process_id)
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
        if not +segment._holders:  # the holders with a positive count
            del self._lent[number], self._number_of[segment]
            segment._take_back()


def traffic() -> Traffic | None:
    """What this process has moved through the data plane; None if it has not used that. Imports nothing."""
    read: Callable[[], Traffic] | None = getattr(sys.modules.get("skipper.dataplane"), "traffic", None)
    return None if read is None else read()


def _is_fixed(view: memoryview) -> bool:
    owner = view.obj
    while isinstance(owner, memoryview):
        owner = owner.obj
    return isinstance(owner, bytes)


def _follow(buffer: RDMABuffer, memory: memoryview) -> None:
    """Read a segment into ``memory`` while its bytes are being copied there.

    Raises:
        DataplaneError: it cannot be read, or its owner stands still.
    """
    from skipper.dataplane import TransferTimeoutError

    count, front = bytearray(_COUNT.size), buffer.at(0, _COUNT.size)
    deadline = time.monotonic() + FETCH_TIMEOUT_S
    done, nbytes = 0, len(memory)
    while done < nbytes:
        front.read_into(count, timeout=FETCH_TIMEOUT_S).get()
        (there,) = _COUNT.unpack(count)
        if there > done:
            part = buffer.at(_FRONT_NBYTES + done, there - done)
            part.read_into(memory[done:there], timeout=FETCH_TIMEOUT_S, stream=nbytes >= _STREAM_NBYTES).get()
            done = there
        elif time.monotonic() > deadline:
            raise TransferTimeoutError(f"{done} of {nbytes} bytes were there after {FETCH_TIMEOUT_S:g} s")
        else:
            time.sleep(_LOOK_AGAIN_S)
