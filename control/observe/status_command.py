"""``skipper status``: a running job at a glance, once or repeatedly: its processes and actors, and what went wrong."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from skipper.commandline import FAILED, STDOUT, CommandParser, add_json, seconds, whole
from skipper.control.api.join import visiting
from skipper.control.model.errors import SupervisionError
from skipper.control.observe.job_query import survey
from skipper.control.observe.program import parser_of, run
from skipper.control.observe.status import ActorStatus, JobStatus, ProcessReport, ProcessStatus, Transfers, status_of
from skipper.control.runtime.history import Event

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


_EXIT_CODES = {FAILED: "a process does not answer"}


def parser(prog: str) -> CommandParser:
    """The parser of the command."""
    own = parser_of(
        prog, "Show what a running job consists of, and what it is doing.", timeout_s=3.0, exit_codes=_EXIT_CODES
    )
    add_json(own, "the status (with --watch: a line for each refresh)")
    own.add_argument(
        "-w",
        "--watch",
        nargs="?",
        type=seconds,
        const=1.0,
        default=None,
        metavar="S",
        help="refresh every S seconds (default: 1), until Ctrl-C or the end of the job",
    )
    own.add_argument("-n", "--times", type=whole(1), default=None, metavar="N", help="with --watch: stop after N times")
    return own


def main(argv: Sequence[str], *, prog: str = "skipper status") -> int:
    """Show what a job is doing; returns the exit code, 1 if a process does not answer."""
    return run(parser(prog), argv, _show)


def _show(given: argparse.Namespace) -> int:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140  # a pipe has no size
    with visiting(given.job, timeout=given.timeout) as process, _json_to(given.json) as write_json:
        previous: JobStatus | None = None
        left: int | None = given.times
        while True:
            begun = time.monotonic()
            try:
                status = status_of(survey(process, "status", timeout=given.timeout))
            except SupervisionError:
                if previous is None:
                    raise
                sys.stderr.write("the job has ended\n")
                return 0
            if write_json is not None:
                write_json(json.dumps(status.to_dict(), indent=2 if given.watch is None else None))
            if given.json != STDOUT:
                if given.watch is not None and console.is_terminal:
                    console.clear()
                console.print(view(status, previous))
            previous = status
            left = None if left is None else max(left - 1, 0)
            if given.watch is None or left == 0:
                return 0 if status.is_healthy else 1
            time.sleep(max(given.watch - (time.monotonic() - begun), 0.05))


@contextlib.contextmanager
def _json_to(where: str | None) -> Iterator[Callable[[str], None] | None]:
    """A function that writes lines of JSON to standard output or a file; None if nobody wants them."""
    if where is None:
        yield None
        return
    with contextlib.nullcontext(sys.stdout) if where == STDOUT else open(where, "w", encoding="utf-8") as file:

        def write(text: str) -> None:
            file.write(text + "\n")
            file.flush()

        yield write


MAX_DEATHS = 5


def view(status: JobStatus, before: JobStatus | None = None) -> RenderableType:
    """A job's status for rich to print; CPU use counts from the earlier status ``before``, else from the start."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    names = ("process / actor", "pid", "state", "for", "queue", "done", "errors", "restarts", "cpu", "memory", "moved")
    for name in names:
        is_text = name in ("process / actor", "state")
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    depth = {"": -1}
    many_hosts = len(status.hosts) > 1
    for process in status.processes:
        depth[process.id] = level = depth.get(process.parent_id, -1) + 1
        _add_process(table, process, level, status.taken_s, _cpu(status, before, process), many_hosts=many_hosts)
    parts: list[RenderableType] = [Text(_headline(status)), table]
    parts += [Text(line) for line in _troubles(status)]
    parts += [Text(line) for line in (*_transfers(status), *_figures(status))]
    return Group(*parts)


def _headline(status: JobStatus) -> str:
    actors = len(status.actors)
    script = status.processes[0].report
    since = "" if script is None else f", up {duration(status.taken_s - script.started_s)}"
    lent = sum(process.report.lent_nbytes for process in status.processes if process.report is not None)
    lending = f", {nbytes(lent)} of messages lent" if lent else ""
    return (
        f"job {status.job} on {', '.join(status.hosts)}{since}: {_count(len(status.processes), 'process', 'es')}, "
        f"{_count(actors, 'actor')}, {_count(status.deaths_total, 'death')}{lending}"
    )


def _add_process(
    table: Table, process: ProcessStatus, level: int, taken_s: float, cpu: str, *, many_hosts: bool
) -> None:
    from rich.text import Text

    indent = "  " * level
    report = process.report
    host = f" ({process.host})" if many_hosts and process.host and process.host not in process.name else ""
    up_s = "" if report is None else duration(taken_s - report.started_s)
    style = {"up": "", "starting": "yellow"}.get(process.state, "bold red")
    table.add_row(
        Text(f"{indent}{process.name}{host}"),
        str(process.pid or ""),
        Text(process.state, style=style),
        up_s,
        "",
        "",
        "" if report is None or not report.errors_total else str(report.errors_total),
        str(process.restarts or ""),
        cpu,
        "" if report is None else nbytes(report.rss_nbytes),
        "" if report is None or report.transfers is None else nbytes(_moved(report.transfers)),
    )
    for actor in () if report is None else report.actors:
        state, for_s = _state(actor)
        table.add_row(
            Text(f"{indent}  {actor.label} {actor.class_name}"),
            "",
            Text(state, style={"parked": "magenta", "busy": "cyan", "ending": "yellow"}.get(actor.state, "")),
            for_s,
            str(actor.queued),
            str(actor.handled),
            str(actor.errors or ""),
        )


def _state(actor: ActorStatus) -> tuple[str, str]:
    if not actor.doing:
        return actor.state, ""
    longest = max(actor.doing, key=lambda doing: doing.for_s)
    more = f" +{len(actor.doing) - 1}" if len(actor.doing) > 1 else ""
    return f"{actor.state} {longest.endpoint}{more}", duration(longest.for_s)


def _moved(transfers: Transfers) -> int:
    return transfers.read_nbytes + transfers.written_nbytes


def _transfers(status: JobStatus) -> list[str]:
    lines = []
    for process in status.processes:
        transfers = None if process.report is None else process.report.transfers
        if transfers is not None and (transfers.in_flight or transfers.failed):
            lines.append(
                f"{process.name}: {_count(transfers.in_flight, 'transfer')} in flight, {transfers.done} done, "
                f"{transfers.failed} failed"
            )
    return lines


def _troubles(status: JobStatus) -> list[str]:
    lines = [f"{process.name}: {process.problem}" for process in status.processes if process.state == "silent"]
    deaths: list[Event] = sorted(
        (death for process in status.processes if process.report is not None for death in process.report.deaths),
        key=lambda death: death.at_s,
    )
    lines += [
        f"died {duration(status.taken_s - death.at_s)} ago: {death.who}: {death.message}"
        for death in deaths[-MAX_DEATHS:]
    ]
    if (error := status.last_error) is not None:
        lines.append(f"last error {duration(status.taken_s - error.at_s)} ago: {error.who}: {error.message}")
    return lines


def _figures(status: JobStatus) -> list[str]:
    lines = []
    for process in status.processes:
        for part, figures in ({} if process.report is None else process.report.figures).items():
            shown = ", ".join(f"{name} {value:g}" for name, value in figures.items())
            lines.append(f"{process.name}: {part}: {shown}")
    return lines


def _cpu(status: JobStatus, before: JobStatus | None, process: ProcessStatus) -> str:
    now = process.report
    if now is None:
        return ""
    then = None if before is None else _report(before, process.id)
    used = now.cpu_s - (0.0 if then is None else then.cpu_s)
    since = now.started_s if before is None or then is None else before.taken_s
    return f"{100 * used / max(status.taken_s - since, 0.1):.0f} %"


def _report(status: JobStatus, process_id: str) -> ProcessReport | None:
    return next((process.report for process in status.processes if process.id == process_id), None)


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"


def duration(seconds: float) -> str:
    """A time span in two units at most: ``0.4 s``, ``12 s``, ``3 min 5 s``, ``2 h 10 min``."""
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def nbytes(count: int) -> str:
    """A size in binary units."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
