"""``skipper actors`` from the command line to the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from skipper.benchmarks.actors.rounds import FANOUT, MESSAGE_NBYTES, PIPELINED, ActorsPlan, measure
from skipper.benchmarks.actors.rows import rows
from skipper.benchmarks.actors.table import table
from skipper.benchmarks.arguments import Parser
from skipper.benchmarks.program import EXIT_CODES, add_report_options, run
from skipper.control import ControlError

__all__ = ["main"]

_QUICK = ActorsPlan(rounds=2, calls=20, broadcasts=200, spawns=1, warmup=1)


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
    plan = _QUICK if given.quick else ActorsPlan()
    config = {
        "tool": "actors",
        "processes": FANOUT,
        "message_nbytes": MESSAGE_NBYTES,
        "pipelined_calls": PIPELINED,
        **asdict(plan),
    }
    return run(
        argv,
        given,
        lambda results: results.extend(rows(measure(plan), plan)),
        prog=prog,
        tables=lambda results: [table(results)],
        config=lambda: config,
        failures=(ControlError,),
    )


def _parser(prog: str) -> Parser:
    parser = Parser(
        prog=prog,
        description="Latency and throughput of actor calls, beside raw gRPC and memcpy in the same run.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    add_report_options(parser)
    return parser
