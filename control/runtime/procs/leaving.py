"""`Leaving`: how a worker's process ends once its runtime has: as a program of Python does, but within a bound."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback

THREADS_S = 5.0
"""So long is waited for threads that are no daemons. Many never end, where nobody expected their process to."""


class Leaving:
    """Has the main thread return, and sees to it that the process ends.

    Args:
        told: descriptor of the eventfd at which the main thread waits.
        name: of the process, for people.
    """

    def __init__(self, told: int, name: str) -> None:
        self._told = told
        self._name = name

    def __call__(self, bound_s: float) -> None:
        """Let threads, ``atexit`` handlers and finalizers run; on a daemon thread. Returns if they do not end."""
        until_s = time.monotonic() + bound_s
        is_beyond_threads = threading.Event()
        atexit.register(is_beyond_threads.set)  # the last to be registered, and so the first to be called
        os.eventfd_write(self._told, 1)
        if is_beyond_threads.wait(min(THREADS_S, bound_s / 2)):
            time.sleep(max(until_s - time.monotonic(), 0.0))  # the process ends meanwhile
            self._complain(f"what it does at its exit has not ended within {bound_s:.3g} s:\n{_main_stack()}")
            return
        left = [thread.name for thread in threading.enumerate() if not thread.daemon and thread.ident != _main_id()]
        self._complain(f"its threads {', '.join(left) or '(none any more)'} have not ended; they would, as daemons\n")
        atexit._run_exitfuncs()

    def _complain(self, what: str) -> None:
        sys.stderr.write(f"control: process {self._name} is ended by force: {what}")


def _main_id() -> int | None:
    return threading.main_thread().ident


def _main_stack() -> str:
    frame = sys._current_frames().get(_main_id() or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""
