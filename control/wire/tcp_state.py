"""Whether the other side of a TCP connection has closed it. gRPC checks a connection only while a call waits for it."""

from __future__ import annotations

import os
import select
import socket
import stat

_HUNG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


class ConnectionWatch:
    """Finds the connection that a library will make, but whose descriptor it does not expose. For any thread.

    Args:
        target: host and port of the connection. Connections that others make there at the same moment count as it, too.
    """

    def __init__(self, target: str) -> None:
        port = target.rpartition(":")[2]
        self._port = int(port) if port.isdecimal() else None
        self._before = self._connections()
        self._fds: tuple[int, ...] = ()

    def begin(self) -> None:
        """Note that the connection is made."""
        self._fds = tuple(self._connections() - self._before)

    def has_hung_up(self) -> bool:
        """Whether the other side, or this process, has closed it; False if it was not found. One system call."""
        if not self._fds:
            return False
        poll = select.poll()
        for fd in self._fds:
            poll.register(fd, select.POLLRDHUP)
        return any(events & _HUNG_UP for _, events in poll.poll(0))

    def _connections(self) -> set[int]:
        try:
            descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
        except OSError:
            return set()
        return {fd for fd in descriptors if self._port is not None and _peer_port(fd) == self._port}


def _peer_port(fd: int) -> int | None:
    """The port that a descriptor is connected to by TCP; None if it is anything else."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        copy = os.dup(fd)  # `socket` closes its descriptor
    except OSError:  # it was closed just now
        return None
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
    with connection:
        try:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                return int(connection.getpeername()[1])
        except OSError:  # the socket listens, or its connection has ended
            return None
    return None
