"""``skipper actors`` from the command line to the exit code: which rows there are, and what each is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from skipper.benchmarks.actors.rounds import (
    BULK_NBYTES,
    FANOUT,
    MESSAGE_NBYTES,
    PIPELINED,
    REPLICAS,
    ActorsPlan,
    Times,
    measure,
)
from skipper.benchmarks.output import figures_table
from skipper.benchmarks.program import Parser, report_parser, run, tell_round
from skipper.benchmarks.report import Result, latency, rate
from skipper.control import ControlError

__all__ = ["main", "parser", "rows"]

_QUICK = ActorsPlan(rounds=2, calls=20, broadcasts=200, spawns=1, warmup=1)


def parser(prog: str) -> Parser:
    """The parser of the command."""
    return report_parser(prog, "Latency and throughput of actor calls, beside raw gRPC and memcpy in the same run.")


def main(argv: Sequence[str], *, prog: str = "skipper actors") -> int:
    """Measure the control plane; returns the exit code, as ``--help`` lists them."""
    given = parser(prog).read(argv)
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

    def measure_all(results: list[Result]) -> None:
        times: Times = {}
        try:
            measure(plan, times, tell_round)
        finally:  # what there is of a run that was cut short
            results += rows(times, plan)

    return run(
        argv,
        measure_all,
        prog=prog,
        json=given.json,
        csv=given.csv,
        tables=lambda results: [figures_table(results, title="control plane")],
        config=lambda: config,
        failures=(ControlError,),
    )


def rows(times: Times, plan: ActorsPlan) -> list[Result]:
    """The rows of a run, references first; none where no round of it is whole."""
    if "memcpy" not in times:
        return []
    unary = latency("grpc_aio_unary_p50_us", times["grpc_unary"])
    stream = rate("grpc_aio_bidi_msgs_per_s", times["grpc_stream"], PIPELINED)
    bulk = {"nbytes": BULK_NBYTES}
    memcpy = rate("memcpy_64MiB_gb_per_s", times["memcpy"], BULK_NBYTES, unit="GB/s", parameters=bulk)
    call_one = latency("call_one_p50_us", times["call_one"], unary)
    spawn_s = [ns / 1e9 for ns in times["spawn"]]
    return [
        unary,
        stream,
        memcpy,
        call_one,
        latency("service_route_p50_us", times["service_route"], call_one, {"replicas": REPLICAS}),
        latency("rpc_client_call_p50_us", times["rpc_call"], unary, {"form": "sync"}),
        latency("rpc_client_future_p50_us", times["rpc_future"], unary, {"form": "future"}),
        latency("actor_to_actor_p50_us", times["actor_to_actor"], unary, {"actors": "sync"}),
        latency("actor_to_actor_async_p50_us", times["async_actor_to_actor"], unary, {"actors": "async"}),
        latency("call_fanout4_p50_us", times["fanout"], unary, {"actors": FANOUT}),
        rate("pipelined_calls_per_s", times["pipelined"], PIPELINED, stream, parameters={"calls": PIPELINED}),
        rate("broadcast_msgs_per_s", times["broadcast"], FANOUT * plan.broadcasts, parameters={"actors": FANOUT}),
        rate("call_64MiB_gb_per_s", times["bulk"], BULK_NBYTES, memcpy, unit="GB/s", parameters=bulk),
        Result.from_samples("spawn_4_procs_s", "s", spawn_s, parameters={"processes": FANOUT}),
    ]
