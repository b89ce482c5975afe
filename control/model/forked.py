"""A forked copy of a process of a job is not part of the job: it has the memory of the process, but no threads.

gRPC does not survive a fork, so such a copy cannot begin a job of its own either. It may do all else that Python can.
If the code of an actor returns in it, there is no caller to return to, and the copy ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import NoReturn

from skipper.control.model.errors import ForkedProcessError

original = ""
"""The name of the process that this one is a copy of; empty if it is none."""


def note(name: str) -> None:
    """Note that this process is a copy of the one of this name, which belongs to a job."""
    global original
    original = original or f"{name} (pid {os.getppid()})"


def check() -> None:
    """Raise an error for what a copy cannot do.

    Raises:
        ForkedProcessError: this process is a copy.
    """
    if original:
        raise ForkedProcessError(
            f"this process (pid {os.getpid()}) was forked from {original} and does not belong to its job: calls and"
            " futures do not work here. Make the call in the parent, or start a process with subprocess or with"
            " multiprocessing's 'spawn' method, which then has a job of its own"
        )


def leave(outcome: BaseException | None = None) -> NoReturn:
    """End this copy as Python ends a program which has returned, or has raised this."""
    code = 0 if outcome is None else _code_of(outcome)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no stream, no reader, or closed
            stream.flush()
    os._exit(code & 0xFF)


def _code_of(outcome: BaseException) -> int:
    if not isinstance(outcome, SystemExit):
        traceback.print_exception(outcome)
        return 1
    if isinstance(outcome.code, int):
        return outcome.code
    if outcome.code is None:
        return 0
    print(outcome.code, file=sys.stderr)  # noqa: T201  (as Python does)
    return 1
