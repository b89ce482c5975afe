"""What a job has written, read from its files; the job may run or have ended.

The files may be cut off at any point, and processes may have written anything. A line that is no record is skipped.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from skipper.control.api import announced
from skipper.control.model.errors import JobNotFoundError
from skipper.control.observe.log_files import (
    OLDER_SUFFIX,
    PROCESSES_FILE,
    SUFFIX,
    about_job,
    folders_home,
    is_running,
    jobs_with_files,
)
from skipper.control.observe.log_lines import MAX_LINE_NBYTES, LineSplitter, label_of
from skipper.control.runtime import join_file

_RECORD = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z) (stdout|stderr) ([FP]) (.*)", re.DOTALL)
_WORD = re.compile(r"(?P<name>[^\[\]:]+)(?:\[(?P<rank>[^\[\]]+)\]|:(?P<index>[\d,]+))?")
_POINT = re.compile(r"'(\w+)': (\d+)")
_MAX_RECORD_NBYTES = 1 << 20
_FOLLOW_S = 0.2


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A line that a process has written.

    Attributes:
        at_s: when its first part was read, as `time.time` counts.
        label: its process as a prefix names it.
        process: its name.
        pid: on its host.
        host: address by which its host was attached; empty for the script's own.
        stream: ``stdout`` or ``stderr``.
        text: the line, safe for a terminal.
    """

    at_s: float
    label: str
    process: str
    pid: int
    host: str
    stream: str
    text: str


@dataclass(slots=True)
class WrittenBy:
    """The process that a file belongs to.

    Attributes:
        file: its name.
        name: name of the process.
        pid: on its host.
        host: address by which the host was attached.
        actors: the meshes of its actors.
    """

    file: str
    name: str
    pid: int
    host: str
    actors: tuple[str, ...]

    def is_meant_by(self, word: str) -> bool:
        """Whether a word chooses it: a pid, or the name of a mesh of processes or actors, with a rank or without.

        ``trainers``, ``trainers[3]``, ``trainers[hosts=1,gpus=3]``, ``trainers[1,3]`` and ``trainers:3``.
        """
        if word.isdecimal():
            return self.pid == int(word)
        asked = _WORD.fullmatch(word)
        if asked is None:
            return word == self.name
        if asked["name"] not in (self.name.partition("{")[0], *self.actors):
            return False
        point = _POINT.findall(self.name)
        if not (rank := asked["rank"] or asked["index"]):
            return True
        parts = [part.strip() for part in rank.split(",")]
        if all("=" in part for part in parts):
            return set(parts) <= {f"{axis}={number}" for axis, number in point}
        return parts == [number for _, number in point]


def decode_processes(content: bytes) -> list[WrittenBy]:
    """Read the list of files and their processes; the last entry of each file counts."""
    found: dict[str, WrittenBy] = {}
    for line in content.splitlines():
        try:
            said = json.loads(line)
            file, name, pid = str(said["file"]), str(said["name"]), int(said["pid"])
            actors = tuple(map(str, said["actors"]))
            host = str(said["host"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
        if "/" not in file and file.endswith(SUFFIX):
            found[file] = WrittenBy(file, name, pid, host, actors)
    return list(found.values())


def decode_record(line: bytes) -> tuple[float, str, bool, bytes] | None:
    """A line of a file without its end: time, stream, whether the line of the process ends there, what was written."""
    record = _RECORD.fullmatch(line)
    if record is None:
        return None
    try:
        moment = datetime.strptime(record[1].decode("ascii"), "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
    except ValueError:  # the 31st of February
        return None
    return moment.timestamp(), record[2].decode("ascii"), record[3] == b"F", record[4]


@dataclass(slots=True)
class _Part:
    """A line that is not complete."""

    at_s: float
    lines: LineSplitter = field(default_factory=LineSplitter)


class EntryMaker:
    """Makes the lines of one process from the records in its file."""

    def __init__(self, by: WrittenBy) -> None:
        self.by = by
        self._label = label_of(by.name, by.actors)
        self._parts: dict[str, _Part] = {}

    def tell(self, by: WrittenBy) -> None:
        """Take what has since become known of the process."""
        self.by = by
        self._label = label_of(by.name, by.actors)

    def take(self, line: bytes) -> Iterator[LogEntry]:
        """The lines that a line of the file ends; a line that is no record ends none."""
        record = decode_record(line)
        if record is None:
            return
        at_s, stream, is_end, content = record
        part = self._parts.get(stream) or _Part(at_s)
        if not is_end:
            self._parts[stream] = part
            part.lines.feed(content, 0.0, 0)
            return
        self._parts.pop(stream, None)
        for text in part.lines.feed(content + b"\n", 0.0, 1):
            yield self._made(part.at_s, stream, text)

    def rest(self) -> Iterator[LogEntry]:
        """The last line if it has no line end; once nothing more comes."""
        for stream, part in self._parts.items():
            if (text := part.lines.end()) is not None:
                yield self._made(part.at_s, stream, text)
        self._parts.clear()

    def _made(self, at_s: float, stream: str, text: str) -> LogEntry:
        return LogEntry(at_s, self._label, self.by.name, self.by.pid, self.by.host, stream, text)


class ProcessLog:
    """Reads what one process has written, from the beginning, and continues as more comes; a context manager."""

    def __init__(self, folder: Path, by: WrittenBy) -> None:
        self._path = folder / by.file
        self._made = EntryMaker(by)
        self._files: list[BinaryIO] = []
        self._rest = b""
        for path in (folder / f"{by.file.removesuffix(SUFFIX)}{OLDER_SUFFIX}", self._path):
            self._open(path)

    @property
    def by(self) -> WrittenBy:
        """Whose it is."""
        return self._made.by

    def tell(self, by: WrittenBy) -> None:
        """Take what has since become known of the process."""
        self._made.tell(by)

    def close(self) -> None:
        """Close the files."""
        while self._files:
            self._files.pop().close()

    def __enter__(self) -> ProcessLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def entries(self) -> Iterator[LogEntry]:
        """The new lines since the last call, oldest first."""
        while True:
            if not self._files:
                self._open(self._path)
                if not self._files:
                    return
            for line in self._whole_lines(self._files[0]):
                yield from self._made.take(line)
            if len(self._files) == 1 and not self._is_replaced():
                return
            self._rest = b""
            self._files.pop(0).close()

    def rest(self) -> Iterator[LogEntry]:
        """The last line if it has no line end; once nothing more comes."""
        return self._made.rest()

    def _open(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            self._files.append(os.fdopen(fd, "rb"))

    def _is_replaced(self) -> bool:
        """Whether the file has been renamed because it was full."""
        try:
            return os.stat(self._path).st_ino != os.fstat(self._files[0].fileno()).st_ino
        except OSError:
            return False

    def _whole_lines(self, file: BinaryIO) -> Iterator[bytes]:
        while line := file.readline(_MAX_RECORD_NBYTES):
            self._rest += line
            if line.endswith(b"\n"):
                yield self._rest[:-1]
                self._rest = b""
            elif len(self._rest) > _MAX_RECORD_NBYTES:
                self._rest = self._rest[: 2 * MAX_LINE_NBYTES]  # only the beginning of such a line is shown


class JobLog:
    """What the processes of one job have written; a context manager.

    Attributes:
        folder: where its files are.
    """

    def __init__(self, folder: Path, who: Sequence[str] = ()) -> None:
        self.folder = folder
        self._who = who
        self._logs: dict[str, ProcessLog] = {}
        self._look()

    @property
    def is_running(self) -> bool:
        """Whether more may come."""
        return is_running(about_job(self.folder))

    def processes(self) -> list[WrittenBy]:
        """The processes that have written something, chosen or not."""
        try:
            return decode_processes((self.folder / PROCESSES_FILE).read_bytes())
        except OSError:
            return []

    def chosen(self) -> list[WrittenBy]:
        """The processes that are read."""
        return [log.by for log in self._logs.values()]

    def entries(self, *, since_s: float = float("-inf")) -> Iterator[LogEntry]:
        """The lines so far, in the order of time."""
        merged = heapq.merge(*(log.entries() for log in self._logs.values()), key=lambda entry: entry.at_s)
        return (entry for entry in merged if entry.at_s >= since_s)

    def follow(self, *, since_s: float = float("-inf")) -> Iterator[LogEntry]:
        """The same, and further lines until the job has ended."""
        while True:
            goes_on = self.is_running
            self._look()
            yield from self.entries(since_s=since_s)
            if not goes_on:
                yield from self.rest(since_s=since_s)
                return
            time.sleep(_FOLLOW_S)

    def rest(self, *, since_s: float = float("-inf")) -> Iterator[LogEntry]:
        """The lines that have no line end yet."""
        rests = (entry for log in self._logs.values() for entry in log.rest() if entry.at_s >= since_s)
        return iter(sorted(rests, key=lambda entry: entry.at_s))

    def close(self) -> None:
        """Close all files."""
        for log in self._logs.values():
            log.close()

    def __enter__(self) -> JobLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _look(self) -> None:
        """Begin to read new processes."""
        for by in self.processes():
            known = self._logs.get(by.file)
            if known is not None:
                known.tell(by)
            elif not self._who or any(map(by.is_meant_by, self._who)):
                self._logs[by.file] = ProcessLog(self.folder, by)


def find_job(job: str | None) -> Path:
    """The folder of a job's files.

    Args:
        job: a folder, the id of a job, the name under which a running one is served, its connection file, or the name
            of the script, whose latest job counts; None: what ``SKIPPER_JOB`` says, or else the user's latest job,
            running jobs first.

    Raises:
        JobNotFoundError: there is none, or it has written nothing.
        ValueError: ``job`` is not a valid name.
    """
    job = job or os.environ.get("SKIPPER_JOB") or None
    if job is not None and (Path(job) / PROCESSES_FILE).is_file():
        return Path(job)
    home = folders_home()
    found = jobs_with_files(home)
    if job is None:
        if not found:
            raise JobNotFoundError(f"no output of a job is saved in {home}")
        return next((folder for folder in found if is_running(about_job(folder))), found[0])
    job_id = _id_of(job)
    for folder in found:
        about = about_job(folder)
        script = Path(str(about.get("script", "")))
        if about.get("job") == job_id or job in (folder.name, about.get("job"), script.name, script.stem):
            return folder
    raise JobNotFoundError(f"no output of a job {job!r} is saved in {home}")


def _id_of(job: str) -> str:
    """The id of a running job by its name or connection file; empty if there is none."""
    with contextlib.suppress(JobNotFoundError, ValueError):
        path = Path(job) if os.sep in job else join_file.path_of(job)
        return join_file.read(path).root.job
    announced_one = announced.find(job)
    return announced_one.root.job if announced_one is not None else ""
