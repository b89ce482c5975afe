"""A benchmark as a program: its command line, and then its rows, its tables, its report and its exit code."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from skipper.benchmarks import output
from skipper.benchmarks.errors import BenchmarkError, UsageError
from skipper.benchmarks.report import Report, Result

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["EXIT_CODES", "INTERRUPTED", "Parser", "number", "report_parser", "require_device", "run", "whole"]

EXIT_CODES = "exit codes: 0 all is well; 1 the run could not be finished; 2 wrong arguments; 130 interrupted"
INTERRUPTED = 130
"""Exit code of an interrupted run: 128 + SIGINT, as shells report it."""


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` where argparse would exit, so that all wrong command lines are handled alike."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse."""
        raise UsageError(message)

    def read(self, argv: Sequence[str], *files: str) -> argparse.Namespace | int:
        """The arguments, or the exit code if there is nothing to run because help or a complaint has been printed.

        Args:
            argv: What was typed, without the program's name.
            files: Names of the arguments that name files to write; each is checked before anything is measured.
        """
        try:
            given = self.parse_args(list(argv))
            for name in files:
                output.check_writable(getattr(given, name))
        except SystemExit as leave:  # argparse's, after --help
            return leave.code if isinstance(leave.code, int) else 0
        except BenchmarkError as error:
            print(f"{self.prog}: {error}", file=sys.stderr)
            return error.exit_code
        return given


def whole(least: int, most: int = 10**12) -> Callable[[str], int]:
    """A type of argument: whole numbers from ``least`` to ``most``."""

    def parse(text: str) -> int:
        value = int(text) if re.fullmatch(r"[0-9]{1,12}", text) else -1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return value

    return parse


def number(*, zero: bool = False) -> Callable[[str], float]:
    """A type of argument: positive numbers below a million, and zero where it is allowed."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not (0 < value < 1e6 or (zero and value == 0)):
            raise argparse.ArgumentTypeError(f"{text!r} is {'neither 0 nor' if zero else 'not'} a positive number")
        return value

    return parse


def report_parser(
    prog: str,
    description: str | None,
    *,
    epilog: str = EXIT_CODES,
    quick: str = "a few rounds, to see that it works; trust no figure",
) -> Parser:
    """A parser with the options ``--quick``, ``--json`` and ``--csv``; ``quick`` says what the first does."""
    parser = Parser(prog=prog, description=description, epilog=epilog, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("-J", "--json", metavar="PATH", help="write the report; - prints it alone on standard output")
    parser.add_argument("--csv", metavar="PATH", help="write the rows")
    return parser


def require_device(device: str) -> None:
    """See that torch has it.

    Raises:
        UsageError: It is a GPU, and torch cannot use one.
    """
    if device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        why = "was built without CUDA" if torch.version.cuda is None else "sees none"
        raise UsageError(f"this needs a GPU, and torch {torch.__version__} {why}")


def run(
    argv: Sequence[str],
    measure: Callable[[list[Result]], object],
    *,
    prog: str,
    json: str | None,
    csv: str | None,
    tables: Callable[[Sequence[Result]], Iterable[Table]],
    config: Callable[[], Mapping[str, Any]],
    failures: tuple[type[Exception], ...],
) -> int:
    """Measure, show the rows, and write the files that were asked for.

    Args:
        argv: What was typed, without the program's name.
        measure: Appends rows. The rows that it has appended before it fails are shown and written, too.
        prog: The program's name.
        json: File for the report, or ``-`` for standard output.
        csv: File for the rows.
        tables: Lays the rows out for people.
        config: What the report says of the run; called when the run is over.
        failures: Errors that end the run with exit code 1, besides `BenchmarkError`, which has its own.

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
        errors, exit_code = ["interrupted"], INTERRUPTED
    for sentence in errors:
        print(f"{prog}: {sentence}", file=sys.stderr)
    if results:
        console = output.console(json_on_stdout=json == output.STDOUT)
        for table in tables(results):
            console.print(table)
        if csv is not None:
            output.write_csv(results, csv)
    if json is not None:
        report = Report(argv=[*prog.split(), *argv], config=dict(config()), results=results, errors=errors)
        output.write_json(report, json)
    return exit_code
