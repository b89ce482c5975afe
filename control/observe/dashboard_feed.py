"""What the dashboard shows, as JSON: one look at the job per interval, however many browsers ask."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from skipper.control.model.errors import ControlError
from skipper.control.observe.recent import RecentResult
from skipper.control.observe.status import ActorStatus, JobStatus, ProcessReport, ProcessStatus
from skipper.control.runtime.history import Event

KEPT_EVENTS = 200
MAX_MESSAGE = 2000
"""Of a longer message so many characters are shown: an exception may say anything."""


class Feed:
    """The newest look at a job, and what has gone wrong since the first one. For any thread.

    Nothing is asked of the job while nobody asks for the feed.

    Args:
        look: takes the status, with tables.
        interval_s: how old a look may be before another one is taken.
    """

    def __init__(self, look: Callable[[], JobStatus], interval_s: float) -> None:
        self._look = look
        self._interval_s = interval_s
        self._texts = RecentResult(lambda: json.dumps(self._fresh(), separators=(",", ":")), interval_s)
        self._known: dict[str, Any] = {}
        self._events = Events()

    def text(self) -> str:
        """The feed as JSON, no older than the interval; where the script does not answer, the last one with why."""
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
    """Errors and deaths, newest first; also of processes that are gone and cannot tell any more."""

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
