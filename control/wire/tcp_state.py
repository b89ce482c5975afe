"""Whether the other side of a TCP connection has hung up. gRPC looks at a connection only while a call waits for it."""

from __future__ import annotations

import os
import select
import socket
import stat

_HUNG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


class ConnectionWatch:
    """Finds the connection that a library is about to make without telling its descriptor. For any thread.

    Args:
        target: host and port that it will lead to. Connections that others make there at the same moment are taken for
            it, too.
    """

    def __init__(self, target: str) -> None:
        port = target.rpartition(":")[2]
        self._port = int(port) if port.isdecimal() else None
        self._before = self._connections()
        self._fds: tuple[int, ...] = ()

    def begin(self) -> None:
        """Note that the connection has been made."""
        self._fds = tuple(self._connections() - self._before)

    def has_hung_up(self) -> bool:
        """Whether the other side has closed it, or this process has; False where it was not found. A system call."""
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
    """The port that a descriptor is connected to by TCP; None where it is anything else."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        copy = os.dup(fd)  # `socket` closes what it is given
    except OSError:  # closed meanwhile
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
        except OSError:  # it listens, or has ended
            return None
    return None
