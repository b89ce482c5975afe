"""`FaultHistory`: what has gone wrong in and below a process, for people who ask later."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, replace

from skipper.control.model.exception_text import class_name, describe, place_of, shorten, summarize

KEPT_DEATHS = 32
KEPT_ERRORS = 32
KEPT_NAMES = 1024
KEPT_GROUPS = 64
MOST_TRACEBACK = 16 << 10
"""Characters of a group's traceback that are kept."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that went wrong.

    Attributes:
        at_s: when, as `time.time` counts.
        who: the process, or the actor and its endpoint.
        message: for people.
    """

    at_s: float
    who: str
    message: str


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Errors with the same endpoint of one actor, the same class, and the same line where they were raised.

    Attributes:
        who: the actor and its endpoint.
        error: name of the class.
        place: file and line where it was raised; empty where that is not known.
        count: how many there have been.
        first_s: when the first was, as `time.time` counts.
        last_s: when the latest was.
        message: of the latest, for people.
        traceback: of the first one.
    """

    who: str
    error: str
    place: str
    count: int
    first_s: float
    last_s: float
    message: str
    traceback: str


class FaultHistory:
    """The deaths of the processes that this one has launched, and the errors of its actors. For any thread.

    Attributes:
        deaths: the latest unexpected ones, oldest first.
        deaths_total: how many there have been.
        errors_total: how many exceptions left an endpoint, or ended an actor.
        errors: the latest ones, oldest first.
        last_error: the latest of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deaths_of: OrderedDict[str, int] = OrderedDict()
        self.started_s = time.time()
        self.deaths: deque[Event] = deque(maxlen=KEPT_DEATHS)
        self.deaths_total = 0
        self.errors: deque[Event] = deque(maxlen=KEPT_ERRORS)
        self.errors_total = 0
        self.last_error: Event | None = None
        self._groups: OrderedDict[tuple[str, str, str], ErrorGroup] = OrderedDict()

    def died(self, name: str, reason: str) -> None:
        """Note that a process of this name has ended without having been told to."""
        with self._lock:
            self.deaths.append(Event(time.time(), name, reason))
            self.deaths_total += 1
            self._deaths_of[name] = self._deaths_of.get(name, 0) + 1
            self._deaths_of.move_to_end(name)
            while len(self._deaths_of) > KEPT_NAMES:
                self._deaths_of.popitem(last=False)

    def deaths_of(self, name: str) -> int:
        """How many processes of this name have died: so often has the running one been restarted."""
        return self._deaths_of.get(name, 0)

    def failed(self, who: str, error: BaseException) -> Event:
        """Note an exception. Its traceback is made only for the first of its kind."""
        event = Event(time.time(), who, summarize(error))
        key = who, class_name(error), place_of(error)
        known = self._groups.get(key)
        trace = shorten(describe(error), MOST_TRACEBACK) if known is None else known.traceback
        with self._lock:
            self.errors_total += 1
            self.errors.append(event)
            self.last_error = event
            before = self._groups.get(key) or ErrorGroup(*key, 0, event.at_s, event.at_s, "", trace)
            message = shorten(event.message, MOST_TRACEBACK)
            self._groups[key] = replace(before, count=before.count + 1, last_s=event.at_s, message=message)
            self._groups.move_to_end(key)
            if len(self._groups) > KEPT_GROUPS:
                self._groups.popitem(last=False)
        return event

    def groups(self) -> list[ErrorGroup]:
        """The errors by kind, the most recently seen kind last; `KEPT_GROUPS` kinds at most."""
        with self._lock:
            return list(self._groups.values())
