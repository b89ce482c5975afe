"""``skipper scale`` from the command line to the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from skipper.benchmarks.arguments import Parser, whole
from skipper.benchmarks.program import EXIT_CODES, add_report_options, run
from skipper.benchmarks.report import Result
from skipper.benchmarks.scale.crowd import gather_crowd
from skipper.benchmarks.scale.rounds import MESSAGE_NBYTES, ScalePlan, costs_of, measure
from skipper.benchmarks.scale.rows import measured, modelled
from skipper.benchmarks.scale.table import tables
from skipper.control import ControlError

__all__ = ["main"]

_MOST = 1024


def main(argv: Sequence[str], *, prog: str = "skipper scale") -> int:
    """Measure casts to many, and model them to more.

    Args:
        argv: The arguments, without the program's name.
        prog: What was typed before them; shown in messages.

    Returns:
        The exit code: 0 all is well, 1 the run could not be finished, 2 a wrong command line, 130 interrupted.
    """
    given = _parser(prog).read(argv, "json", "csv")
    if isinstance(given, int):
        return given
    plan = ScalePlan(given.procs, given.fanout)
    if given.quick:
        plan = ScalePlan(min(given.procs, 6), given.fanout, rounds=2, calls=2, broadcasts=5)
    limit = ""

    def measure_and_model(results: list[Result]) -> None:
        nonlocal limit
        with gather_crowd(plan.procs) as crowd:
            limit = crowd.limit
            times = measure(crowd, plan)
            costs = costs_of(times, plan)
            results += measured(crowd, times, plan, costs)
            results += modelled(crowd.straight.size, given.ranks, plan, costs[crowd.straight.size])

    return run(
        argv,
        given,
        measure_and_model,
        prog=prog,
        tables=lambda results: tables(results, limit),
        config=lambda: {
            "tool": "scale",
            "ranks": given.ranks,
            "limit": limit,
            "message_nbytes": MESSAGE_NBYTES,
            **asdict(plan),
        },
        failures=(ControlError,),
    )


def _parser(prog: str) -> Parser:
    parser = Parser(
        prog=prog,
        description="Calls and broadcasts to many processes of this host, straight and down a tree, beside a model of "
        "them that goes on to many more.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n", "--procs", type=whole(4, _MOST), default=_MOST, help=f"at most so many processes (default: {_MOST})"
    )
    parser.add_argument("--fanout", type=whole(2, _MOST), default=8, help="of the trees (default: 8)")
    parser.add_argument("--ranks", type=whole(4, 1 << 20), default=1 << 15, help="model up to these (default: 32768)")
    add_report_options(parser, quick="6 processes, to see that it works; trust no figure")
    return parser
