"""`ActorChannel`: a client's connection to one actor server. It translates gRPC's failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from skipper.control.model.errors import (
    AuthenticationError,
    BackpressureError,
    ConnectionLostError,
    ControlError,
    DeadlineError,
    MessageTooLargeError,
    ProtocolError,
    UnreachableError,
)
from skipper.control.model.exception_text import in_seconds
from skipper.control.rpc.wire import messages
from skipper.control.rpc.wire.session import VERSION, BadAnswerError, ClientSession
from skipper.control.support.daemon_threads import DaemonThreads
from skipper.control.wire import auth
from skipper.control.wire.certificates import Tls
from skipper.control.wire.grpc_core import NO_COMPRESSION
from skipper.control.wire.tcp_state import ConnectionWatch

T = TypeVar("T")

_MESSAGE_OVERHEAD_NBYTES = 64 << 10
"""The size of a message besides its payload, rounded up generously."""

SILENCE_MS = 10_000
"""If a call waits and the other side shows no sign of life for this long, the connection counts as lost."""

_CONNECT_S = 5.0

_UNDELIVERED = ("failed to connect to all addresses", "dns resolution failed", messages.STOPPING)
"""Prefixes of the details of UNAVAILABLE if no server has seen a request: no connection, or a server that ends.

The first two are from gRPC. With other details a request counts as perhaps delivered, to be safe."""

_MOST_BESIDE = 16
"""How many asynchronous calls at a time get a thread each, which waits for the answer.

For further calls gRPC has one thread that reads all answers; gRPC starts it again whenever no call was outstanding.
That is good for many calls, but a single call takes 1.5 times as long.
"""
_threads = DaemonThreads(_MOST_BESIDE, name="rpc-call")
_beside = threading.Semaphore(_MOST_BESIDE)

_TOO_LARGE = "message larger than max"


class SessionEndedError(UnreachableError):
    """The server no longer knows the session, and has seen nothing of the request: a new session may work."""


class ActorChannel:
    """A connection to an actor server, opened and closed as needed; for any number of threads.

    ``max_message_nbytes`` limits the payload of one message in each direction. Without ``tls`` nothing is encrypted.
    """

    def __init__(self, target: str, secret: bytes, *, tls: Tls | None = None, max_message_nbytes: int) -> None:
        self.target = target
        self._secret = secret
        self._max_nbytes = max_message_nbytes
        limit = max_message_nbytes + _MESSAGE_OVERHEAD_NBYTES
        self._tls = tls
        self._options: list[tuple[str, object]] = [
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_send_message_length", limit),
            ("grpc.keepalive_time_ms", SILENCE_MS // 2),
            ("grpc.keepalive_timeout_ms", SILENCE_MS),
            ("grpc.http2.ping_timeout_ms", SILENCE_MS),  # for all others; a minute by default
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 20),
            ("grpc.min_reconnect_backoff_ms", int(1000 * _CONNECT_S)),
            ("grpc.max_reconnect_backoff_ms", 250),
            *NO_COMPRESSION,
        ]
        if tls is not None and tls.server_name is not None:
            self._options.append(("grpc.ssl_target_name_override", tls.server_name))
        self._is_closed = False
        self._connection = self._connect()
        self._opening = threading.Lock()
        self._session: ClientSession | None = None
        self._watch: ConnectionWatch | None = None

    @property
    def is_open(self) -> bool:
        """Whether both sides have proven themselves; the connection may have been lost after that."""
        return self._session is not None

    def let_go_if_ended(self) -> bool:
        """Whether the server has closed the connection after it was opened; then the channel is not open any more.

        Data written to such a connection are lost, and gRPC does not check it before.
        """
        session, watch = self._session, self._watch
        if session is None or watch is None or not watch.has_hung_up():
            return False
        self._reconnect(session)
        return True

    def _connect(self) -> _Connection:
        if self._tls is None:
            return _Connection(grpc.insecure_channel(self.target, options=self._options))
        credentials = grpc.ssl_channel_credentials(self._tls.authority, self._tls.key, self._tls.certificate)
        return _Connection(grpc.secure_channel(self.target, credentials, options=self._options))

    def open(self, timeout: float) -> None:
        """Exchange proofs with the server, unless that has been done.

        Raises:
            UnreachableError: no server answers there, or none with this protocol.
            AuthenticationError: the server does not know the client's secret.
            DeadlineError: another thread is opening it, and was not done in time.
        """
        if not self._opening.acquire(timeout=max(timeout, 0)):
            raise DeadlineError(f"no connection to {self.target} within {in_seconds(timeout)}")
        try:
            if self._session is None:
                self._session = self._handshake(timeout)
        finally:
            self._opening.release()

    def _handshake(self, timeout: float) -> ClientSession:
        if self._is_closed:
            raise self._closed()
        nonce = auth.new_nonce()
        watch = ConnectionWatch(self.target)
        try:
            answer = self._connection.rpc("OpenSession")(messages.encode_nonce(nonce, VERSION), timeout=timeout)
            session = ClientSession(self._secret, nonce, *messages.decode_session(answer))
        except grpc.RpcError as error:
            self._connection = self._connect()
            status, details = error.code(), error.details() or ""
            if status is grpc.StatusCode.PERMISSION_DENIED:
                raise AuthenticationError(f"{self.target}: {details}") from error
            raise UnreachableError(f"no actor server answers at {self.target}: {status.name}: {details}") from error
        except ProtocolError as error:
            raise UnreachableError(f"no actor server answers at {self.target}: {error}") from error
        except ValueError as error:
            raise self._closed() from error
        except BadAnswerError as error:
            raise AuthenticationError(f"{self.target}: {error}") from error
        watch.begin()
        self._watch = watch
        return session

    def invoke(self, call: messages.MethodCall, timeout: float | None) -> messages.CallResult:
        """Call a method and wait in this thread, for at most ``timeout`` seconds.

        Raises:
            RpcError: there is no answer; the class says whether the call may have run.
            DeadlineError: there is none in time.
            BackpressureError: the server has too many calls at the moment; this one has not been delivered.
        """
        return self._ask("Invoke", messages.encode_call(call), messages.decode_answer, timeout)

    def begin(
        self,
        call: messages.MethodCall,
        timeout: float | None,
        done: Callable[[messages.CallResult | ControlError], None],
    ) -> None:
        """`invoke` without the wait: ``done`` gets the answer, or the error, on a thread that must not be blocked.

        Raises:
            SessionEndedError: the channel is not open.
            MessageTooLargeError: the arguments are too large.
        """
        session = self._session
        if session is None:
            raise SessionEndedError(f"there is no session with {self.target}")
        number, request = self._prove(session, b"Invoke", messages.encode_call(call))
        rpc = self._connection.rpc("Invoke")

        def conclude(result: Callable[[], bytes]) -> None:
            try:
                answer = messages.decode_answer(session.open(b"Invoke", number, result()))
            except (grpc.RpcError, grpc.FutureCancelledError) as error:
                done(self._translated(error, session, timeout))
            except (BadAnswerError, ProtocolError) as error:
                done(self._untrusted(session, error))
            except ValueError:
                done(self._closed())
            else:
                done(answer)

        def wait_here() -> None:
            try:
                conclude(lambda: rpc(request, timeout=timeout))
            finally:
                _beside.release()

        if _beside.acquire(blocking=False):
            _threads.submit(wait_here)
            return
        try:
            future = rpc.future(request, timeout=timeout)
        except ValueError as error:
            raise self._closed() from error
        future.add_done_callback(lambda ended: conclude(lambda: ended.result(0)))

    def list_actors(self, query: messages.Query, timeout: float | None) -> tuple[messages.ActorInfo, ...]:
        """The server's actors; raises as `invoke` does."""
        return self._ask("ListActors", messages.encode_actors_query(query), messages.decode_actors, timeout)

    def start(self, start: messages.Start, timeout: float | None) -> messages.OperationState:
        """Start an operation; raises as `invoke` does."""
        return self._ask("StartOperation", messages.encode_start(start), messages.decode_operation, timeout)

    def poll(self, query: messages.OperationQuery, timeout: float | None) -> messages.OperationState:
        """Query an operation; raises as `invoke` does."""
        return self._ask("PollOperation", messages.encode_poll(query), messages.decode_operation, timeout)

    def cancel(self, query: messages.OperationQuery, timeout: float | None) -> messages.OperationState:
        """Cancel an operation; raises as `invoke` does."""
        return self._ask("CancelOperation", messages.encode_cancel(query), messages.decode_operation, timeout)

    def close(self) -> None:
        """Close the connection: calls in flight end with `ConnectionLostError`."""
        self._is_closed = True
        self._session = None
        self._connection.channel.close()

    def _ask(self, name: str, body: bytes, decode: Callable[[bytes], T], timeout: float | None) -> T:
        end = None if timeout is None else time.monotonic() + timeout
        for is_last in (False, True):
            left = None if end is None else max(end - time.monotonic(), 0)
            self.open(_CONNECT_S if left is None else min(left, _CONNECT_S))
            session = self._session
            if session is None:  # closed, or another thread has found that it has ended
                continue
            number, request = self._prove(session, name.encode(), body)
            try:
                return decode(session.open(name.encode(), number, self._connection.rpc(name)(request, timeout=left)))
            except grpc.RpcError as error:
                translated = self._translated(error, session, timeout)
                if is_last or not isinstance(translated, SessionEndedError):
                    raise translated from error
            except (BadAnswerError, ProtocolError) as error:
                raise self._untrusted(session, error) from error
            except ValueError as error:
                raise self._closed() from error
        raise SessionEndedError(f"{self.target} rejected the session of this client")

    def _prove(self, session: ClientSession, name: bytes, body: bytes) -> tuple[int, bytes]:
        if len(body) > self._max_nbytes:
            raise MessageTooLargeError(
                f"a request of {len(body)} bytes is larger than the {self._max_nbytes} that max_message_nbytes allows"
            )
        return session.prove(name, body)

    def _translated(self, error: Any, session: ClientSession, timeout: float | None) -> ControlError:
        """Translate gRPC's failure of a request: the only place that knows its statuses."""
        if isinstance(error, grpc.FutureCancelledError):
            return ConnectionLostError(f"the connection to {self.target} was closed while a call was on its way")
        code, details = error.code(), error.details() or ""
        words = f"{self.target}: {code.name}: {details}"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            bound = "the deadline" if timeout is None else in_seconds(timeout)
            return DeadlineError(f"no answer from {self.target} within {bound}; the call may have run")
        if code is grpc.StatusCode.UNAUTHENTICATED:
            self._forget(session)
            return SessionEndedError(words)
        if code is grpc.StatusCode.PERMISSION_DENIED:
            self._forget(session)
            return AuthenticationError(f"{self.target}: {details}")
        if code is grpc.StatusCode.UNAVAILABLE:
            self._reconnect(session)
        if code is grpc.StatusCode.UNAVAILABLE and details.lower().startswith(_UNDELIVERED):
            return UnreachableError(words)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in details:
            return MessageTooLargeError(words)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return BackpressureError(words)
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return UnreachableError(f"no actor server answers at {words}")
        return ConnectionLostError(words)

    def _closed(self) -> ControlError:
        """The error for gRPC's `ValueError`: the channel has been closed."""
        return UnreachableError(f"the connection to {self.target} has been closed")

    def _untrusted(self, session: ClientSession, error: Exception) -> ControlError:
        self._forget(session)
        return ConnectionLostError(f"{self.target}: {error}")

    def _forget(self, session: ClientSession) -> None:
        if self._session is session:
            self._session = None

    def _reconnect(self, session: ClientSession) -> None:
        """Use a new connection for the next request.

        A failed connection reconnects only while a call waits for it, but these calls fail at once. The old one is not
        closed, since there may be calls on it; it ends with the last of them.
        """
        if self._session is not session:  # another thread reconnects, or has done so
            return
        with self._opening:
            if self._session is session and not self._is_closed:
                self._session = None
                self._connection = self._connect()


class _Connection:
    """A gRPC channel, and its RPCs."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self._rpcs: dict[str, Any] = {}

    def rpc(self, name: str) -> Any:
        """The RPC with a name, on bytes."""
        rpc = self._rpcs.get(name)
        if rpc is None:
            rpc = self._rpcs[name] = self.channel.unary_unary(f"/{messages.SERVICE}/{name}")
        return rpc
