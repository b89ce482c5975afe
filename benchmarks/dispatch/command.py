"""``skipper dispatch`` from the command line to the exit code: its rows, and what each is compared with."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace

from skipper import control, tensor_engine
from skipper.benchmarks.dispatch.rounds import (
    BULK_NBYTES,
    ELEMENTS,
    GROUPS,
    MESSAGE_NBYTES,
    PROGRAM_OPS,
    DispatchPlan,
    Times,
    measure,
)
from skipper.benchmarks.dispatch.steps import USUAL_NETWORK, TrainedNetwork, messages_per_step
from skipper.benchmarks.output import figures_table
from skipper.benchmarks.program import Parser, report_parser, rounds_shown, run
from skipper.benchmarks.report import Result, Scalar, latency, rate
from skipper.commandline import add_certs, add_insecure, add_secret_file, whole
from skipper.control import ControlError, attach_to_hosts
from skipper.tensor_engine import TensorEngineError

__all__ = ["main", "parser", "rows"]

_QUICK = DispatchPlan(rounds=2, ops=200, calls=10, many=3, warmup=1, steps=4)


def parser(prog: str) -> Parser:
    """The parser of the command."""
    own = report_parser(
        prog,
        "Measure the time to issue, run and fetch operations of the tensor engine, and raw gRPC, torch and memcpy to "
        "compare.",
    )
    size = own.add_argument_group("network", "What the training steps train: linear layers, on two workers.")
    network = USUAL_NETWORK
    size.add_argument(
        "--layers", metavar="N", type=whole(1, 1000), default=network.layers, help="number of layers (default: 4)"
    )
    size.add_argument(
        "--width",
        metavar="N",
        type=whole(1, 1 << 16),
        default=network.width,
        help="features of each layer (default: 256)",
    )
    size.add_argument(
        "--samples",
        metavar="N",
        type=whole(1, 1 << 20),
        default=network.samples,
        help="samples of each worker (default: 64)",
    )
    where = own.add_argument_group("hosts", "With hosts, the messages per step and host are counted too.")
    where.add_argument("--hosts", metavar="FILE", help="file with the addresses of agents to run on")
    where.add_argument(
        "--per-host", metavar="N", type=whole(1, 1024), default=2, help="processes on each host (default: 2)"
    )
    add_secret_file(where)
    add_certs(where)
    add_insecure(where)
    return own


def main(argv: Sequence[str], *, prog: str = "skipper dispatch") -> int:
    """Measure the tensor engine; returns the exit code, as ``--help`` lists them."""
    given = parser(prog).read(argv)
    if isinstance(given, int):
        return given
    network = TrainedNetwork(given.layers, given.width, given.samples)
    plan = replace(_QUICK if given.quick else DispatchPlan(), network=network)
    config = {
        "tool": "dispatch",
        "message_nbytes": MESSAGE_NBYTES,
        "elements": ELEMENTS,
        "bulk_nbytes": BULK_NBYTES,
        **asdict(plan),
    }

    def measure_all(results: list[Result]) -> None:
        times: Times = {}
        try:
            with rounds_shown(prog, GROUPS * plan.rounds) as on_round:
                measure(plan, times, on_round)
        finally:  # also the rows of a run that was interrupted
            results += rows(times, plan)
        if given.hosts is not None:
            results.extend(_message_rows(given, plan))

    return run(
        argv,
        measure_all,
        prog=prog,
        json=given.json,
        csv=given.csv,
        tables=lambda results: [figures_table(results, title="tensor engine")],
        config=lambda: config,
        failures=(ControlError, TensorEngineError, OSError, ValueError),
    )


def _message_rows(given: argparse.Namespace, plan: DispatchPlan) -> list[Result]:
    """Messages per step and host, on attached hosts."""
    try:
        hosts = attach_to_hosts(
            given.hosts,
            secret_file=given.secret_file,
            certs=given.certs,
            insecure=given.insecure,
            data_plane=True if given.certs else None,
        )
        found = messages_per_step(hosts, given.per_host, plan.steps)
    finally:
        tensor_engine.shutdown()
        control.shutdown()
    there: dict[str, Scalar] = {"hosts": hosts.size, "per_host": given.per_host}
    return [
        Result.from_samples(f"messages_per_{name}_and_host", "1", each, parameters=there)
        for name, each in found.items()
    ]


def rows(times: Times, plan: DispatchPlan) -> list[Result]:
    """The rows of a run, references first; a run that was interrupted has fewer."""
    return [
        row
        for last, rows_of in (("memcpy", _rows_of_few), ("issue_to_many", _rows_of_both), ("step", _rows_of_steps))
        if last in times
        for row in rows_of(times, plan)
    ]


def _rows_of_few(times: Times, plan: DispatchPlan) -> list[Result]:
    elements: dict[str, Scalar] = {"elements": ELEMENTS}
    program: dict[str, Scalar] = {"program_ops": PROGRAM_OPS}
    workers: dict[str, Scalar] = {"workers": plan.few}
    bulk: dict[str, Scalar] = {"nbytes": BULK_NBYTES}
    unary = latency("grpc_aio_unary_p50_us", times["grpc_unary"])
    call = latency("call_one_p50_us", times["call_one"], unary)
    eager = latency("eager_torch_op_us", times["eager_op"], parameters=elements)
    memcpy = rate("memcpy_64MiB_gb_per_s", times["memcpy"], BULK_NBYTES, unit="GB/s", parameters=bulk)
    replayed = [there - here for there, here in zip(times["worker_replay_op"], times["eager_op"], strict=True)]
    beyond = [there - here for there, here in zip(times["worker_op"], times["eager_op"], strict=True)]
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
    ]


def _rows_of_both(times: Times, plan: DispatchPlan) -> list[Result]:
    both: dict[str, Scalar] = {"few_workers": plan.few, "many_workers": plan.many}
    few = latency("issue_to_few_us", times["issue_to_few"], parameters={"workers": plan.few})
    many = latency("issue_to_many_us", times["issue_to_many"], few, {"workers": plan.many})
    growth = [late / early for late, early in zip(times["issue_to_many"], times["issue_to_few"], strict=True)]
    return [few, many, Result.from_samples("issue_cost_vs_world", "x", growth, parameters=both)]


def _rows_of_steps(times: Times, plan: DispatchPlan) -> list[Result]:
    training: dict[str, Scalar] = {"workers": plan.few, **asdict(plan.network)}
    ddp = latency("ddp_step_us", times["ddp_step"], parameters=training)
    return [
        ddp,
        latency("step_us", times["step"], ddp, training),
        latency("compiled_step_us", times["compiled_step"], ddp, training),
    ]
