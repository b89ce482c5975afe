"""`Faults`: failures that reached the script. A failure that the script does not hear of ends it."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from time import monotonic as _now
from typing import Any

from skipper.control.model.errors import SupervisionError
from skipper.control.model.failure import MeshFailure
from skipper.control.model.future import Future, Members, unread_error

GRACE_S = 1.0
"""How long a failure may stay unheard of if no call waits for it: a call may follow soon, as after a `spawn`."""

_LOOK_S = 0.25
"""How often the runtime checks whether a call that would raise an older failure still waits."""

_HEARD = 4096
"""How many origins of heard failures are remembered. A script may lose and replace processes for ever."""


@dataclass(slots=True)
class _Pending:
    failure: MeshFailure
    due_s: float


@dataclass(slots=True)
class _Held:
    """A future with an error that nobody has retrieved.

    Attributes:
        future: a weak reference: when the future is gone, nobody can retrieve the error any more.
        members: whose answers it waited for.
        origins: of the failures that its error reports, or may report; None until that has been looked at.
    """

    future: weakref.ref[Future[Any]]
    members: Members
    origins: frozenset[str] | None = None

    def would_tell_of(self, origin: str) -> bool:
        """Whether code that retrieves the error hears of the failures of this origin."""
        future = self.future()
        if future is None:
            return False
        if self.origins is None:
            # If the runtime itself has looked at an error, no one else hears of it.
            error = unread_error(future)
            self.origins = frozenset() if error is None else origins_of(error) | self.members()
        return origin in self.origins


class Faults:
    """Failures that reached the script. For any thread; a `control.model.future.Listener`.

    A failure is *heard of* when its cause was raised in this process, from a future. All failures that follow from the
    end of one process, or from the failure of one actor, have one cause. While a future holds the error and nobody has
    retrieved it, and for a short grace in any case, nothing happens.

    Args:
        is_awaited: whether code waits for an answer of actors or processes with such ids.
        unheard: called, on a thread of its own, with each failure that nobody will hear of.
    """

    def __init__(self, is_awaited: Callable[[Collection[str]], bool], unheard: Callable[[MeshFailure], object]) -> None:
        self._is_awaited = is_awaited
        self._unheard = unheard
        self._lock = threading.Lock()
        self._pending: dict[str, _Pending] = {}
        self._heard: OrderedDict[str, None] = OrderedDict()
        self._heard_together: deque[tuple[float, frozenset[str]]] = deque()
        """Members of calls that ended with the failure of one: failures at the same time count as heard of, too."""
        self._held: dict[int, _Held] = {}
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # may be filled during a garbage collection
        self._judge: threading.Thread | None = None
        self._is_closed = False

    def entrust(self, failure: MeshFailure, *, at_once: bool = False) -> None:
        """Take a failure, to report it if nobody hears of it; ``at_once``: nobody can hear of it."""
        with self._lock:
            if self._is_closed or self._is_heard_of(failure.origin()):
                return
            due_s = _now() + (0 if at_once else GRACE_S)
            self._pending.setdefault(failure.origin(), _Pending(failure, due_s))
            self._start_judge()
        self._wake.put(None)

    def expect(self) -> None:
        """Prepare for failures: they may come from now on."""
        if sys.version_info[:2] == (3, 12):  # it starts no thread once the main thread has ended
            with self._lock:
                self._start_judge()

    def _start_judge(self) -> None:
        if self._judge is None:
            judge = threading.Thread(target=self._judge_all, name="control-faults", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter ends: `close` returns the failure
                judge.start()
                self._judge = judge

    def close(self) -> list[MeshFailure]:
        """Take and report nothing more; returns the failures that nobody has heard of."""
        with self._lock:
            self._is_closed = True
            unheard = [pending.failure for pending in self._pending.values()]
            self._pending.clear()
        self._wake.put(None)
        return unheard

    # Outcomes of futures

    def failed(self, future: Future[Any], members: Members) -> None:
        """Note that a future has ended with an error."""
        key, held, wake = id(future), self._held, self._wake

        def forgotten(_: object) -> None:
            held.pop(key, None)
            wake.put(None)

        held[key] = _Held(weakref.ref(future, forgotten), members)

    def heard(self, future: Future[Any], error: BaseException) -> None:
        """Note that the error of a future is raised to code."""
        held = self._held.pop(id(future), None)
        if origins := origins_of(error):
            self.hear(*origins, members=frozenset() if held is None else held.members())

    def hear(self, *origins: str, members: frozenset[str] = frozenset()) -> None:
        """Note that failures of these origins are heard of; members: of the call that ended with them."""
        with self._lock:
            for origin in origins:
                self._heard[origin] = None
                self._heard.move_to_end(origin)
            while len(self._heard) > _HEARD:
                self._heard.popitem(last=False)
            if len(members) > len(origins):
                self._heard_together.append((_now(), members))
            for origin in [origin for origin in self._pending if origin in origins or origin in members]:
                del self._pending[origin]

    def _is_heard_of(self, origin: str) -> bool:
        while self._heard_together and self._heard_together[0][0] < _now() - GRACE_S:
            self._heard_together.popleft()
        return origin in self._heard or any(origin in members for _, members in self._heard_together)

    # Judging

    def _judge_all(self) -> None:
        while not self._is_closed:
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=self._wait_s())
            for failure in self._due():
                self._unheard(failure)

    def _wait_s(self) -> float | None:
        with self._lock:
            if not self._pending:
                return None
            return max(min(pending.due_s for pending in self._pending.values()) - _now(), _LOOK_S)

    def _due(self) -> list[MeshFailure]:
        """Failures that nobody will hear of any more; they are forgotten here."""
        with self._lock:
            due = [(origin, one.failure) for origin, one in self._pending.items() if one.due_s <= _now()]
        lost = [origin for origin, failure in due if not self._may_be_heard(origin, failure)]
        with self._lock:
            unheard = [self._pending.pop(origin, None) for origin in lost]
        return [pending.failure for pending in unheard if pending is not None]

    def _may_be_heard(self, origin: str, failure: MeshFailure) -> bool:
        return any(held.would_tell_of(origin) for held in list(self._held.values())) or self._is_awaited(failure.ids())


def origins_of(error: BaseException | None) -> frozenset[str]:
    """The origins of the failures that an exception, or one of its causes, reports."""
    origins = set()
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, SupervisionError) and error.failure is not None:
            origins.add(error.failure.origin())
        error = error.__cause__
    return frozenset(origins)
