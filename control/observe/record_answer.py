"""What each process says for the record: its status, and what has happened in it lately. A subject of `survey`."""

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
        within_s: of what has happened, what is no older; each process tells by its own clock.
        with_tables: whether the tables are wanted, too.
    """

    within_s: float
    with_tables: bool


@dataclass(frozen=True, slots=True)
class RecordAnswer:
    """What one process says.

    Attributes:
        report: its status, without what is in the rest.
        errors: its errors by kind.
        deaths: of processes that it has launched.
        occurrences: what its parts have done, by the part's name.
        logs: the folder of what all processes write; empty where this one does not know.
    """

    report: ProcessReport
    errors: Sequence[ErrorGroup]
    deaths: Sequence[Event]
    occurrences: Mapping[str, Sequence[Occurrence]]
    logs: str


def answer(process: Process, asked: Asked) -> RecordAnswer:
    """What this process says."""
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
    """A report without what is told of but once; the words of the last error may be long."""
    last = report.last_error
    return dataclasses.replace(
        report,
        actors=[dataclasses.replace(actor, last_error=None) for actor in report.actors],
        deaths=(),
        errors=(),
        last_error=None if last is None else dataclasses.replace(last, message=shorten(last.message, _MOST_MESSAGE)),
    )


def _folder_of_logs() -> str:
    from skipper.control.observe.logs import shown_output  # the script has it anyway, and nobody else needs it

    output = shown_output()
    return "" if output is None or output.folder is None else str(output.folder)
