"""`serve_dashboard`: a running job in a browser: its parts, how fast they go, what they keep, what has gone wrong."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib import resources
from typing import Any

from skipper.commandline import CommandParser, add_port, seconds
from skipper.control.api.join import visiting
from skipper.control.model.errors import ControlError, SupervisionError
from skipper.control.observe.job_query import survey
from skipper.control.observe.metrics import RecentResult
from skipper.control.observe.program import add_served_host, parser_of, run, serve
from skipper.control.observe.status import ActorStatus, JobStatus, ProcessReport, ProcessStatus, status_of
from skipper.control.runtime import current_runtime
from skipper.control.runtime.history import Event
from skipper.control.support.pages import Page, PageServer

INTERVAL_S = 1.0
TIMEOUT_S = 2.0
"""How long a process has to answer before it is shown as silent."""

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
    "/tables.css": ("tables.css", "text/css; charset=utf-8"),
    "/main.js": ("main.js", "text/javascript; charset=utf-8"),
    "/model.js": ("model.js", "text/javascript; charset=utf-8"),
    "/format.js": ("format.js", "text/javascript; charset=utf-8"),
    "/view.js": ("view.js", "text/javascript; charset=utf-8"),
    "/topology.js": ("topology.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


class Dashboard(PageServer):
    """A dashboard that is served until it is closed; a context manager.

    Args:
        feed: what it shows.
        port: as of `PageServer`, like the next two.
        host: where it listens.
        token: what browsers have to know.
    """

    def __init__(self, feed: Feed, port: int, host: str, token: str | bool | None) -> None:
        pages: dict[str, Callable[[], Page]] = {
            path: partial(_file, name, kind) for path, (name, kind) in _FILES.items()
        }
        pages["/data.json"] = lambda: Page("application/json", feed.text())
        super().__init__(pages, port, host, name="control-dashboard", token=token)


def serve_dashboard(
    port: int = 0,
    host: str = "127.0.0.1",
    *,
    interval: float = INTERVAL_S,
    timeout: float = TIMEOUT_S,
    with_token: bool | None = None,
) -> Dashboard:
    """Show this process' job in a browser: `Dashboard.url` says where.

    While somebody looks, all processes are asked once per interval, and never where nobody does. A process that does
    not answer in time is shown as silent within the interval and the time-out.

    Whoever may look reads names of processes, actors, endpoints and keys, figures, and the messages of errors.

    Args:
        port: to listen on; 0: one that is free (see `PageServer.port`).
        host: the address to listen on; ``"0.0.0.0"`` for all of this host's.
        interval: seconds between looks.
        timeout: seconds that a process has to answer.
        with_token: whether a browser needs the token that is part of the address; None: where others than this host
            reach it, which always need it.

    Returns:
        The running server. It ends with the process, or by ``close()``, or as a context manager.

    Raises:
        ValueError: ``interval`` or ``timeout`` is not positive, or ``with_token`` is false where others reach it.
        OSError: the port is taken, or the address is not this host's.
    """
    if interval <= 0 or timeout <= 0:
        raise ValueError(f"interval and timeout are positive numbers of seconds, not {interval} and {timeout}")
    process = current_runtime.current()

    def look() -> JobStatus:
        if process.closing:  # and not of a job that begins after it
            raise SupervisionError("the job has ended")
        return status_of(survey(process, "status", True, timeout=timeout))

    return Dashboard(Feed(look, interval), port, host, with_token)


def _file(name: str, content_type: str) -> Page:
    return Page(content_type, resources.files("skipper.control.observe").joinpath("web", name).read_text("utf-8"))


KEPT_EVENTS = 200
MAX_MESSAGE = 2000
"""Of a longer message so many characters are shown: an exception may say anything."""


class Feed:
    """The newest look at a job, and what has gone wrong since the first one. For any thread.

    Nothing is asked of the job while nobody asks for the feed. ``look`` takes the status with its tables; it is called
    again once the last look is ``interval_s`` old.
    """

    def __init__(self, look: Callable[[], JobStatus], interval_s: float) -> None:
        self._look = look
        self._interval_s = interval_s
        self._texts = RecentResult(lambda: json.dumps(self._fresh(), separators=(",", ":")), interval_s)
        self._known: dict[str, Any] = {}
        self._events = Events()

    def text(self) -> str:
        """The feed as JSON, no older than the interval; if the script does not answer, the last one and the reason."""
        return self._texts.get()

    def _fresh(self) -> dict[str, Any]:
        try:
            status = self._look()
        except ControlError as error:
            return {"processes": [], "events": [], "tables": [], **self._known, "problem": _cut(str(error))}
        self._events.note(status)
        self._known = {
            "job": status.job,
            "taken_s": status.taken_s,
            "interval_s": self._interval_s,
            "problem": "",
            "deaths": status.deaths_total,
            "processes": [_process(process) for process in status.processes],
            "events": self._events.newest(),
            "tables": [
                {**dataclasses.asdict(table), "process": process.name}
                for process in status.processes
                if process.report is not None
                for table in process.report.tables
            ],
        }
        return self._known


class Events:
    """Errors and deaths, newest first, including those of processes that have ended since."""

    def __init__(self) -> None:
        self._events: list[tuple[str, Event]] = []

    def note(self, status: JobStatus) -> None:
        """Add what a look has brought."""
        reports = [process.report for process in status.processes if process.report is not None]
        found = {("error", event) for report in reports for event in report.errors}
        found |= {("death", event) for report in reports for event in report.deaths}
        every = sorted(found.union(self._events), key=lambda entry: entry[1].at_s, reverse=True)
        self._events = every[:KEPT_EVENTS]

    def newest(self) -> list[dict[str, Any]]:
        """All of them, as plain data."""
        return [
            {"kind": kind, "at_s": event.at_s, "who": event.who, "message": _cut(event.message)}
            for kind, event in self._events
        ]


def _process(process: ProcessStatus) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "id": process.id,
        "name": process.name,
        "pid": process.pid,
        "parent": process.parent_id,
        "host": process.host,
        "state": process.state,
        "problem": _cut(process.problem),
        "restarts": process.restarts,
    }
    return facts if process.report is None else {**facts, **_report(process.report)}


def _report(report: ProcessReport) -> dict[str, Any]:
    return {
        "started_s": report.started_s,
        "rss_nbytes": report.rss_nbytes,
        "cpu_s": report.cpu_s,
        "heard_messages": report.heard_messages,
        "transfers": None if report.transfers is None else dataclasses.asdict(report.transfers),
        "errors": report.errors_total,
        "actors": [_actor(actor) for actor in report.actors],
        "figures": report.figures,
    }


def _actor(actor: ActorStatus) -> dict[str, Any]:
    return {
        "id": actor.actor_id,
        "label": actor.label,
        "class": actor.class_name,
        "state": actor.state,
        "doing": [[doing.endpoint, doing.for_s] for doing in actor.doing],
        "queued": actor.queued,
        "handled": actor.handled,
        "errors": actor.errors,
    }


def _cut(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]} …"


def parser(prog: str) -> CommandParser:
    """The parser of the command."""
    own = parser_of(prog, "A running job in a browser; prints the address to open.", timeout_s=TIMEOUT_S)
    add_port(own, default=0, what="to serve at (default: one that is free)")
    add_served_host(own)
    own.add_argument(
        "--interval", type=seconds, default=INTERVAL_S, metavar="S", help=f"between looks (default: {INTERVAL_S:g})"
    )
    own.add_argument("--token", action="store_true", help="ask for a token on this host, too: it has other users")
    return own


def main(argv: Sequence[str], *, prog: str = "skipper dashboard") -> int:
    """Serve the dashboard of a job until Ctrl-C or the job's end; returns the exit code."""
    return run(parser(prog), argv, _serve)


def _serve(given: argparse.Namespace) -> int:
    def start() -> Dashboard:
        return serve_dashboard(
            given.port, given.host, interval=given.interval, timeout=given.timeout, with_token=given.token or None
        )

    with visiting(given.job, timeout=given.timeout) as process:
        return serve(process, start, f"{given.host}:{given.port}")
