"""``skipper bw compare`` from the command line to the exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from skipper.benchmarks import output
from skipper.benchmarks.arguments import Parser, number
from skipper.benchmarks.bandwidth.compare import Comparison, compare, differences, load, require_at_least
from skipper.benchmarks.errors import BenchmarkError
from skipper.benchmarks.report import Report

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["COMPARE", "compare_main"]

COMPARE = "compare"
"""The word; a server on a host of that name is reached as ``compare:PORT``."""

_STYLES = {"faster": "green", "slower": "red", "unclear": "dim"}

_EPILOG = """\
A and B are reports that a benchmark here wrote with --json: skipper bw, skipper actors, ... What speeds up is
above 1, for rates and for times. exit codes: 0 compared; 2 nothing to compare; 4 below --fail-below for sure
"""


def compare_main(argv: Sequence[str], *, prog: str) -> int:
    """Compare two reports.

    Args:
        argv: The arguments after ``compare``.
        prog: What was typed before them.

    Returns:
        The exit code; ``--help`` lists them.
    """
    given = _parser(prog).read(argv, "json")
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
    output.console(json_on_stdout=given.json == output.STDOUT).print(_table(comparisons, relative=given.relative))
    if given.json is not None:
        config = {"tool": "compare", "relative": given.relative, "tolerance": given.tolerance, "warnings": warnings}
        results = [comparison.to_result() for comparison in comparisons]
        output.write_json(
            Report(argv=[*prog.split(), *argv], config=config, results=results, errors=errors), given.json
        )
    return exit_code


def _parser(prog: str) -> Parser:
    parser = Parser(
        prog=prog,
        description="Hold the rows of two reports against each other.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("before", metavar="A.json")
    parser.add_argument("after", metavar="B.json")
    parser.add_argument(
        "--relative", action="store_true", help="compare the ratios to each run's own yardstick, not the figures"
    )
    parser.add_argument(
        "--tolerance",
        type=number(zero=True),
        default=0.05,
        metavar="T",
        help="what differs by less is no difference (0.05)",
    )
    parser.add_argument(
        "--fail-below", type=number(), metavar="R", help="exit with 4 when B is surely slower than R times A"
    )
    parser.add_argument("-J", "--json", metavar="PATH", help="write the comparison; - prints it on standard output")
    return parser


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
