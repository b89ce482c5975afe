"""`GrpcDoor`: listens in place of gRPC within this host, until the first connection comes.

Processes of a host talk through packet sockets. A process that dials gRPC within a host belongs to another user, or is
in another language. That is rare, and gRPC needs threads that wake several times a second and a tenth of a second of
imports. So a socket listens in its place, and gRPC starts behind it with the first connection.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import threading
from collections.abc import Callable

from skipper.control.model.errors import WireError
from skipper.control.wire import addresses
from skipper.control.wire._poller import Poller
from skipper.control.wire.socket_forwarder import SocketForwarder

_log = logging.getLogger("skipper.control")

_BACKLOG = 128
_LOOK_S = 0.002


class GrpcDoor:
    """The door of one process.

    Args:
        process_id: of this process, by which it is dialed.
        poller: waits for the first connection.
        open_listener: makes gRPC listen at a target; on a thread of the door.

    Raises:
        WireError: it cannot listen.
    """

    def __init__(self, process_id: str, poller: Poller, open_listener: Callable[[str], object]) -> None:
        self._inner = f"{addresses.within_host(process_id)}/grpc"
        self._poller = poller
        self._open_listener = open_listener
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._forwarder: SocketForwarder | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind("\0" + addresses.within_host(process_id).partition(":")[2])
            self._socket.listen(_BACKLOG)
            self._poller.watch(self._socket.fileno(), self._knocked)
        except OSError as error:
            self._socket.close()
            raise WireError(f"cannot listen within this host: {error}") from error

    async def close(self) -> None:
        """Accept no more connections, and cut the present ones; idempotent."""
        with self._lock:
            self._is_closed, thread = True, self._thread
        if thread is None:
            if self._socket.fileno() >= 0:
                self._poller.unwatch(self._socket.fileno())
                self._socket.close()
        else:
            # While the interpreter ends, a thread that would report these ends can no longer be started.
            while thread.is_alive():  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)
            while self._forwarder is not None and not self._forwarder.end():  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)

    def fall_silent(self) -> None:
        """Close the socket: this is a forked copy of the process, and the poller belongs to the original."""
        self._socket.close()

    def _knocked(self) -> None:
        with self._lock:
            if self._is_closed or self._thread is not None:
                return
            self._poller.unwatch(self._socket.fileno())
            self._thread = threading.Thread(target=self._begin, name="control-door", daemon=True)
            self._thread.start()

    def _begin(self) -> None:
        try:
            self._open_listener(self._inner)
        except WireError as error:
            _log.warning("connections by gRPC within this host are refused: %s", error)
            self._socket.close()
            return
        self._forwarder = SocketForwarder(self._socket, self._inner.partition(":")[2], _most_connections())


def _most_connections() -> int:
    """A limit that leaves most descriptors to the rest of the process: each connection takes three."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else max(soft // 6, 8)
