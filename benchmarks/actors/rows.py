"""From durations to rows: which figure is held against which."""

from __future__ import annotations

from collections.abc import Sequence

from skipper.benchmarks.actors.rounds import BULK_NBYTES, FANOUT, PIPELINED, REPLICAS, ActorsPlan, Times
from skipper.benchmarks.report import Reference, Result, Scalar

__all__ = ["rows"]

_UNARY, _STREAM, _MEMCPY = "grpc_aio_unary_p50_us", "grpc_aio_bidi_msgs_per_s", "memcpy_64MiB_gb_per_s"


def rows(times: Times, plan: ActorsPlan) -> list[Result]:
    """The rows of a run, references first."""
    unary = _latency(_UNARY, times["grpc_unary"])
    stream = _rate(_STREAM, times["grpc_stream"], PIPELINED)
    memcpy = _rate(_MEMCPY, times["memcpy"], BULK_NBYTES, unit="GB/s", parameters={"nbytes": BULK_NBYTES})
    call_one = _latency("call_one_p50_us", times["call_one"], unary)
    return [
        unary,
        stream,
        memcpy,
        call_one,
        _latency("service_route_p50_us", times["service_route"], call_one, {"replicas": REPLICAS}),
        _latency("rpc_client_call_p50_us", times["rpc_call"], unary, {"form": "sync"}),
        _latency("rpc_client_future_p50_us", times["rpc_future"], unary, {"form": "future"}),
        _latency("actor_to_actor_p50_us", times["actor_to_actor"], unary, {"actors": "sync"}),
        _latency("actor_to_actor_async_p50_us", times["async_actor_to_actor"], unary, {"actors": "async"}),
        _latency("call_fanout4_p50_us", times["fanout"], unary, {"actors": FANOUT}),
        _rate("pipelined_calls_per_s", times["pipelined"], PIPELINED, stream, parameters={"calls": PIPELINED}),
        _rate("broadcast_msgs_per_s", times["broadcast"], FANOUT * plan.broadcasts, parameters={"actors": FANOUT}),
        _rate(
            "call_64MiB_gb_per_s", times["bulk"], BULK_NBYTES, memcpy, unit="GB/s", parameters={"nbytes": BULK_NBYTES}
        ),
        Result.from_samples(
            "spawn_4_procs_s", "s", [ns / 1e9 for ns in times["spawn"]], parameters={"processes": FANOUT}
        ),
    ]


def _latency(
    name: str, durations: Sequence[int], beside: Result | None = None, parameters: dict[str, Scalar] | None = None
) -> Result:
    reference = None if beside is None else Reference(beside.name, beside.value)
    return Result.from_samples(name, "us", [ns / 1e3 for ns in durations], reference=reference, parameters=parameters)


def _rate(
    name: str,
    durations: Sequence[int],
    amount: int,
    beside: Result | None = None,
    *,
    unit: str = "1/s",
    parameters: dict[str, Scalar] | None = None,
) -> Result:
    """``amount`` per second, or per ns where that makes GB/s; the percentiles are those of the rate."""
    per = 1.0 if unit == "GB/s" else 1e9
    samples = [amount * per / ns for ns in durations]
    reference = None if beside is None else Reference(beside.name, beside.value)
    return Result.from_samples(name, unit, samples, reference=reference, parameters=parameters)
