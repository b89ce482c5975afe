"""`Guards`: the guards of this process, as its launcher uses them, and what they have started (`Kept`).

What a process inherits at its start comes from its guard, which inherited it from this process earlier. If the kernel's
part of that has changed since, another guard is started.
"""

from __future__ import annotations

import contextlib
import logging
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from skipper.control.runtime.procs import guard
from skipper.control.runtime.procs.guard import EXIT_STATUS, receive_frame, send_frame
from skipper.control.runtime.procs.inheritance import Surroundings, of_the_kernel
from skipper.control.wire.vitals import Condition, look_at

if TYPE_CHECKING:
    import asyncio

ANSWER_TIMEOUT_S = 5.0
"""How long to wait for an answer of a guard or a fork server before each look at it; it is given up if it has been
stopped. One that only gets no processor will start a process sooner than another could."""
REPORT_TIMEOUT_S = 1.0
"""The same for keepers, when the exit status of a process that is gone, or its offspring's end, is awaited."""
REPORTS_AWAITED = 10
"""After this many looks it is given up in any case."""
END_TIMEOUT_S = 3.0
"""How long a guard may take to end everything that is left; then it is killed."""

logger = logging.getLogger(__name__)


class AnswerError(OSError):
    """A guard has ended or does not answer."""


class GuardOrigin(Protocol):
    """The starter of a process for this one: a guard or a fork server.

    Attributes:
        offspring: process ids of the processes that it has started and whose end has not been seen; the loop notes
            their ends.
    """

    offspring: set[int]

    @property
    def description(self) -> str:
        """What it is, with its process id."""

    def has_ended(self) -> bool:
        """Whether its process is gone."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A process that has been started for this one, below a keeper.

    Attributes:
        pid: its process id.
        pidfd: readable once the process has ended; the receiver closes it.
        report: the pipe from its keeper: brings its exit status, and ends once no descendant of it is left. The
            receiver closes it, which `when_buried` does.
        origin: its starter.
    """

    pid: int
    pidfd: int
    report: int
    origin: GuardOrigin

    def has_ended(self) -> bool:
        """Whether it is gone."""
        return is_readable(self.pidfd)

    def kill(self) -> None:
        """Send SIGKILL; harmless if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.pidfd)
        os.close(self.report)

    def when_buried(
        self,
        loop: asyncio.AbstractEventLoop,
        describe: Callable[[int], str],
        done: Callable[[str], None],
        cleared: Callable[[], None],
    ) -> None:
        """Report how it ended, and then that no descendant of it is left; each once it is known or has taken too long.

        On the loop's thread, after its end.
        """
        self.origin.offspring.discard(self.pid)
        reason = ""
        timer: asyncio.TimerHandle

        def tell(what: str) -> None:
            nonlocal reason
            if not reason:
                reason = what
                done(reason)

        def finish(what: str) -> None:
            loop.remove_reader(self.report)
            os.close(self.report)
            timer.cancel()
            tell(what)
            cleared()

        def readable() -> None:
            if status := os.read(self.report, EXIT_STATUS.size):
                tell(describe(EXIT_STATUS.unpack(status)[0]))
            elif self.origin.has_ended():
                finish(f"was killed with {self.origin.description}")
            else:
                finish("was killed together with its parent process")

        def late(looks: int) -> None:
            nonlocal timer
            if _is_stopped(_parent_of(self.pid)) or looks == REPORTS_AWAITED:
                finish("has ended; how is not known, because its parent process does not answer")
            else:
                timer = loop.call_later(REPORT_TIMEOUT_S, late, looks + 1)

        timer = loop.call_later(REPORT_TIMEOUT_S, late, 1)
        loop.add_reader(self.report, readable)


class _Guard:
    """One guard, as its client sees it. The launcher's thread uses it, and is the parent of its watcher."""

    def __init__(self, hurry: int, timeout: float) -> None:
        self._hurry = hurry
        self.of_the_kernel = of_the_kernel()
        self.offspring: set[int] = set()
        self._connection, theirs = socket.socketpair()
        command = [sys.executable, "-S", "-P", os.path.abspath(guard.__file__), str(theirs.fileno()), str(os.getpid())]
        try:
            self._watcher = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(theirs.fileno(),)
            )
        except OSError:
            self._connection.close()
            raise
        finally:
            theirs.close()
        self._pid, self._pidfd = self._watcher.pid, -1
        try:
            (self._pid, number), _ = self._answer(timeout)
            self._pidfd = os.pidfd_open(self._pid)
        except OSError as error:
            self._watcher.kill()
            self.close()
            raise AnswerError(str(error)) from None
        if number:
            logger.warning(
                "this kernel has no child subreapers (%s): processes that the children of an actor start may outlive "
                "the actor's process",
                os.strerror(number),
            )

    @property
    def description(self) -> str:
        """What it is, with its process id."""
        return f"the guard (pid {self._pid})"

    def has_ended(self) -> bool:
        """Whether its process is gone; from any thread."""
        return self._watcher.poll() is not None or is_readable(self._pidfd)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int], timeout: float
    ) -> Kept:
        """Make it execute a command."""
        argv = [os.fsencode(word) for word in command]
        variables = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
        self._connection.settimeout(timeout)
        send_frame(self._connection, marshal.dumps((argv, variables)), descriptors)
        pid, handles = self._answer(timeout)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        self.offspring.add(pid)
        pidfd, report = handles
        return Kept(pid, pidfd, report, self)

    def close(self) -> None:
        """Make it kill everything that it has started, and wait for its end."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        if self._pidfd >= 0:
            self._end_guard()
        self._watcher.send_signal(signal.SIGCONT)  # in case it is frozen
        try:
            self._watcher.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._watcher.kill()
            self._watcher.wait()
        if self._pidfd >= 0:
            os.close(self._pidfd)

    def _end_guard(self) -> None:
        """Wait for its end, and kill it if that takes too long."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGCONT)
            if not is_readable(self._pidfd, END_TIMEOUT_S):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _answer(self, timeout: float) -> tuple[Any, list[int]]:
        """Its answer to a request, whose type depends on the request, and descriptors.

        Raises:
            ConnectionError: it has ended.
            TimeoutError: it does not answer, or nobody waits any more.
        """
        self._connection.settimeout(timeout)
        deadline = time.monotonic() + timeout
        wait_for(self, self._pid, self._connection.fileno(), self._hurry, deadline)
        try:
            body, handles = receive_frame(self._connection)
        except EOFError as error:
            raise ConnectionError(f"{self.description} has ended") from error
        return marshal.loads(body), handles


class Guards:
    """The guards of one launcher; used by its thread alone.

    Args:
        hurry: a descriptor that becomes readable when nothing must be waited for any more.
    """

    def __init__(self, hurry: int) -> None:
        self._hurry = hurry
        self._guards: list[_Guard] = []
        self._frozen: list[_Guard] = []

    def start(
        self, command: Sequence[str], surroundings: Surroundings, descriptors: Sequence[int], timeout: float
    ) -> Kept:
        """Execute a command below a keeper.

        Args:
            command: with `guard.PARENT` for the process id of its parent.
            surroundings: what it inherits.
            descriptors: its open descriptors besides the standard streams, from `guard.FIRST_FD` on.
            timeout: seconds for a guard to start, and again for it to answer.

        Raises:
            OSError: it cannot be started. After an `AnswerError` it may have been started anyway, and have the
                descriptors; another attempt asks another guard.
        """
        self._refuse_in_a_hurry()
        one = self._suitable(timeout)
        place = surroundings.descriptors()
        try:
            return one.start(command, surroundings.environment, (*place, *descriptors), timeout)
        except TimeoutError as error:
            self._guards.remove(one)
            self._frozen.append(one)  # not closed, since its processes would end with it
            self._refuse_in_a_hurry()
            raise AnswerError(str(error)) from None
        except ConnectionError as error:
            self._guards.remove(one)
            one.close()
            raise AnswerError(str(error)) from None

    def close(self) -> None:
        """Kill all started processes that are left."""
        for one in self._guards + self._frozen:
            one.close()

    def _refuse_in_a_hurry(self) -> None:
        if is_readable(self._hurry):
            raise OSError("the job is about to end")

    def _suitable(self, timeout: float) -> _Guard:
        of_now = of_the_kernel()
        for one in list(self._guards):
            if one.of_the_kernel == of_now and not one.has_ended():
                return one
            if not one.offspring:
                self._guards.remove(one)
                one.close()
        self._guards.append(_Guard(self._hurry, timeout))
        return self._guards[-1]


def wait_for(who: GuardOrigin, pid: int, answer: int, hurry: int, deadline: float) -> None:
    """Wait for an answer while it may still come.

    Raises:
        TimeoutError: ``who`` has been stopped, it took too long, or ``hurry`` says that nobody waits any more.
    """
    poll = select.poll()
    for one in (answer, hurry):
        poll.register(one, select.POLLIN)
    while not (ready := poll.poll(max(min(deadline - time.monotonic(), ANSWER_TIMEOUT_S), 0) * 1000)):
        if _is_stopped(pid):
            raise TimeoutError(f"{who.description} does not answer: it has been stopped")
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{who.description} does not answer: the machine is too busy")
    if any(one == hurry for one, _ in ready):
        raise TimeoutError(f"{who.description} is no longer waited for")


def _is_stopped(pid: int) -> bool:
    """Whether a process has been stopped by a signal or a debugger, or is gone."""
    return look_at(pid).condition in (Condition.STOPPED, Condition.ENDED)


def _parent_of(pid: int) -> int:
    """The parent's process id; 0 if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def is_readable(descriptor: int, timeout: float = 0) -> bool:
    """Whether there is something to read within some seconds, or the other end is closed."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout * 1000))
