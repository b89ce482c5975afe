"""``skipper dispatch`` from the command line to the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from skipper.benchmarks.actors.table import table
from skipper.benchmarks.arguments import Parser
from skipper.benchmarks.dispatch.rounds import BULK_NBYTES, ELEMENTS, MESSAGE_NBYTES, DispatchPlan, measure
from skipper.benchmarks.dispatch.rows import rows
from skipper.benchmarks.program import EXIT_CODES, add_report_options, run
from skipper.control import ControlError
from skipper.tensor_engine import TensorEngineError

__all__ = ["main"]

_QUICK = DispatchPlan(rounds=2, ops=200, calls=10, many=3, warmup=1)


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
    plan = _QUICK if given.quick else DispatchPlan()
    config = {
        "tool": "dispatch",
        "message_nbytes": MESSAGE_NBYTES,
        "elements": ELEMENTS,
        "bulk_nbytes": BULK_NBYTES,
        **asdict(plan),
    }
    return run(
        argv,
        given,
        lambda results: results.extend(rows(measure(plan), plan)),
        prog=prog,
        tables=lambda results: [table(results, title="tensor engine")],
        config=lambda: config,
        failures=(ControlError, TensorEngineError),
    )


def _parser(prog: str) -> Parser:
    parser = Parser(
        prog=prog,
        description="Issuing, running and fetching operations of the tensor engine, beside raw gRPC, torch and memcpy.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    add_report_options(parser)
    return parser
