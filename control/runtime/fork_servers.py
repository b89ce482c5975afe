"""`ForkServers`: the fork servers of this process, as its launcher uses them.

A server may fork a process if nothing that such a process would have taken along from its start has changed since the
server's own: the kernel's attributes, where to import from, the variables that were stated for it, and those of the
script that somebody has looked at already. Else there is a server more, up to a limit; and beyond that, or where a
server is of no use, the process is executed as if there were none.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from control.runtime.forking import EXIT_STATUS, Birth, Born, Prepare, Unable, receive, send
from control.runtime.inheritance import Surroundings, of_the_kernel
from control.runtime.worker import command_of_fork_server

if TYPE_CHECKING:
    import asyncio

MOST_SERVERS = 4
"""Of one process, those that must stay because of their offspring included."""
ANSWER_TIMEOUT_S = 5.0
"""After each time that a server has not answered for so long it is looked at, and given up if it has been stopped. One
that merely gets no processor will fork sooner than another process could import."""
REPORT_TIMEOUT_S = 1.0
"""Likewise, where the exit status of a process is waited for that is gone."""
REPORTS_AWAITED = 10
"""After so many looks it is given up in any case."""
ROOM_FOR_NAMES = 160
"""Bytes for the command line that a forked process shows, beyond those of the server's own."""

# Read by the interpreter, the loader, the C library or a thread pool before Python code could be seen asking for them.
_READ_EARLY = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "LC_", "LANG", "TZ"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "DNNL_", "ONEDNN_"),
    *("ATEN_", "TORCH", "PYTORCH_", "CUDA_", "CUBLAS_", "NVIDIA_", "HIP_", "ROCR_", "UCX_"),
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Forked:
    """A process that was forked for this one.

    Attributes:
        pid: its process id.
        pidfd: readable once it has ended; the receiver closes it.
        report: the pipe from the server that brings its exit status; `when_buried` closes it.
        server: its parent.
    """

    pid: int
    pidfd: int
    report: int
    server: _Server

    def when_buried(
        self, loop: asyncio.AbstractEventLoop, describe: Callable[[int], str], done: Callable[[str], None]
    ) -> None:
        """Say how it has ended, once that is known or has taken too long. On the loop's thread, after its end."""
        self.server.offspring.discard(self.pid)
        timer: asyncio.TimerHandle

        def told(reason: str) -> None:
            loop.remove_reader(self.report)
            os.close(self.report)
            timer.cancel()
            done(reason)

        def readable() -> None:
            if status := os.read(self.report, EXIT_STATUS.size):
                told(describe(EXIT_STATUS.unpack(status)[0]))
            else:
                told(f"was killed with the fork server that it came from (pid {self.server.process.pid})")

        def late(looks: int) -> None:
            nonlocal timer
            server = self.server.process.pid
            if is_stopped(server) or looks == REPORTS_AWAITED:
                told(f"has ended; how is not known, its fork server (pid {server}) does not answer")
            else:
                timer = loop.call_later(REPORT_TIMEOUT_S, late, looks + 1)

        timer = loop.call_later(REPORT_TIMEOUT_S, late, 1)
        loop.add_reader(self.report, readable)


class _Server:
    """One server, from the side of who asks. The launcher's thread uses it, whose child it is.

    Attributes:
        is_able: whether it may be asked to fork.
        offspring: process ids of those that it has forked and that have not been seen to end; that they have, the loop
            says.
        process: the server.
    """

    def __init__(self, modules: tuple[str, ...], surroundings: Surroundings) -> None:
        self._modules = modules
        self._given = surroundings.given
        self._environment = surroundings.environment
        self._imports_from = surroundings.sys_path, surroundings.place
        self._of_the_kernel = of_the_kernel()
        self._looked_up: frozenset[str] = frozenset()
        self.is_able = False
        self.offspring: set[int] = set()
        self._connection, theirs = socket.socketpair()
        command = command_of_fork_server(theirs.fileno(), os.getpid())
        try:
            self.process = subprocess.Popen(
                [*command, "".ljust(ROOM_FOR_NAMES, ".")],
                stdin=subprocess.DEVNULL,
                stdout=surroundings.stdout,
                stderr=surroundings.stderr,
                cwd=f"/proc/self/fd/{surroundings.directory}",
                env=surroundings.environment,
                pass_fds=(theirs.fileno(),),
            )
        except OSError:
            self._connection.close()
            raise
        finally:
            theirs.close()

    def prepare(self, hurry: int, timeout: float) -> None:
        """Have it import; `is_able` says then whether it can fork.

        Raises:
            OSError: it is gone or does not answer.
        """
        deadline = time.monotonic() + timeout
        answer, _ = self._ask(Prepare(self._modules, self._imports_from[0]), (), 0, hurry, deadline)
        if isinstance(answer, Unable):
            logger.warning("processes are started without preloading %s: %s", ", ".join(self._modules), answer.reason)
        else:
            self._looked_up = answer.looked_up
            self.is_able = True

    def suits(self, modules: tuple[str, ...], surroundings: Surroundings) -> bool:
        """Whether a process of these surroundings would be the same if it had been executed now."""
        if (modules, surroundings.given) != (self._modules, self._given):
            return False
        if (surroundings.sys_path, surroundings.place) != self._imports_from or of_the_kernel() != self._of_the_kernel:
            return False
        changed = {name for name, _ in self._environment.items() ^ surroundings.environment.items()}
        return not any(name in self._looked_up or name.startswith(_READ_EARLY) for name in changed)

    def fork(self, name: str, pipe: int, surroundings: Surroundings, hurry: int, timeout: float) -> Forked:
        """Have it fork a process that reads its config from a pipe.

        Raises:
            OSError: it cannot, or is gone (`ConnectionError`), or does not answer (`TimeoutError`).
        """
        birth = Birth(name, surroundings.environment)
        deadline = time.monotonic() + timeout
        born, (pidfd, report) = self._ask(birth, (pipe, *surroundings.descriptors()), 2, hurry, deadline)
        assert isinstance(born, Born)
        self.offspring.add(born.pid)
        return Forked(born.pid, pidfd, report, self)

    def has_ended(self) -> bool:
        """Whether its process is gone; it is reaped then."""
        return self.process.poll() is not None

    def let_go(self) -> None:
        """Ask nothing more of it. It stays until its offspring has ended."""
        self.is_able = False
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def kill(self) -> None:
        """End it, and with it whatever it has forked."""
        self.let_go()
        self.process.kill()
        self.process.wait()

    def _ask(
        self, message: object, descriptors: tuple[int, ...], expected: int, hurry: int, deadline: float
    ) -> tuple[Any, list[int]]:
        self._connection.settimeout(max(deadline - time.monotonic(), 0.001))
        send(self._connection, message, descriptors)
        poll = select.poll()
        for descriptor in (self._connection.fileno(), hurry):
            poll.register(descriptor, select.POLLIN)
        while not (ready := poll.poll(max(min(deadline - time.monotonic(), ANSWER_TIMEOUT_S), 0) * 1000)):
            if is_stopped(self.process.pid):
                raise TimeoutError(f"the fork server (pid {self.process.pid}) does not answer: it has been stopped")
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the fork server (pid {self.process.pid}) does not answer: the machine is too busy")
        if any(descriptor == hurry for descriptor, _ in ready):
            raise TimeoutError(f"the fork server (pid {self.process.pid}) is not waited for any more")
        try:
            return receive(self._connection, descriptors=expected)
        except EOFError as error:
            raise ConnectionError(f"the fork server (pid {self.process.pid}) has ended") from error


def is_stopped(pid: int) -> bool:
    """Whether a process has been stopped by a signal or a debugger, or is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "TtZX"
    except OSError:
        return True


class ForkServers:
    """The servers of one launcher; used by its thread alone.

    Args:
        hurry: a descriptor that is readable once nothing is to be waited for any more.
    """

    def __init__(self, hurry: int) -> None:
        self._hurry = hurry
        self._servers: list[_Server] = []
        self._left: list[_Server] = []

    def fork(
        self, modules: tuple[str, ...], name: str, pipe: int, surroundings: Surroundings, timeout: float
    ) -> Forked | None:
        """Fork a process that reads its config from ``pipe``; None if it had better be executed.

        Args:
            modules: what it is to have imported already.
            name: its name, for people.
            pipe: the end that it reads from. It has a copy then, perhaps even if the result is None.
            surroundings: what it finds around it.
            timeout: seconds for this, within which the first process of a server waits for the imports.

        Raises:
            OSError: no process can be started at the moment, in whatever way.
        """
        if self._is_hurried():
            return None
        for _ in range(2):  # one that turns out to be dead costs another attempt
            server = self._suitable(modules, surroundings, timeout)
            if server is None or not server.is_able:
                return None
            try:
                return server.fork(name, pipe, surroundings, self._hurry, timeout)
            except TimeoutError as error:
                if not self._is_hurried():
                    logger.warning("%s: processes are started without it", error)
                self._leave(server)
                return None
            except ConnectionError as error:
                logger.info("%s", error)
                server.kill()
                self._servers.remove(server)
        return None

    def close(self) -> None:
        """Kill the servers."""
        for server in self._servers + self._left:
            server.kill()

    def _suitable(self, modules: tuple[str, ...], surroundings: Surroundings, timeout: float) -> _Server | None:
        """A server for such a process, perhaps one that is not able; None if there are too many."""
        self._left = [server for server in self._left if not server.has_ended()]
        for server in [server for server in self._servers if server.has_ended() and server.is_able]:
            server.let_go()
            self._servers.remove(server)
        for server in self._servers:
            if server.suits(modules, surroundings):
                self._servers.remove(server)
                self._servers.append(server)
                return server
        while len(self._servers) + len(self._left) >= MOST_SERVERS:
            if not self._make_room():
                return None
        server = _Server(modules, surroundings)
        self._servers.append(server)
        try:
            server.prepare(self._hurry, timeout)
        except OSError as error:
            if not self._is_hurried():
                logger.warning("processes are started without preloading %s: %s", ", ".join(modules), error)
            server.kill()
        return server

    def _make_room(self) -> bool:
        """End a server that nobody needs any more: of those without offspring the one that was used least recently."""
        for server in self._servers:
            if not server.offspring:
                server.kill()
                self._servers.remove(server)
                return True
        return False

    def _leave(self, server: _Server) -> None:
        server.let_go()
        self._servers.remove(server)
        self._left.append(server)

    def _is_hurried(self) -> bool:
        poll = select.poll()
        poll.register(self._hurry, select.POLLIN)
        return bool(poll.poll(0))
