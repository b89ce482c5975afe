"""What each process reports for the record: its status and its recent events. A subject of `survey`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skipper.control.model.exception_text import shorten
from skipper.control.observe import status
from skipper.control.observe.status import ProcessReport
from skipper.control.runtime.history import ErrorGroup, Event
from skipper.control.runtime.status_providers import Occurrence, occurrences_since

if TYPE_CHECKING:
    from skipper.control.runtime.process import Process

_MOST_MESSAGE = 300


@dataclass(frozen=True, slots=True)
class Asked:
    """What the recorder asks for.

    Attributes:
        within_s: greatest age of the events; each process uses its own clock.
        with_tables: whether to include the tables.
    """

    within_s: float
    with_tables: bool


@dataclass(frozen=True, slots=True)
class RecordAnswer:
    """The answer of one process.

    Attributes:
        report: its status, without what the other attributes have.
        errors: its errors by kind.
        deaths: deaths of processes that it has launched.
        occurrences: events that its parts report, by the part's name.
        logs: the folder with the output of all processes; empty if this process does not know it.
    """

    report: ProcessReport
    errors: Sequence[ErrorGroup]
    deaths: Sequence[Event]
    occurrences: Mapping[str, Sequence[Occurrence]]
    logs: str


def answer(process: Process, asked: Asked) -> RecordAnswer:
    """The answer of this process."""
    since_s = time.time() - asked.within_s
    report = status.answer(process, asked.with_tables)
    return RecordAnswer(
        report=_short(report),
        errors=[group for group in process.history.groups() if group.last_s >= since_s],
        deaths=[death for death in report.deaths if death.at_s >= since_s],
        occurrences=occurrences_since(since_s),
        logs=_folder_of_logs() if process.root.id == process.me.id else "",
    )


def _short(report: ProcessReport) -> ProcessReport:
    """A report without the things that are reported only once; the text of the last error may be long."""
    last = report.last_error
    return dataclasses.replace(
        report,
        actors=[dataclasses.replace(actor, last_error=None) for actor in report.actors],
        deaths=(),
        errors=(),
        last_error=None if last is None else dataclasses.replace(last, message=shorten(last.message, _MOST_MESSAGE)),
    )


def _folder_of_logs() -> str:
    from skipper.control.observe.logs import shown_output  # the script has it, and no other process needs it

    output = shown_output()
    return "" if output is None or output.folder is None else str(output.folder)
