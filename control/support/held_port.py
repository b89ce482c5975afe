"""`HeldPort`: a port that is reserved from the moment of its choice, for a library that listens there itself."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self


class HeldPort:
    """A free port, which the kernel gives to no other program while it is held.

    A socket is bound to it and does not listen. A program that asks the kernel for any free port, or connects from
    one, gets another; a request for exactly this one is refused. Only a socket with SO_REUSEADDR may also be bound to
    it (socket(7)); sockets of servers usually have it: those of ``torch.distributed``, of gRPC, of Python.

    Attributes:
        number: number of the port, the same for IPv4 and IPv6.

    Raises:
        OSError: there is no free port, or no descriptor left.
    """

    def __init__(self) -> None:
        is_dual = socket.has_dualstack_ipv6()
        self._socket = socket.socket(socket.AF_INET6 if is_dual else socket.AF_INET, socket.SOCK_STREAM)
        try:
            if is_dual:
                self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            # If this were set later, another program that holds a port in this way could have the same one.
            self._socket.bind(("", 0))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError:
            self._socket.close()
            raise
        self.number = int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Release the port; a server that listens there continues. Idempotent."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self.close()
