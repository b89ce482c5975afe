"""`LocalListener`: takes the streams of other processes of this host, until they have proven themselves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Any

from skipper.control.model.errors import WireError
from skipper.control.wire._poller import Poller
from skipper.control.wire.handshake import Guest
from skipper.control.wire.local_stream import IncomingLocalStream, is_of_this_user, new_socket, socket_name
from skipper.control.wire.message_stream import Status
from skipper.control.wire.process_ref import ProcessRef
from skipper.control.wire.strangers import HANDSHAKE_TIMEOUT_S, Strangers

_log = logging.getLogger("skipper.control")

_BACKLOG = 512
_AT_A_TIME = 64
_PAUSE_S = 0.1
"""How long no connection is accepted if the system has no room for one more."""


class LocalListener:
    """Accepts processes of this user on this host that know a secret.

    Args:
        process_id: of this process, by which it is dialed.
        secret: the secret that the others have to know.
        poller: reads for the streams; connections are accepted on its threads.
        loop: for timers.
        on_proven: takes the stream and the process at its other end, on the stream's thread.

    Raises:
        WireError: it cannot listen.
    """

    def __init__(
        self,
        process_id: str,
        secret: bytes,
        poller: Poller,
        loop: asyncio.AbstractEventLoop,
        *,
        on_proven: Callable[[Guest, ProcessRef], None],
    ) -> None:
        self._process_id = process_id
        self._secret = secret
        self._poller = poller
        self._loop = loop
        self._on_proven = on_proven
        self._strangers = Strangers()
        self._socket = new_socket()
        try:
            self._socket.bind(socket_name(process_id))
            self._socket.listen(_BACKLOG)
            self._poller.watch(self._socket.fileno(), self._accept)
        except OSError as error:
            self._socket.close()
            raise WireError(f"cannot listen within this host: {error}") from error

    def close(self) -> None:
        """Accept no more, and turn away the streams that have not proven themselves; idempotent."""
        if self._socket.fileno() >= 0:
            self._poller.unwatch(self._socket.fileno())
            self._socket.close()
        self._strangers.turn_away_all()

    def fall_silent(self) -> None:
        """Close the socket: this is a forked copy of the process."""
        self._socket.close()

    def let_in(self, guest: Guest, peer: ProcessRef) -> None:
        """Take a stream that has proven itself. For its `_Arrival`."""
        self._strangers.forget(guest.stream)
        self._on_proven(guest, peer)

    def forget(self, stream: IncomingLocalStream) -> None:
        """Forget a stream that has left. For its `_Arrival`."""
        self._strangers.forget(stream)

    def greet(self, stream: IncomingLocalStream) -> None:
        """Begin the handshake of a stream with its metadata. For its `_Arrival`."""
        guest = Guest(
            stream,
            self._process_id,
            self._secret,
            on_proven=self.let_in,
            on_gone=lambda guest: self.forget(stream),
        )
        if not guest.receive():
            self.forget(stream)

    def _accept(self) -> None:
        for _ in range(_AT_A_TIME):
            try:
                accepted, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if self._socket.fileno() >= 0:
                    _log.warning("new processes are refused for %g s: %s", _PAUSE_S, error)
                    self._pause()
                return
            with accepted:
                if is_of_this_user(accepted):
                    self._take(accepted)

    def _take(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        arrival = _Arrival(self)
        stream = arrival.stream = IncomingLocalStream(accepted, arrival, self._poller)
        self._strangers.add(stream)
        stream.start()
        self._later(HANDSHAKE_TIMEOUT_S, self._strangers.lose_patience)

    def _pause(self) -> None:
        self._poller.unwatch(self._socket.fileno())
        self._later(_PAUSE_S, self._go_on)

    def _later(self, delay_s: float, call: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends
            self._loop.call_soon_threadsafe(self._loop.call_later, delay_s, call)

    def _go_on(self) -> None:
        if self._socket.fileno() >= 0:
            self._poller.watch(self._socket.fileno(), self._accept)


class _Arrival:
    """The user of a stream until the other end has sent its metadata."""

    def __init__(self, listener: LocalListener) -> None:
        self._listener = listener
        self.stream: IncomingLocalStream | None = None

    def opened(self, metadata: dict[str, Any]) -> None:
        """Let it prove itself."""
        if self.stream is not None:
            self._listener.greet(self.stream)

    def received(self, message: bytes) -> bool:
        """Do nothing: the metadata come first."""
        return False

    def sent(self) -> None:
        """Do nothing: nothing is sent before the proof."""

    def ended(self, status: Status) -> None:
        """Note that it has left."""
        if self.stream is not None:
            self._listener.forget(self.stream)
