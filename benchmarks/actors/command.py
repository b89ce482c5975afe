"""``skipper actors`` from the command line to the exit code: its rows, and what each is compared with."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from skipper.benchmarks.actors.rounds import (
    PIPELINED,
    REPLICAS,
    ActorsPlan,
    Times,
    measure,
)
from skipper.benchmarks.machine import available_nbytes
from skipper.benchmarks.output import figures_table
from skipper.benchmarks.program import Parser, report_parser, rounds_shown, run
from skipper.benchmarks.report import Result, latency, rate
from skipper.benchmarks.sizes import binary_size, format_size, size_up_to
from skipper.commandline import USAGE, whole
from skipper.control import ControlError

__all__ = ["main", "parser", "rows"]

_MOST = 1024
_COPIES = 8  # of the large argument: at the script, in transit, at the actor, and those that memcpy fills
_LARGEST_MESSAGE = 1 << 20  # raw gRPC, with which it is compared, takes 4 MiB at most
_QUICK = ActorsPlan(rounds=2, calls=20, broadcasts=200, spawns=1, warmup=1)


def parser(prog: str) -> Parser:
    """The parser of the command."""
    own = report_parser(
        prog, "Measure latency and throughput of actor calls, and raw gRPC and memcpy in the same run to compare."
    )
    usual = ActorsPlan()
    own.add_argument(
        "-n",
        "--procs",
        type=whole(2, _MOST),
        default=usual.procs,
        metavar="N",
        help=f"number of processes, each with one actor (default: {usual.procs})",
    )
    own.add_argument(
        "-s",
        "--size",
        type=size_up_to(_LARGEST_MESSAGE),
        default=usual.message_nbytes,
        metavar="SIZE",
        help=f"size of the message that each call sends and returns (default: {usual.message_nbytes})",
    )
    own.add_argument(
        "--bulk",
        type=size_up_to(1 << 30),
        default=usual.bulk_nbytes,
        metavar="SIZE",
        help=f"size of the large argument (default: {format_size(usual.bulk_nbytes)})",
    )
    return own


def main(argv: Sequence[str], *, prog: str = "skipper actors") -> int:
    """Measure the control plane; returns the exit code, as ``--help`` lists them."""
    given = parser(prog).read(argv)
    if isinstance(given, int):
        return given
    needed, room = _COPIES * given.bulk, available_nbytes()
    if needed > room:
        sentence = (
            f"--bulk {format_size(given.bulk)} takes {needed / 1e9:.1f} GB of memory, and {room / 1e9:.1f} are free"
        )
        print(f"{prog}: {sentence}", file=sys.stderr)
        return USAGE
    plan = replace(
        _QUICK if given.quick else ActorsPlan(), procs=given.procs, message_nbytes=given.size, bulk_nbytes=given.bulk
    )
    config = {"tool": "actors", "pipelined_calls": PIPELINED, **asdict(plan)}

    def measure_all(results: list[Result]) -> None:
        times: Times = {}
        try:
            with rounds_shown(prog, plan.rounds) as on_round:
                measure(plan, times, on_round)
        finally:  # also the rows of a run that was interrupted
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
    """The rows of a run, references first; none if no round is complete."""
    if "memcpy" not in times:
        return []
    unary = latency("grpc_aio_unary_p50_us", times["grpc_unary"])
    stream = rate("grpc_aio_bidi_msgs_per_s", times["grpc_stream"], PIPELINED)
    procs, size = plan.procs, binary_size(plan.bulk_nbytes)
    bulk = {"nbytes": plan.bulk_nbytes}
    memcpy = rate(f"memcpy_{size}_gb_per_s", times["memcpy"], plan.bulk_nbytes, unit="GB/s", parameters=bulk)
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
        latency(f"call_fanout{procs}_p50_us", times["fanout"], unary, {"actors": procs}),
        rate("pipelined_calls_per_s", times["pipelined"], PIPELINED, stream, parameters={"calls": PIPELINED}),
        rate("broadcast_msgs_per_s", times["broadcast"], procs * plan.broadcasts, parameters={"actors": procs}),
        rate(f"call_{size}_gb_per_s", times["bulk"], plan.bulk_nbytes, memcpy, unit="GB/s", parameters=bulk),
        Result.from_samples(f"spawn_{procs}_procs_s", "s", spawn_s, parameters={"processes": procs}),
    ]
