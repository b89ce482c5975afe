"""Listening sockets that another program, such as systemd, has opened for an agent."""

from __future__ import annotations

import os
import socket

_FIRST_FD = 3
"""The first descriptor that a service manager passes on: SD_LISTEN_FDS_START of sd_listen_fds(3)."""


def adopt(fd: int) -> socket.socket:
    """A listening socket that this process has inherited; programs that it starts do not inherit it.

    Raises:
        ValueError: there is no such descriptor, or it is not a listening TCP socket.
    """
    try:
        found = socket.socket(fileno=fd)
    except OSError as error:
        raise ValueError(f"descriptor {fd} is not a socket that can be listened on: {error.strerror}") from None
    is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
    if not is_tcp or not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        found.detach()  # its owner keeps it open
        raise ValueError(f"descriptor {fd} is not a TCP socket that listens")
    found.set_inheritable(False)
    return found


def passed_on() -> int | None:
    """The descriptor that a service manager passes to this process by ``LISTEN_FDS`` (see sd_listen_fds(3)).

    The variables are removed from the environment, so that no program that this one starts takes them for its own.

    Returns:
        The descriptor; None if there is none, or it is meant for another process.

    Raises:
        ValueError: there are several descriptors.
    """
    count, pid = os.environ.pop("LISTEN_FDS", ""), os.environ.pop("LISTEN_PID", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal() or count == "0":
        return None
    if count != "1":
        raise ValueError(f"an agent listens on one socket, and {count} were passed to it (LISTEN_FDS)")
    return _FIRST_FD
