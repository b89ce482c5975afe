"""`errors_around`: what has gone wrong in a running job, by kind, each with a traceback and how often it was seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skipper.control.observe.job_query import survey
from skipper.control.runtime.history import ErrorGroup

if TYPE_CHECKING:
    from skipper.control.runtime.process import Process


@dataclass(frozen=True, slots=True)
class ProcessErrors:
    """The errors of one process by kind, as far as it keeps them (see `FaultHistory.groups`).

    Attributes:
        process_id: which process.
        groups: those of which one was seen last at the end.
    """

    process_id: str
    groups: list[ErrorGroup]


def errors_around(process: Process, *, timeout: float) -> list[ProcessErrors]:
    """The errors of all processes of a job that answer, as a process of it, or one that visits it, sees them.

    Raises:
        DeadlineError: (a `TimeoutError`) the script did not answer.
        SupervisionError: the script is gone.
    """
    answers = survey(process, "errors", timeout=timeout)
    return [ProcessErrors(answer.process.id, answer.value() or []) for answer in answers]


def answer(process: Process, argument: None) -> list[ErrorGroup]:
    """Those of this process."""
    return process.history.groups()
