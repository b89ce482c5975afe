"""Values and errors as they travel back to a port."""

from __future__ import annotations

from typing import Any

from skipper.control.model.endpoint_spec import WRAPPED
from skipper.control.model.errors import ActorError, ControlError, StopTimeoutError, SupervisionError
from skipper.control.model.exception_text import describe, summarize_fully
from skipper.control.model.failure import MeshFailure
from skipper.control.runtime.exception_causes import open_chain, pack_chain
from skipper.control.runtime.interfaces import Credit, Replier
from skipper.control.runtime.messages import Mail
from skipper.control.wire.envelope import Kind, Payload
from skipper.control.wire.payload import pack, unpack

_ACTOR, _SUPERVISION, _STOP_TIMEOUT = "actor", "supervision", "stop timeout"


def pack_exception(error: BaseException, *, actor_id: str, endpoint: str) -> Payload:
    """An exception that an endpoint raised.

    The exception itself is packed apart from its description, so that one that cannot be pickled, or not be
    unpickled by the caller, costs the caller only `ActorError.cause`.
    """
    return pack((_ACTOR, actor_id, endpoint, summarize_fully(error), describe(error), pack_chain(error)))


def pack_error(error: ControlError, *, actor_id: str, method: str) -> Payload:
    """An error of this package, which is raised again as what it is where it arrives."""
    if isinstance(error, StopTimeoutError):
        return pack((_STOP_TIMEOUT, error.message, error.failure))
    if isinstance(error, SupervisionError):
        return pack_supervision(error.message, error.failure, is_unhandled=error.is_unhandled)
    if isinstance(error, ActorError):
        cause = None if error.cause is None else pack_chain(error.cause)
        return pack((_ACTOR, error.actor_id, error.endpoint, error.summary, error.remote_traceback, cause))
    return pack_exception(error, actor_id=actor_id, endpoint=method)


def first_exception(error: BaseException) -> str:
    """The class of an exception; where it says what another endpoint raised, the class of that."""
    while isinstance(error, ActorError) and error.cause is not None:
        error = error.cause
    return type(error).__name__


def pack_supervision(message: str, failure: MeshFailure | None, *, is_unhandled: bool = False) -> Payload:
    """That an actor cannot answer; and whether it surely has not begun to."""
    return pack((_SUPERVISION, message, failure, is_unhandled))


def refuse(
    credit: Credit,
    replier: Replier,
    mail: Mail,
    reason: str,
    failure: MeshFailure | None,
    *,
    delivered: bool = False,
) -> None:
    """Answer a message that no actor will handle, or that was ``delivered`` and not finished."""
    if mail.envelope.kind is Kind.CALL:
        credit.handled(mail)
    if mail.envelope.reply_to and not (delivered and not mail.envelope.wants_reply):
        is_call = mail.envelope.kind is Kind.CALL
        message = f"cannot answer {mail.envelope.method.removesuffix(WRAPPED)}: {reason}" if is_call else reason
        replier.reply(mail, Kind.ERROR, pack_supervision(message, failure, is_unhandled=not delivered))


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
    _, actor_id, endpoint, summary, remote_traceback, causes = content
    raise ActorError(actor_id, endpoint, summary, remote_traceback, open_chain(causes, remote_traceback))
