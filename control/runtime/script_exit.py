"""How a failure ends the script: through its main thread, so that Python does all its work at exit.

The main thread runs `finally` blocks, context managers and `atexit` handlers, and flushes output. A signal that nothing
else uses wakes it from any wait (`time.sleep`, a lock, a queue, an event loop), and its handler raises there.
`_thread.interrupt_main` is not enough: it interrupts no system call, and does nothing if SIGINT is ignored, as in the
background of a shell.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType

SIGNAL = signal.SIGRTMIN + 8
"""A real-time signal that nothing uses by default; the one below is `stack_file`'s."""

_HARD_EXIT_S = 15.0
"""How long a process that ends without its main thread may take to end its children and to flush its output."""

_AGAIN_S = 0.1

_errands: deque[Callable[[FrameType | None], None]] = deque()
_ended = threading.Event()
_is_leaving = False
_is_sheltered = False
_status = 0


def prepare() -> None:
    """Prepare to interrupt the main thread; called on that thread. Another call does nothing."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(SIGNAL) is signal.SIG_DFL:
        signal.signal(SIGNAL, _run_errand)


def leave(code: int, *, within_s: float, end_children: Callable[[], None]) -> None:
    """End the process with ``code``, through the main thread; by `os._exit` if that does not end in time.

    It returns when the main thread is at its end.

    Args:
        code: the exit status, even if the main thread continues and ends without an error.
        within_s: how long the main thread may take, in seconds.
        end_children: called before `os._exit`.
    """
    global _is_leaving
    fail(code)
    if threading.current_thread() is threading.main_thread():
        raise SystemExit(code)

    def raise_exit(_: FrameType | None) -> None:
        if _may_be_interrupted():
            raise SystemExit(code)

    _is_leaving = True
    if not _interrupt(raise_exit):
        _raise_in_main_as_soon_as_it_runs()
    if not _wait(_ended, raise_exit, within_s):
        _exit_without_main(code, within_s, end_children)


def raise_in_main(error: Exception, *, if_in: Callable[[FrameType | None], bool], within_s: float) -> bool:
    """Raise an exception in the main thread, if that runs code that should get it.

    Args:
        error: the exception.
        if_in: decides; called in the main thread with the frame that it is in.
        within_s: how long the main thread may take to look, in seconds.

    Returns:
        Whether it was raised. If not, it will not be raised later.
    """
    looked, is_raised = threading.Event(), False

    def raise_error(frame: FrameType | None) -> None:
        nonlocal is_raised
        is_raised = _may_be_interrupted() and if_in(frame)
        looked.set()
        if is_raised:
            raise error

    if threading.current_thread() is threading.main_thread() or not _interrupt(raise_error):
        return False
    if not _wait(looked, raise_error, within_s):
        try:
            _errands.remove(raise_error)
        except ValueError:
            looked.wait()  # the main thread has just taken it
    return is_raised


@contextlib.contextmanager
def sheltered() -> Iterator[None]:
    """Keep the main thread from being interrupted: its next work must not stop halfway.

    Raises:
        SystemExit: at the end, in the main thread, if it should have been interrupted during the work.
    """
    global _is_sheltered
    _is_sheltered = True
    try:
        yield
    finally:
        _is_sheltered = False
    if _is_leaving and _may_be_interrupted() and threading.current_thread() is threading.main_thread():
        raise SystemExit(_status)


def fail(code: int = 1) -> None:
    """Make the process end with ``code`` even if the script ends without an error; the first code stays."""
    global _status
    _status = _status or code


def end() -> None:
    """Note that the main thread is at its end: nothing interrupts it any more. Called from an `atexit` handler."""
    _ended.set()


def set_exit_status() -> None:
    """Set the exit status after `fail`, and after Ctrl-C. Called from an `atexit` handler.

    Python has nothing for that, but C does: a function registered with the C library runs after Python has ended, and
    of several calls of ``exit`` the last one sets the status (glibc's ``__run_exit_handlers``).

    A script that KeyboardInterrupt ends must end by SIGINT. CPython forgets this if it compiles source text afterwards
    (``run_eval_code_obj`` in its pythonrun.c), as an import of dataclasses does, and ends with 1.
    """
    libc = ctypes.CDLL(None)
    if _status:
        libc.__cxa_atexit(ctypes.cast(libc.exit, ctypes.c_void_p), ctypes.c_void_p(_status), None)
    elif getattr(sys, "last_type", None) is KeyboardInterrupt and not hasattr(sys, "ps1"):  # no prompt continues
        libc.__cxa_atexit(ctypes.cast(libc["raise"], ctypes.c_void_p), ctypes.c_void_p(signal.SIGINT), None)


def forget() -> None:
    """Reset a forked copy of this process: it ends by itself."""
    global _ended, _is_leaving, _is_sheltered, _status
    _ended, _is_leaving, _is_sheltered, _status = threading.Event(), False, False, 0
    _errands.clear()


def _may_be_interrupted() -> bool:
    return not (_is_sheltered or _ended.is_set())


def _run_errand(number: int, frame: FrameType | None) -> None:
    try:
        errand = _errands.popleft()
    except IndexError:
        return  # it was withdrawn
    errand(frame)


def _interrupt(errand: Callable[[FrameType | None], None]) -> bool:
    """Make the main thread run something at once; False if it could not be prepared for that."""
    if signal.getsignal(SIGNAL) is not _run_errand:
        return False
    _errands.append(errand)
    signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
    return True


def _wait(event: threading.Event, errand: Callable[[FrameType | None], None], within_s: float) -> bool:
    """Wait for an event, and signal again while the errand has not begun.

    If a signal comes after the interpreter has checked for one, and before the system call begins that it should
    interrupt, it interrupts nothing.
    """
    deadline = time.monotonic() + within_s
    while not event.wait(min(_AGAIN_S, max(deadline - time.monotonic(), 0))):
        if time.monotonic() >= deadline:
            return False
        if errand in _errands:
            signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
    return True


class _Leave(SystemExit):
    def __init__(self) -> None:
        super().__init__(_status)


def _raise_in_main_as_soon_as_it_runs() -> None:
    main = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(_Leave))


def _exit_without_main(code: int, waited_s: float, end_children: Callable[[], None]) -> None:
    def last_words() -> None:
        sys.stderr.write(
            f"control: the main thread has not ended within {waited_s:g} s, since it is in a call that signals do not "
            "interrupt or has caught the SystemExit: the process ends without it, and without atexit\n"
        )
        sys.stderr.flush()
        end_children()
        sys.stdout.flush()

    # On a thread of its own: the main thread may hold a lock that this needs.
    thread = threading.Thread(target=last_words, name="control-last-words", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Python 3.12 starts no threads while it waits for the script's threads
        faulthandler.dump_traceback_later(_HARD_EXIT_S, exit=True)
        last_words()
    else:
        thread.join(_HARD_EXIT_S)
    os._exit(code)
