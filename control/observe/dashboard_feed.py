"""`Feed`: what the dashboard's page gets about the job once per interval, as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skipper.control.model.errors import ControlError
from skipper.control.observe.metrics import RecentResult
from skipper.control.observe.status import ActorStatus, JobStatus, ProcessReport, ProcessStatus
from skipper.control.runtime.history import Event

KEPT_EVENTS = 200
MAX_MESSAGE = 2000
"""Longer messages are cut to this many characters: the message of an exception may have any length."""


SLOW_AFTER_S = 30.0
HUNG_AFTER_S = 120.0


@dataclass(frozen=True, slots=True)
class CallBounds:
    """How long an endpoint may run before it is shown as slow, and as hanging, in seconds.

    Raises:
        ValueError: they are not positive, or the second is less than the first.
    """

    slow_after_s: float = SLOW_AFTER_S
    hung_after_s: float = HUNG_AFTER_S

    def __post_init__(self) -> None:
        if not 0 < self.slow_after_s <= self.hung_after_s < float("inf"):
            raise ValueError(
                f"a call is slow after a positive number of seconds, and hangs after as many or more, "
                f"not {self.slow_after_s:g} and {self.hung_after_s:g}"
            )


class Feed:
    """The newest status of a job, and what has gone wrong since the first one. For any thread.

    The job is not asked while nobody asks for the feed.

    Args:
        look: returns the status with its tables; it is called again once the last status is ``interval_s`` old.
        interval_s: seconds.
        bounds: when a call is shown as slow, and when as hanging.
        name: name of the job, for people.
        outcome: how it has ended, for people; empty while it runs.
    """

    def __init__(
        self,
        look: Callable[[], JobStatus],
        interval_s: float,
        bounds: CallBounds | None = None,
        *,
        name: str = "",
        outcome: str = "",
    ) -> None:
        self._name = name
        self._outcome = outcome
        self._look = look
        self._interval_s = interval_s
        self._bounds = bounds or CallBounds()
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
            return {"processes": [], "events": [], "tables": [], **self._known, "problem": cut(str(error))}
        self._events.note(status)
        self._known = {
            "job": status.job,
            "name": self._name,
            "outcome": self._outcome,
            "taken_s": status.taken_s,
            "interval_s": self._interval_s,
            "slow_after_s": self._bounds.slow_after_s,
            "hung_after_s": self._bounds.hung_after_s,
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
        """Add what a new status shows."""
        reports = [process.report for process in status.processes if process.report is not None]
        found = {("error", event) for report in reports for event in report.errors}
        found |= {("death", event) for report in reports for event in report.deaths}
        every = sorted(found.union(self._events), key=lambda entry: entry[1].at_s, reverse=True)
        self._events = every[:KEPT_EVENTS]

    def newest(self) -> list[dict[str, Any]]:
        """All of them, as plain data."""
        return [
            {"kind": kind, "at_s": event.at_s, "who": event.who, "message": cut(event.message)}
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
        "problem": cut(process.problem),
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
        "latencies": [
            [known.endpoint, known.calls, known.p50_s, known.p99_s, known.max_s] for known in actor.latencies
        ],
    }


def cut(text: str) -> str:
    """The beginning of a text that may be long."""
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]} …"
