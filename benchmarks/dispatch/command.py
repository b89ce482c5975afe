"""``skipper dispatch`` from the command line to the exit code: which rows there are, and what each is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from skipper.benchmarks.dispatch.rounds import (
    BULK_NBYTES,
    ELEMENTS,
    MESSAGE_NBYTES,
    PROGRAM_OPS,
    DispatchPlan,
    Times,
    measure,
)
from skipper.benchmarks.output import figures_table
from skipper.benchmarks.program import report_parser, run
from skipper.benchmarks.report import Result, Scalar, latency, rate
from skipper.control import ControlError
from skipper.tensor_engine import TensorEngineError

__all__ = ["main", "rows"]

_QUICK = DispatchPlan(rounds=2, ops=200, calls=10, many=3, warmup=1)


def main(argv: Sequence[str], *, prog: str = "skipper dispatch") -> int:
    """Measure the tensor engine; returns the exit code, as ``--help`` lists them."""
    parser = report_parser(
        prog, "Issuing, running and fetching operations of the tensor engine, beside raw gRPC, torch and memcpy."
    )
    given = parser.read(argv, "json", "csv")
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
        lambda results: results.extend(rows(measure(plan), plan)),
        prog=prog,
        json=given.json,
        csv=given.csv,
        tables=lambda results: [figures_table(results, title="tensor engine")],
        config=lambda: config,
        failures=(ControlError, TensorEngineError),
    )


def rows(times: Times, plan: DispatchPlan) -> list[Result]:
    """The rows of a run, references first."""
    elements: dict[str, Scalar] = {"elements": ELEMENTS}
    program: dict[str, Scalar] = {"program_ops": PROGRAM_OPS}
    workers: dict[str, Scalar] = {"workers": plan.few}
    both: dict[str, Scalar] = {"few_workers": plan.few, "many_workers": plan.many}
    bulk: dict[str, Scalar] = {"nbytes": BULK_NBYTES}
    unary = latency("grpc_aio_unary_p50_us", times["grpc_unary"])
    call = latency("call_one_p50_us", times["call_one"], unary)
    eager = latency("eager_torch_op_us", times["eager_op"], parameters=elements)
    memcpy = rate("memcpy_64MiB_gb_per_s", times["memcpy"], BULK_NBYTES, unit="GB/s", parameters=bulk)
    few = latency("issue_to_few_us", times["issue_to_few"], parameters=workers)
    many = latency("issue_to_many_us", times["issue_to_many"], few, {"workers": plan.many})
    replayed = [there - here for there, here in zip(times["worker_replay_op"], times["eager_op"], strict=True)]
    beyond = [there - here for there, here in zip(times["worker_op"], times["eager_op"], strict=True)]
    growth = [late / early for late, early in zip(times["issue_to_many"], times["issue_to_few"], strict=True)]
    return [
        unary,
        call,
        eager,
        memcpy,
        latency("eager_op_issue_us", times["issue"], unary, workers | elements),
        latency("replay_op_us", times["replay"], unary, workers | program),
        latency("worker_replay_overhead_us", replayed, eager, program),
        latency("worker_op_overhead_us", beyond, eager, elements),
        latency("fetch_small_p50_us", times["fetch_small"], call, elements),
        rate("fetch_64MiB_gb_per_s", times["fetch_bulk"], BULK_NBYTES, memcpy, unit="GB/s", parameters=bulk),
        few,
        many,
        Result.from_samples("issue_cost_vs_world", "x", growth, parameters=both),
    ]
