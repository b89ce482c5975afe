"""The messages between clients and an actor server: as dataclasses, and as the messages of `actor_service.proto`."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from skipper.control.model.errors import ProtocolError
from skipper.control.wire._generated import actor_service_pb2 as pb

FILE = pb.DESCRIPTOR
"""The proto file."""

SERVICE: str = pb.DESCRIPTOR.services_by_name["ActorService"].full_name

STOPPING = "this actor server is stopping"
"""The details of UNAVAILABLE for a request that a server has not looked at."""

MAX_MESSAGE_NBYTES = 64 << 20
"""Default limit for the bytes of arguments, or of a result. They are in memory several times."""

LARGEST_MESSAGE_NBYTES = (1 << 31) - (1 << 20)
"""The largest possible limit: gRPC counts the bytes of a message in 32 bits, and a message has more in it."""

Segments = tuple[bytes, ...]
"""The encoded value, and its out-of-band buffers."""

M = TypeVar("M", bound=Message)


class Code(enum.IntEnum):
    """Why a call has no result; `proto/actor_service.proto` says what each means."""

    UNSPECIFIED = pb.ERROR_CODE_UNSPECIFIED
    RAISED = pb.RAISED
    HANDLE_EXPIRED = pb.HANDLE_EXPIRED
    NO_SUCH_ACTOR = pb.NO_SUCH_ACTOR
    NO_SUCH_METHOD = pb.NO_SUCH_METHOD
    BUSY = pb.BUSY
    LATE = pb.LATE
    ACTOR_DEAD = pb.ACTOR_DEAD
    NO_SUCH_OPERATION = pb.NO_SUCH_OPERATION
    CANCELLED = pb.CANCELLED
    BAD_ARGUMENTS = pb.BAD_ARGUMENTS
    BAD_RESULT = pb.BAD_RESULT


@dataclass(frozen=True, slots=True)
class CallFailure:
    """Why a call has no result.

    Attributes:
        code: the kind of reason.
        message: for people; of an exception its type and message.
        traceback: where the method raised.
        cause: the exception itself, pickled, or empty.
    """

    code: Code
    message: str
    traceback: str = ""
    cause: Segments = ()


@dataclass(frozen=True, slots=True)
class MethodCall:
    """A call of a method.

    Attributes:
        method: its name.
        segments: the arguments.
        handle: identifies the actor, or empty.
        actor: without a handle, the name of the actor.
        is_json: whether the arguments, and the result, are JSON and not pickles.
    """

    method: str
    segments: Segments
    handle: str = ""
    actor: str = ""
    is_json: bool = False


@dataclass(frozen=True, slots=True)
class CallResult:
    """How a call ended.

    Attributes:
        segments: the result, if there is one.
        failure: why there is none.
    """

    segments: Segments = ()
    failure: CallFailure | None = None


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """A method that can be called: its name, signature and documentation, and whether it is idempotent."""

    name: str
    signature: str
    doc: str
    is_idempotent: bool


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """An actor of a server: its name, its handle and the name of its class."""

    name: str
    handle: str
    class_name: str


@dataclass(frozen=True, slots=True)
class OperationState:
    """The state of a long call.

    Attributes:
        id: of the operation.
        answer: how it ended, or None while it runs.
        failure: why there is no such operation, or why it was not started.
    """

    id: str
    answer: CallResult | None = None
    failure: CallFailure | None = None


@dataclass(frozen=True, slots=True)
class Query:
    """A query for a list of an actor's methods, or of actors.

    Attributes:
        handle: of an actor, or empty.
        actor: its name, or empty.
        namespace: the namespace to look in, or empty.
    """

    handle: str = ""
    actor: str = ""
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class OperationQuery:
    """An operation, and how long to wait for its end, in seconds."""

    id: str
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Start:
    """A request to start an operation, with an id that the caller chooses."""

    id: str
    call: MethodCall


def encode_nonce(nonce: bytes, version: int) -> bytes:
    """An OpenSessionRequest."""
    return pb.OpenSessionRequest(version=version, nonce=nonce).SerializeToString()


def decode_nonce(data: bytes) -> tuple[int, bytes]:
    """Version and nonce of an OpenSessionRequest."""
    message = _parse(pb.OpenSessionRequest(), data)
    return message.version, message.nonce


def encode_session(session: bytes, proof: bytes) -> bytes:
    """An OpenSessionResponse."""
    return pb.OpenSessionResponse(session=session, proof=proof).SerializeToString()


def decode_session(data: bytes) -> tuple[bytes, bytes]:
    """Session and proof of an OpenSessionResponse."""
    message = _parse(pb.OpenSessionResponse(), data)
    return message.session, message.proof


def encode_call(call: MethodCall) -> bytes:
    """An ActorRequest."""
    return _call(call).SerializeToString()


def decode_call(data: bytes) -> MethodCall:
    """An ActorRequest."""
    return _read_call(_parse(pb.ActorRequest(), data))


def encode_answer(answer: CallResult) -> bytes:
    """An ActorResponse."""
    return _answer(answer).SerializeToString()


def decode_answer(data: bytes) -> CallResult:
    """An ActorResponse."""
    return _read_answer(_parse(pb.ActorResponse(), data))


def decode_methods_query(data: bytes) -> Query:
    """A ListMethodsRequest."""
    message = _parse(pb.ListMethodsRequest(), data)
    return Query(handle=message.actor_handle, actor=message.actor)


def encode_methods(methods: Iterable[MethodInfo] | CallFailure) -> bytes:
    """A ListMethodsResponse."""
    if isinstance(methods, CallFailure):
        return pb.ListMethodsResponse(error=_failure(methods)).SerializeToString()
    listed = [
        pb.Method(name=method.name, signature=method.signature, doc=method.doc, idempotent=method.is_idempotent)
        for method in methods
    ]
    return pb.ListMethodsResponse(methods=listed).SerializeToString()


def encode_actors_query(query: Query) -> bytes:
    """A ListActorsRequest."""
    return pb.ListActorsRequest(actor=query.actor, namespace=query.namespace).SerializeToString()


def decode_actors_query(data: bytes) -> Query:
    """A ListActorsRequest."""
    message = _parse(pb.ListActorsRequest(), data)
    return Query(actor=message.actor, namespace=message.namespace)


def encode_actors(actors: Iterable[ActorInfo]) -> bytes:
    """A ListActorsResponse."""
    listed = [pb.ActorInfo(name=each.name, actor_handle=each.handle, class_name=each.class_name) for each in actors]
    return pb.ListActorsResponse(actors=listed).SerializeToString()


def decode_actors(data: bytes) -> tuple[ActorInfo, ...]:
    """A ListActorsResponse."""
    message = _parse(pb.ListActorsResponse(), data)
    return tuple(ActorInfo(each.name, each.actor_handle, each.class_name) for each in message.actors)


def encode_start(start: Start) -> bytes:
    """A StartOperationRequest."""
    return pb.StartOperationRequest(id=start.id, request=_call(start.call)).SerializeToString()


def decode_start(data: bytes) -> Start:
    """A StartOperationRequest."""
    message = _parse(pb.StartOperationRequest(), data)
    return Start(message.id, _read_call(message.request))


def encode_poll(query: OperationQuery) -> bytes:
    """A PollOperationRequest."""
    return pb.PollOperationRequest(id=query.id, wait_s=query.wait_s).SerializeToString()


def decode_poll(data: bytes) -> OperationQuery:
    """A PollOperationRequest."""
    message = _parse(pb.PollOperationRequest(), data)
    return OperationQuery(message.id, message.wait_s)


def encode_cancel(query: OperationQuery) -> bytes:
    """A CancelOperationRequest."""
    return pb.CancelOperationRequest(id=query.id).SerializeToString()


def decode_cancel(data: bytes) -> OperationQuery:
    """A CancelOperationRequest."""
    return OperationQuery(_parse(pb.CancelOperationRequest(), data).id)


def encode_operation(state: OperationState) -> bytes:
    """An Operation."""
    message = pb.Operation(id=state.id, done=state.answer is not None)
    if state.answer is not None:
        message.response.CopyFrom(_answer(state.answer))
    if state.failure is not None:
        message.error.CopyFrom(_failure(state.failure))
    return message.SerializeToString()


def decode_operation(data: bytes) -> OperationState:
    """An Operation."""
    message = _parse(pb.Operation(), data)
    return OperationState(
        message.id,
        _read_answer(message.response) if message.done else None,
        _read_failure(message.error) if message.HasField("error") else None,
    )


def _call(call: MethodCall) -> pb.ActorRequest:
    args, *buffers = call.segments or (b"",)
    return pb.ActorRequest(
        actor_handle=call.handle,
        method=call.method,
        args=args,
        encoding=pb.ENCODING_JSON if call.is_json else pb.ENCODING_PICKLE,
        buffers=buffers,
        actor=call.actor,
    )


def _read_call(message: pb.ActorRequest) -> MethodCall:
    return MethodCall(
        message.method,
        (message.args, *message.buffers),
        message.actor_handle,
        message.actor,
        message.encoding == pb.ENCODING_JSON,
    )


def _answer(answer: CallResult) -> pb.ActorResponse:
    if answer.failure is not None:
        return pb.ActorResponse(error=_failure(answer.failure))
    result, *buffers = answer.segments
    return pb.ActorResponse(result=result, buffers=buffers)


def _read_answer(message: pb.ActorResponse) -> CallResult:
    if message.HasField("error"):
        return CallResult(failure=_read_failure(message.error))
    return CallResult((message.result, *message.buffers))


def _failure(failure: CallFailure) -> pb.Error:
    cause, *buffers = failure.cause or (b"",)
    return pb.Error(
        code=pb.ErrorCode.Name(failure.code),
        message=failure.message,
        traceback=failure.traceback,
        cause=cause,
        cause_buffers=buffers,
    )


def _read_failure(message: pb.Error) -> CallFailure:
    try:
        code = Code(message.code)
    except ValueError:  # from a later version
        code = Code.UNSPECIFIED
    cause = (message.cause, *message.cause_buffers) if message.cause else ()
    return CallFailure(code, message.message, message.traceback, cause)


def _parse(message: M, data: bytes) -> M:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise ProtocolError(f"{type(message).__name__} cannot be parsed: {error}") from error
    return message
