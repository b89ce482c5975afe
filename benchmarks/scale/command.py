"""``skipper scale`` from the command line to the exit code: its rows, measured and modelled, and its tables."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from skipper.benchmarks.output import plain_table, significant
from skipper.benchmarks.program import Parser, report_parser, rounds_shown, run
from skipper.benchmarks.report import Reference, Report, Result, Scalar
from skipper.benchmarks.scale.crowd import Crowd, gather_crowd
from skipper.benchmarks.scale.host_page import host_tables, page
from skipper.benchmarks.scale.host_rounds import HostsFound, HostsPlan, measure_apart
from skipper.benchmarks.scale.host_rows import grown_rows, host_rows, modelled_rows
from skipper.benchmarks.scale.host_sources import HOLLOW, MEASURED
from skipper.benchmarks.scale.model import Costs, latency_us, traffic
from skipper.benchmarks.scale.rounds import WAYS, ScalePlan, Times, costs_of, measure, sizes
from skipper.benchmarks.sizes import size_up_to
from skipper.benchmarks.statistics import percentile
from skipper.commandline import USAGE, output_path, whole
from skipper.control import ControlError
from skipper.control.cluster.hollow import MAX_HOSTS

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["main", "parser"]

_MOST = 1024
_MESSAGE_NBYTES = 100

_PICKLE_NBYTES = 24
"""Bytes that a pickle adds to a message of 100 bytes."""
_TEXT_NBYTES = 14
"""Bytes of ``echo``, and of an axis called ``ranks`` with its size."""


def parser(prog: str) -> Parser:
    """The parser of the command."""
    description = (
        "Measure calls and broadcasts to many processes of this host, directly and through a tree. A model made from "
        "these figures tells the cost for many more processes."
    )
    own = report_parser(prog, description, quick="6 processes only, to check that it works; the figures mean nothing")
    own.add_argument(
        "-n",
        "--procs",
        type=whole(4, _MOST),
        default=_MOST,
        metavar="N",
        help=f"largest number of processes (default: {_MOST})",
    )
    own.add_argument("--fanout", type=whole(2, _MOST), default=8, metavar="N", help="fan-out of the trees (default: 8)")
    own.add_argument(
        "-s",
        "--size",
        type=size_up_to(1 << 20),
        default=_MESSAGE_NBYTES,
        metavar="SIZE",
        help=f"size of the message that each call sends and returns (default: {_MESSAGE_NBYTES})",
    )
    own.add_argument(
        "--ranks",
        type=whole(4, 1 << 20),
        default=1 << 15,
        metavar="N",
        help="largest number of ranks to model (default: 32768)",
    )
    own.add_argument(
        "--hollow",
        type=_numbers,
        metavar="N,N,...",
        help="measure hosts instead of processes: a run with each of these numbers of hollow hosts, which speak the "
        "protocol of hosts and share one process",
    )
    own.add_argument(
        "--real",
        type=_numbers,
        default=(),
        metavar="N,N,...",
        help="with --hollow: also runs with these numbers of real hosts",
    )
    own.add_argument(
        "--net",
        choices=("tcp", "local"),
        default="tcp",
        help="with --hollow: links between hosts over TCP, or sockets within this host (default: tcp)",
    )
    own.add_argument(
        "--page", type=output_path, metavar="PATH", help="with --hollow: write the results as a Markdown page"
    )
    return own


def main(argv: Sequence[str], *, prog: str = "skipper scale") -> int:
    """Measure casts to many, and model them for more; returns the exit code, as ``--help`` lists them."""
    given = parser(prog).read(argv)
    if isinstance(given, int):
        return given
    if given.hollow is not None:
        return _run_hosts(argv, given, prog)
    if given.real or given.page is not None:
        print(f"{prog}: {'--real' if given.real else '--page'} is about --hollow", file=sys.stderr)
        return USAGE
    plan = ScalePlan(given.procs, given.fanout, message_nbytes=given.size)
    if given.quick:
        plan = replace(plan, procs=min(given.procs, 6), rounds=2, calls=2, broadcasts=5)
    limit = ""

    def measure_and_model(results: list[Result]) -> None:
        nonlocal limit
        with gather_crowd(plan.procs) as crowd:
            limit = crowd.limit
            times = Times()
            try:
                with rounds_shown(prog, plan.rounds) as on_round:
                    measure(crowd, plan, times, on_round)
            finally:
                if times.is_whole:  # even if the run was interrupted after that
                    costs = costs_of(times, plan)
                    results += measured(crowd, times, plan, costs)
                    results += modelled(crowd.straight.size, given.ranks, plan, costs[crowd.straight.size])

    return run(
        argv,
        measure_and_model,
        prog=prog,
        json=given.json,
        csv=given.csv,
        tables=lambda results: tables(results, limit),
        config=lambda: {
            "tool": "scale",
            "ranks": given.ranks,
            "limit": limit,
            **asdict(plan),
        },
        failures=(ControlError,),
    )


def _run_hosts(argv: Sequence[str], given: argparse.Namespace, prog: str) -> int:
    """Measure jobs on hollow hosts, and on real ones."""
    plan = HostsPlan(own_ips=given.net == "tcp", fanout=given.fanout, message_nbytes=given.size)
    if given.quick:
        plan = replace(plan, calls=5, references=5, broadcasts=5, turns=8, deaths=2, idle_s=1.0, freezes=False)
    runs = [*((MEASURED, count) for count in given.real), *((HOLLOW, count) for count in given.hollow)]
    config = {
        "tool": "scale",
        "hollow": list(given.hollow),
        "real": list(given.real),
        "beyond_idle": True,
        **asdict(plan),
    }

    def measure_hosts(results: list[Result]) -> None:
        found: list[HostsFound] = []
        with rounds_shown(prog, len(runs)) as on_run:
            for label, count in runs:
                found.append(measure_apart(label, count, plan))
                results += host_rows(found[-1])
                on_run(len(found))
        results += modelled_rows(found, plan)
        results += grown_rows(results)

    def show(results: Sequence[Result]) -> Iterator[Table]:
        if given.page is not None:
            report = Report(argv=[*prog.split(), *argv], config=config, results=list(results))
            Path(given.page).write_text(page(report), encoding="utf-8")
        return host_tables(results)

    return run(
        argv,
        measure_hosts,
        prog=prog,
        json=given.json,
        csv=given.csv,
        tables=show,
        config=lambda: config,
        failures=(ControlError, OSError, BrokenProcessPool),
    )


def _numbers(text: str) -> tuple[int, ...]:
    """Numbers of hosts, in ascending order.

    Raises:
        ArgumentTypeError: one of them is not a number of hosts.
    """
    return tuple(sorted(set(map(whole(1, MAX_HOSTS), text.split(",")))))


def measured(crowd: Crowd, times: Times, plan: ScalePlan, costs: dict[int, Costs]) -> list[Result]:
    """The rows of the real processes; the model's figure is the reference of each call's.

    Args:
        crowd: The processes.
        times: What was measured.
        plan: How it was measured.
        costs: The model's costs, by number of ranks.
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
    more = [1 << power for power in range(last.bit_length()) if 1 << power > first]
    return [_modelled(ranks, way, plan, costs) for ranks in more for way in WAYS]


def _modelled(ranks: int, way: str, plan: ScalePlan, costs: Costs) -> Result:
    fanout = plan.fanout if way == "tree" else None
    nbytes = plan.message_nbytes + _PICKLE_NBYTES
    sent = traffic(ranks, fanout, argument_nbytes=nbytes, result_nbytes=nbytes, text_nbytes=_TEXT_NBYTES)
    value = latency_us(ranks, fanout, costs, cores=None)
    return Result.single("modelled_call_us", "us", value, parameters={"ranks": ranks, "way": way, **asdict(sent)})


def tables(results: Sequence[Result], limit: str) -> Iterator[Table]:
    """The measured calls, their costs, and the model; ``limit`` says why there are not more processes."""
    by_key = {(row.name, row.parameters.get("ranks"), row.parameters.get("way")): row for row in results}
    calls = [row for row in results if row.name == "call_us"]
    procs = next(row for row in results if row.name == "processes")
    measured_columns = ("ranks", "way", "call p50 us", "p99", "model us", "error", "broadcast msgs/s")
    out = plain_table(f"{procs.value:g} processes ({limit})", *measured_columns)
    for row in calls:
        ranks, way = row.parameters["ranks"], row.parameters["way"]
        rate = by_key["broadcast_msgs_per_s", ranks, way]
        error = row.parameters["model_error"]
        assert isinstance(error, float)  # see `measured`
        assert row.reference is not None
        figures = [significant(value) for value in (row.p50, row.p99, row.reference.value)]
        out.add_row(str(ranks), str(way), *figures, f"{error:+.0%}", significant(rate.p50))
    yield out
    cores = next(row for row in results if row.name == "cores")
    prices = [row for row in results if row.name.startswith("cost_")]
    names = [name.removeprefix("cost_").removesuffix("_us") for name in dict.fromkeys(row.name for row in prices)]
    costs = plain_table(f"measured costs in us; the processes got {significant(cores.value)} cores", "ranks", *names)
    for ranks in dict.fromkeys(row.parameters["ranks"] for row in prices):
        costs.add_row(str(ranks), *(significant(row.value) for row in prices if row.parameters["ranks"] == ranks))
    yield costs
    columns = ("ranks", "way", "depth", "call ms", "caster's messages", "caster's kB", "most of a rank", "kB")
    beyond = plain_table("modelled, each rank on a core of its own", *columns)
    for row in results:
        if row.name == "modelled_call_us":
            found = row.parameters
            kilobytes = [significant(float(found[key] or 0) / 1e3) for key in ("caster_nbytes", "most_nbytes")]
            beyond.add_row(
                str(found["ranks"]),
                str(found["way"]),
                str(found["depth"]),
                significant(row.value / 1e3),
                str(found["caster_messages"]),
                kilobytes[0],
                str(found["most_messages"]),
                kilobytes[1],
            )
    yield beyond
