"""``skipper bw compare A.json B.json``: is B faster than A, slower, or do the samples not show it?

Two rows are compared when they measured the same thing: the same name, unit, sizes, operation and so on. Their medians
are compared, or, with ``--relative``, their ratios to the yardstick of their own run: ratios differ less between two
machines, or two days of one machine, than absolute figures do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipper.benchmarks import output
from skipper.benchmarks.errors import BelowMinimumError, BenchmarkError, ReportError, UsageError
from skipper.benchmarks.program import Parser
from skipper.benchmarks.report import Report, Result, Scalar
from skipper.benchmarks.sizes import format_size
from skipper.commandline import STDOUT, add_json, number

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "COMPARE",
    "Comparison",
    "compare",
    "main",
    "parser",
    "differences",
    "load",
    "matches",
    "require_at_least",
]

COMPARE = "compare"
"""The subcommand; a server on a host of that name is reached as ``compare:PORT``."""

_STYLES = {"faster": "green", "slower": "red", "unclear": "dim"}

_NOTES = """\
A and B are reports that a benchmark of Skipper wrote with --json: skipper bw, skipper actors, ... A speedup is
above 1 where B is faster, for rates and for times.
"""

# Parameters that say how a row was measured and what came out, not what was measured.
_OUTCOMES = frozenset({"verified", "transfers_per_sample", "wire", "segments"})
_TELLING = ("mem", "bidirectional", "pairs", "actors")
# Two runs may differ in these on purpose: which is the better choice?
_CHOICES = frozenset({"backend", "copy_threads"})
_SAME_MACHINE = ("cpu", "cores_usable", "memory_nbytes", "machine", "kernel")
_SAME_SOFTWARE = ("python", "torch", "numpy", "ucx")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two rows of one thing.

    Attributes:
        before: Row of A.
        after: Row of B.
        speedup: How many times as fast B is; for times, the time of A over that of B.
        low, high: 95% interval of that; ``None`` where the samples were too few.
        verdict: ``faster``, ``slower``, ``no difference``, or ``unclear`` where there is no interval.
    """

    before: Result
    after: Result
    speedup: float
    low: float | None
    high: float | None
    verdict: str

    @property
    def label(self) -> str:
        """What was measured, in a few words."""
        words = [self.before.name]
        parameters = self.before.parameters
        if isinstance(size := parameters.get("size"), int):
            words.append(
                format_size(size) if parameters.get("batch", 1) == 1 else f"{parameters['batch']} x {format_size(size)}"
            )
        words += [f"{key} {parameters[key]}" for key in _TELLING if parameters.get(key) not in (None, 1, False, "host")]
        backends = [row.parameters.get("backend") for row in (self.before, self.after)]
        if backends[0] != backends[1]:
            words.append(f"{backends[0]} -> {backends[1]}")
        return " ".join(words)

    def to_result(self) -> Result:
        """As a row of a report."""
        changed = self.after.parameters.get("backend")
        parameters: dict[str, Scalar] = {
            **dict(_identity(self.before)),
            "before": self.before.value,
            "after": self.after.value,
            "of_unit": self.before.unit,
            "low": self.low,
            "high": self.high,
            "verdict": self.verdict,
        }
        if changed != self.before.parameters.get("backend"):
            parameters["backend_after"] = changed
        return Result.single(self.before.name, "speedup", self.speedup, parameters=parameters)


def load(path: str) -> Report:
    """Read a report.

    Raises:
        UsageError: There is no such file, or it holds no report.
    """
    try:
        return Report.from_json(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ReportError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error


def compare(before: Report, after: Report, *, relative: bool, tolerance: float) -> list[Comparison]:
    """Compare every row of ``before`` with the row of ``after`` that measured the same.

    Args:
        before: A.
        after: B.
        relative: Compare the rows' ratios to their own yardsticks. Rows without one are left out.
        tolerance: Speedups from ``1 - tolerance`` to ``1 + tolerance`` count as no difference, however narrow
            their intervals: an interval shows how much samples vary within a run, not from run to run.

    Raises:
        UsageError: The two have no row in common.
    """
    pairs = matches(before.results, after.results)
    found = [
        _compared(old, new, relative=relative, tolerance=tolerance)
        for old, new in pairs
        if not relative or (old.ratio and new.ratio)
    ]
    if not found:
        raise UsageError("the two reports have no row in common: they are of different sizes, operations or tools")
    return found


def matches(before: Iterable[Result], after: Iterable[Result]) -> list[tuple[Result, Result]]:
    """Pair rows that measured the same; those that differ only in backend or copy threads, if only one fits."""
    pairs: list[tuple[Result, Result]] = []
    left_before, left_after = list(before), list(after)
    for without in (frozenset[str](), _CHOICES):
        by_key: dict[Any, list[Result]] = {}
        for row in left_after:
            by_key.setdefault(_key(row, without), []).append(row)
        unmatched = []
        for row in left_before:
            candidates = by_key.get(_key(row, without), [])
            if len(candidates) == 1:
                pairs.append((row, candidates.pop()))
            else:
                unmatched.append(row)
        left_before, left_after = unmatched, [row for rows in by_key.values() for row in rows]
    order = {id(row): index for index, row in enumerate(before)}
    return sorted(pairs, key=lambda pair: order[id(pair[0])])


def differences(before: Report, after: Report) -> list[str]:
    """What makes the two runs hard to compare, a sentence each."""
    said = [
        f"{name} was measured incomplete: {'; '.join(report.errors)}"
        for name, report in (("A", before), ("B", after))
        if report.errors
    ]
    for keys, consequence in (
        (_SAME_MACHINE, "another machine; --relative compares ratios to its own yardstick"),
        (_SAME_SOFTWARE, "other software"),
    ):
        changed = [
            f"{key} {_shown(before.environment, key)} -> {_shown(after.environment, key)}"
            for key in keys
            if before.environment.get(key) != after.environment.get(key)
        ]
        if changed:
            said.append(f"{consequence}: {', '.join(changed)}")
    return said


def require_at_least(comparisons: Sequence[Comparison], least: float) -> None:
    """For CI: fail when something has certainly become slower. Rows without an interval are not judged.

    Raises:
        BelowMinimumError: The whole interval of a speedup is below ``least``.
        UsageError: No row has an interval.
    """
    if all(item.high is None for item in comparisons):
        raise UsageError("no row has enough samples for --fail-below: measure again with more --iters")
    low = [f"{item.label} at {item.speedup:.3f}" for item in comparisons if item.high is not None and item.high < least]
    if low:
        raise BelowMinimumError(f"below --fail-below {least:g}: {', '.join(low)}")


def _compared(before: Result, after: Result, *, relative: bool, tolerance: float) -> Comparison:
    old, new = (_measured(row, relative=relative) for row in (before, after))
    speedup = new[1] / old[1]
    low = None if new[0] is None or old[2] is None else new[0] / old[2]
    high = None if new[2] is None or old[0] is None else new[2] / old[0]
    if before.unit in ("us", "ms", "s"):
        speedup = 1 / speedup
        low, high = (None if end is None else 1 / end for end in (high, low))
    return Comparison(before, after, speedup, low, high, _verdict(speedup, low, high, tolerance))


def _measured(row: Result, *, relative: bool) -> tuple[float | None, float, float | None]:
    """Low end, middle and high end of what is compared."""
    name, value = ("ratio", row.ratio or 0.0) if relative else ("p50", row.value)
    low, high = (row.parameters.get(f"{name}_{end}") for end in ("low", "high"))
    if not isinstance(low, float | int) or not isinstance(high, float | int):
        return None, value, None
    return min(low, value), value, max(high, value)


def _verdict(speedup: float, low: float | None, high: float | None, tolerance: float) -> str:
    if low is None or high is None:
        return "unclear"
    if low > 1 and speedup > 1 + tolerance:
        return "faster"
    if high < 1 and speedup < 1 - tolerance:
        return "slower"
    return "no difference"


def _key(row: Result, without: frozenset[str]) -> Any:
    return row.name, row.unit, tuple(sorted((key, value) for key, value in _identity(row) if key not in without))


def _identity(row: Result) -> list[tuple[str, Scalar]]:
    """The parameters that say what was measured. Fractions are results, and so are `_OUTCOMES`."""
    return [
        (key, value)
        for key, value in row.parameters.items()
        if not isinstance(value, float) and value is not None and key not in _OUTCOMES
    ]


def _shown(environment: Mapping[str, Any], key: str) -> str:
    return str(environment.get(key, "?"))


def main(argv: Sequence[str], *, prog: str = "skipper bw compare") -> int:
    """Compare two reports, given the arguments after ``compare``; returns the exit code, as ``--help`` lists them."""
    given = parser(prog).read(argv)
    if isinstance(given, int):
        return given
    errors: list[str] = []
    exit_code = 0
    try:
        before, after = load(given.before), load(given.after)
        comparisons = compare(before, after, relative=given.relative, tolerance=given.tolerance)
        if given.fail_below is not None:
            try:
                require_at_least(comparisons, given.fail_below)
            except BenchmarkError as error:
                errors.append(str(error))
                exit_code = error.exit_code
    except BenchmarkError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return error.exit_code

    warnings = differences(before, after)
    for sentence in [*warnings, *errors]:
        print(f"{prog}: {sentence}", file=sys.stderr)
    output.console(json_on_stdout=given.json == STDOUT).print(_table(comparisons, relative=given.relative))
    if given.json is not None:
        config = {"tool": "compare", "relative": given.relative, "tolerance": given.tolerance, "warnings": warnings}
        results = [comparison.to_result() for comparison in comparisons]
        output.write_json(
            Report(argv=[*prog.split(), *argv], config=config, results=results, errors=errors), given.json
        )
    return exit_code


def parser(prog: str) -> Parser:
    """The parser of ``skipper bw compare``."""
    own = Parser(
        prog=prog,
        description="Compare the rows of two reports.",
        notes=_NOTES,
        exit_codes={0: "compared", 2: "bad arguments, or nothing to compare", 4: "a speedup is below --fail-below"},
    )
    own.add_argument("before", metavar="A.json", help="the report to compare with (before)")
    own.add_argument("after", metavar="B.json", help="the report to compare (after)")
    own.add_argument(
        "--relative",
        action="store_true",
        help="compare each figure's ratio to the reference of its own run (such as memcpy)",
    )
    own.add_argument(
        "--tolerance",
        type=number(zero=True),
        default=0.05,
        metavar="T",
        help="treat relative differences up to this as none (default: 0.05)",
    )
    own.add_argument(
        "--fail-below", type=number(), metavar="R", help="exit with 4 if the samples show that a speedup is below R"
    )
    add_json(own, "the comparison")
    return own


def _table(comparisons: Sequence[Comparison], *, relative: bool) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")
    for column in ("A", "B", "", "B is ... x\nas fast", "95%\ninterval"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    for item in comparisons:
        pair = (
            (item.before.ratio or 0.0, item.after.ratio or 0.0) if relative else (item.before.value, item.after.value)
        )
        unit = f"x {item.before.reference.name}" if relative and item.before.reference else item.before.unit
        interval = "" if item.low is None or item.high is None else f"{item.low:.3f} - {item.high:.3f}"
        verdict = Text(item.verdict, style=_STYLES.get(item.verdict, ""))
        figures = [output.significant(value) for value in pair]
        table.add_row(item.label, *figures, unit, f"{item.speedup:.3f}", interval, verdict)
    return table
