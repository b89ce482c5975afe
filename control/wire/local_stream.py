"""Streams of messages within a host: one AF_UNIX packet socket, one packet per message.

A packet arrives whole or not at all, and the end of the other process shows as end of file. The first packet in each
direction is metadata. A packet of the dialed end that begins with `_STATUS` is the last one and has the reason.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from skipper.control.model.errors import ProtocolError
from skipper.control.wire._poller import MAX_NBYTES, PacketSocket, Poller
from skipper.control.wire.message_stream import CLOSED, Metadata, Status, User

MAX_METADATA_NBYTES = 8 << 10

_STATUS = b"\xff"
_ITEM = struct.Struct("<HH")
_CREDENTIALS = struct.Struct("iII")  # ucred: pid, uid, gid


def socket_name(process_id: str) -> bytes:
    """Where a process listens for processes on its host (and in its network namespace)."""
    return b"\0skipper-%s/local" % process_id.encode()


def new_socket() -> socket.socket:
    """A non-blocking socket for streams.

    Raises:
        OSError: there is no room for one more.
    """
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


def is_of_this_user(connected: socket.socket) -> bool:
    """Whether the process at the other end belonged to this process' user when it connected."""
    packed = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(packed)[1]
    return uid == os.geteuid()


def pack_metadata(metadata: Metadata) -> bytes:
    """Metadata as a packet."""
    parts: list[bytes] = []
    for name, value in metadata:
        data = value if isinstance(value, bytes) else value.encode()
        parts += (_ITEM.pack(len(name.encode()), len(data)), name.encode(), data)
    return b"".join(parts)


def unpack_metadata(packet: bytes) -> dict[str, Any]:
    """The inverse of `pack_metadata`.

    Raises:
        ProtocolError: it is not such a packet.
    """
    metadata: dict[str, Any] = {}
    position = 0
    if len(packet) > MAX_METADATA_NBYTES:
        raise ProtocolError(f"metadata of {len(packet)} bytes")
    try:
        while position < len(packet):
            name_nbytes, nbytes = _ITEM.unpack_from(packet, position)
            begin = position + _ITEM.size + name_nbytes
            position = begin + nbytes
            if position > len(packet):
                raise ProtocolError("metadata that exceed their packet")
            name, value = packet[begin - name_nbytes : begin].decode(), packet[begin:position]
            metadata[name] = value if name.endswith("-bin") else value.decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise ProtocolError(f"not metadata: {error}") from error
    return metadata


class LocalStream:
    """One end of a stream within a host: a `MessageStream`.

    Args:
        connected: taken over.
        poller: reads it; the thread that reads is the stream's thread.

    Attributes:
        user: as in `MessageStream`.
        flows: as there; messages are delivered at once in any case.
        max_nbytes: as there.
        send: as there, from any thread, one at a time: it is the socket's own method.
    """

    max_nbytes = MAX_NBYTES

    def __init__(self, connected: socket.socket, user: User, poller: Poller) -> None:
        self.user = user
        self._poller = poller
        self._over = False
        self._is_ended = False
        self._began = False
        self._unsent: bytes | None = None
        self._ending = threading.Lock()
        self._socket = PacketSocket(connected.detach(), self)
        self.send = self._socket.post

    def start(self, name: str = "") -> None:
        """Register the stream with the poller.

        Raises:
            OSError: the system has no room for it.
        """
        try:
            self._poller.add(self._socket)
        except OSError:
            self._socket.close()
            raise

    @property
    def flows(self) -> bool:
        """Whether threads that may be interrupted may deliver answers: from now on only frames of a link come."""
        return self._socket.repeats

    @flows.setter
    def flows(self, flows: bool) -> None:
        self._socket.repeats = flows
        self._socket.receive = self.user.received if flows else None

    def flush_soon(self, flush: Callable[[], object]) -> bool:
        """Call ``flush()`` in a moment (see `MessageStream.flush_soon`)."""
        self._poller.flush_soon(flush)
        return True

    def receive(self) -> None:
        """Do nothing: every message is delivered."""

    def end(self) -> None:
        """End the stream; from any thread. It may be called again. The user is told on the stream's thread."""
        with self._ending:
            self._is_ended = True
            self._socket.shut_down()

    # Events of the poller

    def received(self, packet: bytes) -> None:
        """Take a packet."""
        if self._over:
            return
        if self._began:
            self._take(packet)
            return
        self._began = True
        try:
            self._begin(packet)
        except ProtocolError as error:
            self._finish(Status("UNKNOWN", str(error)))
            self.end()

    def blocked(self, message: bytes) -> None:
        """Keep a message for which there was no room."""
        self._unsent = message
        self._poller.want_out(self._socket)

    def writable(self) -> None:
        """Send the messages that were kept."""
        message, self._unsent = self._unsent, None
        if message is not None and self.send(message) and not self._over:
            self.user.sent()

    def hung_up(self) -> None:
        """Note the end: nothing comes any more, and nothing more can be sent."""
        self._poller.remove(self._socket)
        self._finish(CLOSED)
        with self._ending:
            self._socket.close()

    def _begin(self, packet: bytes) -> None:
        """Take the first packet.

        Raises:
            ProtocolError: it is not metadata.
        """
        raise NotImplementedError

    def _take(self, packet: bytes) -> None:
        self.user.received(packet)

    def _finish(self, status: Status) -> None:
        if not self._over:
            self._over = True
            self.user.ended(status)


class OutgoingLocalStream(LocalStream):
    """The dialing end: connects at once, or not at all.

    Args:
        process_id: of the process to dial.
        poller: reads it.
        metadata: sent first.
        user: has the stream at first.

    Raises:
        PermissionError: a process of another user listens there.
        OSError: nobody listens there, or not quickly enough.
    """

    def __init__(self, process_id: str, poller: Poller, metadata: Metadata, user: User) -> None:
        with new_socket() as connecting:
            connecting.connect(socket_name(process_id))
            if not is_of_this_user(connecting):
                raise PermissionError(errno.EPERM, "it belongs to another user")
            connecting.send(pack_metadata(metadata))
            super().__init__(connecting, user, poller)

    def _begin(self, packet: bytes) -> None:
        if packet.startswith(_STATUS):
            self._take(packet)
        else:
            self.user.opened(unpack_metadata(packet))

    def _take(self, packet: bytes) -> None:
        if not packet.startswith(_STATUS):
            self.user.received(packet)
            return
        name, _, details = packet[1:].decode(errors="replace").partition(":")
        self._finish(Status(name.upper(), details))
        self.end()


class IncomingLocalStream(LocalStream):
    """The end of a process that was dialed: a `DialedStream`.

    Args:
        accepted: the connection, taken over.
        user: has the stream at first; gets its metadata by ``opened``.
        poller: reads it.

    Attributes:
        metadata: what the other side said first; empty before.
    """

    def __init__(self, accepted: socket.socket, user: User, poller: Poller) -> None:
        super().__init__(accepted, user, poller)
        self.metadata: dict[str, Any] = {}

    def shown(self) -> list[bytes] | None:
        """None: there is no TLS within a host."""
        return None

    def answer(self, metadata: Metadata) -> None:
        """Send the metadata."""
        self.send(pack_metadata(metadata))

    def turn_away(self, name: str, details: str) -> None:
        """End the stream with a gRPC status (its name in lower case) and a reason; from any thread."""
        if not self._is_ended:
            self.send(_STATUS + f"{name}:{details}".encode()[:1024])
            self.end()

    def _begin(self, packet: bytes) -> None:
        self.metadata = unpack_metadata(packet)
        self.user.opened(self.metadata)
