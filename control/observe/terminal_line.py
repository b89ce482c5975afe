"""A line that is drawn on the terminal below the output, and erased: only this module draws one.

It is in the row below the cursor, which stays where it was. So text of C libraries, or of a user who types, appears
where it would without the line. Python's own output to the terminal erases the line first.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TextIO

_ERASE = "\x1b[J"  # from the cursor to the end of the screen: ECMA-48, ED
_MAKE_ROOM = "\x1bD\x1b[A"  # down, which scrolls at the bottom, and up again, in the same column: IND, CUU
_SAVE, _NEXT_ROW, _RESTORE = "\x1b7", "\x1bE", "\x1b8"  # DECSC, NEL, DECRC

_lock = threading.RLock()
_drawn: tuple[TextIO, str] | None = None
"""The stream of the line, and its text."""
_guarded: dict[int, TextIO] = {}
"""The streams whose ``write`` erases the line first."""
_is_watching_forks = False
_others = 0
"""How many others draw on the terminal at the moment."""


def draw(text_of: Callable[[int], str]) -> None:
    """Show a line in place of the one before; nothing if standard error is not a terminal of ours.

    Args:
        text_of: returns the text for at most this many columns.
    """
    global _drawn
    with _lock:
        erase()
        stream = sys.stderr  # the present one: a notebook or a test may have replaced it
        columns = _columns(stream)
        if _others or columns < 2 or not (text := text_of(columns - 1)):
            return
        if _write(stream, f"{_ERASE}{_MAKE_ROOM}{_SAVE}{_NEXT_ROW}{text}{_RESTORE}"):
            _drawn = stream, text
            _guard()


def erase() -> None:
    """Erase the line, if there is one."""
    global _drawn
    with _lock:
        if _drawn is not None:
            stream, _drawn = _drawn[0], None
            for guarded in _guarded.values():
                with contextlib.suppress(AttributeError):  # other code has removed it
                    del guarded.write  # this uncovers the method of the class
            _guarded.clear()
            _write(stream, _ERASE)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Erase the line while something else is written to the terminal, and draw it again afterwards."""
    if _drawn is None:
        yield
        return
    with _lock:
        text = "" if _drawn is None else _drawn[1]
        erase()
        try:
            yield
        finally:
            draw(lambda columns: text[:columns])


@contextlib.contextmanager
def none_meanwhile() -> Iterator[None]:
    """No line is drawn within the context: something else draws on the terminal."""
    global _others
    with _lock:
        _others += 1
        erase()
    try:
        yield
    finally:
        with _lock:
            _others -= 1


def is_shown() -> bool:
    """Whether standard error is a terminal on which a line may be drawn."""
    return _columns(sys.stderr) > 1


def _guard() -> None:
    """Make the script's own streams erase the line before they write, as long as there is one."""
    global _is_watching_forks
    if not _is_watching_forks:
        _is_watching_forks = True
        os.register_at_fork(after_in_child=_forget)
    for stream in (sys.stdout, sys.stderr):
        if id(stream) not in _guarded and _columns(stream):
            with contextlib.suppress(AttributeError):  # a replacement that takes no attributes
                stream.write = _erasing(stream.write)  # type: ignore[method-assign]
                _guarded[id(stream)] = stream


def _erasing(write: Callable[[str], int]) -> Callable[[str], int]:
    def erase_and_write(text: str) -> int:
        with _lock:
            erase()
            return write(text)

    return erase_and_write


def _forget() -> None:
    """A forked copy has no line; the lock may have been another thread's."""
    global _lock, _drawn
    _lock = threading.RLock()
    _drawn = None
    for stream in _guarded.values():
        with contextlib.suppress(AttributeError):
            del stream.write
    _guarded.clear()


def _columns(stream: TextIO) -> int:
    """The columns of the stream's terminal; 0 if it has none, or this process is in its background."""
    if os.environ.get("TERM", "dumb") == "dumb" or os.environ.get("CI"):
        return 0
    try:
        if not stream.isatty():
            return 0
        descriptor = stream.fileno()
        with contextlib.suppress(OSError):  # only the controlling terminal of this process can stop it
            if os.tcgetpgrp(descriptor) != os.getpgrp():
                return 0  # writing there may stop the process: stty(1), tostop
        return os.get_terminal_size(descriptor).columns or 80
    except (AttributeError, OSError, ValueError):  # replaced, closed, or hung up
        return 0


def _write(stream: TextIO, text: str) -> bool:
    encoding = getattr(stream, "encoding", None) or "ascii"
    try:
        stream.write(text.encode(encoding, "replace").decode(encoding))  # it may lack some characters
        stream.flush()
    except (OSError, ValueError):  # nobody reads it any more, or it is closed
        return False
    return True
