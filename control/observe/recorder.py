"""`JobRecorder`: visits the job of a script, from a separate process, and writes down what it sees.

It takes the status once per interval, and writes it at once. So however the script ends, and the job with it, the
record has the last status. A script that ends in good order waits a moment for one more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipper.control.api.join import visiting
from skipper.control.model.errors import ControlError, DeadlineError, SupervisionError
from skipper.control.model.future import Future
from skipper.control.observe.job_query import survey
from skipper.control.observe.record import RecordWriter
from skipper.control.observe.record_answer import Asked, RecordAnswer
from skipper.control.observe.script_record import JOB_ENDING, LAST_LOOK
from skipper.control.observe.stacks import job_stacks
from skipper.control.observe.stacks_command import shown
from skipper.control.observe.status import JobStatus, ProcessStatus, status_of
from skipper.control.runtime import join_file

if TYPE_CHECKING:
    from skipper.control.runtime.process import Process

TIMEOUT_S = 2.0
"""How long a process has to answer before it is written down as silent."""

MOST_CPU = 0.1
"""The part of one CPU that status requests may take. If they need more, they are made less often."""

_FIND_S = 0.05
"""How often the recorder checks whether the script's job exists."""
_ENTER_S = 5.0
_TABLES_S = 10.0
"""How often tables are requested, in addition to the last time, if a job ends in good order."""
_SLACK_S = 2.0
"""Events are requested for this much longer than since the last status, because clocks may be set."""
_MOST_WITHIN_S = 600.0
_STACKS_TIMEOUT_S = 2.0
_CLOSE_S = 5.0
_MOST_STACKS = 1 << 20
"""Characters of all stacks at one time."""

_log = logging.getLogger("skipper.control")


class JobRecorder:
    """Records, on a thread of its own, the jobs of one script, one after the other.

    Args:
        record: where to write.
        name: name under which the script serves its job.
        interval_s: seconds between status requests.
        stacks_s: seconds between recordings of all stacks.
    """

    def __init__(self, record: RecordWriter, name: str, *, interval_s: float, stacks_s: float) -> None:
        self._record = record
        self._path = join_file.path_of(name)
        self._interval_s = interval_s
        self._stacks_s = stacks_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control-recorder", daemon=True)
        self._last_seen = ""

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Stop, and wait for the last writes, for a few seconds at most."""
        self._over.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._over.wait(_FIND_S):
            if not self._path.exists():
                continue
            try:
                if join_file.read(self._path).root.id == self._last_seen:
                    continue  # it has ended, and its file will be removed
                with visiting(self._path, timeout=_ENTER_S) as process:
                    self._last_seen = process.root.id
                    JobLooks(self._record, process, self._path, self._stacks_s).run(self._interval_s, self._over)
            except (ControlError, OSError) as error:
                _log.info("the recorder: %s", error)
                self._over.wait(self._interval_s)


class JobLooks:
    """Records one job until it ends.

    Args:
        record: where to write.
        process: this process, which visits the job.
        path: path of the job's connection file.
        stacks_s: seconds between recordings of all stacks.
    """

    def __init__(self, record: RecordWriter, process: Process, path: Path, stacks_s: float) -> None:
        self._record = record
        self._process = process
        self._path = path
        self._stacks_s = stacks_s
        self._changes = Changes(record)
        self._full_s = time.monotonic()
        """The last time at which all processes answered."""
        self._tables_s = float("-inf")
        self._stacks_due_s = time.monotonic() + min(stacks_s, 2.0)
        self._stacks: threading.Thread | None = None
        self._is_script_silent = False

    def run(self, interval_s: float, over: threading.Event) -> None:
        """Take the status once per interval, or as `MOST_CPU` allows, until the job ends or ``over`` is set."""
        process = self._process
        self._record.event("job", process.root.job, "the job begins")
        ending = process.request(process.root, JOB_ENDING)
        wake = threading.Event()
        ending.add_done_callback(lambda _: wake.set())
        while not over.is_set():
            begun_s, begun_cpu_s = time.monotonic(), time.process_time()
            is_last = ending.done()
            try:
                self._look(is_last=is_last)
            except DeadlineError:
                self._script_is_silent()
            except SupervisionError:
                break
            if is_last:
                _say_that_it_is_done(process)
                break
            wake.wait(pause_s(interval_s, time.monotonic() - begun_s, time.process_time() - begun_cpu_s))
        self._record.event("job-end", process.root.job, "the job has ended")

    def _look(self, *, is_last: bool) -> None:
        now_s = time.monotonic()
        with_tables = is_last or now_s - self._tables_s >= _TABLES_S
        within_s = min(now_s - self._full_s + _SLACK_S, _MOST_WITHIN_S)
        answers = survey(self._process, "record", Asked(within_s, with_tables), timeout=TIMEOUT_S)
        said: dict[str, RecordAnswer | None] = {answer.process.id: answer.value() for answer in answers}
        status = status_of(answers, {key: None if each is None else each.report for key, each in said.items()})
        self._record.status(status)
        fallen_silent = self._changes.note(status, said)
        if self._is_script_silent:
            self._is_script_silent = False
            self._record.event("answers", "script", "it answers again")
        if with_tables:
            self._tables_s = now_s
        if status.is_healthy:
            self._full_s = now_s
        if fallen_silent:
            self._look_at_stacks(f"{', '.join(fallen_silent)} did not answer")
        elif status.is_healthy and now_s >= self._stacks_due_s:
            self._look_at_stacks("")

    def _script_is_silent(self) -> None:
        if not self._is_script_silent:
            self._is_script_silent = True
            self._record.event("silent", "script", f"it did not answer within {TIMEOUT_S:g} s")
            self._look_at_stacks("the script did not answer")

    def _look_at_stacks(self, why: str) -> None:
        """On a thread of its own: it waits for processes that hang, and may inspect them from outside."""
        if self._stacks is not None and self._stacks.is_alive():
            return
        self._stacks_due_s = time.monotonic() + self._stacks_s

        def look() -> None:
            with contextlib.suppress(ControlError, OSError):  # the job has ended in the meantime
                found = job_stacks(self._path, timeout=_STACKS_TIMEOUT_S)
                self._record.stacks(why, shown(found)[:_MOST_STACKS])

        self._stacks = threading.Thread(target=look, name="control-recorder-stacks", daemon=True)
        self._stacks.start()


def pause_s(interval_s: float, took_s: float, used_cpu_s: float) -> float:
    """How long to wait after a status that took this time and CPU time, to keep the interval and `MOST_CPU`."""
    return max(interval_s - took_s, used_cpu_s * (1 / MOST_CPU - 1), 0.0)


def _say_that_it_is_done(process: Process) -> None:
    done: Future[None] = process.request(process.root, LAST_LOOK)
    with contextlib.suppress(ControlError):
        done.get(TIMEOUT_S)


@dataclasses.dataclass(slots=True)
class _Known:
    """What is known of a process: its last status, and what has been written down of it."""

    status: ProcessStatus
    errors: dict[tuple[str, str, str], int] = dataclasses.field(default_factory=dict)
    death_s: float = 0.0
    occurrence_s: dict[str, float] = dataclasses.field(default_factory=dict)


class Changes:
    """Finds what is new in a status, and writes each new thing down once."""

    def __init__(self, record: RecordWriter) -> None:
        self._record = record
        self._known: dict[str, _Known] = {}
        self._traced: set[tuple[str, str]] = set()
        self._logs = ""

    def note(self, status: JobStatus, said: Mapping[str, RecordAnswer | None]) -> Sequence[str]:
        """Write down what is new; returns the names of processes that have fallen silent since the last status."""
        fallen_silent = []
        for process in status.processes:
            known = self._known.get(process.id)
            before = "" if known is None else known.status.state
            if known is None:
                known = self._known[process.id] = _Known(process)
                self._record.event("process", process.name, "it is there", pid=process.pid, host=process.host)
            known.status = process
            if process.state == "silent" and before != "silent":
                fallen_silent.append(process.name)
                self._record.event("silent", process.name, process.problem, pid=process.pid)
            elif before == "silent" and process.state == "up":
                self._record.event("answers", process.name, "it answers again", pid=process.pid)
            if (answer := said[process.id]) is not None:
                self._note_answer(known, process.name, answer)
        there = {process.id for process in status.processes}
        for gone in [known for key, known in self._known.items() if key not in there]:
            del self._known[gone.status.id]
            self._record.event("gone", gone.status.name, "it no longer exists", pid=gone.status.pid)
        return fallen_silent

    def _note_answer(self, known: _Known, name: str, answer: RecordAnswer) -> None:
        for death in answer.deaths:
            if death.at_s > known.death_s:
                known.death_s = death.at_s
                self._record.event("death", death.who, death.message, at_s=death.at_s)
        for group in answer.errors:
            key = group.who, group.error, group.place
            before = known.errors.get(key, 0)
            if group.count != before:
                count = group.count - before if group.count > before else group.count  # that process had forgotten it
                more: dict[str, Any] = {"process": name, "error": group.error, "place": group.place, "count": count}
                if key[1:] not in self._traced:  # one traceback is enough for many ranks that fail in the same way
                    self._traced.add(key[1:])
                    more["traceback"] = group.traceback
                self._record.event("error", group.who, group.message, at_s=group.last_s, **more)
            known.errors[key] = group.count
        for part, occurrences in answer.occurrences.items():
            since_s = known.occurrence_s.get(part, 0.0)
            for occurrence in occurrences:
                if occurrence.at_s > since_s:
                    known.occurrence_s[part] = occurrence.at_s
                    figures = dict(occurrence.figures)
                    self._record.event("sync", name, occurrence.what, at_s=occurrence.at_s, part=part, figures=figures)
        if answer.logs and answer.logs != self._logs:
            self._logs = answer.logs
            self._record.event("logs", name, answer.logs)
