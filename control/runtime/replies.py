"""Values and errors as they travel back to a port.

An exception travels behind its description, with its causes, its notes and the members of its groups. Each exception of
that chain is pickled separately: if one cannot be pickled, or not be unpickled at the receiver, only that one is lost.
An `ActorError` in the chain travels without its remote traceback, since the text of the chain contains it. So each
actor that passes an error on adds only its own part.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from typing import TYPE_CHECKING, Any, TypeAlias

from skipper.control.model.endpoint_spec import WRAPPED
from skipper.control.model.errors import ActorError, ControlError, PayloadError, StopTimeoutError, SupervisionError
from skipper.control.model.exception_text import (
    MOST_HEADLINE,
    MOST_MESSAGE,
    describe,
    is_interrupt,
    shorten,
    summarize,
    summarize_fully,
)
from skipper.control.model.failure import MeshFailure
from skipper.control.runtime.interfaces import Replier
from skipper.control.runtime.messages import Mail
from skipper.control.wire.messages import Call, Kind, Payload
from skipper.control.wire.payload import pack, pack_inert, unpack

if TYPE_CHECKING:
    from skipper.control.runtime.flow_control import Flow

_ACTOR, _SUPERVISION, _STOP_TIMEOUT, _DROPPED = "actor", "supervision", "stop timeout", "dropped port"


def pack_exception(error: BaseException, *, actor_id: str, endpoint: str) -> Payload:
    """An exception that an endpoint raised.

    The exception itself is packed apart from its description. If it cannot be pickled, or the caller cannot unpickle
    it, the caller loses only `ActorError.cause`.
    """
    return pack((_ACTOR, actor_id, endpoint, summarize_fully(error), describe(error), pack_chain(error)))


def pack_error(error: ControlError, *, actor_id: str, method: str) -> Payload:
    """An error of this package, which the receiver raises again as the same class."""
    if isinstance(error, StopTimeoutError):
        return pack((_STOP_TIMEOUT, error.message, error.failure))
    if isinstance(error, SupervisionError):
        return pack_supervision(error.message, error.failure, is_unhandled=error.is_unhandled)
    if isinstance(error, ActorError):
        cause = None if error.cause is None else pack_chain(error.cause)
        return pack((_ACTOR, error.actor_id, error.endpoint, error.summary, error.remote_traceback, cause))
    return pack_exception(error, actor_id=actor_id, endpoint=method)


def first_exception(error: BaseException) -> str:
    """The class of an exception; if it reports an exception of another endpoint, the class of that."""
    while isinstance(error, ActorError) and error.cause is not None:
        error = error.cause
    return type(error).__name__


def pack_supervision(message: str, failure: MeshFailure | None, *, is_unhandled: bool = False) -> Payload:
    """The error that an actor, which has ended, cannot answer; ``is_unhandled``: it has certainly not begun to."""
    return pack((_SUPERVISION, message, failure, is_unhandled))


def pack_dropped(message: str) -> Payload:
    """The error that an actor, which may live on, has dropped the port for its answer."""
    return pack((_DROPPED, message))


def refuse(
    flow: Flow, replier: Replier, mail: Mail, reason: str, failure: MeshFailure | None, *, delivered: bool = False
) -> None:
    """Answer a message that no actor will handle, or that was ``delivered`` but not finished."""
    if isinstance(mail.message, Call):
        flow.handled(mail)
    if mail.message.reply_to and not (delivered and not mail.message.wants_reply):
        is_call = isinstance(mail.message, Call)
        message = f"cannot answer {mail.message.method.removesuffix(WRAPPED)}: {reason}" if is_call else reason
        replier.reply(mail, Kind.FAILURE, pack_supervision(message, failure, is_unhandled=not delivered))


def open_supervision(payload: Payload) -> SupervisionError | None:
    """The error that has arrived, if it says that the actor has ended; None for any other."""
    content = unpack(payload)
    return _supervision_error(*content[1:]) if content[0] == _SUPERVISION else None


def _supervision_error(message: str, failure: MeshFailure | None, is_unhandled: bool) -> SupervisionError:
    return SupervisionError(message, failure, is_unhandled=is_unhandled)


def open_reply(kind: Kind, payload: Payload) -> Any:
    """The value that a reply brought.

    Raises:
        ActorError: the endpoint raised.
        SupervisionError: the actor cannot answer, or has dropped the port for its answer; a `StopTimeoutError` if it
            did not end in time.
        PayloadError: the value cannot be unpickled here.
    """
    content = unpack(payload)
    if kind is not Kind.FAILURE:
        return content
    if content[0] == _SUPERVISION:
        raise _supervision_error(*content[1:])
    if content[0] == _STOP_TIMEOUT:
        raise StopTimeoutError(*content[1:])
    if content[0] == _DROPPED:
        raise SupervisionError(*content[1:])
    _, actor_id, endpoint, summary, remote_traceback, causes = content
    raise ActorError(actor_id, endpoint, summary, remote_traceback, open_chain(causes, remote_traceback))


MOST_NBYTES = 4 << 20
"""An exception with a larger pickle is not sent."""
OPEN_TIMEOUT_S = 5.0
"""An exception that takes longer to unpickle is given up."""
_MOST_LINKS = 64
"""How many causes of causes, and members of groups, travel with an exception."""

Link: TypeAlias = "tuple[Any, ...]"
"""Its kind, its notes, and what it is made from."""
Chain: TypeAlias = "tuple[Link, ...]"
"""An exception and its causes; the first one was raised."""

_PICKLED, _GROUP, _TEXT = "pickled", "group", "text"
_PLAIN = frozenset({str, int, float, bool, type(None), MeshFailure})


def pack_chain(error: BaseException) -> Chain | None:
    """An exception and its causes; None if the exception itself cannot be pickled, or is too large."""
    try:
        chain = _pack(error, [_MOST_LINKS])
    except BaseException as raised:  # all of this can run user code
        if is_interrupt(raised):
            raise
        return None
    return None if chain[0][0] == _TEXT else chain


def open_chain(chain: Chain | None, text: str) -> BaseException | None:
    """The exception that has arrived, with its causes; None if it cannot be unpickled here.

    Args:
        chain: what `pack_chain` made of it.
        text: the remote traceback that came with it.
    """
    if chain is None:
        return None
    if all(_is_harmless(link) for link in chain):
        return _open(chain, text)
    # Unpickling runs user code, which may take for ever. A caller that waits for a reply must not wait for that.
    opened: list[BaseException | None] = []
    here = contextvars.copy_context()
    thread = threading.Thread(
        target=lambda: opened.append(here.run(_open, chain, text)), name="control-unpickle", daemon=True
    )
    try:
        thread.start()
    except RuntimeError:  # no thread can be started
        return _open(chain, text)
    thread.join(OPEN_TIMEOUT_S)
    return opened[0] if opened else None


def _pack(error: BaseException, room: list[int]) -> Chain:
    links: list[Link] = []
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen and (room[0] > 0 or not links):
        seen.add(id(cause))
        room[0] -= 1
        links.append(_pack_one(cause, room))
        cause = _cause_of(cause)
    return tuple(links)


def _cause_of(error: BaseException) -> BaseException | None:
    if type(error) is ActorError:
        return error.cause
    found: BaseException | None = vars(BaseException)["__cause__"].__get__(error)  # even if its class overrides it
    return found


def _pack_one(error: BaseException, room: list[int]) -> Link:
    notes, kind = _notes_of(error), type(error)
    if kind is ActorError:
        return (_ACTOR, notes, error.actor_id, error.endpoint, error.summary)  # type: ignore[attr-defined]
    if kind is ExceptionGroup or kind is BaseExceptionGroup:
        members = error.exceptions[: max(room[0], 1)]  # type: ignore[attr-defined]
        return (_GROUP, notes, error.message, tuple(_pack(member, room) for member in members))  # type: ignore[attr-defined]
    summary = shorten(summarize(error), MOST_HEADLINE)
    try:
        packed = pack_inert(error)
    except PayloadError as failed:
        return (_TEXT, notes, f"{summary} (which cannot be pickled: {failed})")
    nbytes = sum(map(len, packed))
    if nbytes > MOST_NBYTES:
        return (_TEXT, notes, f"{summary} (whose pickle of {nbytes} bytes is too large to send)")
    return (_PICKLED, notes, _harmless_home(error), packed, summary)


def _harmless_home(error: BaseException) -> str:
    """The module of an exception that is unpickled without any user code, once this is imported; else nothing."""
    home = type(error).__module__
    is_known = home == "builtins" or home.partition(".")[0] == __name__.partition(".")[0]
    return home if is_known and all(map(_is_plain, (*error.args, *vars(error).values()))) else ""


def _is_plain(value: object) -> bool:
    if type(value) is list:
        return all(type(item) in _PLAIN for item in value)  # a list within a list may be itself
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in _PLAIN


def _notes_of(error: BaseException) -> tuple[str, ...]:
    try:
        notes = list(getattr(error, "__notes__", ()))
    except BaseException as raised:  # it belongs to a user
        if is_interrupt(raised):
            raise
        return ()
    return tuple(shorten(note, MOST_MESSAGE) for note in notes[:_MOST_LINKS] if type(note) is str)


def _is_harmless(link: Link) -> bool:
    """Whether opening it runs no user code."""
    if link[0] == _GROUP:
        return all(_is_harmless(inner) for member in link[3] for inner in member)
    return link[0] != _PICKLED or link[2] in sys.modules


def _open(chain: Chain, text: str) -> BaseException | None:
    error: BaseException | None = None
    for place, link in reversed(list(enumerate(chain))):
        error = _open_one(link, error, text, may_stand_in=place > 0)
    return error


def _open_one(link: Link, cause: BaseException | None, text: str, *, may_stand_in: bool) -> BaseException | None:
    try:
        error = _made(link, cause, text)
        if cause is not None:
            error.__cause__ = cause
        if link[1] and not getattr(error, "__notes__", None):
            for note in link[1]:
                error.add_note(note)
    except BaseException as raised:  # it belongs to a user
        if is_interrupt(raised):
            raise
        if not may_stand_in:
            return None
        error = PayloadError(f"in place of an exception that cannot be unpickled here: {link[-1]}")
        error.__cause__ = cause
    return error


def _made(link: Link, cause: BaseException | None, text: str) -> BaseException:
    kind, data = link[0], link[2:]
    if kind == _ACTOR:
        actor_id, endpoint, summary = data
        passed_on = ActorError(actor_id, endpoint, summary, text, cause)
        passed_on.is_shown_by_another = True
        return passed_on
    if kind == _GROUP:
        message, members = data
        return BaseExceptionGroup(
            message, [_open(member, text) or PayloadError(str(member[0][-1])) for member in members]
        )
    if kind == _TEXT:
        return PayloadError(f"in place of {data[0]}")
    error = unpack(data[1])
    if not isinstance(error, BaseException):
        raise PayloadError(f"what was an exception is unpickled as a value of type {type(error).__qualname__}")
    return error
