"""The messages between a process and its fork server, with descriptors, over a socket pair.

The first request to the server is `Prepare`, which it answers with `Ready` or `Unable`. Then comes any number of
`Birth` requests, which it answers with `Born` or the `OSError` that occurred.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skipper.control.runtime.procs.guard import receive_frame, send_frame


@dataclass(frozen=True, slots=True)
class Prepare:
    """Import these modules, from this path."""

    modules: tuple[str, ...]
    sys_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """Forking can begin.

    Attributes:
        looked_up: the environment variables that Python code read while it was imported.
    """

    looked_up: frozenset[str]


@dataclass(frozen=True, slots=True)
class Unable:
    """Why nothing can be forked from this server."""

    reason: str


@dataclass(frozen=True, slots=True)
class Birth:
    """Fork a process; comes with the descriptors of its pipe, working directory, standard output and standard error."""

    name: str
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class Born:
    """The process is forked; comes with a pidfd, and the pipe for its exit status (see `guard.fork_kept`)."""

    pid: int


def send(connection: socket.socket, message: object, descriptors: Sequence[int] = ()) -> None:
    """Send a message; the receiver gets copies of the descriptors.

    Raises:
        OSError: the other end is gone, or does not read (`TimeoutError`).
    """
    send_frame(connection, pickle.dumps(message, protocol=5), descriptors)


def receive(connection: socket.socket, *, descriptors: int) -> tuple[Any, list[int]]:
    """Receive a message and as many descriptors as it must have; the caller closes them.

    Raises:
        EOFError: the other end is gone.
        OSError: the other end is gone, nothing comes (`TimeoutError`), or there is no room for the descriptors.
    """
    body, received = receive_frame(connection)
    try:
        message = pickle.loads(body)
        if isinstance(message, OSError):
            raise message
        assert len(received) == descriptors  # the other end is our own
    except BaseException:
        for descriptor in received:
            os.close(descriptor)
        raise
    return message, received
