"""`HeldPort`: a port that nobody else gets from the moment of its choice, for a library that listens there itself."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self


class HeldPort:
    """A free port, which the kernel gives to nobody else while it is held.

    A socket is bound to it and does not listen. Whoever asks the kernel for any free port, or connects from one, gets
    another; who asks for just this one is refused. Only a socket with SO_REUSEADDR may be bound to it as well
    (socket(7)), and that of a server is as a rule: that of ``torch.distributed``, of gRPC, of Python's.

    Attributes:
        number: of the port, the same for IPv4 and IPv6.

    Raises:
        OSError: there is no free port, or no descriptor left.
    """

    def __init__(self) -> None:
        is_dual = socket.has_dualstack_ipv6()
        self._socket = socket.socket(socket.AF_INET6 if is_dual else socket.AF_INET, socket.SOCK_STREAM)
        try:
            if is_dual:
                self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            # Asked for afterwards, the port could be one that another holds like this.
            self._socket.bind(("", 0))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError:
            self._socket.close()
            raise
        self.number = int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Let others have it; what listens there goes on. Idempotent."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self.close()
