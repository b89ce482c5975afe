"""The journal of a store's controller, in memory that survives it: a checkpoint of its state, and the changes since.

Two anonymous memory files belong to another process, which outlives the controller. One of them contains a checkpoint
of the state and the changes since then. When the changes have grown larger than the checkpoint, a new checkpoint is
written into the other file. Its header is written last, and makes it replace the first file. A controller that dies
before that leaves the first file unchanged. A controller that dies within a record leaves a record with a wrong
checksum, which does not count.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from skipper.torchstore.errors import JournalError
from skipper.torchstore.support.process import ProcessId, this_process

_NAME = "skipper-journal"
_LINK = f"/memfd:{_NAME} (deleted)"
_HEADER = struct.Struct("<8sQQI")  # magic, token, number of the checkpoint, checksum of these
_MAGIC = b"SKjrnl01"
_RECORD = struct.Struct("<II")  # bytes, checksum
_LARGEST = 1 << 30  # bytes of a record; a checkpoint consists of several
_AHEAD = 1 << 20  # bytes of memory that are requested at once
_LEAST_CHANGES = 16 << 20  # bytes before the next checkpoint
_LOCK_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class JournalAddress:
    """Where a journal is.

    Attributes:
        owner: The process that owns the memory.
        files: Its descriptors there.
        token: In the headers of both files: a descriptor's number may belong to another file by now.
    """

    owner: ProcessId
    files: tuple[int, int]
    token: int


class JournalMemory:
    """The two files, in the process that outlives the controller.

    Raises:
        JournalError: The system has no descriptors left.
    """

    def __init__(self) -> None:
        self._files: list[int] = []
        try:
            for _ in range(2):
                self._files.append(os.memfd_create(_NAME, os.MFD_CLOEXEC))
                os.fchmod(self._files[-1], 0o600)
            token = int.from_bytes(os.urandom(8), "little")
            os.pwrite(self._files[0], _header(token, 1), 0)
        except OSError as error:
            self.close()
            raise JournalError(f"not enough memory for a journal: {error.strerror}") from error
        self.address = JournalAddress(this_process(), (self._files[0], self._files[1]), token)

    def close(self) -> None:
        """Release the memory; idempotent."""
        while self._files:
            os.close(self._files.pop())


class Journal:
    """A journal, opened by the controller that writes it. Only one can have it open.

    An earlier controller may take ``timeout`` seconds to end.

    Raises:
        JournalError: It does not exist, or another controller still writes it.
    """

    def __init__(self, address: JournalAddress, timeout: float) -> None:
        self._token = address.token
        self._files: list[int] = []
        try:
            for number in address.files:
                self._files.append(_open(address.owner, number))
            self._lock(timeout)
            numbers = [self._number_of(fd) for fd in self._files]
        except BaseException:
            self.close()
            raise
        if not any(numbers):
            self.close()
            raise JournalError("the journal has no header")
        self._number = max(numbers)
        self._at = numbers.index(self._number)
        self._end = self._room = _HEADER.size  # the ends of what was read or written, and of its memory
        self._checkpoint_nbytes = 0

    @property
    def has_checkpoint(self) -> bool:
        """Whether it begins with a checkpoint."""
        return self._number > 1

    def read(self) -> Iterator[bytes]:
        """Its records: first the checkpoint, if there is one, in pieces that end with an empty one, then the changes.

        The iterator must be exhausted before anything is written.
        """
        fd, size = self._files[self._at], os.fstat(self._files[self._at]).st_size
        at = _HEADER.size
        while at + _RECORD.size <= size:
            nbytes, expected = _RECORD.unpack(os.pread(fd, _RECORD.size, at))
            record = os.pread(fd, nbytes, at + _RECORD.size) if nbytes <= _LARGEST else b""
            if len(record) != nbytes or self._sum(record) != expected:
                break  # torn: no client got an answer for it
            at += _RECORD.size + nbytes
            self._end = at
            if not record:
                self._checkpoint_nbytes = at
            yield record
        os.ftruncate(fd, self._end)
        self._room = self._end

    def prepare(self, nbytes: int) -> None:
        """Get the memory to add a change of this size.

        Raises:
            JournalError: There is no memory for it.
        """
        needed = self._end + _RECORD.size + nbytes
        if needed <= self._room:
            return
        if nbytes > _LARGEST:
            raise JournalError(f"a change of {nbytes:,} bytes is too large for the journal")
        room = needed + _AHEAD
        try:
            os.posix_fallocate(self._files[self._at], self._end, room - self._end)
        except OSError as error:
            raise JournalError(f"not enough memory for the journal: {error.strerror}") from error
        self._room = room

    def append(self, record: bytes) -> None:
        """Add a change.

        Raises:
            JournalError: There is no memory for it. Nothing was added.
        """
        self.prepare(len(record))
        self._write(self._files[self._at], self._end, record)
        self._end += _RECORD.size + len(record)

    @property
    def needs_checkpoint(self) -> bool:
        """Whether it is time for another checkpoint."""
        return self._end - self._checkpoint_nbytes > max(_LEAST_CHANGES, self._checkpoint_nbytes)

    def postpone_checkpoint(self) -> None:
        """Wait with the next checkpoint until there are as many changes once more."""
        self._checkpoint_nbytes = self._end

    def write_checkpoint(self, checkpoint: bytes) -> None:
        """Replace the changes by a checkpoint of the state.

        Raises:
            JournalError: There is no memory for it. The journal is unchanged.
        """
        old, new = self._files[self._at], self._files[1 - self._at]
        end = _HEADER.size
        try:
            os.ftruncate(new, 0)
            for begin in range(0, len(checkpoint), _LARGEST):
                piece = checkpoint[begin : begin + _LARGEST]
                self._write(new, end, piece)
                end += _RECORD.size + len(piece)
            self._write(new, end, b"")
            end += _RECORD.size
            os.pwrite(new, _header(self._token, self._number + 1), 0)
        except OSError as error:
            os.ftruncate(new, 0)
            raise JournalError(f"not enough memory for the journal: {error.strerror}") from error
        os.ftruncate(old, 0)
        self._at, self._number = 1 - self._at, self._number + 1
        self._end = self._room = self._checkpoint_nbytes = end

    def _sum(self, record: bytes) -> int:
        return zlib.crc32(record, self._token & 0xFFFFFFFF | 1)  # for no bytes it is not 0, unlike new memory

    def _write(self, fd: int, at: int, record: bytes) -> None:
        data = memoryview(_RECORD.pack(len(record), self._sum(record)) + record)
        while data:
            written = os.pwrite(fd, data, at)
            data, at = data[written:], at + written

    def close(self) -> None:
        """Close it, so that another controller can write it; idempotent."""
        while self._files:
            os.close(self._files.pop())

    def _lock(self, timeout: float) -> None:
        """Become the only writer. The kernel takes the lock from a writer that dies."""
        end = time.monotonic() + timeout
        while True:
            try:
                return fcntl.flock(self._files[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise JournalError("another controller still writes the journal") from None
                time.sleep(_LOCK_POLL_S)

    def _number_of(self, fd: int) -> int:
        """The number of the checkpoint in a file; 0: there is none."""
        header = os.pread(fd, _HEADER.size, 0)
        if len(header) < _HEADER.size:
            return 0
        magic, token, number, _ = _HEADER.unpack(header)
        return number if (magic, token) == (_MAGIC, self._token) and header == _header(token, number) else 0


def _header(token: int, number: int) -> bytes:
    head = struct.pack("<8sQQ", _MAGIC, token, number)
    return head + struct.pack("<I", zlib.crc32(head))


def _open(owner: ProcessId, number: int) -> int:
    path = f"/proc/{owner.pid}/fd/{number}"
    try:
        # Check the name first: opening anything else with that number (a pipe, a terminal) could have effects.
        if not owner.is_alive() or os.readlink(path) != _LINK:
            raise JournalError(f"{owner} has closed the journal")
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise JournalError(f"the journal of {owner} cannot be opened: {error.strerror}") from error
