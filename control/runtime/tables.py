"""`report_table`: parts of a process add a table of theirs to what people see who watch the job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from skipper.control.runtime.reporters import Reporters

MAX_ROWS = 500
"""More of one table are not sent."""

Entry = str | float | None


@dataclass(frozen=True, slots=True)
class Table:
    """Something to be shown as a table.

    Attributes:
        title: for people; tables of one title from several processes are shown one below the other.
        columns: their names. A name that ends in ``bytes`` says that the numbers below it are sizes.
        rows: as many entries each; None where there is nothing to say.
        left_out: how many rows there are beside these.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Entry]]
    left_out: int = 0


_reporters: Reporters[Table | None] = Reporters("the table of %s is not to be had")


def report_table(part: str, table: Callable[[], Table | None] | None) -> None:
    """Have a table of some part of this process shown to those who watch the job (see `serve_dashboard`).

    Args:
        part: its name; a second reporter of that name takes the place of the first.
        table: called, on any thread, whenever somebody looks; it must be quick, and says None where there is nothing
            to show. None takes the reporter of that name back.
    """
    _reporters.set(part, table)


def tables_now() -> list[Table]:
    """The tables of all parts, cut to `MAX_ROWS`; without those whose function raises."""
    return [_cut(table) for _, table in _reporters.ask() if table is not None]


def _cut(table: Table) -> Table:
    surplus = len(table.rows) - MAX_ROWS
    if surplus <= 0:
        return table
    return replace(table, rows=table.rows[:MAX_ROWS], left_out=table.left_out + surplus)
