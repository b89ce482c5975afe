"""A source of a page about a job that holds what it says."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from skipper.control import JobNotFoundError
from skipper.control.observe import JobStatus, ProcessStacks
from skipper.control.observe.errors import ProcessErrors


@dataclass
class SourceOf:
    """What a job that is no more has left: this status, these errors and stacks, and the output in that folder."""

    found: JobStatus
    kept_errors: Sequence[ProcessErrors] = ()
    kept_stacks: Sequence[ProcessStacks] = ()
    folder: Path | None = None
    name: str = "train"
    outcome: str = ""

    def status(self) -> JobStatus:
        return self.found

    def errors(self) -> Sequence[ProcessErrors]:
        return self.kept_errors

    def stacks(self) -> Sequence[ProcessStacks]:
        return self.kept_stacks

    def output(self) -> Path:
        if self.folder is None:
            raise JobNotFoundError("nobody has written anything")
        return self.folder
