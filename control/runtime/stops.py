"""`Stops`: time bounds for the ends of a process' actors, and for their ``__init__``.

An actor that is stopped drains and cleans up. When most of its time is up, the runtime cuts short what still runs: it
cancels a coroutine and raises an exception in a thread, so that ``finally`` blocks and ``__cleanup__`` have the rest.
It also cuts short a cleanup that does not end. If the actor then has not ended, it is given up: its callers are told,
and its thread is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic as _now
from typing import TYPE_CHECKING

from skipper.control.model.errors import StopTimeoutError
from skipper.control.model.future import Promise

if TYPE_CHECKING:
    from skipper.control.runtime.actor_state import ActorState
    from skipper.control.runtime.process_state import ProcessState

HANDED_DOWN = 0.9
"""The fraction of a bound that the stopping process gets: its answer must come within the bound."""
OWNED = 0.8
"""The fraction of an actor's remaining time that its owned meshes may take; the rest is for its own cleanup."""
UNWIND_S = 0.5
"""How long an ending process waits for the endpoint of a failed actor, so that the actor's cleanup can begin."""

_DRAIN = 0.7
"""The fraction of an actor's time for draining."""
_CLEAN_UP = 0.9
"""The fraction of it after which its cleanup is cut short."""
_TICK_S = 0.02
"""How often the runtime looks again at a thread that it cannot interrupt yet, since that runs the runtime's code."""


class Stage(enum.IntEnum):
    """What the runtime has done to an actor that ends."""

    DRAINS = 0
    CUT = 1
    """Its current message is cut short."""
    CLEANUP_CUT = 2
    """Its cleanup is cut short, too."""


@dataclass(slots=True)
class Bound:
    """When an actor has to end, on the clock of `time.monotonic`.

    Attributes:
        began_s: when it was stopped, or failed.
        cut_s: when its draining is cut short.
        cleanup_cut_s: when its cleanup is cut short.
        end_s: when it is given up.
        stage: what has been done.
        is_interrupted: whether its thread has got the exception of this stage.
    """

    began_s: float
    cut_s: float
    cleanup_cut_s: float
    end_s: float
    stage: Stage = Stage.DRAINS
    is_interrupted: bool = False

    @staticmethod
    def within(seconds: float) -> Bound:
        """A bound that begins now."""
        now = _now()
        return Bound(now, now + _DRAIN * seconds, now + _CLEAN_UP * seconds, now + seconds)

    def tighten(self, other: Bound) -> None:
        """Take the sooner times of another bound."""
        self.cut_s = min(self.cut_s, other.cut_s)
        self.cleanup_cut_s = min(self.cleanup_cut_s, other.cleanup_cut_s)
        self.end_s = min(self.end_s, other.end_s)

    def left_s(self) -> float:
        """Seconds until the end."""
        return max(self.end_s - _now(), 0.0)


class Stops:
    """Keeps the bounds of one process. For any thread; due work runs on the loop thread.

    Args:
        state: of the process.
        loop: runs on the loop thread.
        ending: returns the actors that have to end.
    """

    def __init__(
        self, state: ProcessState, loop: asyncio.AbstractEventLoop, ending: Callable[[], Iterable[ActorState]]
    ) -> None:
        self._state = state
        self._loop = loop
        self._ending = ending
        self._lock = threading.Lock()
        self._constructing: dict[int, tuple[ActorState, float]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = math.inf

    def watch_construction(self, actor: ActorState) -> None:
        """Fail a constructor that takes longer than `Settings.init_timeout_s`."""
        due_s = _now() + self._state.settings.init_timeout_s
        self._constructing[actor.uid] = actor, due_s
        self._look_at(due_s)

    def constructed(self, actor: ActorState) -> None:
        """Note that a constructor has ended, with or without an error."""
        self._constructing.pop(actor.uid, None)

    def within(self, actor: ActorState, seconds: float, *, cut_now: bool = False) -> None:
        """Bound the end of an actor; a bound that it has already is only made tighter.

        Args:
            actor: the actor.
            seconds: from now on.
            cut_now: cut short its current message at once: nobody waits for it.
        """
        bound = Bound.within(seconds)
        with self._lock:
            cut_s = actor.bind_to(bound, cut_now=cut_now).cut_s
        self._look_at(cut_s)

    def bounded(self, promise: Promise[None], seconds: float, message: str) -> None:
        """End a promise with a `StopTimeoutError` if nothing else has ended it in time."""

        def give_up() -> None:
            promise.set_exception(StopTimeoutError(message))

        def start() -> None:
            if not promise.done():
                timer = self._loop.call_later(seconds, give_up)
                promise.add_done_callback(lambda _: self._soon(timer.cancel))

        self._soon(start)

    def _soon(self, callback: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process has ended
            self._loop.call_soon_threadsafe(callback, *args)

    # On the loop thread

    def _look_at(self, due_s: float) -> None:
        if due_s < self._due_s:  # otherwise a look comes sooner anyway
            self._soon(self._arm, due_s)

    def _arm(self, due_s: float) -> None:
        if self._timer is not None:
            if self._due_s <= due_s:
                return
            self._timer.cancel()
        self._due_s = due_s
        self._timer = self._loop.call_later(max(due_s - _now(), 0.0), self._look)

    def _look(self) -> None:
        self._timer, self._due_s = None, math.inf  # before the look: later calls compare with this
        now, next_s = _now(), math.inf
        for actor, due_s in list(self._constructing.values()):
            if due_s <= now:
                self.constructed(actor)
                actor.give_up_construction(self._state.settings.init_timeout_s)
            else:
                next_s = min(next_s, due_s)
        for actor in self._ending():
            if actor.bound is not None:
                next_s = min(next_s, _advance(actor, actor.bound, now))
        if next_s < math.inf:
            self._arm(next_s)


def _advance(actor: ActorState, bound: Bound, now: float) -> float:
    """Do what is due for an actor that ends; returns when to look again."""
    if now >= bound.end_s and bound.stage is Stage.CLEANUP_CUT:
        actor.give_up()
        return math.inf
    if now >= bound.cleanup_cut_s:
        stage, next_s = Stage.CLEANUP_CUT, max(bound.end_s, now + _TICK_S)  # soon if this look comes late
    elif now >= bound.cut_s:
        stage, next_s = Stage.CUT, bound.cleanup_cut_s
    else:
        return bound.cut_s
    if bound.stage < stage:
        bound.stage, bound.is_interrupted = stage, False
        actor.cut_off()
    if not bound.is_interrupted and (stage is Stage.CLEANUP_CUT or not actor.winds_up.done()):
        bound.is_interrupted = actor.executor.interrupt()
        return min(next_s, now + _TICK_S)
    return next_s
