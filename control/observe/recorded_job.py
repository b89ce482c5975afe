"""`RecordedJob`: a run that has ended, from its record, for a page about a job."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path

from skipper.control.model.errors import JobNotFoundError
from skipper.control.observe.errors import ProcessErrors
from skipper.control.observe.record import Record, RecordedEvent
from skipper.control.observe.stacks import ProcessStacks
from skipper.control.observe.status import JobStatus
from skipper.control.runtime.history import ErrorGroup, Event


class RecordedJob:
    """A `JobSource`. Each part is read once, on demand.

    Args:
        record: record of a run that has ended.

    Raises:
        ValueError: the run has not ended.
    """

    def __init__(self, record: Record) -> None:
        if record.is_running:
            raise ValueError(f"{record.name} has not ended yet: use skipper dashboard --job {record.name}")
        self._record = record

    @property
    def name(self) -> str:
        """The name of the run."""
        return self._record.name

    @property
    def outcome(self) -> str:
        """How the run has ended."""
        return self._record.outcome

    def status(self) -> JobStatus:
        """The last status of the job, with all deaths and errors that were written down."""
        status = self._last
        script, *others = status.processes
        if script.report is None:
            return status
        report = dataclasses.replace(script.report, errors=self._noted("error"), deaths=self._noted("death"))
        return dataclasses.replace(status, processes=[dataclasses.replace(script, report=report), *others])

    def errors(self) -> Sequence[ProcessErrors]:
        """Errors by kind. Those of processes that had ended before the last status have ids that no process has.

        If several ranks failed in the same way, each has the one traceback that was kept.
        """
        ids = {process.name: process.id for process in self._last.processes}
        traces: dict[tuple[str, str], str] = {}
        groups: dict[str, dict[tuple[str, str, str], ErrorGroup]] = defaultdict(dict)
        for event in self._events:
            if event.kind != "error":
                continue
            process, error, place = (str(event.more.get(name, "")) for name in ("process", "error", "place"))
            trace = traces.setdefault((error, place), event.traceback)
            kinds, key = groups[ids.get(process, f"ended {process}")], (event.who, error, place)
            first_s, before = (kinds[key].first_s, kinds[key].count) if key in kinds else (event.at_s, 0)
            count = before + _count(event)
            kinds[key] = ErrorGroup(*key, count, first_s, event.at_s, event.message, trace)
        return [ProcessErrors(process, list(kinds.values())) for process, kinds in groups.items()]

    def stacks(self) -> Sequence[ProcessStacks]:
        """Where the threads of all processes were last, as one text, for each process."""
        last = next(reversed(self._record.stacks()), None)
        if last is None:
            raise JobNotFoundError("no stacks were recorded")
        when = datetime.fromtimestamp(last.at_s).strftime("%H:%M:%S")
        why = f"of the whole job, at {when}{', since ' if last.why else ''}{last.why}"
        return [ProcessStacks(each.name, each.pid, (), (), why, last.text) for each in self._last.processes]

    def output(self) -> Path:
        """The folder with the output of its processes."""
        for event in reversed(self._events):
            if event.kind == "logs":
                return Path(event.message)
        raise JobNotFoundError("the record does not say where its processes wrote")

    @cached_property
    def _last(self) -> JobStatus:
        status = self._record.last_status()
        if status is None or not status.processes:
            raise JobNotFoundError("the run ended before its job was recorded")
        return status

    @cached_property
    def _events(self) -> Sequence[RecordedEvent]:
        return self._record.events()

    def _noted(self, kind: str) -> Sequence[Event]:
        return [Event(event.at_s, event.who, event.message) for event in self._events if event.kind == kind]


def _count(event: RecordedEvent) -> int:
    count = event.more.get("count", 1)
    return count if isinstance(count, int) and count > 0 else 1
