"""What goes between callers and an actor server, as dataclasses; `actor_service` makes messages of them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from skipper.control.wire._generated import actor_service_pb2 as pb

MAX_MESSAGE_NBYTES = 64 << 20
"""Bytes of arguments, or of a result, where nobody says otherwise. They are held in memory several times over."""

LARGEST_MESSAGE_NBYTES = (1 << 31) - (1 << 20)
"""What can be asked for at most: gRPC counts the bytes of a message in 32 bits, and there is more in it."""

Segments = tuple[bytes, ...]
"""What is encoded, and its out-of-band buffers."""


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
        cause: the exception itself, pickled, or nothing.
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
        handle: which actor, or empty.
        actor: where there is no handle, the name of the actor, whichever that is.
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
        segments: the result, where there is one.
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
    """Where a long call is.

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
    """Which actor's methods, or which actors, are to be listed.

    Attributes:
        handle: of an actor, or empty.
        actor: its name, or empty.
        namespace: in which it is looked for, or empty.
    """

    handle: str = ""
    actor: str = ""
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class OperationQuery:
    """Which operation is meant, and for how long its end is waited for, in seconds."""

    id: str
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Start:
    """An operation that is to be started, under an id of the caller's choice."""

    id: str
    call: MethodCall
