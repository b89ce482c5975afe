"""The record of a run: a private folder of bounded size that shows what happened, during the run and afterwards.

==================  ====================================================================================
``job.json``        the run's script, where it ran, and how it has ended
``status.jsonl``    the result of `job_status`, once per interval; fewer are kept of earlier times
``events.jsonl``    deaths, errors with tracebacks, processes that came and went, syncs of weights
``stacks.jsonl``    where every thread was, recently, and when a process fell silent
``script.jsonl``    written by the script itself: exceptions that ended it, failures that nobody handled
==================  ====================================================================================

The command ``skipper run`` writes the first four, from a process that outlives the script; the script the last one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from skipper.control.model.errors import JobNotFoundError
from skipper.control.observe.log_files import JOB_FILE, about_job, is_running, jobs_with_files, remove_old
from skipper.control.observe.record_file import BoundedLines, read_lines
from skipper.control.observe.status import JobStatus
from skipper.control.observe.status_json import decode_status
from skipper.control.support.private_file import make_folder, replace
from skipper.control.support.state_folder import make_own_folder, state_folder

FOLDER_VARIABLE = "SKIPPER_RECORD_FOLDER"
"""Environment variable that names another folder for the folders of runs."""
RECORD_VARIABLE = "SKIPPER_RECORD"
"""Environment variable with the folder of the record of this very run; `skipper run` sets it for the script."""

STATUS, EVENTS, STACKS, SCRIPT = "status", "events", "stacks", "script"

MAX_NBYTES = {STATUS: 32 << 20, EVENTS: 16 << 20, STACKS: 8 << 20, SCRIPT: 4 << 20}
"""Bytes that are kept of each kind of lines."""
KEPT_RUNS = 20
"""How many records of ended runs are kept; older ones are removed when the next run begins."""
MAX_KEPT_NBYTES = 1 << 30
"""Bytes that are kept of these records."""

_MOST_TEXT = 32 << 10
_LATEST_S = 4e9
"""In 2096: a later time is not valid."""

Line = Mapping[str, Any]


def records_home() -> Path:
    """The folder with the folders of runs (see `state_folder`)."""
    return state_folder("records", FOLDER_VARIABLE)


def new_folder(name: str, folder: Path | None = None) -> Path:
    """A folder for the record of a run that is about to begin; records beyond those that are kept are removed.

    Args:
        name: name of the run.
        folder: an empty folder, or one that does not exist yet; None: a new one in `records_home`.

    Raises:
        UnsafeFileError: (a `PermissionError`) the folder of all records belongs to another user.
        FileExistsError: there is something in ``folder``.
        OSError: it cannot be created.
    """
    if folder is not None:
        make_folder(folder)
        if any(folder.iterdir()):
            raise FileExistsError(f"{folder} is not empty: a record needs a folder of its own")
        return folder.absolute()
    home = records_home()
    make_own_folder(home, FOLDER_VARIABLE)
    stem = f"{datetime.now().strftime('%Y%m%d-%H%M%S')}-{name}"
    for number in range(1, 1000):
        made = home / (stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            made.mkdir(mode=0o700)
            remove_old(home, made.name, most=KEPT_RUNS, max_nbytes=MAX_KEPT_NBYTES)
            return made.absolute()
    raise FileExistsError(f"there are too many records named {stem} in {home}")


class RecordWriter:
    """Writes the record of a run. For any thread. It counts lines that cannot be written, and reports them later.

    Args:
        folder: folder of the record.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._is_closed = False
        self._lines = {
            kind: BoundedLines(folder, kind, MAX_NBYTES[kind], keeps_all_times=kind == STATUS)
            for kind in (STATUS, EVENTS, STACKS)
        }

    @property
    def problem(self) -> str:
        """Why the latest line of some kind could not be written; empty if all could."""
        return next((lines.problem for lines in self._lines.values() if lines.lost), "")

    def describe(self, about: Mapping[str, object]) -> bool:
        """Describe the run, in place of the earlier description; returns whether that was written."""
        try:
            replace(self.folder / JOB_FILE, json.dumps(about).encode(), 0o600)
        except OSError:
            return False
        return True

    def status(self, status: JobStatus) -> None:
        """Write down a status."""
        self._append(STATUS, status.to_dict())

    def event(self, kind: str, who: str, message: str, *, at_s: float | None = None, **more: object) -> None:
        """Write down an event.

        Args:
            kind: kind of the event, for programs.
            who: the process, or the actor and its endpoint.
            message: text for people.
            at_s: time, as `time.time` counts; None: now.
            more: further values that JSON can represent.
        """
        self._append(EVENTS, event_line(kind, who, message, at_s=at_s, **more))

    def stacks(self, why: str, text: str) -> None:
        """Write down where every thread is, and why the stacks were taken."""
        self._append(STACKS, {"at_s": time.time(), "why": why, "text": text})

    def close(self) -> None:
        """Stop writing; idempotent."""
        with self._lock:
            self._is_closed = True
            for lines in self._lines.values():
                lines.close()

    def _append(self, kind: str, line: Line) -> None:
        with self._lock:
            lines = self._lines[kind]
            if self._is_closed or not lines.append(line) or not lines.lost:
                return
            message = f"{lines.lost} lines of {kind} are missing before this line: {lines.problem}"
            if self._lines[EVENTS].append(event_line("gap", "the record", message)):
                lines.lost, lines.problem = 0, ""


def event_line(kind: str, who: str, message: str, *, at_s: float | None = None, **more: object) -> dict[str, Any]:
    """An event as it is in a file."""
    said = {"at_s": time.time() if at_s is None else at_s, "kind": kind, "who": who, "message": message[:_MOST_TEXT]}
    return {**said, **more}


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedEvent:
    """An event of a run.

    Attributes:
        at_s: when, as `time.time` counts.
        kind: ``begin``, ``end``, ``job``, ``job-end``, ``process``, ``gone``, ``silent``, ``answers``, ``death``,
            ``error``, ``sync``, ``logs``, ``unhandled``, ``exception``, ``gap``.
        who: the process, or the actor and its endpoint.
        message: for people.
        traceback: traceback of an error, if it is the first of its kind.
        more: further values.
    """

    at_s: float
    kind: str
    who: str
    message: str
    traceback: str
    more: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Stacks:
    """Where every thread was: the time, why the stacks were taken, and the text that `skipper stacks` would show."""

    at_s: float
    why: str
    text: str


class Record:
    """Reads the record of a run, which may still run.

    Args:
        folder: folder of the record.

    Raises:
        JobNotFoundError: there is no such record.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.about = about_job(folder)
        if not self.about:
            raise JobNotFoundError(f"{folder} holds no record of a run")

    @property
    def name(self) -> str:
        """The name of the run."""
        return str(self.about.get("name", ""))

    @property
    def is_running(self) -> bool:
        """Whether the script may still run."""
        return "ended_s" not in self.about and is_running(self.about)

    @property
    def began_s(self) -> float:
        """When the run began, as `time.time` counts."""
        try:
            return _time(self.about.get("began_s"))
        except ValueError:
            return 0.0

    @property
    def outcome(self) -> str:
        """How the run has ended, for people."""
        if self.is_running:
            return "runs"
        return str(self.about.get("outcome") or "ended; how is not known, because skipper run was killed too")

    def statuses(self) -> Iterator[JobStatus]:
        """The status reports that are kept, oldest first; each is read on demand.

        Raises:
            UnsafeFileError: (a `PermissionError`) a file is a link, or not this user's.
        """
        for line in read_lines(self.folder, STATUS):
            with contextlib.suppress(ValueError):
                yield decode_status(line)

    def last_status(self) -> JobStatus | None:
        """The last status; None if there was none.

        Raises:
            UnsafeFileError: (a `PermissionError`) a file is a link, or not this user's.
        """
        newest = deque(read_lines(self.folder, STATUS), maxlen=1)
        with contextlib.suppress(ValueError):
            return decode_status(newest[0]) if newest else None
        return None

    def events(self) -> list[RecordedEvent]:
        """The events, oldest first.

        Raises:
            UnsafeFileError: (a `PermissionError`) a file is a link, or not this user's.
        """
        found = []
        for kind in (EVENTS, SCRIPT):
            for line in read_lines(self.folder, kind):
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    found.append(_event(line))
        return sorted(found, key=lambda event: event.at_s)

    def stacks(self) -> list[Stacks]:
        """Where every thread was, oldest first.

        Raises:
            UnsafeFileError: (a `PermissionError`) a file is a link, or not this user's.
        """
        found = []
        for line in read_lines(self.folder, STACKS):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                found.append(Stacks(_time(line["at_s"]), str(line["why"]), str(line["text"])))
        return found


def _time(value: object) -> float:
    """A time, as `time.time` counts.

    Raises:
        ValueError: it is not a time.
    """
    if not isinstance(value, float | int) or not 0 <= value < _LATEST_S:
        raise ValueError(f"{value!r} is not a time")
    return float(value)


def _event(line: Line) -> RecordedEvent:
    known = ("at_s", "kind", "who", "message", "traceback")
    return RecordedEvent(
        at_s=_time(line["at_s"]),
        kind=str(line["kind"]),
        who=str(line["who"]),
        message=str(line["message"]),
        traceback=str(line.get("traceback", "")),
        more={key: value for key, value in line.items() if key not in known},
    )


def records(home: Path) -> Sequence[Record]:
    """The records in a folder; those of the runs that began last are first."""
    found = []
    for folder in jobs_with_files(home):
        with contextlib.suppress(JobNotFoundError):  # removed in the meantime
            found.append(Record(folder))
    return found


def find_record(word: str | None) -> Record:
    """A record by its folder, or by the name of its run; the latest of several, or with None the latest of all.

    Raises:
        JobNotFoundError: there is none.
    """
    if word is not None and (os.sep in word or (Path(word) / JOB_FILE).is_file()):
        return Record(Path(word))
    home = records_home()
    for record in records(home):
        if word in (None, record.name, record.folder.name):
            return record
    raise JobNotFoundError(
        f"{home} has no record{'' if word is None else f' of a run {word!r}'}: skipper run makes them"
    )


def name_for(script: str) -> str:
    """A name for the run of a script, or a module, that has been given none."""
    stem = Path(script).stem if os.sep in script or script.endswith(".py") else script
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem)[:_MOST_NAME].strip("._-") or "run"


_MOST_NAME = 40
