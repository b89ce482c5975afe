"""Ending user code that runs on a thread: where the thread is, and an exception raised there from outside.

Only user code gets the exception. What the runtime does on the same thread, for example a write to a shared link, is
never left half done.
"""

from __future__ import annotations

import asyncio
import ctypes
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Collection, Iterator
from types import CodeType, FrameType
from typing import Any

_PACKAGES = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_INNER = tuple(os.path.join(_PACKAGES, folder, "") for folder in ("control/runtime", "control/wire", "dataplane"))
"""Folders of code that changes data shared with other threads."""


def interrupt(thread_id: int, error: type[BaseException], callers: Collection[CodeType]) -> bool:
    """Raise an exception in what a thread runs, if that is user code at this moment.

    It is raised once the thread runs Python: a C call, such as `time.sleep`, ends first. Between the check and the
    raising the interpreter lock is not released, unless the operating system takes a long break.

    Args:
        thread_id: as `threading.get_ident` returns it there.
        error: its class, which is called without arguments.
        callers: the functions of the runtime that call user code.

    Returns:
        Whether it was raised; if not, the thread is about to enter or leave user code, or user code has called the
        runtime.
    """
    frame = sys._current_frames().get(thread_id)
    if frame is None or frame.f_code in callers or not _is_in_user_code(frame, callers):
        return False
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(error))
    return True


class _TakenBack(BaseException):
    """Raised, and caught at once, in place of an exception that must not come any more."""


def take_back() -> None:
    """Forget an exception that was to be raised in this thread and has not been.

    Clearing it is not enough: CPython then believes for ever that there is one (``PyThreadState_SetAsyncExc`` with NULL
    sets the flag that only a raised one resets). It looks for it at each call and each loop iteration, in all threads,
    and with 3.11 a traced function never begins.

    Raises:
        BaseException: it has come just now; call again.
    """
    try:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(_TakenBack))
        while True:
            pass
    except _TakenBack:
        return


def stack_of(thread_id: int, callers: Collection[CodeType]) -> list[traceback.FrameSummary]:
    """Where a thread is in user code, the innermost call last; empty if it runs none."""
    frames: list[traceback.FrameSummary] = []
    for frame in _frames(sys._current_frames().get(thread_id)):
        if frame.f_code in callers:
            return frames[::-1]
        frames.append(summary_of(frame))
    return []


def stack_of_task(task: asyncio.Task[Any], callers: Collection[CodeType]) -> list[traceback.FrameSummary]:
    """Where a coroutine of user code waits, the innermost call last; empty if the task is in none."""
    frames: list[traceback.FrameSummary] = []
    is_of_user = False
    coroutine: Any = task.get_coro()
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        if is_of_user:
            frames.append(summary_of(frame))
        is_of_user = is_of_user or frame.f_code in callers
        coroutine = coroutine.cr_await
    return frames


def summary_of(frame: FrameType) -> traceback.FrameSummary:
    """A frame in the form that tracebacks show."""
    code, line = frame.f_code, frame.f_lineno or 0
    text = linecache.getline(code.co_filename, line).strip()
    return traceback.FrameSummary(code.co_filename, line, code.co_name, lookup_line=False, line=text)


def is_of_users(summary: traceback.FrameSummary) -> bool:
    """Whether a frame belongs to code outside the runtime and the standard library: the one to look at."""
    return not summary.filename.startswith((os.path.join(_PACKAGES, "control", ""), *_INNER, _STANDARD, "<frozen"))


_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def _is_in_user_code(frame: FrameType, callers: Collection[CodeType]) -> bool:
    for inner in _frames(frame):
        if inner.f_code in callers:
            return True
        if inner.f_code.co_filename.startswith(_INNER):
            return False
    return False


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
