"""A benchmark as a program, once its command line has been read: its rows, its table, its report, its exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from skipper.benchmarks import output
from skipper.benchmarks.errors import BenchmarkError
from skipper.benchmarks.report import Report, Result

if TYPE_CHECKING:
    from rich.table import Table

    from skipper.benchmarks.arguments import Parser

__all__ = ["EXIT_CODES", "add_report_options", "run"]

EXIT_CODES = "exit codes: 0 all is well; 1 the run could not be finished; 2 wrong arguments; 130 interrupted"
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def add_report_options(parser: Parser, *, quick: str = "a few rounds, to see that it works; trust no figure") -> None:
    """The options that these programs share; ``quick`` says what ``--quick`` does."""
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("-J", "--json", metavar="PATH", help="write the report; - prints it alone on standard output")
    parser.add_argument("--csv", metavar="PATH", help="write the rows")


def run(
    argv: Sequence[str],
    given: argparse.Namespace,
    measure: Callable[[list[Result]], object],
    *,
    prog: str,
    tables: Callable[[Sequence[Result]], Iterable[Table]],
    config: Callable[[], Mapping[str, Any]],
    failures: tuple[type[Exception], ...],
) -> int:
    """Measure, show, write what was asked for.

    Args:
        argv: What was typed, without the program's name.
        given: The same, read, with the options of `add_report_options`.
        measure: Appends rows; what it has appended before it fails is shown and written, too.
        prog: The program's name.
        tables: Lays the rows out for people.
        config: What the report says of the run, asked for when that is over.
        failures: Errors that end the run with exit code 1, besides `BenchmarkError`, which knows its own.

    Returns:
        The exit code.
    """
    results: list[Result] = []
    errors: list[str] = []
    exit_code = 0
    try:
        measure(results)
    except BenchmarkError as error:
        errors, exit_code = [str(error)], error.exit_code
    except failures as error:
        errors, exit_code = [f"{type(error).__name__}: {error}"], 1
    except KeyboardInterrupt:
        errors, exit_code = ["interrupted"], _INTERRUPTED
    for sentence in errors:
        print(f"{prog}: {sentence}", file=sys.stderr)
    if results:
        console = output.console(json_on_stdout=given.json == output.STDOUT)
        for table in tables(results):
            console.print(table)
        if given.csv is not None:
            output.write_csv(results, given.csv)
    if given.json is not None:
        report = Report(argv=[*prog.split(), *argv], config=dict(config()), results=results, errors=errors)
        output.write_json(report, given.json)
    return exit_code
