"""Processes for tests without the time that their imports take: forked from one that has done them and nothing else.

An interpreter that imports numpy and dataplane takes a third of a second, in the guest kernel two, and there are
hundreds of them. The server opens nothing and uses no buffer, so that what is forked from it is as good as new.

It is asked ("start", module, environment), with a descriptor to follow, and answers the process' id; or ("end", id,
options of waitpid), and answers the exit status.
"""

import atexit
import gc
import importlib
import importlib.util
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
EARLY = ("concurrent.futures", "skipper.dataplane", "multiprocessing.connection", "tests.conformance.visitor")
EARLY_FOR_VERBS = ("addr", "cm_enums", "cmid", "cq", "device", "enums", "mr", "pd", "pyverbs_error", "qp", "wr")


class Forked:
    """A process that was forked from the server, to be used like a `subprocess.Popen`."""

    def __init__(self, server: "ForkServer", pid: int) -> None:
        self.pid = pid
        self._server = server
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._ended(os.WNOHANG)

    def kill(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """Wait for the end of one that is about to end: nothing else is started meanwhile."""
        status = self._ended(0, timeout)
        assert status is not None
        return status

    def _ended(self, options: int, timeout: float = PATIENCE_S) -> int | None:
        if self._status is None:
            self._status = self._server.ask("end", self.pid, options, timeout=timeout)
        return self._status


class ForkServer:
    """The server, as the tests use it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", "tests.conformance.fork_server", str(theirs.fileno())]
        self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()])
        theirs.close()
        atexit.register(self.close)

    def start(self, module: str, descriptor: int) -> Forked:
        """Run a module as `python -m` would, with the descriptor as its argument."""
        return Forked(self, self.ask("start", module, dict(os.environ), descriptor=descriptor))

    def ask(self, *request: Any, descriptor: int | None = None, timeout: float = PATIENCE_S) -> Any:
        with self._lock:
            self._connection.send(request)
            if descriptor is not None:
                send_handle(self._connection, descriptor, self._process.pid)
            if not self._connection.poll(timeout):
                raise TimeoutError("the fork server does not answer")
            return self._connection.recv()

    def close(self) -> None:
        self._connection.close()
        self._process.wait(PATIENCE_S)


_LOCK = threading.Lock()
_SERVERS: list[ForkServer] = []


def server() -> ForkServer:
    """The one of this process, started with the first use."""
    with _LOCK:
        if not _SERVERS:
            _SERVERS.append(ForkServer())
        return _SERVERS[0]


def serve(connection: "Connection[Any, Any]") -> tuple[str, Mapping[str, str], int] | None:
    """Answer until nobody asks any more. In a forked process: its module, environment and descriptor."""
    while True:
        try:
            wanted, *request = connection.recv()
        except EOFError:
            return None
        if wanted == "start":
            module, environment = request
            descriptor = recv_handle(connection)
            pid = os.fork()
            if pid == 0:
                connection.close()
                return module, environment, descriptor
            os.close(descriptor)
            connection.send(pid)
        else:
            pid, status = os.waitpid(*request)
            connection.send(os.waitstatus_to_exitcode(status) if pid else None)


def main() -> None:
    for name in EARLY:
        importlib.import_module(name)
    if importlib.util.find_spec("pyverbs") is not None:
        for name in EARLY_FOR_VERBS:
            importlib.import_module(f"pyverbs.{name}")
    gc.collect()
    gc.freeze()  # what is there already is never looked at again, and so its pages stay shared
    forked = serve(Connection(int(sys.argv[1])))
    if forked is not None:
        module, environment, descriptor = forked
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[1:] = [str(descriptor)]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
