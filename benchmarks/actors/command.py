"""``skipper actors`` from the command line to the exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks import output
from benchmarks.actors.rounds import FANOUT, MESSAGE_NBYTES, PIPELINED, Plan, measure
from benchmarks.actors.rows import rows
from benchmarks.actors.table import table
from benchmarks.arguments import Parser
from benchmarks.errors import BenchmarkError
from benchmarks.report import Report, Result
from control import ControlError

__all__ = ["main"]

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_QUICK = Plan(rounds=2, calls=20, broadcasts=200, spawns=1, warmup=1)


def main(argv: Sequence[str], *, prog: str = "skipper actors") -> int:
    """Measure the control plane.

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
    except ControlError as error:
        errors, exit_code = [f"{type(error).__name__}: {error}"], 1
    except KeyboardInterrupt:
        errors, exit_code = ["interrupted"], _INTERRUPTED
    for sentence in errors:
        print(f"{prog}: {sentence}", file=sys.stderr)
    config = {
        "tool": "actors",
        "processes": FANOUT,
        "message_nbytes": MESSAGE_NBYTES,
        "pipelined_calls": PIPELINED,
        **asdict(plan),
    }
    if results:
        output.console(json_on_stdout=given.json == output.STDOUT).print(table(results))
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
        description="Latency and throughput of actor calls, beside raw gRPC and memcpy in the same run.",
        epilog="exit codes: 0 all is well; 1 the run could not be finished; 2 wrong arguments; 130 interrupted",
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that it works; trust no figure")
    parser.add_argument("-J", "--json", metavar="PATH", help="write the report; - prints it alone on standard output")
    parser.add_argument("--csv", metavar="PATH", help="write the rows")
    return parser
