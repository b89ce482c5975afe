"""Streams of messages between hosts, directly on gRPC's completion queues.

Any thread sends by itself, and the one thread that waits at a completion queue reads the socket and gets the message:
on its way from one process to another a message wakes only its receiver.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from skipper.control.wire._poller import serve_here
from skipper.control.wire.certificates import Certificates, Tls
from skipper.control.wire.frames import MAX_MESSAGE_NBYTES
from skipper.control.wire.grpc_core import NO_COMPRESSION, core, server_certificates, wake_period
from skipper.control.wire.message_stream import CLOSED, Metadata, Status, User

METHOD = "/skipper.control.v1.Link/Connect"

_log = logging.getLogger("skipper.control")

_NO_FLAGS = 0
_WAIT_FOR_READY = core.InitialMetadataFlags.wait_for_ready | core.InitialMetadataFlags.wait_for_ready_explicitly_set
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_NBYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_NBYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.min_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),
    ("grpc.max_metadata_size", 8 << 10),
    *NO_COMPRESSION,
)


def _to_dial(certificates: Certificates | None) -> Any:
    if certificates is None:
        return None
    authority, certificate, key = certificates.pems()
    return core.SSLChannelCredentials(authority, key, certificate)


def to_listen(certificates: Certificates | Tls | None) -> Any:
    """The gRPC credentials for a server with TLS that accepts only certain client certificates, if it asks for them.

    gRPC gets `Certificates` again for every connection.
    """
    if certificates is None:
        return None
    if isinstance(certificates, Tls):
        pair = core.SslPemKeyCertPair(certificates.key, certificates.certificate)
        return core.server_credentials_ssl(certificates.authority, [pair], certificates.authority is not None)
    last = certificates.pems()

    def look() -> Any:
        nonlocal last
        now = certificates.pems()
        if now == last:
            return None  # unchanged
        last = now
        return server_certificates(*now)

    return core.server_credentials_ssl_dynamic_cert_config(server_certificates(*last), look, True)


_CODES = {value: name.upper() for name, value in vars(core.StatusCode).items() if isinstance(value, int)}


class GrpcStream:
    """One end of a stream that gRPC carries: a `MessageStream`."""

    user: User
    flows = False
    max_nbytes = MAX_MESSAGE_NBYTES

    def __init__(self) -> None:
        self._over = False

    def send(self, message: bytes) -> bool:
        """Send a message; from any thread, but not again before `User.sent` was called. Does nothing after the end."""
        self._start((core.SendMessageOperation(message, _NO_FLAGS),), self._sent)
        return False

    def flush_soon(self, flush: Callable[[], object]) -> bool:
        """False: messages that are posted while one is being sent wait for that, and then leave together."""
        return False

    def receive(self) -> None:
        """Ask for the first message; the others follow."""
        self._start((core.ReceiveMessageOperation(_NO_FLAGS),), self._received)

    def end(self) -> None:
        """End the stream; from any thread. It may be called again."""
        raise NotImplementedError

    def _start(self, operations: tuple[Any, ...], then: Callable[[Any], None]) -> None:
        """Start operations of gRPC; ``then`` takes the event of their completion."""
        raise NotImplementedError

    def _sent(self, event: Any) -> None:
        if event.success:
            self.user.sent()

    def _received(self, event: Any) -> None:
        message = event.batch_operations[0].message()
        if message is None:
            self._dried_up()
        elif self.flows:
            # First, since it releases the interpreter lock, which the receiver of the message will need.
            self.receive()
            self.user.received(message)
        elif self.user.received(message):
            self.receive()

    def _dried_up(self) -> None:
        """Note that nothing more will come from the other side."""

    def _finish(self, status: Status) -> None:
        if not self._over:
            self._over = True
            self.user.ended(status)


class OutgoingStream(GrpcStream):
    """The dialing end, with a connection of its own. Its thread is the one that calls `run`.

    ``metadata`` is sent first, and ``user`` has the stream at first. Without ``certificates`` there is no TLS.
    """

    def __init__(self, address: str, metadata: Metadata, user: User, certificates: Certificates | None = None) -> None:
        super().__init__()
        self.user = user
        self._channel = core.Channel(address.encode(), OPTIONS, _to_dial(certificates))
        operations = (
            ((core.SendInitialMetadataOperation(metadata, _WAIT_FOR_READY),), _ignore),
            ((core.ReceiveInitialMetadataOperation(_NO_FLAGS),), self._opened),
            ((core.ReceiveStatusOnClientOperation(_NO_FLAGS),), self._closed),
        )
        self._lock = threading.RLock()  # reentrant, as in `IncomingStream`
        self._due: set[Callable[[Any], None]] = {then for _, then in operations}
        """What gRPC still has to complete: no more events than these may be requested."""
        self._call = self._channel.segregated_call(
            core.PropagationConstants.GRPC_PROPAGATE_DEFAULTS,
            METHOD.encode(),
            None,  # the called host: that of the address
            None,  # no deadline for the stream as a whole
            metadata,
            None,  # no credentials of gRPC's own
            operations,
            None,  # it is not traced
        )

    def start(self, name: str) -> None:
        """Serve the stream in a thread of this name."""
        threading.Thread(target=self.run, name=name, daemon=True).start()

    def run(self) -> None:
        """Serve the stream in this thread, to its end."""
        serve_here()
        with wake_period.waiting():
            self._run()

    def _run(self) -> None:
        try:
            while not self._is_drained():
                event = self._call.next_event()
                self._due.discard(event.tag)
                try:
                    event.tag(event)
                except Exception:  # noqa: BLE001  (a defect of its user must not leave the stream without a thread)
                    _log.exception("a stream ends because its user failed")
                    self.end()
                event = None  # an event keeps its call alive
        finally:
            self._channel.close(core.StatusCode.cancelled, "the stream is over")

    def end(self) -> None:
        """Hang up."""
        self._call.cancel(core.StatusCode.cancelled, "hung up")

    def _start(self, operations: tuple[Any, ...], then: Callable[[Any], None]) -> None:
        with self._lock:
            self._due.add(then)
            if not self._call.operate(operations, then):  # the call is over, which its user learns separately
                self._due.discard(then)

    def _is_drained(self) -> bool:
        if not self._over:
            return False
        with self._lock:
            return not self._due

    def _opened(self, event: Any) -> None:
        self.user.opened(dict(event.batch_operations[0].initial_metadata()))

    def _closed(self, event: Any) -> None:
        status = event.batch_operations[0]
        self._finish(Status(_CODES.get(status.code(), "UNKNOWN"), status.details() or ""))


class IncomingStream(GrpcStream):
    """The end at the process that was dialed.

    gRPC aborts the process if a message is sent after the status, or an operation begins once the completion queue of
    its listener is shut down. So code that begins an operation holds the lock of the stream, or runs on the listener's
    thread; this thread learns that a stream is closed, and only then may the listener end.

    Args:
        event: the event that has brought it.
        on_closed: called on the listener's thread when no more operations will begin.

    Attributes:
        metadata: what the other side said first.
        method: the requested method, as gRPC's path.
        deadline: when it stops waiting, as `time.time` counts.
        connection: the connection it came on: gRPC's name for the other end, such as ``ipv4:10.0.0.1:40000``.
    """

    def __init__(self, event: Any, on_closed: Callable[[IncomingStream], None]) -> None:
        super().__init__()
        self.method: str = event.call_details.method.decode(errors="replace")
        self.deadline: float = event.call_details.deadline
        self.connection: str = event.call.peer().decode(errors="replace")
        self.metadata: dict[str, Any] = dict(event.invocation_metadata)
        self._call = event.call
        self._on_closed = on_closed
        self._answered = False
        self._finished = False
        self._sending = False
        self._is_closed = False
        self._lock = threading.RLock()
        """Reentrant, since garbage collection may make a thread send while it sends: loans that are dropped unread are
        given back."""
        self._start((core.ReceiveCloseOnServerOperation(_NO_FLAGS),), self._closed)

    def shown(self) -> list[bytes] | None:
        """PEM: the certificates that the other end has shown to TLS, its own first; None without TLS."""
        context: dict[bytes, Sequence[bytes]] = core.auth_context(self._call)
        if list(context.get(b"transport_security_type", ())) == [b"insecure"]:
            return None
        return [*context.get(b"x509_pem_cert", ()), *context.get(b"x509_pem_cert_chain", ())]

    def send(self, message: bytes) -> bool:
        """Send a message, unless the stream has been ended."""
        with self._lock:
            if not self._finished:
                self._sending = True
                super().send(message)
        return False

    def _sent(self, event: Any) -> None:
        self._sending = False  # before its user knows, and so before the next message
        super()._sent(event)

    def answer(self, metadata: Metadata) -> None:
        """Send the metadata, and ask for the first message."""
        self._answered = True
        self._start((core.SendInitialMetadataOperation(metadata, _NO_FLAGS),), _ignore)
        self.receive()

    def turn_away(self, name: str, details: str) -> None:
        """End the stream with a gRPC status (its name in lower case) and a reason; from any thread."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
            if self._sending:  # that may take long: the other side may not be reading
                self._call.cancel()
                return
            first = () if self._answered else (core.SendInitialMetadataOperation((), _NO_FLAGS),)
            code = getattr(core.StatusCode, name)
            last = core.SendStatusFromServerOperation((), code, details.encode(), _NO_FLAGS)
            self._start((*first, last), _ignore)

    def conclude(self, message: bytes) -> None:
        """Answer with one message, and end the stream; from any thread, if nothing was sent yet."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
            operations = (
                core.SendInitialMetadataOperation((), _NO_FLAGS),
                core.SendMessageOperation(message, _NO_FLAGS),
                core.SendStatusFromServerOperation((), core.StatusCode.ok, b"", _NO_FLAGS),
            )
            self._start(operations, _ignore)

    def cancel(self) -> None:
        """End the stream without a status; from any thread."""
        with self._lock:
            self._finished = True
            self._call.cancel()

    def end(self) -> None:
        """End the stream with the status OK."""
        self.turn_away("ok", "")

    def _start(self, operations: tuple[Any, ...], then: Callable[[Any], None]) -> None:
        if not self._is_closed:  # the caller is the thread that changes it, or holds the lock for it
            self._call.start_server_batch(operations, then)

    def _dried_up(self) -> None:
        self._finish(CLOSED)

    def _closed(self, event: Any) -> None:
        with self._lock:
            self._is_closed = True
        try:
            self._finish(CLOSED)
        finally:
            self._on_closed(self)


def _ignore(event: Any) -> None:
    """Do nothing: another event shows how this operation ended."""
