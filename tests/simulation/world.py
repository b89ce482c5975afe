"""`World`: the virtual clock, and what is going to happen, in the order in which it will."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from skipper.control.model.future import Gate, set_reader
from skipper.control.runtime import current_runtime, running
from skipper.control.runtime.procs import ending
from skipper.control.support import cgroup
from skipper.control.wire import heartbeats

if TYPE_CHECKING:
    from tests.simulation.processes import SimulatedProcess

BEGIN_S = 1000.0
_SOON_S = 100e-6
"""What a process does at once takes place within this time, so that processes take turns in any order."""


class ProcessKilledError(BaseException):
    """Unwinds what a process waits for that has been killed."""


class Event:
    """Something that is going to happen; what loops call a handle."""

    __slots__ = ("arguments", "call", "context", "is_cancelled", "owner", "when_s")

    def __init__(
        self,
        when_s: float,
        owner: SimulatedProcess | None,
        call: Callable[..., object],
        arguments: Sequence[Any],
        context: contextvars.Context | None = None,
    ) -> None:
        self.when_s = when_s
        self.owner = owner
        self.call = call
        self.arguments = arguments
        self.context = context
        self.is_cancelled = False

    def cancel(self) -> None:
        """It will not happen."""
        self.is_cancelled = True

    def cancelled(self) -> bool:
        """Whether it will not happen."""
        return self.is_cancelled

    def when(self) -> float:
        """When it happens."""
        return self.when_s


class World:
    """One schedule.

    Args:
        seed: decides whatever may vary.
        trace: told of everything that happens, for people; None: nobody is.

    Attributes:
        now_s: the virtual time, of `time.monotonic` everywhere.
        chance: for whatever may vary.
        steps: how many things have happened.
        digest: the same for two runs in which the same happened at the same times.
        wrong: what has broken an invariant.
    """

    def __init__(self, seed: int, trace: Callable[[str], object] | None = None) -> None:
        self.now_s = BEGIN_S
        self.chance = random.Random(seed)
        self.steps = 0
        self.digest = 0
        self.wrong: list[str] = []
        self.current: SimulatedProcess | None = None
        self._trace = trace
        self._due: list[tuple[float, int, Event]] = []
        self._count = 0

    # What is going to happen

    def at(
        self,
        when_s: float,
        owner: SimulatedProcess | None,
        call: Callable[..., object],
        *arguments: Any,
        context: contextvars.Context | None = None,
    ) -> Event:
        """Have something happen at a time, in a process; None: in none. It does not where that has ended by then."""
        event = Event(when_s, owner, call, arguments, context)
        self._count += 1
        heapq.heappush(self._due, (when_s, self._count, event))
        return event

    def soon(self, owner: SimulatedProcess, call: Callable[..., object], *arguments: Any) -> Event:
        """Have something happen in a moment."""
        when_s = self.now_s + _SOON_S * self.chance.random()
        event = Event(when_s, owner, call, arguments)
        self._count += 1
        heapq.heappush(self._due, (when_s, self._count, event))
        return event

    def soon_here(self, call: Callable[..., object], *arguments: Any) -> Event:
        """Likewise, in the process that runs."""
        assert self.current is not None
        return self.soon(self.current, call, *arguments)

    def step(self, until_s: float = float("inf")) -> bool:
        """The next thing happens; False where there is none by then.

        Behind it the process that it happened to still runs.
        """
        due = self._due
        while due and due[0][0] <= until_s:
            when_s, number, event = heapq.heappop(due)
            if event.is_cancelled:
                continue
            owner = event.owner
            if owner is not None:
                if owner.is_dead:
                    continue
                if owner.stalled_until_s > when_s:
                    heapq.heappush(due, (owner.stalled_until_s, number, event))
                    continue
            if when_s > self.now_s:
                self.now_s = when_s
            self.steps += 1
            self.digest = hash((self.digest, self.now_s, 0 if owner is None else owner.number))
            if owner is not self.current:
                self.enter(owner)
            try:
                if event.context is not None:
                    event.context.run(event.call, *event.arguments)
                else:
                    event.call(*event.arguments)
            except ProcessKilledError:
                if owner is None or not owner.is_dead:
                    raise
            except Exception as error:  # noqa: BLE001  (a loop goes on behind what a callback raises)
                self._note_raised(event, error)
            return True
        return False

    def run(self, until_s: float) -> None:
        """Let happen what does until a time."""
        before, step = self.current, self.step
        try:
            while step(until_s):
                pass
        finally:
            self.enter(before)
        self.now_s = max(self.now_s, until_s)

    def violation(self, what: str) -> None:
        """Note that an invariant is broken."""
        self.wrong.append(f"at {self.now_s - BEGIN_S:.6f} s: {what}")

    def tell(self, what: str) -> None:
        """Say what happens."""
        if self._trace is not None:
            self._trace(f"{self.now_s - BEGIN_S:12.6f} {what}")

    def _note_raised(self, event: Event, error: Exception) -> None:
        import traceback

        where = "".join(traceback.format_exception(error)[-4:])
        self.violation(f"{event.owner}: {event.call} raised {error!r}\n{where}")

    def enter(self, owner: SimulatedProcess | None) -> None:
        """What runs from now on runs in this process."""
        self.current = owner
        if owner is None:
            running._current = current_runtime._current = None
            asyncio._set_running_loop(None)
        else:
            running._current = current_runtime._current = owner.runtime
            asyncio._set_running_loop(owner.loop)

    # Waiting: a `Reader`

    def wait(self, gate: Gate, timeout_s: float, takes_all: bool) -> None:
        """Let other things happen until a gate is open, or the time is over."""
        here = self.current
        until_s = self.now_s + timeout_s if timeout_s >= 0 else float("inf")
        has_stepped = False
        try:
            while not gate.is_open and self.now_s < until_s:
                if here is not None and here.is_dead:
                    raise ProcessKilledError
                if here is not None and here.stalled_until_s > until_s:
                    until_s = here.stalled_until_s  # it does not see before that its time is over
                if not has_stepped:
                    has_stepped = True
                    self.enter(here)  # also where the loop of an actor ran
                if not contextvars.Context().run(self.step, until_s):
                    if until_s == float("inf"):
                        raise AssertionError("what is waited for will never happen")
                    self.now_s = max(self.now_s, until_s)
        finally:
            if has_stepped:
                self.enter(here)
        if here is not None and here.is_dead:
            raise ProcessKilledError

    def nudge(self) -> None:
        """Do nothing: nobody sleeps."""

    def read_in(self, loop: asyncio.AbstractEventLoop, takes_all: bool = False) -> None:
        """Do nothing: what comes is delivered anyway."""


_world: World | None = None
_monotonic, _perf_counter_ns = time.monotonic, time.perf_counter_ns


def _virtual_now() -> float:
    return _monotonic() if _world is None else _world.now_s


def _virtual_ns() -> int:
    return _perf_counter_ns() if _world is None else int(_world.now_s * 1e9)


def _randbits(bits: int) -> int:
    return current().chance.getrandbits(bits)


def _token_bytes(nbytes: int | None = None) -> bytes:
    return current().chance.randbytes(nbytes or 32)


def _token_hex(nbytes: int | None = None) -> str:
    return _token_bytes(nbytes).hex()


class Thread:
    """What `Ending` does on a thread of its own happens in a moment; while it waits, other things do."""

    def __init__(self, target: Callable[..., object], args: Sequence[Any], name: str, daemon: bool) -> None:
        self._target = target
        self._args = args

    def start(self) -> None:
        """Have it happen."""
        current().soon_here(self._target, *self._args)


class _Threads:
    Thread = Thread


def install() -> None:
    """Have the virtual clock, and the chance of the world, be those of this process of the operating system, for good.

    So it can be no process that does anything else.
    """
    time.monotonic, time.perf_counter_ns = _virtual_now, _virtual_ns
    virtual = {_monotonic: _virtual_now, _perf_counter_ns: _virtual_ns}
    for name, module in list(sys.modules.items()):
        if name.startswith("skipper."):
            for attribute, value in list(vars(module).items()):
                if value is _monotonic or value is _perf_counter_ns:
                    setattr(module, attribute, virtual[value])
    secrets.randbits, secrets.token_bytes, secrets.token_hex = _randbits, _token_bytes, _token_hex
    setattr(ending, "threading", _Threads)  # noqa: B010  (a module's own import)
    namespace = heartbeats.own_namespace()
    heartbeats.own_namespace = lambda: namespace  # which takes a call of the kernel, in each process of a job
    cgroup.oom_kills = lambda: 0
    cgroup.machine_oom_kills = lambda: 0


def forget_tasks() -> None:
    """Have asyncio forget the tasks of jobs that are over: nobody collects them, and `asyncio.all_tasks` visits all."""
    registry = getattr(asyncio.tasks, "_all_tasks" if sys.version_info < (3, 12) else "_scheduled_tasks", None)
    if registry is not None:
        registry.clear()


def current() -> World:
    """The world that is played."""
    assert _world is not None
    return _world


def play(world: World | None) -> None:
    """Have this be the world from now on."""
    global _world
    _world = world
    set_reader(world)
