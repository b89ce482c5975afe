"""`Faults`: failures that reached the script. A failure of which the script does not hear ends it."""

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
"""How long a failure for which nobody waits may stay unheard of: a call may be about to come, as after a `spawn`."""

_LOOK_S = 0.25
"""How often the runtime looks whether somebody still waits to hear of an older failure."""

_HEARD = 4096
"""Origins of failures that are remembered as heard of. A script may lose and replace processes for ever."""


@dataclass(slots=True)
class _Pending:
    failure: MeshFailure
    due_s: float


@dataclass(slots=True)
class _Held:
    """A future that has ended in an error that nobody has asked for.

    Attributes:
        future: not kept alive: when it is forgotten, nobody can ask for the error any more.
        members: says whose answers it waited for.
        origins: of the failures that its error tells of, or may tell of; None where that has not been looked at.
    """

    future: weakref.ref[Future[Any]]
    members: Members
    origins: frozenset[str] | None = None

    def would_tell_of(self, origin: str) -> bool:
        """Whether asking for the error would be hearing of the failures of this origin."""
        future = self.future()
        if future is None:
            return False
        if self.origins is None:
            # An error that the runtime itself has looked at is not heard of by anybody else.
            error = unread_error(future)
            self.origins = frozenset() if error is None else origins_of(error) | self.members()
        return origin in self.origins


class Faults:
    """Failures that reached the script. For any thread; a `control.model.future.Listener`.

    A failure is *heard of* when its cause was raised to somebody in this process, from a future. All failures that
    follow from the end of one process, or from the failure of one actor, have one cause. As long as a future holds the
    error and nobody has asked for it, and for a short grace in any case, nothing happens.

    Args:
        is_awaited: whether somebody waits for an answer of actors or processes with such ids.
        unheard: told, on a thread of its own, of each failure of which nobody will hear.
    """

    def __init__(self, is_awaited: Callable[[Collection[str]], bool], unheard: Callable[[MeshFailure], object]) -> None:
        self._is_awaited = is_awaited
        self._unheard = unheard
        self._lock = threading.Lock()
        self._pending: dict[str, _Pending] = {}
        self._heard: OrderedDict[str, None] = OrderedDict()
        self._heard_together: deque[tuple[float, frozenset[str]]] = deque()
        """Members of calls that ended in the failure of one: failures at the same time count as heard of, too."""
        self._held: dict[int, _Held] = {}
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # may be filled in the middle of a garbage collection
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
        """There may be failures from now on."""
        if sys.version_info[:2] == (3, 12):  # it starts no thread any more once the main one has ended
            with self._lock:
                self._start_judge()

    def _start_judge(self) -> None:
        if self._judge is None:
            judge = threading.Thread(target=self._judge_all, name="control-faults", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter ends: `close` tells of the failure
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

    # What becomes of futures

    def failed(self, future: Future[Any], members: Members) -> None:
        """A future has ended in an error."""
        key, held, wake = id(future), self._held, self._wake

        def forgotten(_: object) -> None:
            held.pop(key, None)
            wake.put(None)

        held[key] = _Held(weakref.ref(future, forgotten), members)

    def heard(self, future: Future[Any], error: BaseException) -> None:
        """Somebody is told of the error of a future."""
        held = self._held.pop(id(future), None)
        if origins := origins_of(error):
            self.hear(*origins, members=frozenset() if held is None else held.members())

    def hear(self, *origins: str, members: frozenset[str] = frozenset()) -> None:
        """Somebody is told of failures of these origins; members: of the call that ended in them."""
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
        """Failures of which nobody will hear any more; they are forgotten here."""
        with self._lock:
            due = [(origin, one.failure) for origin, one in self._pending.items() if one.due_s <= _now()]
        lost = [origin for origin, failure in due if not self._may_be_heard(origin, failure)]
        with self._lock:
            unheard = [self._pending.pop(origin, None) for origin in lost]
        return [pending.failure for pending in unheard if pending is not None]

    def _may_be_heard(self, origin: str, failure: MeshFailure) -> bool:
        return any(held.would_tell_of(origin) for held in list(self._held.values())) or self._is_awaited(failure.ids())


def origins_of(error: BaseException | None) -> frozenset[str]:
    """Where the failures began that an exception tells of, or one that caused it."""
    origins = set()
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, SupervisionError) and error.failure is not None:
            origins.add(error.failure.origin())
        error = error.__cause__
    return frozenset(origins)
