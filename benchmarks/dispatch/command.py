"""``skipper dispatch`` from the command line to the exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks import output
from benchmarks.actors.table import table
from benchmarks.arguments import Parser
from benchmarks.dispatch.rounds import BULK_NBYTES, ELEMENTS, MESSAGE_NBYTES, Plan, measure
from benchmarks.dispatch.rows import rows
from benchmarks.errors import BenchmarkError
from benchmarks.report import Report, Result
from control import ControlError
from tensor_engine import TensorEngineError

__all__ = ["main"]

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_QUICK = Plan(rounds=2, ops=200, calls=10, many=3, warmup=1)


def main(argv: Sequence[str], *, prog: str = "skipper dispatch") -> int:
    """Measure the tensor engine.

    Args:
        argv: The arguments, without the program's name.
        prog: What was typed before them; shown in messages.

    Returns:
        The exit code: 0 all is well, 1 the run could not be finished, 2 a wrong command line, 130 interrupted.
    """
    given = _parser(prog).read(argv, "json", "csv")
    if isinstance(given, int):
        return given
    plan = _QUICK if given.quick else Plan()
    results: list[Result] = []
    errors: list[str] = []
    exit_code = 0
    try:
        results = rows(measure(plan), plan)
    except BenchmarkError as error:
        errors, exit_code = [str(error)], error.exit_code
    except (ControlError, TensorEngineError) as error:
        errors, exit_code = [f"{type(error).__name__}: {error}"], 1
    except KeyboardInterrupt:
        errors, exit_code = ["interrupted"], _INTERRUPTED
    for sentence in errors:
        print(f"{prog}: {sentence}", file=sys.stderr)
    config = {
        "tool": "dispatch",
        "message_nbytes": MESSAGE_NBYTES,
        "elements": ELEMENTS,
        "bulk_nbytes": BULK_NBYTES,
        **asdict(plan),
    }
    if results:
        output.console(json_on_stdout=given.json == output.STDOUT).print(table(results, title="tensor engine"))
    if given.csv is not None and results:
        output.write_csv(results, given.csv)
    if given.json is not None:
        output.write_json(
            Report(argv=[*prog.split(), *argv], config=config, results=results, errors=errors), given.json
        )
    return exit_code


def _parser(prog: str) -> Parser:
    parser = Parser(
        prog=prog,
        description="Issuing, running and fetching operations of the tensor engine, beside raw gRPC, torch and memcpy.",
        epilog="exit codes: 0 all is well; 1 the run could not be finished; 2 wrong arguments; 130 interrupted",
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that it works; trust no figure")
    parser.add_argument("-J", "--json", metavar="PATH", help="write the report; - prints it alone on standard output")
    parser.add_argument("--csv", metavar="PATH", help="write the rows")
    return parser
