"""From durations to rows: what was measured beside what the model says, and what the model says beyond."""

from __future__ import annotations

import statistics
from dataclasses import asdict

from skipper.benchmarks.report import Reference, Result, Scalar
from skipper.benchmarks.scale.crowd import Crowd
from skipper.benchmarks.scale.model import Costs, latency_us, traffic
from skipper.benchmarks.scale.rounds import MESSAGE_NBYTES, WAYS, ScalePlan, Times, sizes
from skipper.benchmarks.statistics import percentile

__all__ = ["measured", "modelled"]

_PICKLE_NBYTES = 24
"""What a pickle has besides a message of 100 bytes."""
_TEXT_NBYTES = 14
"""``echo``, and an axis called ``ranks`` with its size."""


def measured(crowd: Crowd, times: Times, plan: ScalePlan, costs: dict[int, Costs]) -> list[Result]:
    """The rows of the real processes; the model's figure is the reference of each call's.

    Args:
        crowd: The processes.
        times: What was measured.
        plan: How.
        costs: Of the model, by number of ranks.
    """
    cores = statistics.median(times.cores)
    procs = crowd.straight.size
    rows = [
        Result.single("processes", "1", procs, parameters={"memory_nbytes_each": crowd.memory_nbytes}),
        Result.single("start_s", "s", crowd.start_s, parameters={"ranks": procs}),
        Result.from_samples("cores", "1", times.cores),
    ]
    for ranks, found in costs.items():
        among: dict[str, Scalar] = {"ranks": ranks}
        one_us = [ns / 1e3 for ns in times.one[ranks]]
        rows.append(Result.from_samples("call_one_us", "us", one_us, parameters=among))
        rows += [Result.single(f"cost_{name}", "us", value, parameters=among) for name, value in asdict(found).items()]
    errors = []
    for ranks in sizes(procs):
        for way in WAYS:
            fanout = plan.fanout if way == "tree" else None
            model = Reference("modelled_call_us", latency_us(ranks, fanout, costs[ranks], cores=cores))
            parameters: dict[str, Scalar] = {"ranks": ranks, "way": way}
            samples = [ns / 1e3 for ns in times.calls[way, ranks]]
            error = model.value / percentile(sorted(samples), 50) - 1
            errors.append(abs(error))
            told: dict[str, Scalar] = {**parameters, "model_error": error}
            rows.append(Result.from_samples("call_us", "us", samples, reference=model, parameters=told))
            rates = [ranks * plan.broadcasts * 1e9 / ns for ns in times.broadcasts[way, ranks]]
            rows.append(Result.from_samples("broadcast_msgs_per_s", "1/s", rates, parameters=parameters))
    rows.append(Result.from_samples("model_error", "1", errors, parameters={"median": statistics.median(errors)}))
    return rows


def modelled(first: int, last: int, plan: ScalePlan, costs: Costs) -> list[Result]:
    """Rows for more ranks than there are processes here, each rank on a core of its own."""
    rows = []
    ranks = 1
    while ranks <= last:
        if ranks > first:
            rows += [_modelled(ranks, way, plan, costs) for way in WAYS]
        ranks *= 2
    return rows


def _modelled(ranks: int, way: str, plan: ScalePlan, costs: Costs) -> Result:
    fanout = plan.fanout if way == "tree" else None
    nbytes = MESSAGE_NBYTES + _PICKLE_NBYTES
    sent = traffic(ranks, fanout, argument_nbytes=nbytes, result_nbytes=nbytes, text_nbytes=_TEXT_NBYTES)
    value = latency_us(ranks, fanout, costs, cores=None)
    return Result.single("modelled_call_us", "us", value, parameters={"ranks": ranks, "way": way, **asdict(sent)})
