"""Sends what a process writes to descriptors 1 and 2, C libraries included, to the collector of the job's output."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import sys
import threading
from dataclasses import dataclass

PIPE_NBYTES = 256 << 10
"""How much fits in the pipe to the collector before the process waits. A user may have some 64 MiB in all."""

_MAX_ACTORS = 8
_MAX_NAME = 64

TIMEOUT_S = 5.0

_log = logging.getLogger("skipper.control")
_lock = threading.Lock()
_originals: tuple[int, int] | None = None
_sink = ""
_actors: list[str] = []


@dataclass(frozen=True, slots=True)
class Redirection:
    """Where output is to go.

    Attributes:
        sink: the abstract socket of the collector; empty for the original output.
        level: the level of the `logging` messages to show; None leaves that to the process.
    """

    sink: str
    level: int | None = None


def redirect(redirection: Redirection, name: str) -> bool:
    """Send what this process writes to a collector, or back to its original output.

    Returns:
        Whether it goes there now; False if the collector cannot be reached.
    """
    global _originals, _sink
    with _lock:
        if redirection.level is not None:
            _let_logging_speak(redirection.level)
        if redirection.sink == _sink:
            return True
        if redirection.sink:
            try:
                ends = _connect(redirection.sink, name)
            except OSError as error:
                _log.debug("%s: its output cannot be collected: %s", name, error)
                return False
            if _originals is None:
                _originals = os.dup(1), os.dup(2)
        else:
            assert _originals is not None  # it has been redirected
            ends = tuple(map(os.dup, _originals))  # type: ignore[assignment]
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed by its user
                stream.flush()
        for number, end in zip((1, 2), ends, strict=True):
            os.dup2(end, number)
            os.close(end)
        _sink = redirection.sink
        return True


def note_actor(name: str) -> None:
    """Tell the collector that this process has an actor of this mesh: its lines get that name."""
    name = name[:_MAX_NAME]
    with _lock:
        if name in _actors or len(_actors) >= _MAX_ACTORS:
            return
        _actors.append(name)
        if not _sink:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect("\0" + _sink)
            connection.send(json.dumps({"pid": os.getpid(), "actors": _actors}).encode())


def _connect(sink: str, name: str) -> tuple[int, int]:
    """Make two pipes; the collector gets their reading ends."""
    fds: list[int] = []
    try:
        for _ in range(2):
            reading, writing = os.pipe()
            fds += [reading, writing]
            with contextlib.suppress(OSError):  # a user's pipe memory is limited
                fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_NBYTES)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect("\0" + sink)
            words = json.dumps({"name": name[:1000], "pid": os.getpid(), "actors": _actors}).encode()
            socket.send_fds(connection, [words], [fds[0], fds[2]])
            if connection.recv(1) != b"+":  # the collector has them now: nothing that is written can be lost
                raise OSError("the collector has refused")
    except OSError:
        for fd in fds:
            os.close(fd)
        raise
    os.close(fds[0])
    os.close(fds[2])
    return fds[1], fds[3]


def _let_logging_speak(level: int) -> None:
    root = logging.getLogger()
    root.setLevel(level)
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_Lines("%(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)


class _Lines(logging.Formatter):
    """Names the actor of a record, but not its rank: lines that ranks have in common are shown once."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (a method of logging's)
        if actor := getattr(record, "actor_name", ""):
            return f"{record.levelname} {record.name} (actor {actor}): {record.message}"
        return super().formatMessage(record)


def _forget() -> None:
    """Reset a forked copy: it shares the pipes of its parent, and may get some of its own."""
    global _originals, _sink, _lock
    _originals, _sink, _lock = None, "", threading.Lock()
    _actors.clear()


os.register_at_fork(after_in_child=_forget)
