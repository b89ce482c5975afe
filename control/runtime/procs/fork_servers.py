"""`ForkServers`: the fork servers of this process, as its launcher uses them.

A server may fork a process if nothing that such a process would inherit at its start has changed since the server's own
start: the kernel's attributes, the import path, the variables stated for it, and those variables of the script that
imported code has read. Otherwise another server is started, up to a limit. Beyond the limit, or if a server is of no
use, the process is executed as if there were no servers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from typing import Any

from skipper.control.runtime.procs import guard
from skipper.control.runtime.procs.fork_messages import Birth, Born, Prepare, Unable, receive, send
from skipper.control.runtime.procs.guards import Guards, Kept, is_readable, wait_for
from skipper.control.runtime.procs.inheritance import Surroundings, of_the_kernel
from skipper.control.runtime.procs.worker_config import command_of_fork_server

MOST_SERVERS = 4
"""How many servers one process has, including those that must stay because of their offspring."""
ROOM_FOR_NAMES = 160
"""Bytes for the command line of a forked process, beyond the server's own."""

# The interpreter, the loader, the C library or a thread pool reads these before the server can record reads.
_READ_EARLY = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "LC_", "LANG", "TZ"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "DNNL_", "ONEDNN_"),
    *("ATEN_", "TORCH", "PYTORCH_", "CUDA_", "CUBLAS_", "NVIDIA_", "HIP_", "ROCR_", "UCX_"),
)

logger = logging.getLogger(__name__)


class _Server:
    """One server, as its client sees it: the launcher's thread.

    Attributes:
        is_able: whether it may be asked to fork.
        offspring: process ids of the processes that it has forked and whose end has not been seen; the loop notes their
            ends.
        process: the server.
    """

    def __init__(self, modules: tuple[str, ...], surroundings: Surroundings, guards: Guards, timeout: float) -> None:
        self._modules = modules
        self._given = surroundings.given
        self._environment = surroundings.environment
        self._imports_from = surroundings.sys_path, surroundings.place
        self._of_the_kernel = of_the_kernel()
        self._looked_up: frozenset[str] = frozenset()
        self.is_able = False
        self.offspring: set[int] = set()
        self._is_retired = False
        self._connection, theirs = socket.socketpair()
        command = [*command_of_fork_server(guard.FIRST_FD, guard.PARENT), "".ljust(ROOM_FOR_NAMES, ".")]
        try:
            self.process: Kept = guards.start(command, surroundings, (theirs.fileno(),), timeout)
            os.close(self.process.report)  # nobody needs its exit status
        except OSError:
            self._connection.close()
            raise
        finally:
            theirs.close()

    def prepare(self, hurry: int, timeout: float) -> None:
        """Make it import; then `is_able` says whether it can fork.

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
        """Whether a process with these surroundings would be the same if it were executed now."""
        if (modules, surroundings.given) != (self._modules, self._given):
            return False
        if (surroundings.sys_path, surroundings.place) != self._imports_from or of_the_kernel() != self._of_the_kernel:
            return False
        changed = {name for name, _ in self._environment.items() ^ surroundings.environment.items()}
        return not any(name in self._looked_up or name.startswith(_READ_EARLY) for name in changed)

    def fork(self, name: str, pipe: int, surroundings: Surroundings, hurry: int, timeout: float) -> Kept:
        """Make it fork a process that reads its config from a pipe.

        Raises:
            OSError: the server cannot fork, or is gone (`ConnectionError`), or does not answer (`TimeoutError`).
        """
        birth = Birth(name, surroundings.environment)
        deadline = time.monotonic() + timeout
        born, (pidfd, report) = self._ask(birth, (pipe, *surroundings.descriptors()), 2, hurry, deadline)
        assert isinstance(born, Born)
        self.offspring.add(born.pid)
        return Kept(born.pid, pidfd, report, self)

    @property
    def description(self) -> str:
        """What it is, with its process id."""
        return f"the fork server (pid {self.process.pid})"

    def has_ended(self) -> bool:
        """Whether its process is gone; from any thread."""
        return self._is_retired or self.process.has_ended()

    def let_go(self) -> None:
        """Send it no more requests. It stays until its offspring has ended."""
        self.is_able = False
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def kill(self) -> None:
        """Kill it, and with it everything that it has forked."""
        self.let_go()
        self.process.kill()

    def retire(self) -> None:
        """Release its process, which has ended or was killed."""
        self._is_retired = True  # first: the loop's thread may ask at any time
        self.process.origin.offspring.discard(self.process.pid)
        os.close(self.process.pidfd)

    def _ask(
        self, message: object, descriptors: tuple[int, ...], expected: int, hurry: int, deadline: float
    ) -> tuple[Any, list[int]]:
        self._connection.settimeout(max(deadline - time.monotonic(), 0.001))
        send(self._connection, message, descriptors)
        wait_for(self, self.process.pid, self._connection.fileno(), hurry, deadline)
        try:
            return receive(self._connection, descriptors=expected)
        except EOFError as error:
            raise ConnectionError(f"{self.description} has ended") from error


class ForkServers:
    """The servers of one launcher; used by its thread alone.

    Args:
        guards: start the servers.
        hurry: a descriptor that becomes readable when nothing must be waited for any more.
    """

    def __init__(self, guards: Guards, hurry: int) -> None:
        self._guards = guards
        self._hurry = hurry
        self._servers: list[_Server] = []
        self._left: list[_Server] = []

    def fork(
        self, modules: tuple[str, ...], name: str, pipe: int, surroundings: Surroundings, timeout: float
    ) -> Kept | None:
        """Fork a process that reads its config from ``pipe``; None if it should be executed instead.

        Args:
            modules: the modules that it should have imported already.
            name: its name, for people.
            pipe: the end that it reads from. The process then has a copy, perhaps even if the result is None.
            surroundings: what it inherits.
            timeout: seconds for all of this; the first process of a server waits for the imports, too.

        Raises:
            OSError: no process can be started at the moment, forked or executed.
        """
        if is_readable(self._hurry):
            return None
        for _ in range(2):  # a server that turns out to be dead costs another attempt
            server = self._suitable(modules, surroundings, timeout)
            if server is None or not server.is_able:
                return None
            try:
                return server.fork(name, pipe, surroundings, self._hurry, timeout)
            except TimeoutError as error:
                if not is_readable(self._hurry):
                    logger.warning("%s: processes are started without it", error)
                self._leave(server)
                return None
            except ConnectionError as error:
                logger.info("%s", error)
                self._end(server)
        return None

    def close(self) -> None:
        """Kill the servers."""
        for server in self._servers + self._left:
            server.kill()
            server.retire()

    def _suitable(self, modules: tuple[str, ...], surroundings: Surroundings, timeout: float) -> _Server | None:
        """A server for such a process, perhaps one that cannot fork; None if there are too many."""
        for server in [server for server in self._left if server.has_ended()]:
            self._left.remove(server)
            server.retire()
        for server in [server for server in self._servers if server.has_ended() and server.is_able]:
            self._end(server)
        for server in self._servers:
            if server.suits(modules, surroundings):
                self._servers.remove(server)
                self._servers.append(server)
                return server
        while len(self._servers) + len(self._left) >= MOST_SERVERS:
            if not self._make_room():
                return None
        server = _Server(modules, surroundings, self._guards, timeout)
        self._servers.append(server)
        try:
            server.prepare(self._hurry, timeout)
        except OSError as error:
            if not is_readable(self._hurry):
                logger.warning("processes are started without preloading %s: %s", ", ".join(modules), error)
            server.kill()
        return server

    def _make_room(self) -> bool:
        """End a server that is not needed any more: the least recently used one without offspring."""
        for server in self._servers:
            if not server.offspring:
                self._end(server)
                return True
        return False

    def _end(self, server: _Server) -> None:
        self._servers.remove(server)
        server.kill()
        server.retire()

    def _leave(self, server: _Server) -> None:
        server.let_go()
        self._servers.remove(server)
        self._left.append(server)
