"""A run with hosts as a page in Markdown, and as tables for a terminal: every row says how its cells were obtained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skipper.benchmarks.output import plain_table, significant
from skipper.benchmarks.report import Report, Result
from skipper.benchmarks.scale.host_rows import MODELLED
from skipper.benchmarks.scale.host_sources import HOLLOW, MEASURED
from skipper.control.cluster.hollow.hosts import PER_PROCESS

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["BOUND", "host_tables", "page"]

BOUND = 0.25
"""The largest error of the model that is fine where it can be checked; the page reports a larger one."""


@dataclass(frozen=True, slots=True)
class _Figure:
    """A row of the page.

    Attributes:
        name: Name of the rows of the report.
        title: For people.
        shown: Makes the text of the cell from a row.
    """

    name: str
    title: str
    shown: Callable[[Result], float]


def _value(scale: float = 1.0) -> Callable[[Result], float]:
    return lambda row: row.value * scale


def _p99(scale: float = 1.0) -> Callable[[Result], float]:
    return lambda row: row.p99 * scale


_FIGURES = (
    _Figure("attach_s", "attach all, s", _value()),
    _Figure("first_reply_s", "spawn a process and an actor on each, to the first answers of all, s", _value()),
    _Figure("cast_us", "cast and all answers, p50, ms", _value(1e-3)),
    _Figure("cast_us", "the same, p99, ms", _p99(1e-3)),
    _Figure("cast_reference_us", "cast of a reference to all actors, p50, ms", _value(1e-3)),
    _Figure("reference_nbytes_per_host", "such a reference: bytes for each host", _value()),
    _Figure("call_one_us", "call of one host's actor, p50, ms", _value(1e-3)),
    _Figure("broadcast_msgs_per_s", "messages without answers, handled by all hosts together, 1,000/s", _value(1e-3)),
    _Figure("root_cast_cpu_us", "script: CPU time for a cast, ms", _value(1e-3)),
    _Figure("host_cast_cpu_us", "host: CPU time for a cast, µs", _value()),
    _Figure("root_cast_messages", "script: messages that it receives for a cast", _value()),
    _Figure("root_cast_nbytes", "script: kB that it receives for a cast", _value(1e-3)),
    _Figure("root_memory_nbytes_per_host", "script: memory for each host, kB", _value(1e-3)),
    _Figure("root_descriptors_per_host", "script: descriptors for each host", _value()),
    _Figure("root_threads_per_host", "script: threads for each host", _value()),
    _Figure("idle_root_messages_per_s", "idle: messages to the script, 1/s", _value()),
    _Figure("idle_root_cores", "idle: cores of the script", _value()),
    _Figure("idle_hosts_cores", "idle: cores of all hosts together", _value()),
    _Figure("process_death_known_ms", "until the death of a process is known, p50, ms", _value()),
    _Figure("process_death_known_ms", "the same, p99, ms", _p99()),
    _Figure("death_known_ms", "until the death of a host is known, p50, ms", _value()),
    _Figure("death_known_ms", "the same, p99, ms", _p99()),
    _Figure("silence_known_s", "an eighth of the hosts cut off at once: until each is known, p50, s", _value()),
    _Figure("silence_known_s", "the same, p99, s", _p99()),
    _Figure("all_deaths_known_s", "until the death of all hosts at once is known, s", _value()),
    _Figure("root_death_cpu_us", "script: CPU time for each of these, µs", _value()),
    _Figure("recovery_s", "a lost host attached again, to its first answer, s", _value()),
)

_WORK = (
    "* *Attach*: it proves to each agent that it knows their secret, and gives it the job's secret, to 64 at a time. "
    "Hosts do not do this for each other: they would need the agents' secret, with which each could start processes on "
    "all others.",
    "* *Spawn*: one request to each host, which then starts its processes itself.",
    "* *Signs of life*: each host sends one eight times in `heartbeat_s`, however many processes it has, and gets as "
    "many. Other hosts do not pass them on: they may hear a host that the script does not reach, and this is what has "
    "to be noticed. The agent of each host gets a tenth as many.",
    "* *Casts and answers* go through a tree of hosts. Deaths are told to the script by each host alone.",
    "* *References to meshes* have the addresses of all members, packed, and are opened where they are used.",
)
"""What grows with the number of hosts, and why it does not go through a tree where it does not."""

_LABELS = (MEASURED, HOLLOW, MODELLED)


def page(report: Report) -> str:
    """The page of a run.

    Args:
        report: Report of ``skipper scale --hollow``.
    """
    rows = report.results
    lines = [
        "<!-- Written by `skipper scale --hollow N,... --page PATH`. -->",
        "# One script and many hosts",
        "",
        f"Of {_when(report)}. This page says what a job costs its script as the number of hosts grows. "
        "Plans and weight sync at such sizes have [a page of their own](scale_weights.md).",
        "",
        "| label | what it means |",
        "|---|---|",
        "| *measured* | each host is an agent, the process of the job and an actor's process, all of them real |",
        "| *hollow* | links, handshakes, heartbeats, trees, replies and failures are the real code, of the hosts too; "
        f"up to {PER_PROCESS:,} of them share a process of the operating system, one thread for all actors, and so one "
        "core. More hosts have more such processes, which share the cores of the machine with the script |",
        "| *modelled* | casts: a simulation of the tree, with costs from CPU times and from calls of one host; the "
        "rest: in proportion to the number of hosts where it grows, from the next smaller number of hollow hosts |",
        "",
        "The script is the same real one in all of them. " + _casts(report) + _net(report),
        "",
        "## What was found",
    ]
    lines += _markdown(*_grid(rows))
    lines += ["", "## Is the model right?", *_check(rows), "", "## Objectives", *_objectives(rows)]
    lines += ["", "## What the script does for each host", *_WORK]
    lines += ["", "## What breaks first", *_limits(report)]
    return "\n".join(lines) + "\n"


def host_tables(rows: Sequence[Result]) -> Iterator[Table]:
    """The same for a terminal."""
    columns, cells = _grid(rows)
    shown = plain_table("hosts", *columns, left=(columns[0], columns[1]))
    for row in cells:
        shown.add_row(*row)
    yield shown
    if checked := _checked(rows):
        errors = plain_table("model, one core for all hosts", "hosts", "hollow ms", "modelled ms", "error")
        for hollow, model in checked:
            errors.add_row(*_error_cells(hollow, model))
        yield errors


def _grid(rows: Sequence[Result]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and cells of all figures, the numbers of hosts being columns."""
    known = {(row.name, row.parameters["label"], row.parameters["hosts"]): row for row in rows if _is_shown(row)}
    hosts = sorted({int(row.parameters["hosts"] or 0) for row in rows})
    cells = []
    for figure in _FIGURES:
        for label in _LABELS:
            if label == MODELLED and figure.title == "the same, p99, ms" and figure.name == "cast_us":
                continue  # the simulation has no chance in it
            found = [known.get((figure.name, label, count)) for count in hosts]
            if any(row is not None for row in found):
                figures = ("" if row is None else significant(figure.shown(row), 3) for row in found)
                cells.append((figure.title, label, *figures))
    return ("", "label", *(f"{count:,}" for count in hosts)), cells


def _is_shown(row: Result) -> bool:
    return row.parameters.get("cores") in (None, "one for each host")


def _markdown(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    lines = ["", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(row)} |" for row in cells]


def _checked(rows: Sequence[Result]) -> list[tuple[Result, Result]]:
    """Casts to hollow hosts, each with the model's figure for it."""
    casts = [row for row in rows if row.name == "cast_us"]
    hollow = {row.parameters["hosts"]: row for row in casts if row.parameters["label"] == HOLLOW}
    return [(hollow[row.parameters["hosts"]], row) for row in casts if "error" in row.parameters]


def _error_cells(hollow: Result, model: Result) -> tuple[str, ...]:
    figures = (significant(row.value / 1e3, 3) for row in (hollow, model))
    return (f"{int(model.parameters['hosts'] or 0):,}", *figures, f"{_error(model):+.0%}")


def _error(model: Result) -> float:
    error = model.parameters["error"]
    assert isinstance(error, float)  # see `modelled_rows`
    return error


def _check(rows: Sequence[Result]) -> list[str]:
    checked = _checked(rows)
    said = [
        "The model of casts, with one core for all hosts and one for the script, and hollow hosts with the same to "
        "compare. *Modelled* above is the same model with a core for each host, which no machine here has.",
        *_markdown(("hosts", "hollow ms", "modelled ms", "error"), [_error_cells(*pair) for pair in checked]),
    ]
    worst = max((abs(_error(model)) for _, model in checked), default=0.0)
    if worst > BOUND:
        said += [
            "",
            f"**The model errs by up to {worst:.0%}, more than the {BOUND:.0%} that this page allows: read its figures "
            "as orders of magnitude.**",
        ]
    elif checked:
        said += ["", f"The model errs by up to {worst:.0%}."]
    said += _check_grown(rows)
    said += [
        "",
        "Published by others, on clusters: Monarch casts to 8,192 actors on 1,024 hosts in 5.8 ms, and to 64 hosts in "
        "2.2 ms (p50). Hosts here have one actor, and share a machine: this is no comparison.",
    ]
    return said


def _check_grown(rows: Sequence[Result]) -> list[str]:
    """How far the figures that are modelled from fewer hosts are from those that were found."""
    grown = {row.name: row for row in rows if "from" in row.parameters and "error" in row.parameters}
    if not grown:
        return []
    some = next(iter(grown.values())).parameters
    titles = {figure.name: figure.title for figure in reversed(_FIGURES)}  # a p50 stands before its p99
    cells = [(titles[name], f"{_error(row):+.0%}") for name, row in grown.items()]
    return [
        "",
        f"The other modelled figures: those at {int(some['hosts'] or 0):,} hosts, from {int(some['from'] or 0):,}, "
        "beside what was found. At more hosts they are as uncertain.",
        *_markdown(("", "error"), cells),
    ]


def _objectives(rows: Sequence[Result]) -> list[str]:
    found: dict[int, dict[str, Result]] = {}
    for row in rows:
        if row.parameters["label"] == HOLLOW:
            found.setdefault(int(row.parameters["hosts"] or 0), {})[row.name] = row
    if not found:
        return ["Nothing was measured."]
    titles = (
        "hosts",
        "casts are answered by all within",
        "deaths of hosts are known within",
        "an eighth cut off is known within",
    )
    cells = [
        (
            f"{hosts:,}",
            _held(of.get("cast_us"), 1e-3, "ms"),
            _held(of.get("death_known_ms"), 1.0, "ms"),
            _held(of.get("silence_known_s"), 1.0, "s"),
        )
        for hosts, of in sorted(found.items())
    ]
    return [
        f"What held for 99 % of what was tried in this run, with up to {PER_PROCESS:,} hosts on one core:",
        *_markdown(titles, cells),
    ]


def _held(row: Result | None, factor: float, unit: str) -> str:
    return f"{row.p99 * factor:.3g} {unit}, of {row.n}" if row is not None and row.n > 1 else ""


def _limits(report: Report) -> list[str]:
    """At how many hosts the script runs out of something, if costs grow on as at the largest number here."""
    largest: dict[str, Result] = {}
    for row in report.results:
        if row.parameters["label"] == HOLLOW:
            largest[row.name] = row
    limits = [
        ("root_descriptors_per_host", "descriptors", 1 << 20, "the largest limit that Linux has by default (nr_open)"),
        ("root_threads_per_host", "threads", 32_768, "the number of process ids that Linux has by default"),
        ("root_memory_nbytes_per_host", "memory", 16e9, "16 GB"),
    ]
    found = []
    for name, what, limit, why in limits:
        if (each := largest.get(name)) is not None and each.value > 0:
            found.append((limit / each.value, f"{what}: {why}"))
    if (idle := largest.get("idle_root_cores")) is not None and idle.value > 0:
        hosts = int(idle.parameters["hosts"] or 0)
        found.append((hosts / idle.value, "heartbeats: one core of the script, with nothing else to do"))
    if (cast := largest.get("root_cast_cpu_us")) is not None and cast.value > 0:
        hosts = int(cast.parameters["hosts"] or 0)
        found.append((hosts * 1e5 / cast.value, "results: 100 ms of the script's CPU time for those of one cast"))
    lines = [
        "Each connection that the script opens over TCP has a thread, which gRPC wakes at least once in five seconds: "
        "always the one to an agent, and also those to processes if hosts have IPs of their own. If each further host "
        "costs the script as much as at the largest number above:",
        "",
    ]
    return lines + [f"* at {_about(hosts)} hosts: {why}" for hosts, why in sorted(found)]


def _about(count: float) -> str:
    """A number with two digits that count: 14,000."""
    return f"{round(count, 2 - len(str(int(count)))):,.0f}"


def _casts(report: Report) -> str:
    if not report.config.get("beyond_idle"):
        return ""  # of an older run
    return "The cost of a cast is what the job uses beyond an idle job; signs of life do not count. "


def _net(report: Report) -> str:
    silence = f" `heartbeat_s` is {report.config.get('heartbeat_s')} (10 by default)."
    if report.config.get("own_ips"):
        return "Each host has an IP of its own: links are those between hosts, gRPC over TCP on loopback." + silence
    return "All hosts have the IP of the script, so that links are sockets within this host." + silence


def _when(report: Report) -> str:
    environment = report.environment
    return f"{str(environment.get('time', 'an unknown day'))[:10]}, on {environment.get('cpu', 'an unknown processor')}"
