"""The text of exceptions of any origin: it exists even if their methods raise, and is never too long."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from types import TracebackType

from skipper.control.model.errors import ActorError

MOST_MESSAGE = 16 << 10
"""Characters of an exception's message that are kept."""
MOST_TEXT = 256 << 10
"""Characters of a traceback with all its causes that are kept."""
MOST_HEADLINE = 500
"""How many characters are repeated from an error that another actor raised."""
_CALLER = "control/runtime/actor_state.py"
"""The functions that call users' code in an actor. They say nothing about that code: tracebacks begin below them."""
_MOST_LINKS = 64
"""How many causes of causes are followed."""


def shorten(text: str, most: int) -> str:
    """Text of at most about this many characters; the middle is cut out, and the text says there how much."""
    excess = len(text) - most
    if excess <= 0:
        return text
    head = most // 2
    return f"{text[:head]}\n[... {excess} characters are cut here ...]\n{text[head + excess :]}"


def in_seconds(seconds: float) -> str:
    """A time for people; the rest of a bound may be any fraction."""
    if seconds < 0.001:
        return "less than a millisecond"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"


def is_interrupt(error: BaseException) -> bool:
    """Whether an exception is that of Ctrl-C, which belongs to nobody's code."""
    return type(error) is KeyboardInterrupt and threading.current_thread() is threading.main_thread()


def class_name(error: BaseException) -> str:
    """The name of the class of an exception."""
    return str(vars(type)["__name__"].__get__(type(error)))  # a metaclass may override it


def place_of(error: BaseException) -> str:
    """The file and the line where an exception was raised; empty if that is not known."""
    trace: TracebackType | None = vars(BaseException)["__traceback__"].__get__(error)  # a class may override it
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


def message_of(error: BaseException) -> str:
    """The message of an exception, shortened."""
    if issubclass(type(error), ActorError):
        return headline(error)  # type: ignore[arg-type]
    try:
        return shorten(str(error), MOST_MESSAGE)
    except BaseException as raised:  # the class of the exception is a user's, so its methods may raise anything
        if is_interrupt(raised):
            raise
        return f"<its __str__ raised {class_name(raised)}>"


def headline(error: ActorError) -> str:
    """An error of an actor in one line; if another actor's error is its origin, the line of that error."""
    for _ in range(_MOST_LINKS):
        if not isinstance(error.cause, ActorError):
            break
        error = error.cause
    first, _, _ = error.summary.partition("\n")
    return shorten(f"{error.actor_id}.{error.endpoint} raised {first}", MOST_HEADLINE)


def summarize(error: BaseException) -> str:
    """An exception in short: its class, and its message if it has one."""
    message = message_of(error)
    return f"{class_name(error)}: {message}" if message else class_name(error)


def summarize_fully(error: BaseException) -> str:
    """An exception as the last lines of a traceback have it, with its notes."""
    if issubclass(type(error), ActorError):
        return summarize(error)
    try:
        return shorten("".join(traceback.format_exception_only(error)).strip(), MOST_MESSAGE)
    except BaseException as raised:  # as above
        if is_interrupt(raised):
            raise
        return summarize(error)


def describe(error: BaseException) -> str:
    """The traceback of an exception, with those of its causes; each remote traceback is in it once.

    In an actor it begins with the user's code. The causes of an `ActorError` are left out, since its remote traceback
    shows them.
    """
    try:
        whole = traceback.TracebackException.from_exception(error)
        while len(whole.stack) > 1 and whole.stack[0].filename.endswith(_CALLER):
            del whole.stack[0]
        for link, shown in _links(error, whole):
            if issubclass(type(link), ActorError) and link.shows_traceback():  # type: ignore[attr-defined]
                shown.__cause__ = None
        return shorten("".join(whole.format()), MOST_TEXT)
    except BaseException as raised:  # as above
        if is_interrupt(raised):
            raise
        frames = "".join(traceback.format_tb(vars(BaseException)["__traceback__"].__get__(error)))
        return shorten(f"Traceback (most recent call last):\n{frames}{summarize(error)}\n", MOST_TEXT)


def _links(
    error: BaseException, whole: traceback.TracebackException
) -> Iterator[tuple[BaseException, traceback.TracebackException]]:
    """An exception and all its causes, each with the way to show it."""
    todo: list[tuple[BaseException | None, traceback.TracebackException | None]] = [(error, whole)]
    while todo:
        link, shown = todo.pop()
        if link is None or shown is None:
            continue
        yield link, shown
        todo += [(link.__cause__, shown.__cause__), (link.__context__, shown.__context__)]
        if isinstance(link, BaseExceptionGroup):
            todo += zip(link.exceptions, shown.exceptions or (), strict=False)
