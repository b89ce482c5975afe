"""`DashboardLookups`: what the dashboard's page asks for on demand: tracebacks, stacks, output. All as JSON."""

from __future__ import annotations

import dataclasses
import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from skipper.control.model.errors import ControlError
from skipper.control.observe.dashboard_feed import cut
from skipper.control.observe.errors import SeenErrors
from skipper.control.observe.job_source import JobSource
from skipper.control.observe.log_lines import label_of
from skipper.control.observe.log_tail import OutputTail
from skipper.control.observe.metrics import RecentResult
from skipper.control.observe.stacks import ProcessStacks
from skipper.control.observe.stacks_command import shown
from skipper.control.support.pages import Page

PATHS = ("/errors.json", "/stacks.json", "/logs.json")

ERRORS_INTERVAL_S = 1.0
KEPT_TAILS = 4
MAX_WORD = 500
MAX_PROCESSES_NAMED = 2000


class DashboardLookups:
    """Answers for the paths of `PATHS`. For any thread.

    Args:
        source: the job that is asked.
    """

    def __init__(self, source: JobSource) -> None:
        self._source = source
        self._errors = RecentResult(source.errors, ERRORS_INTERVAL_S)
        self._seen_lock = threading.Lock()
        self._seen = SeenErrors()
        self._looking = threading.Lock()
        self._tails_lock = threading.Lock()
        self._tails: OrderedDict[str, tuple[str, OutputTail]] = OrderedDict()

    def answer(self, path: str, query: Mapping[str, str]) -> Page:
        """The page of one of the paths."""
        make = {"/errors.json": self._errors_of, "/stacks.json": self._stacks_of, "/logs.json": self._lines_of}[path]
        try:
            return _json(make(query))
        except ControlError as error:
            return _json({"problem": cut(str(error))})
        except _BadQueryError as error:
            return _json({"problem": str(error)}, HTTPStatus.BAD_REQUEST)

    def _errors_of(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Errors of one process, ``process``, or of all, by kind; the most recent kinds first."""
        found, groups = self._errors.get(), []
        if (asked := query.get("process")) is None:
            with self._seen_lock:
                groups = [dataclasses.asdict(kind) for kind in self._seen.note(found)]
        else:
            own = [errors for errors in found if errors.process_id == asked]
            groups = [dataclasses.asdict(group) for errors in own for group in reversed(errors.groups)]
        return {"problem": "", "groups": [{**group, "message": cut(group["message"])} for group in groups]}

    def _stacks_of(self, query: Mapping[str, str]) -> dict[str, Any]:
        """The stacks of one process as text, by its ``name`` and ``pid``."""
        name, pid = query.get("name", ""), _number(query, "pid")
        if not self._looking.acquire(blocking=False):  # it takes many seconds if processes hang
            return {"problem": "", "busy": True}
        try:
            found = [stacks for stacks in self._source.stacks() if _is(stacks, name, pid)]
        finally:
            self._looking.release()
        if not found:
            return {"problem": f"the process {name} with pid {pid} no longer exists"}
        return {"problem": "", "text": shown(found, with_runtime=False)}

    def _lines_of(self, query: Mapping[str, str]) -> dict[str, Any]:
        """What the processes that ``who`` names have written after the line ``after`` of the reader ``reader``."""
        reader, tail = self._tail_of(query.get("who", ""))
        view = tail.look(_number(query, "after") if query.get("reader") == reader else 0)
        return {
            "problem": "",
            "reader": reader,
            "last": view.last,
            "skipped_nbytes": view.skipped_nbytes,
            "running": view.is_running,
            "processes": [
                {"name": by.name, "label": label_of(by.name, by.actors), "pid": by.pid, "host": by.host}
                for by in view.processes[-MAX_PROCESSES_NAMED:]
            ],
            "lines": [[number, line.at_s, line.label, line.stream, line.text] for number, line in view.entries],
        }

    def _tail_of(self, who: str) -> tuple[str, OutputTail]:
        """The reader of the named processes, and its name; the readers that were used last are kept."""
        if len(who) > MAX_WORD:
            raise _BadQueryError(f"a name has {MAX_WORD} characters at most")
        with self._tails_lock:
            if who not in self._tails:
                self._tails[who] = secrets.token_hex(8), OutputTail(self._source.output(), who)
            self._tails.move_to_end(who)
            if len(self._tails) > KEPT_TAILS:
                self._tails.popitem(last=False)
            return self._tails[who]


class _BadQueryError(Exception):
    """A query that the page never sends."""


def _number(query: Mapping[str, str], name: str) -> int:
    text = query.get(name, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise _BadQueryError(f"{name} is a number")
    return int(text)


def _is(stacks: ProcessStacks, name: str, pid: int) -> bool:
    """Whether these stacks are of a process; if it was inspected from outside, only the pid may be known."""
    return stacks.pid == pid and (stacks.name == name or bool(stacks.problem))


def _json(found: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> Page:
    return Page("application/json", json.dumps(found, separators=(",", ":")), status)
