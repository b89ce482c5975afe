"""`Children`: the processes that this one has launched; their starts, deaths and orderly ends."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skipper.control.model.future import Future, Promise
from skipper.control.runtime.process_state import ProcessState
from skipper.control.runtime.procs import thread_limit
from skipper.control.runtime.procs.worker_config import (
    EXIT_BINDING,
    EXIT_BOOTSTRAP,
    EXIT_ORPHAN,
    EXIT_THREADS,
    WorkerConfig,
)
from skipper.control.support.cgroup import OomWatch
from skipper.control.wire.process_ref import NO_SIGN_OF_LIFE, ProcessRef

if TYPE_CHECKING:
    from skipper.control.runtime.procs.binding import CpuBinding
    from skipper.control.runtime.procs.launcher import ChildLauncher, Launched

LATE_S = 1.0
"""If a timer fires this late, this whole process stood still, and may not have heard its children."""
EXIT_NOTICE_S = 2.0
"""A child whose link has broken is killed if it has not ended by itself after this long."""


@dataclass(slots=True, eq=False)
class Child:
    """A process launched from here.

    Attributes:
        ref: the process.
        launched: its handles, once it has been started.
        expected: whether it was told to end.
        ended: ends when the process is gone and reaped, and no descendant of it is left, with the reason.
        verdict: why it has to be killed, if this process kills it.
        oom_mark: what was known about a lack of memory when it was launched (see `OomWatch`).
        exited: whether the process is gone; how may not be known yet.
        gone: whether that has been reported.
        reason: why it is gone, then.
    """

    ref: ProcessRef
    launched: Launched | None = None
    expected: bool = False
    ended: Promise[str] = field(default_factory=Promise)
    verdict: str | None = None
    oom_mark: tuple[int, int] = (0, 0)
    exited: bool = False
    gone: bool = False
    reason: str = ""

    @property
    def pid(self) -> int | None:
        """Its process id on this host, from its start until its end."""
        return None if self.launched is None else self.launched.process.pid

    def kill(self, verdict: str) -> None:
        """Send SIGKILL; harmless if it has ended already."""
        if self.exited or self.gone:
            return
        self.verdict = self.verdict or verdict
        if (launched := self.launched) is not None:
            launched.process.kill()


class Children:
    """The children of this process. Public methods may be called from any thread.

    Args:
        loop: the loop that watches them.
        state: of this process; its bounds say how long a child may take until its link stands.
        expect: called with every child before it is started: its link will come soon.
        on_end: called on the loop thread with every child that ends, and the reason.
        ask_to_end: asks a child to end in good order, in so many seconds.
        launcher: starts them; None: a `Launcher` of their own, made with the first child.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        state: ProcessState,
        *,
        expect: Callable[[ProcessRef], object],
        on_end: Callable[[Child, str], None],
        ask_to_end: Callable[[ProcessRef, float], None],
        launcher: ChildLauncher | None = None,
    ) -> None:
        self._loop = loop
        self._state = state
        self._expect = expect
        self._on_end = on_end
        self._ask_to_end = ask_to_end
        self._launcher = launcher
        self._making = threading.Lock()
        self._oom = OomWatch()
        self._children: dict[str, Child] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def launch(
        self,
        members: Sequence[ProcessRef],
        env: Mapping[str, str],
        bootstrap: tuple[bytes, ...],
        bindings: Sequence[CpuBinding],
    ) -> None:
        """Start children, each with its binding; returns at once. A failure to start is an end like any other."""
        from skipper.control.runtime.procs.launcher import Launcher, LaunchRequest  # most processes launch none

        for member in members:
            self._expect(member)
        state, path = self._state, tuple(sys.path)
        beyond = (state.certs, state.data_plane_is_open, state.redirection)
        configs = [
            WorkerConfig(member, state.me, state.root, state.secret, path, state.settings, bootstrap, binding, *beyond)
            for member, binding in zip(members, bindings, strict=True)
        ]
        with self._making:
            launcher = self._launcher = self._launcher or Launcher()
        mark = self._oom.mark()
        children = [Child(config.me, oom_mark=mark) for config in configs]
        self._children.update((child.ref.id, child) for child in children)
        launches = [
            LaunchRequest(config, self._notifier(child)) for config, child in zip(configs, children, strict=True)
        ]
        launcher.launch(launches, env, self._state.settings.preloaded())

    def get(self, process_id: str) -> Child | None:
        """The child with this id, also if it has ended."""
        return self._children.get(process_id)

    def forget(self, process_id: str) -> None:
        """Forget a child that has ended. On the loop thread."""
        child = self._children.get(process_id)
        if child is not None and child.gone:
            del self._children[process_id]

    def stop(self, members: Sequence[ProcessRef], timeout: float) -> Future[None]:
        """Ask children to end; kill the rest after ``timeout`` seconds. The future ends with the last child."""
        children = [child for member in members if (child := self._children.get(member.id)) is not None]
        future: Promise[None] = Promise()
        missing = {child.ref.id for child in children}

        def ended(child: Child) -> None:
            missing.discard(child.ref.id)
            if not missing:
                future.set_result(None)

        if not children:
            future.set_result(None)
        for child in children:
            child.expected = True
            if not child.gone:
                self._ask_to_end(child.ref, timeout)
            child.ended.add_done_callback(lambda _, child=child: ended(child))  # type: ignore[misc]
        verdict = f"was killed because it did not stop within {timeout:g} s"
        self._loop.call_soon_threadsafe(self._loop.call_later, timeout, self.kill, list(missing), verdict)
        return future

    def connected(self, process_id: str) -> None:
        """Note that the child's link stands. On the loop thread."""
        if (timer := self._timers.pop(process_id, None)) is not None:
            timer.cancel()

    def link_lost(self, process_id: str, reason: str) -> bool:
        """Handle a lost link; True if it is a child's, whose end will be reported when it is seen. On the loop."""
        child = self._children.get(process_id)
        if child is None:
            return False
        verdict = f"was killed because {reason}"
        if child.launched is None or NO_SIGN_OF_LIFE in reason:
            child.kill(verdict)
        elif not child.expected:  # otherwise it has the time that it was given
            self._loop.call_later(EXIT_NOTICE_S, child.kill, verdict)
        return True

    def kill(self, process_ids: Sequence[str], verdict: str) -> None:
        """Send SIGKILL to these children."""
        for process_id in process_ids:
            if (child := self._children.get(process_id)) is not None:
                child.expected = True
                child.kill(verdict)

    def alive(self) -> list[Child]:
        """The children that have not ended."""
        return [child for child in self._children.values() if not child.gone]

    def hurry(self) -> None:
        """Wait for no child that is still to be started: all will be killed soon."""
        if self._launcher is not None:
            self._launcher.hurry()

    def close(self) -> None:
        """End the launcher; every child must be gone."""
        if self._launcher is not None:
            self._launcher.close()

    def _notifier(self, child: Child) -> Callable[[Launched | OSError], None]:
        def done(result: Launched | OSError) -> None:
            self._loop.call_soon_threadsafe(self._started, child, result)

        return done

    def _started(self, child: Child, result: Launched | OSError) -> None:
        if isinstance(result, OSError):
            why = f" ({thread_limit.limits()})" if result.errno == errno.EAGAIN else ""
            self._gone(child, f"could not be started: {result}{why}")
            self._cleared(child)
            return
        child.launched = result
        self._loop.add_reader(result.process.pidfd, self._exited, child, result)
        if child.verdict is not None:
            child.kill(child.verdict)
        self._wait_for_link(child, self._state.settings.connect_timeout_s)

    def _wait_for_link(self, child: Child, timeout: float) -> None:
        due = self._loop.time() + timeout
        self._timers[child.ref.id] = self._loop.call_at(due, self._kill_unconnected, child, due)

    def _kill_unconnected(self, child: Child, due: float) -> None:
        late = self._loop.time() - due
        if late > LATE_S:
            self._wait_for_link(child, min(late, self._state.settings.connect_timeout_s))
        else:
            child.kill(f"was killed because it did not connect within {self._state.settings.connect_timeout_s:g} s")

    def _exited(self, child: Child, launched: Launched) -> None:
        process = launched.process
        self._loop.remove_reader(process.pidfd)
        child.exited, child.launched = True, None
        os.close(process.pidfd)
        if launched.lifeline is not None:
            os.close(launched.lifeline)
        self.connected(child.ref.id)
        process.when_buried(
            self._loop,
            lambda status: self._describe_exit(child, status),
            lambda reason: self._gone(child, f"pid {process.pid} {child.verdict or reason}"),
            lambda: self._cleared(child),
        )

    def _describe_exit(self, child: Child, status: int) -> str:
        is_unexplained = status == -signal.SIGKILL and child.verdict is None
        why = self._oom.explain(child.oom_mark) if is_unexplained else ""
        return f"{describe_exit(status)}, {why}" if why else describe_exit(status)

    def _gone(self, child: Child, reason: str) -> None:
        child.gone = True
        child.launched = None
        child.reason = reason
        self._on_end(child, reason)

    def _cleared(self, child: Child) -> None:
        child.ended.settle_by(lambda: child.reason)


def describe_exit(status: int) -> str:
    """An exit status as `subprocess` gives it, in words."""
    if status == EXIT_BOOTSTRAP:
        return "ended because its bootstrap raised (the traceback is on its standard error)"
    if status == EXIT_ORPHAN:
        return (
            "ended because its connection to the process that launched it broke (the reason is on its standard error)"
        )
    if status == EXIT_BINDING:
        return "ended because it could not be bound as proc_bind says (the reason is on its standard error)"
    if status == EXIT_THREADS:
        return f"ended because it could not start its threads: {thread_limit.limits()}"
    if status == -signal.SIGABRT and thread_limit.is_group_full():
        return f"was killed by signal 6 (SIGABRT), probably because no thread could start: {thread_limit.limits()}"
    if status >= 0:
        return f"exited with code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {-status} ({name})"
