"""What has gone wrong in a job, by kind, each with a traceback and how often it was seen.

`errors_around` asks a running job for it. `SeenErrors` counts similar errors of all its processes together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skipper.control.observe.job_query import survey
from skipper.control.runtime.history import ErrorGroup

if TYPE_CHECKING:
    from skipper.control.runtime.process import Process

KEPT_PROCESSES = 64
"""For how many processes that no longer answer the errors are remembered."""
MOST_KINDS = 100
"""How many kinds of errors are reported for a whole job, the most recent ones."""
MOST_NAMED = 16
"""How many actors that failed in the same way are named."""


@dataclass(frozen=True, slots=True)
class ProcessErrors:
    """The errors of one process by kind, as far as it keeps them (see `FaultHistory.groups`).

    Attributes:
        process_id: which process.
        groups: the kinds of errors; the most recent is at the end.
    """

    process_id: str
    groups: list[ErrorGroup]


def errors_around(process: Process, *, timeout: float) -> list[ProcessErrors]:
    """The errors of all processes of a job that answer, seen from a process of the job or one that visits it.

    Raises:
        DeadlineError: (a `TimeoutError`) the script did not answer.
        SupervisionError: the script is gone.
    """
    answers = survey(process, "errors", timeout=timeout)
    return [ProcessErrors(answer.process.id, answer.value() or []) for answer in answers]


def answer(process: Process, argument: None) -> list[ErrorGroup]:
    """The errors of this process."""
    return process.history.groups()


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """Errors of a whole job of the same kind: of one class, raised at one line, after the same calls.

    Attributes:
        error: name of the class.
        place: file and line where it was raised; empty if that is not known.
        count: how many there have been.
        first_s: time of the first one, as `time.time` counts.
        last_s: time of the latest one.
        message: message of the latest one, for people.
        traceback: traceback of the first one.
        who: the actors and their endpoints, `MOST_NAMED` at most, the most recent failures first.
        who_total: how many there are.
    """

    error: str
    place: str
    count: int
    first_s: float
    last_s: float
    message: str
    traceback: str
    who: tuple[str, ...]
    who_total: int


def counted_together(groups: Iterable[ErrorGroup]) -> list[ErrorKind]:
    """Errors of all actors by kind, the most recent first; `MOST_KINDS` at most."""
    alike: dict[tuple[str, str, str], list[ErrorGroup]] = {}
    for group in groups:
        alike.setdefault((group.error, group.place, _calls(group.traceback)), []).append(group)
    kinds = sorted(map(_kind, alike.values()), key=lambda kind: kind.last_s, reverse=True)
    return kinds[:MOST_KINDS]


def _kind(groups: list[ErrorGroup]) -> ErrorKind:
    groups.sort(key=lambda group: group.last_s, reverse=True)
    first = min(groups, key=lambda group: group.first_s)
    who = tuple(dict.fromkeys(group.who for group in groups))
    return ErrorKind(
        error=first.error,
        place=first.place,
        count=sum(group.count for group in groups),
        first_s=first.first_s,
        last_s=groups[0].last_s,
        message=groups[0].message,
        traceback=first.traceback,
        who=who[:MOST_NAMED],
        who_total=len(who),
    )


def _calls(traceback: str) -> str:
    """The lines of a traceback that name files and functions: messages and values differ."""
    return "\n".join(line for line in traceback.splitlines() if line.lstrip().startswith('File "'))


class SeenErrors:
    """The errors of all processes by kind, including processes that have ended since. For one thread at a time."""

    def __init__(self) -> None:
        self._there: dict[str, list[ErrorGroup]] = {}
        self._ended: dict[str, list[ErrorGroup]] = {}

    def note(self, found: Sequence[ProcessErrors]) -> list[ErrorKind]:
        """Add what the processes report now; returns what all of them have reported."""
        there = {errors.process_id: errors.groups for errors in found if errors.groups}
        self._ended.update((key, groups) for key, groups in self._there.items() if key not in there)
        for key in [key for key in self._ended if key in there]:  # it answers again
            del self._ended[key]
        for key in list(self._ended)[:-KEPT_PROCESSES]:
            del self._ended[key]
        self._there = there
        every = (*self._there.values(), *self._ended.values())
        return counted_together(group for groups in every for group in groups)
