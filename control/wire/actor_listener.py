"""`ActorListener`: where an actor server's requests come in, with gRPC's health and reflection services beside."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from control.errors import ControlError, ProtocolError, WireError
from control.wire import actor_service as messages
from control.wire.actor_calls import (
    ActorInfo,
    Answer,
    Call,
    Failure,
    MethodInfo,
    OperationQuery,
    OperationState,
    Query,
    Start,
)
from control.wire.actor_session import VERSION, Refused, Seal, ServerSessions
from control.wire.tls import Tls

_log = logging.getLogger("control")

_MESSAGE_OVERHEAD_NBYTES = 64 << 10
_SILENCE_MS = 10_000
_STOP_S = 5.0
_FOREVER_S = 1e8
"""gRPC has no deadline for None, only one far away."""


class Service(Protocol):
    """What answers the requests; on threads of the listener's executor."""

    def invoke(self, call: Call, remaining_s: float | None) -> Answer:
        """Call a method."""

    def list_methods(self, query: Query) -> tuple[MethodInfo, ...] | Failure:
        """The methods of an actor."""

    def list_actors(self, query: Query) -> tuple[ActorInfo, ...]:
        """The actors."""

    def start_operation(self, start: Start) -> OperationState:
        """Start an operation."""

    def poll_operation(self, query: OperationQuery, remaining_s: float | None) -> OperationState:
        """Where an operation is."""

    def cancel_operation(self, query: OperationQuery) -> OperationState:
        """Cancel an operation."""


class ActorListener:
    """Listens, lets in who has proven to know the secret, and hands on what they ask.

    Args:
        service: what answers.
        address: host and port; port 0 takes a free one.
        secret: what both sides know.
        executor: where requests are served.
        tls: to encrypt; None speaks in the clear.
        takes_open_json: whether requests without a proof are served, where they have nothing to do with pickles.
        max_message_nbytes: of a request or an answer.
        max_calls: requests at the same time; those beyond are turned away.

    Raises:
        WireError: the address cannot be listened on.
    """

    def __init__(
        self,
        service: Service,
        address: str,
        secret: bytes,
        *,
        executor: Executor,
        tls: Tls | None,
        takes_open_json: bool,
        max_message_nbytes: int,
        max_calls: int,
    ) -> None:
        self._service = service
        self._sessions = ServerSessions(secret)
        self._takes_open_json = takes_open_json
        self._quiet = threading.Condition()
        self._active = 0
        self._is_stopping = False
        self._health = health.HealthServicer()
        limit = max_message_nbytes + _MESSAGE_OVERHEAD_NBYTES
        options = (
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_send_message_length", limit),
            ("grpc.so_reuseport", 0),
            ("grpc.max_metadata_size", 8 << 10),
            ("grpc.keepalive_time_ms", _SILENCE_MS // 2),
            ("grpc.keepalive_timeout_ms", _SILENCE_MS),
            ("grpc.http2.ping_timeout_ms", _SILENCE_MS),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", _SILENCE_MS // 10),
            ("grpc.http2.max_ping_strikes", 0),
        )
        self._server: Any = grpc.server(
            executor, handlers=(self._handlers(),), options=options, maximum_concurrent_rpcs=max_calls
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (messages.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        try:
            if tls is None:
                self.port: int = self._server.add_insecure_port(address)
            else:
                pair = ((tls.key, tls.certificate),)
                credentials = grpc.ssl_server_credentials(pair, tls.authority, tls.authority is not None)
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise WireError(f"cannot listen on {address}: {error}") from error
        if self.port == 0:
            raise WireError(f"cannot listen on {address}")

    def start(self) -> None:
        """Begin to serve."""
        self._server.start()
        for name in ("", messages.SERVICE):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def stop(self, grace_s: float) -> None:
        """Take no more requests, and wait for those that are being served, for ``grace_s`` at the longest."""
        # Not by gRPC's own grace, which waits for clients to hang up: idle ones are asleep and do not.
        self._health.enter_graceful_shutdown()
        with self._quiet:
            self._is_stopping = True
            self._quiet.wait_for(lambda: self._active == 0, grace_s)
        self._server.stop(None).wait(_STOP_S)

    def _handlers(self) -> Any:
        service = self._service
        rpcs: dict[str, Callable[[bytes, bool, float | None], bytes]] = {
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
        handlers = {name: grpc.unary_unary_rpc_method_handler(self._proven(name, rpc)) for name, rpc in rpcs.items()}
        handlers["OpenSession"] = grpc.unary_unary_rpc_method_handler(self._open_session)
        return grpc.method_handlers_generic_handler(messages.SERVICE, handlers)

    def _proven(self, name: str, rpc: Callable[[bytes, bool, float | None], bytes]) -> Callable[[bytes, Any], bytes]:
        """A handler of raw requests, of which nothing is parsed before it is known whom they are from."""
        encoded_name = name.encode()

        def handle(request: bytes, context: Any) -> bytes:
            with self._quiet:
                if self._is_stopping:
                    return _turn_away(context, grpc.StatusCode.UNAVAILABLE, messages.STOPPING)
                if context.add_callback(self._one_less):  # once the answer is out, or nobody wants it any more
                    self._active += 1
            return answered(request, context)

        def answered(request: bytes, context: Any) -> bytes:
            seal: Seal | None = None
            try:
                body, seal = self._sessions.accept(encoded_name, request)
                if seal is None and not self._takes_open_json:
                    raise Refused("this server wants a proof: see actor_service.proto")
                left = context.time_remaining()
                answer = rpc(body, seal is not None, None if left is None or left > _FOREVER_S else left)
            except Refused as error:
                return _turn_away(context, grpc.StatusCode.UNAUTHENTICATED, str(error))
            except ProtocolError as error:
                return _turn_away(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
            except ControlError:
                _log.exception("an actor server cannot answer %s", name)
                return _turn_away(context, grpc.StatusCode.INTERNAL, "the server failed")
            return answer if seal is None else seal.close(answer)

        return handle

    def _one_less(self) -> None:
        with self._quiet:
            self._active -= 1
            if self._is_stopping:
                self._quiet.notify()

    def _open_session(self, request: bytes, context: Any) -> bytes:
        try:
            version, nonce = messages.decode_nonce(request)
            if version != VERSION:
                words = f"this server speaks version {VERSION}"
                return _turn_away(context, grpc.StatusCode.FAILED_PRECONDITION, words)
            return messages.encode_session(*self._sessions.offer(nonce))
        except (Refused, ProtocolError) as error:
            return _turn_away(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def _invoke(self, body: bytes, is_proven: bool, remaining_s: float | None) -> bytes:
        return messages.encode_answer(
            self._service.invoke(_checked(messages.decode_call(body), is_proven), remaining_s)
        )

    def _start(self, body: bytes, is_proven: bool, remaining_s: float | None) -> bytes:
        start = messages.decode_start(body)
        _checked(start.call, is_proven)
        return messages.encode_operation(self._service.start_operation(start))


def _checked(call: Call, is_proven: bool) -> Call:
    """A call that may be looked at: nobody's pickle is opened without a proof."""
    if not call.is_json and not is_proven:
        raise Refused("a pickle is taken with a proof only")
    return call


def _turn_away(context: Any, code: Any, details: str) -> bytes:
    context.set_code(code)
    context.set_details(details)
    return b""
