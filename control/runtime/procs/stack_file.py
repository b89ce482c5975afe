"""The stacks of a process, for any process that may trace it, even when it hangs.

A thread waits for questions in a pipe. To answer one it takes the interpreter lock and writes all stacks into a file in
memory. It cannot do that while another thread holds the lock. For that case there is a signal: its handler,
`faulthandler`, writes them without the lock into another such file. The signal is the last resort: a thread that runs
Python code at that time changes the frames that the handler reads, and then the process dies of SIGSEGV.

The pipe and the files have no path. A reader finds them among the descriptors of the process (see
`control.observe.written_stacks`): the kernel lets only users that may trace the process open them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import os
import signal
import sys
import threading
from collections import deque
from pathlib import Path
from types import FrameType

from skipper.control.runtime.procs import thread_limit

SIGNAL = signal.SIGRTMIN + 7
"""A real-time signal that nothing uses by default."""

NAME = "skipper-stacks"
"""The file that the signal handler writes; each time it appends."""

ANSWERS = "skipper-answers-1"
"""How the name of the file of answers begins. The id of the process, as the process sees it, and the inode number of
its pipe follow, each after a hyphen: a forked copy of the process has that file, too, but no thread that answers."""

THREAD = "skipper-stacks"
"""The kernel's name for the thread that answers."""

QUESTION_NBYTES = 16
"""A question is this many hexadecimal digits, unique to it; a pipe never splits them (pipe(7), PIPE_BUF)."""

_QUESTIONS_AT_ONCE = 256
_MOST_FRAMES = 500
"""How many frames of a thread are written, beginning with the innermost."""


def offer() -> None:
    """Be ready to write the stacks of this process; another call does nothing."""
    global _offered
    if _offered is None:
        _offered = _Offer()


def frames_of_threads() -> dict[int, FrameType]:
    """The innermost frame of each thread of this process, by the thread's identifier."""
    global _is_collector_off
    if sys.version_info >= (3, 12) or not gc.isenabled():
        return sys._current_frames()
    # Before Python 3.11.12 a collection may begin in this call, with a lock held that a thread needs to start or end
    # (https://github.com/python/cpython/issues/106883): the process hangs if a finalizer lets such a thread run.
    _is_collector_off = True
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        gc.enable()
        _is_collector_off = False


def answer_to(question: str, written: bytes) -> str | None:
    """The stacks in a file of answers; None if they are older than the question, or not all there yet."""
    head, _, rest = written.partition(b"\n")
    stacks, _, tail = rest.rpartition(b"\n")
    number, *answered = tail.split(b" ")
    if number != head or question.encode() not in answered:
        return None
    return stacks.decode("utf-8", "replace")


class _Offer:
    """The pipe, the thread that reads it, and the two files."""

    def __init__(self) -> None:
        self._inodes: dict[int, tuple[int, int]] = {}
        try:
            self._written_at_signal = self._keep(os.memfd_create(NAME))
            self._questions, _ = map(self._keep, os.pipe())
            pipe = os.fstat(self._questions).st_ino
            self._answers = self._keep(os.memfd_create(f"{ANSWERS}-{os.getpid()}-{pipe}"))
            for file in (self._written_at_signal, self._answers):
                os.fchmod(file, 0o600)
            thread = threading.Thread(target=self._serve, name="control-stacks", daemon=True)
            thread_limit.start(thread)
            with contextlib.suppress(OSError):
                Path(f"/proc/self/task/{thread.native_id}/comm").write_text(THREAD, encoding="ascii")
        except BaseException:
            self.close()
            raise
        faulthandler.register(SIGNAL, file=self._written_at_signal, all_threads=True)

    def close(self) -> None:
        """Close what others have not closed."""
        for descriptor in list(self._inodes):
            if self._is_ours(descriptor):
                os.close(descriptor)
            del self._inodes[descriptor]

    def _keep(self, descriptor: int) -> int:
        self._inodes[descriptor] = _inode(descriptor)
        return descriptor

    def _is_ours(self, descriptor: int) -> bool:
        """Whether it is still ours: once a program has closed all descriptors, the number can be another file's."""
        try:
            return _inode(descriptor) == self._inodes[descriptor]
        except OSError:
            return False

    def _serve(self) -> None:
        """Answer questions until the descriptors are gone or the file cannot be written."""
        answered: deque[bytes] = deque(maxlen=_QUESTIONS_AT_ONCE)
        with contextlib.suppress(OSError):
            for number in itertools.count(1):
                if not self._is_ours(self._questions):
                    break
                asked = os.read(self._questions, _QUESTIONS_AT_ONCE * QUESTION_NBYTES)
                if not asked or not self._is_ours(self._answers):
                    break
                answered.extend(asked[at : at + QUESTION_NBYTES] for at in range(0, len(asked), QUESTION_NBYTES))
                self._write(number, answered)
        faulthandler.unregister(SIGNAL)  # readers would take the missing answers for a held interpreter lock

    def _write(self, number: int, answered: deque[bytes]) -> None:
        """Replace the last answer.

        The first line and the first word of the last line are the same number, so that a reader notices parts of two
        answers. The other words are the questions that it answers, earlier ones included: if two readers ask at once,
        the first may read only when the answer for the second is there.
        """
        try:
            stacks = _stacks()
        except Exception as error:  # noqa: BLE001  (no answer would lead to the signal)
            stacks = f"it could not list its stacks: {type(error).__name__}: {error}"
        left = b"%d\n%s\n%d %s" % (number, stacks.encode("utf-8", "backslashreplace"), number, b" ".join(answered))
        os.ftruncate(self._answers, 0)
        at = 0
        while left:
            written = os.pwrite(self._answers, left, at)
            at, left = at + written, left[written:]


def _stacks() -> str:
    """All threads but this one, in the format of `faulthandler`.

    `faulthandler.dump_traceback` cannot be used: with Python 3.11 it reads the state of a C thread that just enters the
    interpreter before that state is set up, and the process dies of SIGSEGV. `sys._current_frames` takes a lock for it.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    lines: list[str] = []
    for ident, innermost in frames_of_threads().items():
        if ident == own:
            continue
        name = f" [{names[ident]}]" if ident in names else ""
        lines.append(f"Thread {ident:#018x}{name} (most recent call first):")
        frame: FrameType | None = innermost
        for _ in range(_MOST_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_qualname}')
            frame = frame.f_back
        else:
            lines.append("  ...")
    return "\n".join(lines)


def _inode(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _forget() -> None:
    """Reset a forked copy: it shares the pipe and the files with its parent, and gets some of its own."""
    global _offered, _is_collector_off
    if _offered is not None:
        faulthandler.unregister(SIGNAL)
        _offered.close()
        _offered = None
    if _is_collector_off:  # the thread that would turn it on is not in this process
        _is_collector_off = False
        gc.enable()


_offered: _Offer | None = None
_is_collector_off = False
os.register_at_fork(after_in_child=_forget)
