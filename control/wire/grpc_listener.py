"""`StreamListener`: takes the incoming streams of other processes."""

from __future__ import annotations

import logging
import resource
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from skipper.control.model.errors import WireError
from skipper.control.wire._poller import serve_here
from skipper.control.wire.certificates import Certificates, Tls
from skipper.control.wire.grpc_core import core
from skipper.control.wire.grpc_streams import IncomingStream, to_listen

_log = logging.getLogger("skipper.control")

_MAX_PENDING = 16_384
"""Streams that have come and were not looked at. From this many on gRPC drops some at random; its own limit is a
thousand, which an unknown peer can open at once."""


class StreamListener:
    """Takes the streams of dialing processes; they run on its thread.

    gRPC aborts a process that begins an operation on a completion queue that is shut down. So the queue is shut down
    last: after the server is shut down, after no request for a stream is left with it, and after every incoming stream
    is closed, since `IncomingStream` then begins nothing more. Only the listener's thread knows all three.

    Args:
        addresses: where to listen, as gRPC's targets, each with the certificates for TLS or None.
        greeting_s: a connection is closed if its other end has not finished its greeting after this time.
        options: gRPC options for the server.
        on_stream: takes an incoming stream, and must set its user.
        patience: called after every event, and after the number of seconds that it returned the last time.
        on_closed: called when the listener has been closed and nothing of it is left.
        name: of its thread.

    Raises:
        WireError: it cannot listen on an address; then it listens on none.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, Certificates | Tls | None]],
        *,
        greeting_s: float,
        options: Sequence[tuple[str, int]],
        on_stream: Callable[[IncomingStream], None],
        patience: Callable[[], float | None],
        on_closed: Callable[[], None],
        name: str = "control-listener",
    ) -> None:
        self._on_stream = on_stream
        self._patience = patience
        self._on_closed = on_closed
        self._lock = threading.Lock()
        """Held during calls to the server, which must not be called once it is shut down or gone."""
        self._closing = False
        self._is_shut_down = False
        self._expects = False
        """Whether a stream was requested from the server, and has not come. On the listener's thread."""
        self._streams: set[IncomingStream] = set()
        """The streams that are not closed. On the listener's thread."""
        bound_ms = int(1000 * greeting_s)
        limits = (
            ("grpc.server_handshake_timeout_ms", bound_ms),
            ("grpc.http2.settings_timeout", bound_ms),
            ("grpc.server.max_pending_requests", _MAX_PENDING),
            ("grpc.server.max_pending_requests_hard_limit", 2 * _MAX_PENDING),
            ("grpc.max_allowed_incoming_connections", _most_connections()),
        )
        self._queue = core.CompletionQueue()
        self._server = core.Server((*options, *limits), False)
        self._server.register_completion_queue(self._queue)
        try:
            self.ports = tuple(self._listen(*address) for address in addresses)
            threading.Thread(target=self._run, name=name, daemon=True).start()
        except BaseException:
            self._abandon()
            raise
        with self._lock:
            self._server.start()
            self._expect()

    def close(self) -> None:
        """Take no more streams, and end once the present ones have ended; returns at once. Idempotent."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._server.shutdown(self._queue, self._shut_down)

    def cut(self) -> None:
        """End all streams, whatever they are doing. Does nothing before `close`, or if nothing is left."""
        with self._lock:
            if self._closing and not self._is_shut_down:
                self._server.cancel_all_calls()

    def _abandon(self) -> None:
        """Release the addresses on which it listens already; the listener is not in use yet."""
        self._server.start()  # a server that was never started cannot be shut down
        self.close()
        while (event := self._queue.poll()).completion_type != core.CompletionType.queue_shutdown:
            event.tag(event)

    def _listen(self, address: str, certificates: Certificates | Tls | None) -> int:
        try:
            port: int = self._server.add_http2_port(address.encode(), to_listen(certificates))
        except RuntimeError as error:
            raise WireError(f"cannot listen on {address}: {error}") from error
        if not port:
            raise WireError(f"cannot listen on {address}")
        return port

    def _expect(self) -> None:
        """Ask the server for the next stream; the caller holds the lock."""
        self._expects = True
        self._server.request_call(self._queue, self._queue, self._came)

    def _run(self) -> None:
        serve_here()
        wait_s: float | None = None
        while True:
            event = self._queue.poll(None if wait_s is None else time.time() + wait_s)
            if event.completion_type == core.CompletionType.queue_shutdown:
                self._on_closed()
                return
            try:
                if event.completion_type != core.CompletionType.queue_timeout:
                    event.tag(event)
                wait_s = self._patience()
            except Exception:  # noqa: BLE001  (a defect around one stream must not cost all others their thread)
                _log.exception("the listener goes on after a failure")
            event = None  # an event keeps its call alive

    def _came(self, event: Any) -> None:
        self._expects = False
        with self._lock:
            if not self._closing:
                self._expect()
        if not event.success:
            self._end_if_over()
            return
        stream = IncomingStream(event, self._stream_closed)
        self._streams.add(stream)
        try:
            self._on_stream(stream)
        except BaseException:
            stream.cancel()  # it has no owner
            raise

    def _stream_closed(self, stream: IncomingStream) -> None:
        self._streams.discard(stream)
        self._end_if_over()

    def _shut_down(self, event: Any) -> None:
        with self._lock:
            self._is_shut_down = True
            self._server.destroy()
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self._is_shut_down and not self._expects and not self._streams:
            self._queue.shutdown()


def _most_connections() -> int:
    """A limit that leaves a quarter of the descriptors to the rest of the process, however many peers connect."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (1 << 31) - 1 if soft == resource.RLIM_INFINITY else min(3 * soft // 4, (1 << 31) - 1)
