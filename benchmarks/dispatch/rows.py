"""From durations to rows: which figure is held against which."""

from __future__ import annotations

from collections.abc import Sequence

from skipper.benchmarks.dispatch.rounds import BULK_NBYTES, ELEMENTS, PROGRAM_OPS, DispatchPlan, Times
from skipper.benchmarks.report import Reference, Result, Scalar

__all__ = ["rows"]


def rows(times: Times, plan: DispatchPlan) -> list[Result]:
    """The rows of a run, references first."""
    unary = _time("grpc_aio_unary_p50_us", times["grpc_unary"])
    call = _time("call_one_p50_us", times["call_one"], unary)
    eager = _time("eager_torch_op_us", times["eager_op"], parameters={"elements": ELEMENTS})
    memcpy = _rate("memcpy_64MiB_gb_per_s", times["memcpy"])
    few = _time("issue_to_few_us", times["issue_to_few"], parameters={"workers": plan.few})
    many = _time("issue_to_many_us", times["issue_to_many"], few, parameters={"workers": plan.many})
    replayed = [there - here for there, here in zip(times["worker_replay_op"], times["eager_op"], strict=True)]
    beyond = [there - here for there, here in zip(times["worker_op"], times["eager_op"], strict=True)]
    growth = [late / early for late, early in zip(times["issue_to_many"], times["issue_to_few"], strict=True)]
    return [
        unary,
        call,
        eager,
        memcpy,
        _time("eager_op_issue_us", times["issue"], unary, parameters={"workers": plan.few, "elements": ELEMENTS}),
        _time("replay_op_us", times["replay"], unary, parameters={"workers": plan.few, "program_ops": PROGRAM_OPS}),
        _time("worker_replay_overhead_us", replayed, eager, parameters={"program_ops": PROGRAM_OPS}),
        _time("worker_op_overhead_us", beyond, eager, parameters={"elements": ELEMENTS}),
        _time("fetch_small_p50_us", times["fetch_small"], call, parameters={"elements": ELEMENTS}),
        _rate("fetch_64MiB_gb_per_s", times["fetch_bulk"], memcpy),
        few,
        many,
        Result.from_samples(
            "issue_cost_vs_world", "x", growth, parameters={"few_workers": plan.few, "many_workers": plan.many}
        ),
    ]


def _time(
    name: str, durations: Sequence[float], beside: Result | None = None, parameters: dict[str, Scalar] | None = None
) -> Result:
    reference = None if beside is None else Reference(beside.name, beside.value)
    return Result.from_samples(name, "us", [ns / 1e3 for ns in durations], reference=reference, parameters=parameters)


def _rate(name: str, durations: Sequence[float], beside: Result | None = None) -> Result:
    """Bytes per ns, which is GB/s."""
    reference = None if beside is None else Reference(beside.name, beside.value)
    samples = [BULK_NBYTES / ns for ns in durations]
    return Result.from_samples(name, "GB/s", samples, reference=reference, parameters={"nbytes": BULK_NBYTES})
