"""`JobSource`: the data of a page about a job that runs or has ended; `LiveJob`: that of a running job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from skipper.control.model.errors import SupervisionError
from skipper.control.observe.errors import ProcessErrors, errors_around
from skipper.control.observe.job_query import survey
from skipper.control.observe.log_history import find_job
from skipper.control.observe.stacks import ProcessStacks, stacks_around
from skipper.control.observe.status import JobStatus, status_of

if TYPE_CHECKING:
    from skipper.control.runtime.process import Process


class JobSource(Protocol):
    """Answers questions about one job. For any thread; each method may take seconds.

    Raises:
        ControlError: from each method: there is no answer, with the reason in a sentence for people.
    """

    @property
    def name(self) -> str:
        """The name of the job for people; empty if it has none."""

    @property
    def outcome(self) -> str:
        """How it has ended, for people; empty while it runs."""

    def status(self) -> JobStatus:
        """The present or last status of the job, with its tables."""

    def errors(self) -> Sequence[ProcessErrors]:
        """Errors by kind, with their tracebacks."""

    def stacks(self) -> Sequence[ProcessStacks]:
        """Where the threads of all processes are, or were last."""

    def output(self) -> Path:
        """The folder with the output of its processes (see `JobLog`)."""


class LiveJob:
    """A running job. Each method asks it.

    Args:
        process: a process that belongs to the job, or visits it.
        timeout_s: how long a process has to answer.
        name: name of the job, for people.
    """

    def __init__(self, process: Process, timeout_s: float, name: str) -> None:
        self.name = name
        self.outcome = ""
        self._process = process
        self._timeout_s = timeout_s

    def status(self) -> JobStatus:
        """The present status of the job, with its tables."""
        return status_of(survey(self._running(), "status", True, timeout=self._timeout_s))

    def errors(self) -> Sequence[ProcessErrors]:
        """Errors by kind of the processes that answer."""
        return errors_around(self._running(), timeout=self._timeout_s)

    def stacks(self) -> Sequence[ProcessStacks]:
        """Where the threads of all processes are, also of those that hang."""
        return stacks_around(self._running(), timeout=self._timeout_s)

    def output(self) -> Path:
        """The folder with the output of its processes."""
        return find_job(self._process.root.job)

    def _running(self) -> Process:
        if self._process.closing:  # and not of a job that begins after it
            raise SupervisionError("the job has ended")
        return self._process
