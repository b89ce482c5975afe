"""Files of JSON lines with a bounded size, of which a record consists.

Once `BoundedLines.append` has returned, a line survives the end of the job and of the writer. Lines that do not fit
on a full disk are counted, and the file never has incomplete lines.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from skipper.control.support.private_file import open_log, open_own, replace

SUFFIX = ".jsonl"
OLDER_SUFFIX = ".older.jsonl"

MAX_LINE_NBYTES = 32 << 20
"""A longer line does not belong to a record."""


class BoundedLines:
    """Writes one kind of lines into a folder. For one thread at a time.

    Once the newer of the two files has half of the allowed size, its lines move to the older one.

    Args:
        folder: folder of the record.
        kind: the name of the files, without their endings.
        max_nbytes: limit of both files together.
        keeps_all_times: whether the older file keeps lines from the beginning on, fewer of older times; if False, it
            keeps all of the newest lines.

    Attributes:
        lost: lines that could not be written since the last one that could.
        problem: why they could not be written.
    """

    def __init__(self, folder: Path, kind: str, max_nbytes: int, *, keeps_all_times: bool = False) -> None:
        self.lost = 0
        self.problem = ""
        self._path = folder / f"{kind}{SUFFIX}"
        self._older = folder / f"{kind}{OLDER_SUFFIX}"
        self._max_file_nbytes = max_nbytes // 2
        self._keeps_all_times = keeps_all_times
        self._fd = -1
        self._size = 0

    def append(self, line: Mapping[str, Any]) -> bool:
        """Write a line; returns whether it was written."""
        content = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            if self._fd < 0:
                self._fd = open_log(self._path)
                self._size = os.fstat(self._fd).st_size
            self._write(content)
        except OSError as error:  # for example, the disk is full: the next line may fit again
            self.lost += 1
            self.problem = str(error)
            return False
        if self._size >= self._max_file_nbytes:
            with contextlib.suppress(OSError):  # it will be tried again after the next line
                self._roll()
        return True

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, content: bytes) -> None:
        view = memoryview(content)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)  # no half lines
            raise
        self._size += len(content)

    def _roll(self) -> None:
        self.close()
        if self._keeps_all_times:
            lines = [line for path in (self._older, self._path) for line in _raw_lines(path)]
            with contextlib.suppress(OSError):  # no room for a third file: the older lines are given up
                replace(self._older, b"".join(lines[::2]), 0o600)  # half of two halves
                self._path.unlink()
                return
        self._path.rename(self._older)


def read_lines(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    """The lines of one kind, oldest first. Invalid lines are skipped: a writer may be killed in the middle of one.

    Raises:
        UnsafeFileError: (a `PermissionError`) a file is a link, or not this user's: it is not read.
    """
    for suffix in (OLDER_SUFFIX, SUFFIX):
        for line in _raw_lines(folder / f"{kind}{suffix}"):
            try:
                content = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(content, dict):
                yield content


def _raw_lines(path: Path) -> Iterator[bytes]:
    try:
        fd = open_own(path)
    except FileNotFoundError:
        return
    with os.fdopen(fd, "rb") as file:
        while line := file.readline(MAX_LINE_NBYTES):
            if line.endswith(b"\n"):
                yield line
