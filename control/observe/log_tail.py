"""`OutputTail`: the end of the output of a job's processes and what comes after it; always bounded.

Unlike `JobLog`, it does not begin at the beginning, keeps no file open, and skips output if it cannot keep up.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from skipper.control.observe.log_files import OLDER_SUFFIX, PROCESSES_FILE, SUFFIX, about_job, is_running
from skipper.control.observe.log_history import EntryMaker, LogEntry, WrittenBy, decode_processes

KEPT_ENTRIES = 2000
MOST_TEXT = 4000
"""Longer lines are cut to this many characters."""

READ_NBYTES = 512 << 10
"""Bytes that are read of all files at a time: some ten thousand lines, which take a tenth of a second."""
MIN_FILE_NBYTES = 4 << 10
MAX_FILE_NBYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class TailView:
    """The output so far.

    Attributes:
        entries: the new ones, each with its number, which grows.
        last: number of the newest entry.
        skipped_nbytes: bytes skipped since the first read, because output came faster than it could be read.
        processes: all processes that have written something, whether chosen or not.
        is_running: whether more may come.
    """

    entries: list[tuple[int, LogEntry]]
    last: int
    skipped_nbytes: int
    processes: list[WrittenBy]
    is_running: bool


class OutputTail:
    """Follows the files of a job. For any thread.

    Args:
        folder: where they are.
        who: the name of a mesh of processes or actors, with a rank or without, or a pid (see `WrittenBy`); empty: all.
    """

    def __init__(self, folder: Path, who: str) -> None:
        self._folder = folder
        self._who = who
        self._lock = threading.Lock()
        self._tails: dict[str, _FileTail] = {}
        self._kept: deque[tuple[int, LogEntry]] = deque(maxlen=KEPT_ENTRIES)
        self._last = 0

    def look(self, after: int) -> TailView:
        """The entries after the one of a number; 0: all that are kept."""
        with self._lock:
            goes_on = is_running(about_job(self._folder))
            processes = self._processes()
            budget = min(max(READ_NBYTES // max(len(self._tails), 1), MIN_FILE_NBYTES), MAX_FILE_NBYTES)
            came = [entry for tail in self._tails.values() for entry in tail.read(budget)]
            if not goes_on:
                came += [entry for tail in self._tails.values() for entry in tail.rest()]
            for entry in sorted(came, key=lambda entry: entry.at_s):
                self._last += 1
                self._kept.append((self._last, _cut(entry)))
            entries = [(number, entry) for number, entry in self._kept if number > after]
            skipped_nbytes = sum(tail.skipped_nbytes for tail in self._tails.values())
            return TailView(entries, self._last, skipped_nbytes, processes, goes_on)

    def _processes(self) -> list[WrittenBy]:
        try:
            processes = decode_processes((self._folder / PROCESSES_FILE).read_bytes())
        except OSError:
            return []
        for by in processes:
            known = self._tails.get(by.file)
            if known is not None:
                known.tell(by)
            elif not self._who or by.is_meant_by(self._who):
                self._tails[by.file] = _FileTail(self._folder, by)
        return processes


def _cut(entry: LogEntry) -> LogEntry:
    excess = len(entry.text) - MOST_TEXT
    return entry if excess <= 0 else replace(entry, text=f"{entry.text[:MOST_TEXT]} … {excess} characters more")


class _FileTail:
    """Reads the end of one process' file, and what is added to it."""

    def __init__(self, folder: Path, by: WrittenBy) -> None:
        self.skipped_nbytes = 0
        self._path = folder / by.file
        self._older = folder / f"{by.file.removesuffix(SUFFIX)}{OLDER_SUFFIX}"
        self._made = EntryMaker(by)
        self._inode = 0
        self._offset = 0
        self._rest = b""

    def tell(self, by: WrittenBy) -> None:
        """Take what has since become known of the process."""
        self._made.tell(by)

    def read(self, budget: int) -> Iterator[LogEntry]:
        """The last ``budget`` bytes of what has come since the last call."""
        with _Opened(self._path) as file:
            if file.inode != self._inode != 0:  # it was full, and another file was begun
                with _Opened(self._older) as older:
                    if older.inode == self._inode:
                        yield from self._read(older, budget)
                self._offset, self._rest = 0, b""
            is_first, self._inode = self._inode == 0, file.inode
            skipped_nbytes = self.skipped_nbytes
            yield from self._read(file, budget)
            if is_first:
                self.skipped_nbytes = skipped_nbytes  # it was written before the first read

    def rest(self) -> Iterator[LogEntry]:
        """The last line if it has no line end; once nothing more comes."""
        return self._made.rest()

    def _read(self, file: _Opened, budget: int) -> Iterator[LogEntry]:
        begin = max(self._offset, file.nbytes - budget)
        content = file.read(begin, file.nbytes - begin)
        skipped_nbytes, self._offset = begin - self._offset, begin + len(content)
        if skipped_nbytes > 0:
            self.skipped_nbytes += skipped_nbytes
            self._rest = b""
            _, _, content = content.partition(b"\n")  # the rest of a record
        *lines, self._rest = (self._rest + content).split(b"\n")
        self._rest = self._rest[-MAX_FILE_NBYTES:]
        for line in lines:
            yield from self._made.take(line)


class _Opened:
    """A file that is open for a moment; one that cannot be opened is empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self.inode = 0
        self.nbytes = 0

    def __enter__(self) -> _Opened:
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return self
        status = os.fstat(self._fd)
        if stat.S_ISREG(status.st_mode):
            self.inode, self.nbytes = status.st_ino, status.st_size
        return self

    def __exit__(self, *error: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def read(self, begin: int, nbytes: int) -> bytes:
        """That many bytes from there on, or fewer if there are not as many."""
        return os.pread(self._fd, nbytes, begin) if nbytes > 0 else b""
