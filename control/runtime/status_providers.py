"""What parts of a process add to its status: `report_figures` adds numbers, `report_table` a table.

They also add to the record of its job: `report_occurrences` says what they have done lately.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

MAX_ROWS = 500
"""How many rows of a table are sent at most."""
MAX_OCCURRENCES = 64
"""How many occurrences of a part are sent at a time: the newest ones."""

T = TypeVar("T")
Figures = Mapping[str, float]
Entry = str | float | None

_log = logging.getLogger("skipper.control")


@dataclass(frozen=True, slots=True)
class Waterfall:
    """How rows of a table are drawn as bars, each row of a group below the other on one axis of time.

    The example of `Table` shows one.

    Attributes:
        group: name of the column by whose values the rows are grouped.
        begin: name of the column with the time at which a row's bar begins, as `time.time` counts.
        stages: names of the columns of seconds, which follow one another in a bar.
    """

    group: str
    begin: str
    stages: Sequence[str]


@dataclass(frozen=True, slots=True)
class Table:
    """A table that a part of a process adds to the status and the dashboard.

    Attributes:
        title: the title; tables with the same title from several processes are shown one below the other.
        columns: their names. If a name ends in ``bytes``, the numbers of the column are sizes.
        rows: as many entries each; None for an empty entry.
        left_out: how many more rows there are.
        waterfall: how it is drawn as bars, if that is possible; None: it is shown as a table.

    Example:
        ```python
        import time

        from skipper.control.observe import Occurrence, Table, Waterfall, report_occurrences, report_table

        now_s = time.time()
        drawn = Waterfall(group="step", begin="began", stages=("load s", "train s"))
        steps = Table("Steps", ("step", "began", "load s", "train s"), [(1, now_s, 0.2, 1.5)], waterfall=drawn)
        report_table("steps", lambda: steps)
        saved = [Occurrence(now_s, "checkpoint 7", {"nbytes": 3 << 30, "seconds": 12.5})]
        report_occurrences("checkpoints", lambda since_s: [each for each in saved if each.at_s >= since_s])
        ```
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Entry]]
    left_out: int = 0
    waterfall: Waterfall | None = None


@dataclass(frozen=True, slots=True)
class Occurrence:
    """An event that a part of a process reports.

    The example of `Table` shows one.

    Attributes:
        at_s: when it happened, as `time.time` counts.
        what: a description for people.
        figures: figures about it, by name; names end in the unit.
    """

    at_s: float
    what: str
    figures: Mapping[str, Entry]


class _Providers(Generic[T]):
    """Reporting functions, by the part of the process that they report.

    Args:
        failed: what the log says of a function that raises, with ``%s`` for its part.
    """

    def __init__(self, failed: str) -> None:
        self._failed = failed
        self._by_part: dict[str, Callable[..., T]] = {}

    def set(self, part: str, report: Callable[..., T] | None) -> None:
        """Set the function that reports a part, in place of another; None: no function does."""
        if report is None:
            self._by_part.pop(part, None)
        else:
            self._by_part[part] = report

    def ask(self, *about: object) -> Iterator[tuple[str, T]]:
        """The report of each part for these arguments; parts whose function raises are left out."""
        for part, report in list(self._by_part.items()):
            try:
                said = report(*about)
            except Exception:  # noqa: BLE001  (one part that fails must not hide the others)
                _log.exception(self._failed, part)
            else:
                yield part, said


_figures: _Providers[dict[str, float]] = _Providers("cannot read the figures of %s")
_tables: _Providers[Table | None] = _Providers("cannot read the table of %s")

_occurrences: _Providers[Sequence[Occurrence]] = _Providers("cannot read the recent events of %s")


def report_figures(part: str, figures: Callable[[], Figures]) -> None:
    """Add figures of a part of this process to its status, and to the job's metrics.

    Args:
        part: name of the part; a second reporter of that name replaces the first.
        figures: called, on any thread, for each status, and returns numbers by name; it must be quick.
    """
    _figures.set(part, lambda: {name: float(value) for name, value in figures().items()})


def figures_now() -> dict[str, dict[str, float]]:
    """The figures of all parts, by the part's name; without those whose function raises."""
    return dict(_figures.ask())


def report_table(part: str, table: Callable[[], Table | None] | None) -> None:
    """Add a table of a part of this process to the dashboard of the job (see `serve_dashboard`).

    Args:
        part: name of the part; a second reporter of that name replaces the first.
        table: called, on any thread, for each update; it must be quick, and returns None if there is nothing to show.
            Pass None to remove the reporter of that name.
    """
    _tables.set(part, table)


def tables_now() -> list[Table]:
    """The tables of all parts, cut to `MAX_ROWS`; without those whose function raises."""
    return [_cut(table) for _, table in _tables.ask() if table is not None]


def report_occurrences(part: str, lately: Callable[[float], Sequence[Occurrence]]) -> None:
    """Add what a part of this process does to the record of its job, if there is one (``skipper run``).

    Args:
        part: name of the part; a second reporter of that name replaces the first.
        lately: called, on any thread, with a time as `time.time` counts; returns the events since then, oldest first.
            It must be quick.
    """
    _occurrences.set(part, lately)


def occurrences_since(at_s: float) -> dict[str, Sequence[Occurrence]]:
    """The newest occurrences since a time, by the part's name; without those of parts whose function raises."""
    return {part: said[-MAX_OCCURRENCES:] for part, said in _occurrences.ask(at_s) if said}


def _cut(table: Table) -> Table:
    surplus = len(table.rows) - MAX_ROWS
    if surplus <= 0:
        return table
    return replace(table, rows=table.rows[:MAX_ROWS], left_out=table.left_out + surplus)
