"""`Saboteur`: the ways in which a process can die, from within it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from skipper.control import Actor, endpoint

FOR_EVER_S = 86_400


def _die_by(which: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), which)


def _exit() -> None:
    os._exit(1)


def _hang() -> None:
    """Hold the interpreter's lock for ever, as a deadlock in native code does: no thread of Python runs any more."""
    ctypes.PyDLL(None).sleep(FOR_EVER_S)


def _cut() -> None:
    """Lose every connection, as with a broken link."""
    for name in os.listdir("/proc/self/fd"):
        try:
            is_socket = os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except FileNotFoundError:
            continue  # the listing's own
        if is_socket:
            with socket.socket(fileno=os.dup(int(name))) as connection:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # it was not connected


def _lose_host() -> None:
    """Kill the agent of this host: what it has started, this process too, ends with it."""
    pid = os.getppid()
    while pid > 1 and b"serve" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    if pid > 1:
        os.kill(pid, signal.SIGKILL)


HOST = "host"
"""A death of `DEATHS` that needs an engine which gives another host."""

DEATHS: dict[str, Callable[[], None]] = {
    "kill": _die_by(signal.SIGKILL),
    "segv": _die_by(signal.SIGSEGV),
    "abort": _die_by(signal.SIGABRT),
    "exit": _exit,
    "stop": _die_by(signal.SIGSTOP),
    "hang": _hang,
    "cut": _cut,
    HOST: _lose_host,
}
"""By name: killed, crashed, aborted, ended, frozen by SIGSTOP, frozen by a lock, cut off, lost with its host."""


class Saboteur(Actor):
    """One beside a worker, in its process; it has a thread of its own."""

    @endpoint
    def fall(self, kind: str) -> None:
        """Make the process fail in one of the ways of `DEATHS`."""
        DEATHS[kind]()
