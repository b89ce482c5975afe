"""The table of faults in docs/reference/transfer_faults.md, made of what the tests recorded.

    python -m tests.conformance.fault_table RECORDS... --write docs/reference/transfer_faults.md
    python -m tests.conformance.fault_table RECORDS... --check docs/reference/transfer_faults.md

Records come from `pytest --fault-record PATH`, on the host and in the guest. `--check` compares the kinds of errors,
not the times: it fails where the table says something else than the records, or something that none of them shows.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "transfer_faults.md"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"

COLUMNS = {
    "local": "local",
    "shm": "shm",
    "ucx-cma": "ucx, CMA",
    "ucx-posix": "ucx, without CMA",
    "ucx-tcp": "ucx, TCP, same host",
    "ucx-far": "ucx, TCP, another host",
    "ucx-roce": "ucx, RoCE",
    "verbs": "verbs",
}
"""Columns by the backend's name in the records."""

_NOTHING = "\u2013"
_STEPS_S = (0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 5.0)
_AT_DEADLINE = (0.9, 1.5)  # of the deadline, plus what a busy machine takes to notice
_NOTICE_S = 0.5

Cells = Mapping[tuple[str, str], str]  # by label of the row and title of the column


@dataclass(frozen=True, slots=True)
class Table:
    """The table as it stands in the page."""

    cells: Cells

    def outcomes(self, label: str, backend: str) -> frozenset[str]:
        """What the table says for a fault and a backend; empty where it says nothing."""
        return outcomes(self.cells.get((label, COLUMNS[backend]), ""))


def outcomes(cell: str) -> frozenset[str]:
    """The kinds of errors that a cell names."""
    return frozenset(error or word for error, word in re.findall(r"`(\w+Error)`|\b(succeeds)\b", cell))


def committed(page: Path = PAGE) -> Table:
    """The table of a page; one without cells where the page has none."""
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text:
        return Table({})
    return parsed(text[text.index(BEGIN) + len(BEGIN) : text.index(END)])


def parsed(markdown: str) -> Table:
    """A table by its markdown."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    if not rows:
        return Table({})
    return Table({(row[0], title): cell for row in rows[2:] for title, cell in zip(rows[0][1:], row[1:], strict=True)})


def rendered(records: Iterable[Mapping[str, Any]], labels: Mapping[str, str]) -> str:
    """Records as a markdown table.

    Args:
        records: As `records.Record` has them.
        labels: Label of the row by name of the fault, in the order of the rows.
    """
    by_cell: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in records:
        by_cell.setdefault((record["fault"], record["backend"]), []).append(record)
    columns = [backend for backend in COLUMNS if any(backend == column for _, column in by_cell)]
    lines = [
        "| fault | " + " | ".join(COLUMNS[backend] for backend in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for fault, label in labels.items():
        cells = [_cell(by_cell.get((fault, backend), [])) for backend in columns]
        if any(cell != _NOTHING for cell in cells):
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(records: list[Mapping[str, Any]]) -> str:
    """Every outcome that was met, each with the longest time that it took."""
    parts = []
    for outcome in sorted({record["outcome"] for record in records}):
        slowest = max((r for r in records if r["outcome"] == outcome), key=lambda r: float(r["seconds"]))
        name = outcome if outcome == "succeeds" else f"`{outcome}`"
        deadline_s = slowest["deadline_s"] if "Timeout" in outcome else None
        parts.append(f"{name}, {_time(float(slowest['seconds']), deadline_s)}")
    return " or ".join(parts) or _NOTHING


def _time(seconds: float, deadline_s: float | None) -> str:
    if deadline_s is not None and deadline_s * _AT_DEADLINE[0] <= seconds <= deadline_s * _AT_DEADLINE[1] + _NOTICE_S:
        return "at the deadline"
    for step in _STEPS_S:
        if seconds < step:
            return f"< {step * 1000:g} ms" if step < 0.5 else f"< {step:g} s"
    return f"{seconds:.0f} s"


def differences(table: Table, fresh: Table) -> list[str]:
    """Where a committed table and one of fresh records do not name the same errors."""
    found = []
    for label, title in sorted(table.cells.keys() | fresh.cells.keys()):
        old, new = (outcomes(t.cells.get((label, title), "")) for t in (table, fresh))
        if old and not new:
            found.append(f"{label!r} over {title}: the table says {_listed(old)}, no record shows it")
        elif new - old:
            found.append(f"{label!r} over {title}: the table says {_listed(old)}, the records {_listed(new)}")
    return found


def _listed(kinds: frozenset[str]) -> str:
    return " or ".join(sorted(kinds)) or "nothing"


def main() -> int:
    """Write the table, or compare it."""
    from tests.conformance.records import Fault

    parser = argparse.ArgumentParser(prog="python -m tests.conformance.fault_table", description=__doc__)
    parser.add_argument("records", nargs="+", type=Path, help="files of `pytest --fault-record`")
    does = parser.add_mutually_exclusive_group(required=True)
    does.add_argument("--write", type=Path, metavar="PAGE", help="put the table between the marks of this page")
    does.add_argument("--check", type=Path, metavar="PAGE", help="compare the kinds of errors with this page's table")
    given = parser.parse_args()
    records = [json.loads(line) for file in given.records for line in file.read_text(encoding="utf-8").splitlines()]
    table = rendered(records, {fault.name: fault.value for fault in Fault})
    if given.write is not None:
        text = given.write.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN)
        after = rest.split(END)[1]
        given.write.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")
        return 0
    found = differences(committed(given.check), parsed(table))
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
