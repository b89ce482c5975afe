"""A run as a section of a page in Markdown: each table says whether its cells are measured or modelled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skipper.benchmarks.output import plain_table, significant
from skipper.benchmarks.report import Report, Result
from skipper.benchmarks.weight_sync.modelled.fabric import Hardware
from skipper.benchmarks.weight_sync.modelled.rows import CHECK, CONTROLLER, PLAN, SYNC

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["BOUND", "modelled_tables", "section", "worst_error"]

BOUND = 0.25
"""The largest error of the model that is fine where it can be checked; the page reports a larger one."""

_PUBLISHED = (
    "Published: 1.3 s for a trillion parameters from 256 GPUs to 128, with a static schedule (Perplexity). Which "
    "layouts and what else that figure includes is not known here: it can be read next to the rows of 256 → 128, but "
    "it is no comparison with them."
)


def section(report: Report) -> str:
    """The section of a run.

    Args:
        report: Report of ``skipper weight-sync --modelled``.
    """
    lines = [
        "<!-- Written by `skipper weight-sync --modelled --page PATH`. -->",
        "# Weight sync at a trillion parameters",
        "",
        f"Of {_when(report)}. A cell is *measured* on that machine, or *modelled* by a simulation of cards, buses and "
        "switches whose flows are the plans that the store's own code compiles. Nothing here ran on the hardware that "
        "is modelled.",
    ]
    for table in _tables(report.results):
        lines += ["", f"## {table.title}", table.about, ""]
        lines += [f"| {' | '.join(cells)} |" for cells in (table.columns, ["---"] * len(table.columns), *table.cells)]
        lines += ["", table.after] if table.after else []
    return "\n".join(lines) + "\n"


def modelled_tables(rows: Sequence[Result]) -> Iterator[Table]:
    """The same tables for a terminal, without the columns that it has no room for."""
    for table in _tables(rows):
        kept = [index for index, column in enumerate(table.columns) if column not in _FOR_PAGES]
        shown = plain_table(table.title, *(table.columns[index] for index in kept))
        for cells in table.cells:
            shown.add_row(*(cells[index] for index in kept))
        yield shown


_FOR_PAGES = frozenset(
    ("publishers", "precision", "tensors", "finds s", "slowest s", "first answer MB", "later request kB",
     "later answer kB", "readers feed readers"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Table:
    """One table of the section.

    Attributes:
        about: Stands before it.
        after: Stands after it.
    """

    title: str
    about: str
    columns: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    after: str = ""


def _tables(results: Sequence[Result]) -> Iterator[_Table]:
    rows = {name: [row for row in results if row.name == name] for name in (PLAN, CONTROLLER, SYNC, CHECK)}
    controllers = {_key(row): row.value for row in rows[CONTROLLER]}
    yield _Table(
        "Plans: measured",
        "Each reader compiles its own plan from what all publishers say, and nobody compiles another one's. Seconds "
        "are of one core; *finds* is the part in which a reader finds the publishers that hold its tensors. A stretch "
        "is contiguous at both ends: one operation of the network card.",
        ("job", "publishers", "readers", "precision", "tensors", "reader fills", "reads from", "finds s",
         "compiles s, p50", "slowest s", "GB", "stretches"),
        tuple(map(_plan_cells, rows[PLAN])),
    )  # fmt: skip
    yield _Table(
        "Controller: measured",
        "What one controller does for a sync, in seconds of one core, without the network: it takes a share from each "
        "publisher and a request from each reader. Manifests travel with the first version only.",
        ("job", "readers", "precision", "first version s", "later: publish s", "each read ms", "whole sync s",
         "first answer MB", "later request kB", "later answer kB"),
        tuple(map(_controller_cells, rows[CONTROLLER])),
    )  # fmt: skip
    yield _Table(
        "Sync: modelled",
        _hardware(),
        ("job", "readers", "precision", "oversubscription", "readers feed readers", "TB moved", "moving s, from", "to",
         "with the controller s", "limited by"),
        tuple(_sync_cells(row, controllers[_key(row)]) for row in rows[SYNC] if _key(row) in controllers),
        _PUBLISHED,
    )  # fmt: skip
    yield _Table(
        "Is the simulation right? Measured and modelled",
        "The same simulation, with costs from syncs of one size, compared with syncs of other sizes on that "
        "machine through the store. The fastest of each kind counts, since other programs share the machine. Rows "
        "whose costs the model uses prove nothing and do not count.",
        ("bytes by", "trainers → readers", "MB", "n", "measured ms", "modelled ms", "error", ""),
        tuple(map(_check_cells, rows[CHECK])),
        _verdict(rows[CHECK]),
    )


def worst_error(rows: Sequence[Result]) -> Result | None:
    """The row of a sync here with the largest error of the model; None: no row can show one."""
    telling = [row for row in rows if row.name == CHECK and not row.parameters["gave_costs"]]
    return max(telling, key=lambda row: abs(_number(row, "error")), default=None)


def _verdict(rows: Sequence[Result]) -> str:
    worst = worst_error(rows)
    if worst is None:
        return "No sync was checked."
    errors = [abs(_number(row, "error")) for row in rows if not row.parameters["gave_costs"]]
    within = sum(error <= BOUND for error in errors)
    said = f"Of {len(errors)} checked syncs the model is within {BOUND:.0%} for {within}; "
    said += f"its largest error is {_number(worst, 'error'):+.0%} ({worst.parameters['way']}, "
    said += f"{worst.parameters['setting']}, {_number(worst, 'nbytes') / 1e6:.0f} MB)."
    if within < len(errors):
        said += " **That is more than this page allows: read the modelled figures as orders of magnitude.**"
    return said + (
        " All of them move bytes within one host: cards, switches and RDMA reads are modelled and were not checked."
    )


def _hardware() -> str:
    stated = Hardware()
    return (
        f"{stated.name}: {stated.nic_bytes_per_s / 1e9:g} GB/s in each direction, "
        f"{stated.bus_bytes_per_s / 1e9:g} GB/s between GPU and card, {stated.leaf_cards} cards at a leaf switch, "
        "publishers and readers at different ones, a spine that never blocks, "
        f"{stated.post_s * 1e6:g} µs of a reader's processor for each stretch. *From* is at these rates with the work "
        "spread perfectly, which no schedule beats (where readers feed readers: simulated at these rates); *to* is "
        f"simulated, with {stated.efficiency:.0%} of the rates for payload. *With the controller* adds what it "
        "does for the sync to that, as if nothing overlapped. In FP8 the trainer has quantized before it publishes."
    )


def _plan_cells(row: Result) -> tuple[str, ...]:
    found = row.parameters
    figures = (significant(value, 2) for value in (_number(row, "index_s"), row.p50, row.max))
    return (
        str(found["job"]), str(found["trainers"]), str(found["readers"]), str(found["precision"]),
        f"{_number(row, 'tensors'):,.0f}", f"{_number(row, 'filled'):,.0f}", f"{found['sources']}", *figures,
        significant(_number(row, "nbytes") / 1e9, 3), f"{_number(row, 'runs'):,.0f}",
    )  # fmt: skip


def _controller_cells(row: Result) -> tuple[str, ...]:
    found = row.parameters
    return (
        str(found["job"]), str(found["readers"]), str(found["precision"]),
        *(significant(_number(row, key) * scale, 2) for key, scale in (
            ("first_publish_s", 1), ("publish_s", 1), ("read_s", 1e3))),
        significant(row.value, 2),
        *(significant(_number(row, key) / scale, 2) for key, scale in (
            ("first_nbytes", 1e6), ("request_nbytes", 1e3), ("grant_nbytes", 1e3))),
    )  # fmt: skip


def _sync_cells(row: Result, controller_s: float) -> tuple[str, ...]:
    found = row.parameters
    return (
        str(found["job"]), str(found["readers"]), str(found["precision"]), f"{_number(row, 'oversubscription'):g}:1",
        "yes" if found["feed"] else "no", significant(_number(row, "nbytes") / 1e12, 2),
        significant(_number(row, "low_s"), 2), significant(row.value, 2), significant(row.value + controller_s, 2),
        str(found["limit"]),
    )  # fmt: skip


def _check_cells(row: Result) -> tuple[str, ...]:
    found = row.parameters
    told = "gave the costs" if found["gave_costs"] else ""
    return (
        str(found["way"]), str(found["setting"]), significant(_number(row, "nbytes") / 1e6, 3), str(row.n),
        significant(_number(row, "fastest_s") * 1e3, 3), significant(_number(row, "modelled_s") * 1e3, 3),
        f"{_number(row, 'error'):+.0%}", told,
    )  # fmt: skip


def _key(row: Result) -> tuple[object, ...]:
    return row.parameters["job"], row.parameters["readers"], row.parameters["precision"]


def _number(row: Result, name: str) -> float:
    value = row.parameters[name]
    if not isinstance(value, int | float):
        raise TypeError(f"{name} of {row.name} is no number: {value!r}")
    return value


def _when(report: Report) -> str:
    environment = report.environment
    return f"{str(environment.get('time', 'an unknown day'))[:10]}, on {environment.get('cpu', 'an unknown processor')}"
