"""Values and errors as they travel back to a port."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

from control.errors import ActorError, ControlError, PayloadError, StopTimeoutError, SupervisionError
from control.failure import MeshFailure
from control.runtime.messages import Mail
from control.wire.envelope import Kind, Payload
from control.wire.payload import pack, pack_inert, unpack

if TYPE_CHECKING:
    from control.runtime.process import Process

_ACTOR, _SUPERVISION, _STOP_TIMEOUT = "actor", "supervision", "stop timeout"


def pack_exception(error: BaseException, *, actor_id: str, endpoint: str) -> Payload:
    """An exception that an endpoint raised.

    The exception itself is packed apart from its description, so that one that cannot be pickled, or not be
    unpickled by the caller, costs the caller only `ActorError.cause`.
    """
    summary = "".join(traceback.format_exception_only(error)).strip()
    return pack((_ACTOR, actor_id, endpoint, summary, describe(error), _pack_cause(error)))


def pack_error(error: ControlError, *, actor_id: str, method: str) -> Payload:
    """An error of this package, which is raised again as what it is where it arrives."""
    if isinstance(error, StopTimeoutError):
        return pack((_STOP_TIMEOUT, error.message, error.failure))
    if isinstance(error, SupervisionError):
        return pack_supervision(error.message, error.failure, is_unhandled=error.is_unhandled)
    if isinstance(error, ActorError):
        cause = None if error.cause is None else _pack_cause(error.cause)
        return pack((_ACTOR, error.actor_id, error.endpoint, error.summary, error.remote_traceback, cause))
    return pack_exception(error, actor_id=actor_id, endpoint=method)


def _pack_cause(error: BaseException) -> Payload | None:
    try:
        return pack_inert(error)
    except PayloadError:
        return None


def summarize(error: BaseException) -> str:
    """An exception in short: its class, and its words if it has any."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def first_exception(error: BaseException) -> str:
    """The class of an exception; where it says what another endpoint raised, the class of that."""
    while isinstance(error, ActorError) and error.cause is not None:
        error = error.cause
    return type(error).__name__


def describe(error: BaseException) -> str:
    """The traceback of an exception, or what could be had of it."""
    return "".join(traceback.format_exception(error))


def pack_supervision(message: str, failure: MeshFailure | None, *, is_unhandled: bool = False) -> Payload:
    """That an actor cannot answer; and whether it surely has not begun to."""
    return pack((_SUPERVISION, message, failure, is_unhandled))


def refuse(process: Process, mail: Mail, reason: str, failure: MeshFailure | None, *, delivered: bool = False) -> None:
    """Answer a message that no actor will handle, or that was ``delivered`` and not finished."""
    if mail.envelope.kind is Kind.CALL:
        process.flow.handled(mail)
    if mail.envelope.reply_to and not (delivered and not mail.envelope.wants_reply):
        message = f"cannot answer {mail.envelope.method}: {reason}"
        process.reply(mail, Kind.ERROR, pack_supervision(message, failure, is_unhandled=not delivered))


def open_supervision(payload: Payload) -> SupervisionError | None:
    """What has arrived if it says that an actor cannot answer; None for an exception of its endpoint."""
    content = unpack(payload)
    if content[0] != _SUPERVISION:
        return None
    _, message, failure, is_unhandled = content
    return SupervisionError(message, failure, is_unhandled=is_unhandled)


def open_reply(kind: Kind, payload: Payload) -> Any:
    """The value that a reply brought.

    Raises:
        ActorError: the endpoint raised.
        SupervisionError: the actor cannot answer; or did not end in time, which is a `StopTimeoutError`.
        PayloadError: the value cannot be unpickled here.
    """
    content = unpack(payload)
    if kind is Kind.REPLY:
        return content
    if content[0] == _SUPERVISION:
        _, message, failure, is_unhandled = content
        raise SupervisionError(message, failure, is_unhandled=is_unhandled)
    if content[0] == _STOP_TIMEOUT:
        raise StopTimeoutError(*content[1:])
    _, actor_id, endpoint, summary, remote_traceback, packed_cause = content
    cause = None
    if packed_cause is not None:
        try:
            cause = unpack(packed_cause)
        except PayloadError:
            cause = None
    raise ActorError(actor_id, endpoint, summary, remote_traceback, cause)
