"""A benchmark as a program: its command line, and then its rows, its tables, its report and its exit code."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from skipper.benchmarks import output
from skipper.benchmarks.errors import BenchmarkError, UsageError
from skipper.benchmarks.report import Report, Result
from skipper.commandline import (
    DONE,
    FAILED,
    INTERRUPTED,
    STDOUT,
    CommandParser,
    add_csv,
    add_json,
    add_quick,
    reader_is_gone,
    say_more,
    tell_origin,
)

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

__all__ = ["Parser", "report_parser", "require_device", "rounds_shown", "run"]


class Parser(CommandParser):
    """Raises `UsageError` where argparse would exit, so that all wrong command lines are handled alike."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse."""
        raise UsageError(self.explained(message))

    def read(self, argv: Sequence[str]) -> argparse.Namespace | int:
        """The arguments, or the exit code if there is nothing to run because help or an error has been printed.

        Args:
            argv: What was typed, without the program's name.
        """
        try:
            given = self.parse_args(list(argv))
        except SystemExit as leave:  # argparse's, after --help
            return leave.code if isinstance(leave.code, int) else DONE
        except BenchmarkError as error:
            print(f"{self.prog}: {error}", file=sys.stderr)
            return error.exit_code
        say_more(given)
        return given


def report_parser(
    prog: str,
    description: str | None,
    *,
    quick: str = "only a few rounds, to check that it works; the figures mean nothing",
    exit_codes: Mapping[int, str] | None = None,
) -> Parser:
    """A parser with the options ``--quick``, ``--json`` and ``--csv``.

    Args:
        prog: What was typed before the arguments.
        description: What is measured.
        quick: What the first of them does.
        exit_codes: Its own, in addition to the common ones.
    """
    parser = Parser(prog=prog, description=description, exit_codes=exit_codes)
    add_quick(parser, quick)
    add_json(parser)
    add_csv(parser)
    return parser


@contextlib.contextmanager
def rounds_shown(prog: str, total: int) -> Iterator[Callable[[int], None]]:
    """Within its block, a terminal shows how many rounds are complete.

    Args:
        prog: What measures.
        total: How many rounds there will be.

    Yields:
        What is to be called after each round.
    """
    from skipper.control import track_progress  # skipper bw, whose parser is made here too, does not need it

    with track_progress(prog, total, "rounds") as task:
        yield lambda _: task.advance()


def require_device(device: str) -> None:
    """Check that torch can use the device.

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
    tables: Callable[[Sequence[Result]], Iterable[Table | Text]],
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
        tables: Lays the rows out for people, or what is left to say when they have been printed already.
        config: What the report says of the run; called when the run is over.
        failures: Errors that end the run with exit code 1, in addition to `BenchmarkError`, which has its own.

    Returns:
        The exit code.
    """
    results: list[Result] = []
    errors: list[str] = []
    exit_code = DONE
    try:
        measure(results)
    except BenchmarkError as error:
        tell_origin()
        errors, exit_code = [str(error)], error.exit_code
    except failures as error:
        tell_origin()
        errors, exit_code = [f"{type(error).__name__}: {error}"], FAILED
    except KeyboardInterrupt:
        errors, exit_code = ["interrupted"], INTERRUPTED
    for sentence in errors:
        print(f"{prog}: {sentence}", file=sys.stderr)
    if results:
        console = output.console(json_on_stdout=json == STDOUT)
        try:
            for table in tables(results):
                console.print(table)
        except BrokenPipeError:
            reader_is_gone()
        if csv is not None:
            output.write_csv(results, csv)
    if json is not None:
        report = Report(argv=[*prog.split(), *argv], config=dict(config()), results=results, errors=errors)
        output.write_json(report, json)
    return exit_code
