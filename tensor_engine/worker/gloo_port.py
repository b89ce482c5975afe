"""The port that gloo listens on while it connects the members of a group, closed to all others.

gloo does not authenticate connections. So from its first moment the listener has a filter in the kernel that drops
incoming packets (`trust.socket_filter`). While members connect, the filter lets connections through, but no data. The
members tell each other over the job's links which connections are theirs. The filter is removed only from those, and
all others are closed. Then no member needs to connect any more, and the port is closed.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import tempfile
import threading
from collections.abc import Collection
from typing import Any

import torch.distributed as dist

from skipper.tensor_engine.errors import CommunicationError
from skipper.trust import own_sockets, socket_filter
from skipper.trust.own_sockets import SocketPlace

LOOPBACK = "127.0.0.1"
"""The address from which the kernel connects to every address of the loopback."""
_ATTEMPTS = 5
_QUEUED_AT = 24  # of tcp_info, linux/tcp.h: tcpi_unacked, which counts what a listener has not accepted yet
_KICK = b"\0"

_making = threading.Lock()
"""Held while a device is made: its sockets are the new ones."""


class GlooPort:
    """A device of gloo, and its listener.

    Attributes:
        device: the device for the options of a group.
        place: where it listens.
    """

    def __init__(self, device: Any, fd: int, place: SocketPlace, known: dict[int, int]) -> None:
        self.device = device
        self.place = place
        self._fd: int | None = fd
        self._known = known

    @classmethod
    def open(cls, address: str = LOOPBACK) -> GlooPort:
        """Make one that admits no connection.

        Args:
            address: an address of this host. Connections to loopback addresses come from `LOOPBACK`.

        Raises:
            CommunicationError: it cannot be closed to others here, or the listener cannot be found.
        """
        if obstacle := socket_filter.obstacle():
            raise CommunicationError(f"gloo's port would be open to all users: {obstacle}")
        with _making:
            for _ in range(_ATTEMPTS):
                known = own_sockets.descriptors()
                device = dist.ProcessGroupGloo.create_device(hostname=address)
                found = [
                    (fd, place)
                    for fd, place in own_sockets.listening(known).items()
                    if place.address == own_sockets.as_ipv6(address)
                ]
                if len(found) == 1:  # otherwise other code of this process has begun to listen, too
                    port = cls(device, *found[0], known)
                    port._admit()
                    if not port._is_touched():
                        return port
                del device
        raise CommunicationError("gloo's listener cannot be told from others: something keeps opening or trying ports")

    def let_in(self, sources: Collection[str] = (LOOPBACK,)) -> None:
        """Let connections be made from these addresses, without data."""
        self._admit(*sources)

    def outgoing(self, places: Collection[SocketPlace]) -> dict[SocketPlace, SocketPlace]:
        """The places among these that this process is connected to by now, and from where."""
        return {there: here for here, there in self._connections() if there in places}

    def take(self, sources: Collection[SocketPlace]) -> set[SocketPlace]:
        """Open the connections from these places for data; those that gloo has accepted by now."""
        taken = set()
        for _, copy in own_sockets.opened(self._known):
            both = own_sockets.ends(copy)
            if both is not None and both[0] == self.place and both[1] in sources:
                socket_filter.lift(copy)
                taken.add(both[1])
        return taken

    def kick(self, places: Collection[SocketPlace]) -> None:
        """Make the kernel send again at once what the filters of these places have dropped.

        The kernel does so when later data are acknowledged, and otherwise after 200 ms. A byte of urgent data (tcp(7))
        is not part of the stream that its receiver reads.
        """
        for _, copy in own_sockets.opened(self._known):
            both = own_sockets.ends(copy)
            if both is not None and both[1] in places:
                with contextlib.suppress(OSError):  # then the connection has ended, and gloo reports that
                    copy.send(_KICK, socket.MSG_OOB)

    def close(self) -> None:
        """Stop listening, and end the connections that were not opened for data. Idempotent.

        gloo aborts the process if its listener is shut down. So a socket that no process can reach replaces it, and
        gloo waits for that.

        Raises:
            CommunicationError: the system refuses, for example without a descriptor left, or room for temporary files.
                The port then admits nobody; `close` may be called again.
        """
        if self._fd is None:
            return
        self._admit()
        try:
            with _unreachable_listener() as quiet:
                self._end_strangers()
                self._replace(self._fd, quiet)
        except OSError as error:
            raise CommunicationError(f"gloo's port accepts no connections, but could not be closed: {error}") from error

    def _end_strangers(self) -> None:
        for _, copy in own_sockets.opened(self._known):
            both = own_sockets.ends(copy)
            if both is not None and both[0] == self.place and socket_filter.restricted(copy):
                own_sockets.shut(copy)

    def _replace(self, fd: int, quiet: socket.socket) -> None:
        with _making:
            listener = (fd, os.fstat(fd).st_ino)
            loop = next((loop for loop, waits_for in own_sockets.event_loops() if listener in waits_for), None)
            os.dup2(quiet.fileno(), fd, inheritable=False)
            self._fd = None
            if loop is not None:
                # gloo will remove it again; without a requested event, nothing wakes it.
                with contextlib.closing(select.epoll.fromfd(os.dup(loop))) as events:
                    events.register(fd, 0)

    def _connections(self) -> list[tuple[SocketPlace, SocketPlace]]:
        found = [own_sockets.ends(copy) for _, copy in own_sockets.opened(self._known)]
        return [both for both in found if both is not None]

    def _admit(self, *sources: str) -> None:
        assert self._fd is not None  # it has not been closed
        try:
            with contextlib.closing(socket.socket(fileno=os.dup(self._fd))) as listener:
                socket_filter.admit(listener, [own_sockets.as_ipv6(source) for source in sources])
        except OSError as error:
            raise CommunicationError(
                f"gloo's port cannot be closed to other users by a socket filter of the kernel: {error}"
            ) from error

    def _is_touched(self) -> bool:
        """Whether there was a connection before the filter, even one that has ended: gloo may still hold it.

        gloo would take it for the member whose number was sent on it. The kernel forgets the other end of a connection
        that was reset, but not this end.
        """
        assert self._fd is not None  # it was opened just now
        with contextlib.closing(socket.socket(fileno=os.dup(self._fd))) as listener:
            told = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _QUEUED_AT + 4)
        queued = int.from_bytes(told[_QUEUED_AT : _QUEUED_AT + 4], "little")
        return queued > 0 or any(
            fd != self._fd and SocketPlace.of(copy.getsockname()) == self.place
            for fd, copy in own_sockets.opened(self._known)
        )


def _unreachable_listener() -> socket.socket:
    """A socket that listens under a removed name: accepting from it fails at once, since no connection comes.

    Raises:
        OSError: no descriptor is left for it, or there is no folder for temporary files.
    """
    with contextlib.ExitStack() as stack:
        quiet = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        with tempfile.TemporaryDirectory(prefix="skipper-") as folder:
            place = os.open(folder, os.O_PATH | os.O_DIRECTORY)
            try:
                quiet.bind(f"/proc/self/fd/{place}/l")  # its whole path may be too long for a socket
            finally:
                os.close(place)
            quiet.listen(1)
        quiet.setblocking(False)
        stack.pop_all()
    return quiet
