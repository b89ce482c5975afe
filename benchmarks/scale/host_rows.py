"""The rows of runs with hosts: found, and modelled at the same numbers of hosts and beyond."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence

from skipper.benchmarks.report import Result, Scalar
from skipper.benchmarks.scale.host_rounds import HostsFound, HostsPlan
from skipper.benchmarks.scale.host_sources import HOLLOW
from skipper.benchmarks.scale.model import Costs, latency_us
from skipper.benchmarks.scale.rounds import ScalePlan, Times, costs_of
from skipper.benchmarks.statistics import percentile
from skipper.control import configure
from skipper.control.cluster.hollow.hosts import PER_PROCESS

__all__ = ["MODELLED", "grown_rows", "host_rows", "modelled_rows"]

MODELLED = "modelled"

_BEYOND = (4096, 10_000)

_GROWS: Mapping[str, bool] = {
    "attach_s": True,
    "first_reply_s": True,
    "cast_reference_us": True,
    "root_cast_cpu_us": True,
    "root_cast_messages": True,
    "root_cast_nbytes": True,
    "idle_root_messages_per_s": True,
    "idle_root_cores": True,
    "idle_hosts_cores": True,
    "all_deaths_known_s": True,
    "broadcast_msgs_per_s": False,
    "call_one_us": False,
    "host_cast_cpu_us": False,
    "root_memory_nbytes_per_host": False,
    "root_descriptors_per_host": False,
    "root_threads_per_host": False,
    "reference_nbytes_per_host": False,
    "process_death_known_ms": False,
    "death_known_ms": False,
    "silence_known_s": False,
    "root_death_cpu_us": False,
    "recovery_s": False,
}
"""Rows that are in proportion to the number of hosts (true) or do not depend on it, once there are hundreds."""


def host_rows(found: HostsFound) -> Iterator[Result]:
    """What was found at one number of hosts; each row has ``hosts`` and ``label`` among its parameters."""
    among: dict[str, Scalar] = {"hosts": found.hosts, "label": found.label}

    def one(name: str, unit: str, value: float) -> Result:
        return Result.single(name, unit, value, parameters=among)

    def many(name: str, unit: str, values: Sequence[float]) -> Result:
        return Result.from_samples(name, unit, values, parameters=among)

    yield one("attach_s", "s", found.attach_s)
    yield one("first_reply_s", "s", found.first_s)
    if found.held is not None:
        yield one("root_memory_nbytes_per_host", "B", found.held.memory_nbytes / found.hosts)
        yield one("root_descriptors_per_host", "1", found.held.descriptors / found.hosts)
        yield one("root_threads_per_host", "1", found.held.threads / found.hosts)
    if found.called is not None and found.idle is not None:
        calls = len(found.calls_ns)
        yield many("cast_us", "us", [ns / 1e3 for ns in found.calls_ns])
        yield one("root_cast_cpu_us", "us", found.root_call_s() * 1e6)
        if (host_call_s := found.host_call_s()) > 0:  # less than a tick of the kernel's clock, for real hosts
            yield one("host_cast_cpu_us", "us", host_call_s * 1e6)
        yield one("root_cast_messages", "1", found.called.messages / calls)
        yield one("root_cast_nbytes", "B", found.root_call_nbytes())
    if found.references_ns:
        yield many("cast_reference_us", "us", [ns / 1e3 for ns in found.references_ns])
        yield one("reference_nbytes_per_host", "B", found.reference_nbytes / found.hosts)
    yield many("call_one_us", "us", [ns / 1e3 for ns in found.one_ns])
    yield one("broadcast_msgs_per_s", "1/s", found.broadcasts_per_s)
    if found.idle is not None:
        yield one("idle_root_messages_per_s", "1/s", (found.idle.messages + found.idle.signs) / found.idle_s)
        yield one("idle_root_cores", "1", found.idle.cpu_s / found.idle_s)
        yield one("idle_hosts_cores", "1", found.hosts_idle_cores())
    if found.deaths_s:
        yield many("process_death_known_ms", "ms", [seconds * 1e3 for seconds in found.process_deaths_s])
        yield many("death_known_ms", "ms", [seconds * 1e3 for seconds in found.deaths_s])
    if found.recovery_s is not None:
        yield one("recovery_s", "s", found.recovery_s)
    if found.silences_s:
        yield many("silence_known_s", "s", found.silences_s)
    if found.all_deaths_s is not None:
        yield one("all_deaths_known_s", "s", found.all_deaths_s)
        yield one("root_death_cpu_us", "us", found.all_deaths_cpu_s * 1e6)


def modelled_rows(found: Sequence[HostsFound], plan: HostsPlan) -> list[Result]:
    """The model's casts: as the hollow hosts ran, with one core for all; and with a core for each host, to more hosts.

    The model's costs are CPU times, and times of calls to one host alone; times of casts are not used for them.
    """
    hollow = sorted((each for each in found if each.label == HOLLOW), key=lambda each: each.hosts)
    if not hollow:
        return []
    costs = _costs(hollow, plan)
    rows = []
    for each in hollow:
        if each.hosts > PER_PROCESS:
            continue  # they share more cores than one, with the script
        measured_us = percentile(sorted(each.calls_ns), 50) / 1e3
        cores = 1 - each.hosts_idle_cores()
        value = latency_us(each.hosts, _fanout(each.hosts, plan), costs[each.hosts], cores=cores, caster_apart=True)
        among: dict[str, Scalar] = {
            "hosts": each.hosts,
            "label": MODELLED,
            "cores": "one for all hosts",
            "error": value / measured_us - 1,
        }
        rows.append(Result.single("cast_us", "us", value, parameters=among))
    last = hollow[-1].hosts
    for hosts in [each.hosts for each in hollow] + [hosts for hosts in _BEYOND if hosts > last]:
        value = latency_us(hosts, _fanout(hosts, plan), costs[min(hosts, last)], cores=None)
        alone: dict[str, Scalar] = {"hosts": hosts, "label": MODELLED, "cores": "one for each host"}
        rows.append(Result.single("cast_us", "us", value, parameters=alone))
    return rows


def grown_rows(rows: Sequence[Result]) -> list[Result]:
    """What the largest run with hollow hosts would be with more hosts, by `_GROWS`.

    The same from the second largest to the largest shows how far it errs: these rows have an ``error``.
    """
    by_hosts: dict[int, dict[str, Result]] = {}
    for row in rows:
        if row.parameters["label"] == HOLLOW:
            by_hosts.setdefault(int(row.parameters["hosts"] or 0), {})[row.name] = row
    numbers = sorted(by_hosts)
    steps = [*zip(numbers[-2:-1], numbers[-1:], strict=True), *((numbers[-1], hosts) for hosts in _BEYOND)]
    grown = []
    for name, grows in _GROWS.items():
        for base, hosts in steps:
            fewer, found = by_hosts[base].get(name), by_hosts.get(hosts, {}).get(name)
            if fewer is None or hosts <= base:
                continue
            scale = hosts / base if grows else 1.0
            among: dict[str, Scalar] = {"hosts": hosts, "label": MODELLED, "from": base}
            if found is not None and found.value > 0:
                among["error"] = fewer.value * scale / found.value - 1
            grown.append(_scaled(fewer, scale, among))
    return grown


def _scaled(row: Result, scale: float, parameters: dict[str, Scalar]) -> Result:
    numbers = {each: getattr(row, each) * scale for each in ("value", "min", "max", "p50", "p99")}
    return dataclasses.replace(row, **numbers, parameters=parameters)


def _fanout(hosts: int, plan: HostsPlan) -> int | None:
    return plan.fanout if hosts > configure().tree_threshold else None


def _costs(hollow: Sequence[HostsFound], plan: HostsPlan) -> dict[int, Costs]:
    """The costs at each number of hosts, as `costs_of` finds them."""
    times = Times()
    for each in hollow:
        way = "straight" if _fanout(each.hosts, plan) is None else "tree"
        times.caster_cpu[way, each.hosts] = [each.root_call_s() * 1e9]
        times.member_cpu[each.hosts] = [each.one_cpu_ns - statistics.median(each.one_ns) * each.hosts_idle_cores()]
        times.one[each.hosts] = each.one_ns
    one_ns = statistics.median(each.one_called_ns for each in hollow)
    times.caster_cpu.setdefault(("straight", 1), [one_ns])
    return costs_of(times, ScalePlan(max(each.hosts for each in hollow), plan.fanout))
