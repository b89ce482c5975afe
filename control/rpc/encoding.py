"""Arguments, results and errors of calls in messages: pickles between Pythons, JSON from any language."""

from __future__ import annotations

import json
from typing import Any

from skipper.control.model.errors import (
    ActorError,
    BackpressureError,
    ControlError,
    DeadlineError,
    HandleExpiredError,
    NameNotFoundError,
    NoSuchMethodError,
    OperationCancelledError,
    OperationNotFoundError,
    PayloadError,
    SupervisionError,
)
from skipper.control.model.exception_text import describe, summarize_fully
from skipper.control.rpc.hosted import BusyError, LateError
from skipper.control.rpc.wire.messages import CallFailure, CallResult, Code, MethodCall, Segments
from skipper.control.runtime.replies import open_chain, pack_chain
from skipper.control.wire.payload import pack_inert, unpack

_MAX_CAUSE_NBYTES = 1 << 20


class ArgumentsError(Exception):
    """Arguments that do not fit their encoding."""


def decode_arguments(call: MethodCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call; its sender must be trusted for this encoding.

    Raises:
        ArgumentsError: they cannot be decoded.
    """
    try:
        given = json.loads(call.segments[0] or b"[]") if call.is_json else unpack(call.segments)
    except (ValueError, RecursionError, PayloadError) as error:
        raise ArgumentsError(str(error)) from error
    if call.is_json and isinstance(given, list):
        return tuple(given), {}
    if call.is_json and isinstance(given, dict):
        return (), given
    if not call.is_json and isinstance(given, tuple) and len(given) == 2:
        return given
    raise ArgumentsError("arguments are an array or an object" if call.is_json else "arguments are a pair")


def encode_result(value: object, *, is_json: bool, most_nbytes: int) -> CallResult:
    """The answer with a result, or with the reason why it cannot be sent."""
    try:
        segments = (json.dumps(value, default=_plain).encode(),) if is_json else pack_inert(value)
    except (TypeError, ValueError, RecursionError, PayloadError) as error:
        words = f"the result, of type {type(value).__qualname__}, cannot be encoded: {error}"
        return CallResult(failure=CallFailure(Code.BAD_RESULT, words))
    nbytes = sum(map(len, segments))
    if nbytes > most_nbytes:
        words = f"the result of {nbytes} bytes is larger than the {most_nbytes} that max_message_nbytes allows"
        return CallResult(failure=CallFailure(Code.BAD_RESULT, words))
    return CallResult(segments)


def encode_error(error: BaseException, *, is_json: bool) -> CallFailure:
    """The answer to a call that raised."""
    if isinstance(error, BusyError):
        return CallFailure(Code.BUSY, "too many calls wait for this actor")
    if isinstance(error, LateError):
        return CallFailure(Code.LATE, "the deadline passed")
    if isinstance(error, ArgumentsError):
        return CallFailure(Code.BAD_ARGUMENTS, str(error))
    return CallFailure(Code.RAISED, summarize_fully(error), describe(error), () if is_json else _encode_cause(error))


def encode_mesh_error(error: ControlError, *, is_json: bool) -> CallFailure:
    """The answer to a call for which an actor of a mesh has no result."""
    if isinstance(error, ActorError):
        cause = () if is_json or error.cause is None else _encode_cause(error.cause)
        return CallFailure(Code.RAISED, error.summary, error.remote_traceback, cause)
    if isinstance(error, DeadlineError):
        return CallFailure(Code.LATE, str(error))
    if isinstance(error, BackpressureError):
        return CallFailure(Code.BUSY, str(error))
    if isinstance(error, SupervisionError):
        return CallFailure(Code.HANDLE_EXPIRED if error.is_unhandled else Code.ACTOR_DEAD, str(error))
    return encode_error(error, is_json=is_json)


def open_answer(answer: CallResult, *, actor: str, method: str) -> Any:
    """The result of a call. Only for answers of a server that has proven that it knows the secret.

    Args:
        answer: the answer.
        actor: the actor, for people.
        method: the method, for people.

    Raises:
        ActorError: the method raised; its ``cause`` is the exception if that could be sent.
        ControlError: there is no result; the class says why.
    """
    if answer.failure is not None:
        raise error_of(answer.failure, actor=actor, method=method)
    return unpack(answer.segments)


def error_of(failure: CallFailure, *, actor: str, method: str) -> ControlError:
    """The error to raise for a failure. Only for failures of a server that has proven that it knows the secret."""
    if failure.code is Code.RAISED:
        return ActorError(actor, method, failure.message, failure.traceback, _decode_cause(failure))
    error: ControlError = _ERRORS.get(failure.code, ControlError)(f"{actor}.{method}: {failure.message}")
    return error


_ERRORS: dict[Code, Any] = {
    Code.HANDLE_EXPIRED: HandleExpiredError,
    Code.NO_SUCH_ACTOR: NameNotFoundError,
    Code.NO_SUCH_METHOD: NoSuchMethodError,
    Code.BUSY: BackpressureError,
    Code.LATE: DeadlineError,
    Code.ACTOR_DEAD: SupervisionError,
    Code.NO_SUCH_OPERATION: OperationNotFoundError,
    Code.CANCELLED: OperationCancelledError,
    Code.BAD_ARGUMENTS: PayloadError,
    Code.BAD_RESULT: PayloadError,
}


def _encode_cause(error: BaseException) -> Segments:
    chain = pack_chain(error)
    segments = () if chain is None else pack_inert(chain)
    return segments if sum(map(len, segments)) <= _MAX_CAUSE_NBYTES else ()


def _decode_cause(failure: CallFailure) -> BaseException | None:
    if not failure.cause:
        return None
    try:
        return open_chain(unpack(failure.cause), failure.traceback)
    except (PayloadError, TypeError, ValueError):  # it comes from another version of this library
        return None


def _plain(value: object) -> object:
    """Convert a value that JSON does not know: a mesh of values becomes a list."""
    from skipper.control.model.value_mesh import ValueMesh

    if isinstance(value, ValueMesh):
        return value.values()
    raise TypeError(f"{type(value).__qualname__} cannot be expressed in JSON")
