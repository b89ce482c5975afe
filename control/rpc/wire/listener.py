"""`ActorListener`: takes the requests of an actor server, and serves gRPC's health and reflection services.

It uses the streams of `control.wire` and not gRPC's own server: there a thread waits for the body of every request, as
long as the client likes, and every request counts the same.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from functools import cache
from typing import Any, Protocol

from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from skipper.control.model.errors import CertificateError, ProtocolError
from skipper.control.rpc.wire import messages
from skipper.control.rpc.wire.session import VERSION, Refused, ServerSessions
from skipper.control.rpc.wire.unproven import PATIENCE_S, Unproven
from skipper.control.wire.auth import NOT_ADMITTED
from skipper.control.wire.certificates import REVIEW_S, Certificates, Tls
from skipper.control.wire.grpc_core import NO_COMPRESSION
from skipper.control.wire.grpc_listener import StreamListener
from skipper.control.wire.grpc_streams import IncomingStream
from skipper.control.wire.identity import Identity, Role
from skipper.control.wire.message_stream import Status

_log = logging.getLogger("skipper.control")

_MESSAGE_OVERHEAD_NBYTES = 64 << 10
_SILENCE_MS = 10_000
_IDLE_MS = 60_000
"""A connection without a request is closed after this long; clients open another when they need it."""

_STOP_S = 5.0
_FOREVER_S = 1e8
"""gRPC has a far deadline in place of None."""

_MAX_METADATA_NBYTES = 8 << 10

_MAX_WATCHERS = 64
"""How many streams may wait for the news that the server stops; one more displaces the oldest."""

_MOST_KNOWN_CERTIFICATES = 1024
"""How many parsed certificates are kept: parsing one takes longer than a call."""

_HEALTH: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class RequestHandler(Protocol):
    """Answers the requests; on threads of the listener's executor."""

    def invoke(self, call: messages.MethodCall, remaining_s: float | None) -> messages.CallResult:
        """Call a method."""

    def list_methods(self, query: messages.Query) -> tuple[messages.MethodInfo, ...] | messages.CallFailure:
        """The methods of an actor."""

    def list_actors(self, query: messages.Query) -> tuple[messages.ActorInfo, ...]:
        """The actors."""

    def start_operation(self, start: messages.Start) -> messages.OperationState:
        """Start an operation."""

    def poll_operation(self, query: messages.OperationQuery, remaining_s: float | None) -> messages.OperationState:
        """The state of an operation."""

    def cancel_operation(self, query: messages.OperationQuery) -> messages.OperationState:
        """Cancel an operation."""


class ActorListener:
    """Listens at once, admits clients that have proven that they know the secret, and passes their requests on.

    Before a proof has come on a connection, the cost of its requests is limited: see `unproven`.

    Args:
        service: answers the requests.
        address: host and port; port 0 takes a free one.
        secret: the secret that both sides know.
        executor: where requests are served.
        tls: for encryption; None: no encryption.
        roles: with `Certificates`: the roles whose holders may send requests.
        takes_open_json: whether requests without a proof are served if they involve no pickles. Such a server also
            tells every client by reflection how to call it.
        max_message_nbytes: of a request or an answer.
        max_calls: how many requests are served at the same time; more are turned away.

    Raises:
        WireError: it cannot listen on the address.
    """

    def __init__(
        self,
        service: RequestHandler,
        address: str,
        secret: bytes,
        *,
        executor: Executor,
        tls: Certificates | Tls | None,
        roles: Collection[Role] = (),
        takes_open_json: bool,
        max_message_nbytes: int,
        max_calls: int,
    ) -> None:
        self._service = service
        self._sessions = ServerSessions(secret)
        self._clients = ClientCertificates(tls, roles) if isinstance(tls, Certificates) else None
        self._executor = executor
        self._takes_open_json = takes_open_json
        self._max_calls = max_calls
        self._quiet = threading.Condition()
        self._active = 0
        self._is_stopping = False
        self._closed = threading.Event()
        self._watchers: dict[_Watcher, None] = {}
        self._review_at_s = 0.0
        self._unproven: Unproven[_IncomingRequest | _Questions | _Watcher] = Unproven(
            begin=lambda request: request.begin(), refuse=lambda request: request.refuse(), group=_peer_of
        )
        self._proofs: deque[str] = deque()
        """Connections with a new proof; the listener's thread notes them."""
        self._rpcs = self._handlers()
        limit = max_message_nbytes + _MESSAGE_OVERHEAD_NBYTES
        options = (
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_send_message_length", limit),
            ("grpc.max_concurrent_streams", max_calls),
            ("grpc.max_connection_idle_ms", _IDLE_MS),
            ("grpc.so_reuseport", 0),
            ("grpc.max_metadata_size", _MAX_METADATA_NBYTES),
            ("grpc.keepalive_time_ms", _SILENCE_MS // 2),
            ("grpc.keepalive_timeout_ms", _SILENCE_MS),
            ("grpc.http2.ping_timeout_ms", _SILENCE_MS),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", _SILENCE_MS // 10),
            ("grpc.http2.max_ping_strikes", 0),
            *NO_COMPRESSION,
        )
        self._listener = StreamListener(
            ((address, tls),),
            greeting_s=PATIENCE_S,
            options=options,
            on_stream=self._came,
            patience=self._patience,
            on_closed=self._closed.set,
            name="actor-listener",
        )
        (self.port,) = self._listener.ports

    def stop(self, grace_s: float) -> None:
        """Take no more requests, and wait for those that are being served, for at most ``grace_s``."""
        with self._quiet:
            self._is_stopping = True
            for watcher in tuple(self._watchers):
                watcher.tell(health_pb2.HealthCheckResponse.NOT_SERVING)
            self._quiet.wait_for(lambda: self._active == 0, grace_s)
        self._listener.close()
        self._listener.cut()
        self._closed.wait(_STOP_S)

    def _handlers(self) -> dict[str, Callable[[bytes, bool, float | None], bytes]]:
        service = self._service
        return {
            "Invoke": self._invoke,
            "ListMethods": lambda body, _, __: messages.encode_methods(
                service.list_methods(messages.decode_methods_query(body))
            ),
            "ListActors": lambda body, _, __: messages.encode_actors(
                service.list_actors(messages.decode_actors_query(body))
            ),
            "StartOperation": self._start,
            "PollOperation": lambda body, _, remaining_s: messages.encode_operation(
                service.poll_operation(messages.decode_poll(body), remaining_s)
            ),
            "CancelOperation": lambda body, _, __: messages.encode_operation(
                service.cancel_operation(messages.decode_cancel(body))
            ),
        }

    # On the listener's thread

    def _came(self, stream: IncomingStream) -> None:
        if (refusal := self._refusal(stream)) is not None:
            _IncomingRequest(stream, self._gone, lambda _: None)
            stream.turn_away("permission_denied", refusal)
            return
        answer = self._answer_to(stream.method)
        if answer is not None:
            self._take(
                _IncomingRequest(stream, self._gone, lambda request: self._have_answered(answer, request, stream))
            )
        elif stream.method == f"/{_HEALTH}/Watch":
            self._take(_Watcher(stream, self._gone, self._watch))
        elif self._takes_open_json and stream.method == f"/{reflection.SERVICE_NAME}/ServerReflectionInfo":
            self._take(_Questions(stream, self._gone))
        else:
            _IncomingRequest(stream, self._gone, lambda _: None)
            stream.turn_away("unimplemented", "there is no such method")

    def _refusal(self, stream: IncomingStream) -> str | None:
        """Why the client of a stream may not send requests; None if it may."""
        if self._clients is None:
            return None
        try:
            self._clients.admit(stream.shown() or ())
        except CertificateError as error:
            return f"{NOT_ADMITTED}: {error}"
        return None

    def _take(self, request: _IncomingRequest | _Questions | _Watcher) -> None:
        self._unproven.came(request, request.stream.connection, time.monotonic())

    def _gone(self, request: _IncomingRequest | _Questions | _Watcher) -> None:
        if isinstance(request, _Watcher):
            self._watchers.pop(request, None)
        self._unproven.gone(request, time.monotonic())

    def _watch(self, watcher: _Watcher) -> None:
        if len(self._watchers) >= _MAX_WATCHERS:
            oldest = next(iter(self._watchers))
            del self._watchers[oldest]
            oldest.stream.turn_away("resource_exhausted", "too many clients watch already")
        with self._quiet:
            self._watchers[watcher] = None
            status = health_pb2.HealthCheckResponse
            watcher.tell(status.NOT_SERVING if self._is_stopping else status.SERVING)

    def _patience(self) -> float | None:
        while self._proofs:
            self._unproven.proved(self._proofs.popleft())
        now = time.monotonic()
        waits_s = (self._unproven.sweep(now), self._review(now))
        return min((wait_s for wait_s in waits_s if wait_s is not None), default=None)

    def _review(self, now: float) -> float | None:
        """Turn away watchers that are no longer allowed; returns the seconds until the next look.

        All other streams end with the answer to their request, which was checked when it came.
        """
        if self._clients is None or not self._watchers:
            return None
        if now >= self._review_at_s:
            self._review_at_s = now + REVIEW_S
            for watcher in tuple(self._watchers):
                refusal = self._refusal(watcher.stream)
                if refusal is not None:
                    del self._watchers[watcher]
                    watcher.stream.turn_away("permission_denied", refusal)
        return self._review_at_s - now

    def _answer_to(self, method: str) -> Callable[[bytes, IncomingStream], bytes] | None:
        service, _, name = method.removeprefix("/").partition("/")
        if service == messages.SERVICE and name == "OpenSession":
            return self._open_session
        if service == messages.SERVICE and name in self._rpcs:
            return self._proven(name, self._rpcs[name])
        return self._check_health if (service, name) == (_HEALTH, "Check") else None

    def _have_answered(
        self, answer: Callable[[bytes, IncomingStream], bytes], request: bytes, stream: IncomingStream
    ) -> None:
        """Have a request answered on a thread of the executor."""
        with self._quiet:
            if self._is_stopping:
                stream.turn_away("unavailable", messages.STOPPING)
                return
            if self._active >= self._max_calls:
                stream.turn_away("resource_exhausted", "this server has too many calls at the moment")
                return
            self._active += 1
        self._executor.submit(self._answer, answer, request, stream)

    # On a thread of the executor

    def _answer(self, answer: Callable[[bytes, IncomingStream], bytes], request: bytes, stream: IncomingStream) -> None:
        try:
            stream.conclude(answer(request, stream))
        except Refused as error:
            stream.turn_away("unauthenticated", str(error))
        except ProtocolError as error:
            stream.turn_away("invalid_argument", str(error))
        except Exception:  # noqa: BLE001  (whoever asked has to be told, and the next one served)
            _log.exception("an actor server could not answer %s", stream.method)
            stream.turn_away("internal", "the server failed")
        finally:
            with self._quiet:
                self._active -= 1
                if self._is_stopping:
                    self._quiet.notify()

    def _proven(
        self, name: str, rpc: Callable[[bytes, bool, float | None], bytes]
    ) -> Callable[[bytes, IncomingStream], bytes]:
        """A function that answers raw requests; nothing of them is parsed before the sender is known."""
        encoded_name = name.encode()

        def answered(request: bytes, stream: IncomingStream) -> bytes:
            body, seal = self._sessions.accept(encoded_name, request)
            if seal is not None:
                self._proofs.append(stream.connection)
            elif not self._takes_open_json:
                raise Refused("this server needs a proof of the secret: see actor_service.proto")
            left = stream.deadline - time.time()
            answer = rpc(body, seal is not None, None if left > _FOREVER_S else max(left, 0))
            return answer if seal is None else seal.close(answer)

        return answered

    def _open_session(self, request: bytes, stream: IncomingStream) -> bytes:
        version, nonce = messages.decode_nonce(request)
        if version != VERSION:
            stream.turn_away("failed_precondition", f"this server speaks version {VERSION}")
            return b""  # the client does not take it any more
        try:
            return messages.encode_session(*self._sessions.offer(nonce))
        except Refused as error:
            raise ProtocolError(str(error)) from error

    def _check_health(self, request: bytes, stream: IncomingStream) -> bytes:
        """Whether it serves, which every client may know; no name here reveals anything about a job."""
        try:
            asked = health_pb2.HealthCheckRequest.FromString(request).service
        except DecodeError as error:
            raise ProtocolError(f"HealthCheckRequest cannot be parsed: {error}") from error
        if asked not in ("", messages.SERVICE):
            stream.turn_away("not_found", "")
            return b""
        status = health_pb2.HealthCheckResponse.SERVING
        answer: bytes = health_pb2.HealthCheckResponse(status=status).SerializeToString()
        return answer

    def _invoke(self, body: bytes, is_proven: bool, remaining_s: float | None) -> bytes:
        return messages.encode_answer(
            self._service.invoke(_checked(messages.decode_call(body), is_proven), remaining_s)
        )

    def _start(self, body: bytes, is_proven: bool, remaining_s: float | None) -> bytes:
        start = messages.decode_start(body)
        _checked(start.call, is_proven)
        return messages.encode_operation(self._service.start_operation(start))


class _IncomingRequest:
    """A request of one message, until the message has come: the user of its stream.

    ``on_gone`` is called once the message has come, or the stream has ended without one.
    """

    def __init__(
        self, stream: IncomingStream, on_gone: Callable[[_IncomingRequest], None], on_message: Callable[[bytes], None]
    ) -> None:
        self.stream = stream
        self._on_gone = on_gone
        self._on_message = on_message
        stream.user = self

    def begin(self) -> None:
        """Ask for the message."""
        self.stream.receive()

    def refuse(self) -> None:
        """Turn it away."""
        self.stream.turn_away("deadline_exceeded", "its message has not come in time")

    def opened(self, metadata: dict[str, Any]) -> None:
        """Do nothing: the other side dials."""

    def received(self, message: bytes) -> bool:
        """Take the request."""
        self._on_gone(self)
        self._on_message(message)
        return False

    def sent(self) -> None:
        """Do nothing: the stream ends with the answer."""

    def ended(self, status: Status) -> None:
        """Note that it was answered, or has left, or has no message."""
        self._on_gone(self)
        self.stream.turn_away("invalid_argument", "a request is one message")


class _Watcher(_IncomingRequest):
    """A stream of the health service: whether the server serves, and a message when it no longer does."""

    def __init__(
        self, stream: IncomingStream, on_gone: Callable[[_IncomingRequest], None], on_asked: Callable[[_Watcher], None]
    ) -> None:
        super().__init__(stream, on_gone, lambda _: on_asked(self))
        self._lock = threading.Lock()
        self._is_sending = False
        self._news: int | None = None

    def begin(self) -> None:
        """Ask for the message."""
        self.stream.answer(())

    def tell(self, status: int) -> None:
        """Send a status, once the previous one is sent; from any thread."""
        with self._lock:
            if self._is_sending:
                self._news = status
            else:
                self._send(status)

    def sent(self) -> None:
        """Send a newer status, if there is one."""
        with self._lock:
            self._is_sending = False
            if self._news is not None:
                self._send(self._news)
                self._news = None

    def _send(self, status: int) -> None:
        self._is_sending = True
        self.stream.send(health_pb2.HealthCheckResponse(status=status).SerializeToString())


class _Questions:
    """A stream of reflection queries, for `PATIENCE_S` in all: the user of that stream."""

    def __init__(self, stream: IncomingStream, on_gone: Callable[[_Questions], None]) -> None:
        self.stream = stream
        self._on_gone = on_gone
        stream.user = self

    def begin(self) -> None:
        """Ask for the first query."""
        self.stream.answer(())

    def refuse(self) -> None:
        """Turn it away."""
        self.stream.turn_away("deadline_exceeded", "that is enough")

    def opened(self, metadata: dict[str, Any]) -> None:
        """Do nothing: the other side dials."""

    def received(self, message: bytes) -> bool:
        """Answer a query; the next one is taken when the answer is sent."""
        try:
            question = reflection_pb2.ServerReflectionRequest.FromString(message)
        except DecodeError:
            self.stream.turn_away("invalid_argument", "the request names no method")
            return False
        (answer,) = _servicer().ServerReflectionInfo(iter((question,)), None)
        self.stream.send(answer.SerializeToString())
        return False

    def sent(self) -> None:
        """Take the next query."""
        self.stream.receive()

    def ended(self, status: Status) -> None:
        """Note that there are no more queries."""
        self._on_gone(self)
        self.stream.end()


@cache
def _servicer() -> Any:
    """Knows only the services of an actor server, and no other message that this process may have imported."""
    pool = DescriptorPool()
    for file in (messages.FILE, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        pool.AddSerializedFile(file.serialized_pb)
    return reflection.ReflectionServicer((messages.SERVICE, _HEALTH, reflection.SERVICE_NAME), pool)


def _peer_of(connection: str) -> str:
    """The address of a connection's other end."""
    return connection.rpartition(":")[0]


def _checked(call: messages.MethodCall, is_proven: bool) -> messages.MethodCall:
    """Check that a call may be served: no pickle is opened without a proof."""
    if not call.is_json and not is_proven:
        raise Refused("a pickle is accepted only with a proof of the secret")
    return call


class ClientCertificates:
    """Checks role, cluster and validity of certificates, and whether they were revoked; for one thread.

    A parsed certificate is kept for `REVIEW_S`; the lists of revoked ones are checked for each request.

    Args:
        certificates: of the server, with its trusted authorities and the lists of revoked certificates.
        roles: the roles whose holders may send requests.
    """

    def __init__(self, certificates: Certificates, roles: Collection[Role]) -> None:
        self._certificates = certificates
        self._roles = frozenset(roles)
        self._known: OrderedDict[tuple[bytes, ...], tuple[float, Identity]] = OrderedDict()

    def admit(self, shown: Sequence[bytes]) -> Identity:
        """The holder of these certificates.

        Raises:
            CertificateError: it may not send requests.
        """
        key, now = tuple(shown), time.monotonic()
        until, identity = self._known.get(key, (0.0, None))
        if identity is None or now >= until:
            self._known.pop(key, None)
            identity = self._certificates.admit(shown, self._roles)
            self._known[key] = now + REVIEW_S, identity
            while len(self._known) > _MOST_KNOWN_CERTIFICATES:
                self._known.popitem(last=False)
        if self._certificates.is_revoked(identity):
            raise CertificateError(f"the certificate of {identity} was revoked")
        return identity
