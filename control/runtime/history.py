"""`FaultHistory`: what has gone wrong in and below a process, as far as people ask for it later."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass

KEPT_DEATHS = 32
KEPT_ERRORS = 32
KEPT_NAMES = 1024


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


class FaultHistory:
    """The deaths of the processes that this one has launched, and the errors of its actors. For any thread.

    Attributes:
        deaths: the latest that nobody had asked for, oldest first.
        deaths_total: how many there have been.
        errors_total: how many exceptions left an endpoint, or ended an actor.
        errors: the latest of them, oldest first.
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
        """How many processes of this name have died: as often has one that runs now been restarted."""
        return self._deaths_of.get(name, 0)

    def failed(self, who: str, message: str) -> Event:
        """Note an exception."""
        event = Event(time.time(), who, message)
        with self._lock:
            self.errors_total += 1
            self.errors.append(event)
            self.last_error = event
        return event
