"""The stacks of a process, for whoever may look into it, also when it hangs.

A thread waits for questions in a pipe. To answer one it takes the interpreter lock and writes all stacks into a file in
memory. While another thread does not let go of that lock it cannot. For that case there is a signal, at which
`faulthandler` writes them from the handler, without the lock, into another such file. The signal is the last resort: a
thread that runs Python code meanwhile changes the frames that the handler reads, and then the process dies of SIGSEGV.

The pipe and the files have no path. Who asks finds them among the descriptors of the process (see
`control.observe.written_stacks`): the kernel lets only those open them who may trace it.
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
"""One of those that nobody uses for anything by itself."""

NAME = "skipper-stacks"
"""The file that is written at the signal: each time behind what is there already."""

ANSWERS = "skipper-answers-1"
"""How the name of the file of answers begins. The id of the process, as it sees itself, and the inode number of its
pipe follow, each behind a hyphen: a forked copy of the process has that file, too, but no thread that answers."""

THREAD = "skipper-stacks"
"""How the kernel calls the thread that answers."""

QUESTION_NBYTES = 16
"""A question is so many hexadecimal digits that nobody else has used; no pipe tears them apart (pipe(7), PIPE_BUF)."""

_QUESTIONS_AT_ONCE = 256
_MOST_FRAMES = 500
"""Of a thread, beginning with the innermost."""


def offer() -> None:
    """Be ready to write the stacks of this process; again is free."""
    global _offered
    if _offered is None:
        _offered = _Offer()


def frames_of_threads() -> dict[int, FrameType]:
    """The innermost frame of each thread of this process, by the thread's identifier."""
    global _is_collector_off
    if sys.version_info >= (3, 12) or not gc.isenabled():
        return sys._current_frames()
    # Before Python 3.11.12 a collection may begin in there, with a lock held that a thread needs to begin or end
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
        """Close what has not been closed by others."""
        for descriptor in list(self._inodes):
            if self._is_ours(descriptor):
                os.close(descriptor)
            del self._inodes[descriptor]

    def _keep(self, descriptor: int) -> int:
        self._inodes[descriptor] = _inode(descriptor)
        return descriptor

    def _is_ours(self, descriptor: int) -> bool:
        """Whether it still is what it was: the number is another file's once a program has closed all descriptors."""
        try:
            return _inode(descriptor) == self._inodes[descriptor]
        except OSError:
            return False

    def _serve(self) -> None:
        """Answer whoever asks, until the descriptors are gone or the file cannot be written."""
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
        faulthandler.unregister(SIGNAL)  # that nobody answers would be taken for a held interpreter lock

    def _write(self, number: int, answered: deque[bytes]) -> None:
        """Replace the last answer.

        The first line and the first word of the last one are the same number: a reader who got parts of two answers
        notices. The other words are the questions that it is an answer to, also earlier ones: of two who ask at once,
        the first may come to read when the answer for the second is there.
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
    """All threads but this one, in the words of `faulthandler`.

    `faulthandler.dump_traceback` would not do. With Python 3.11 it reads the state of a thread of C that just enters
    the interpreter before that is set up, and the process dies of SIGSEGV. `sys._current_frames` takes a lock for it.
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
    """A forked copy shares the pipe and the files with its parent: it gets some of its own."""
    global _offered, _is_collector_off
    if _offered is not None:
        faulthandler.unregister(SIGNAL)
        _offered.close()
        _offered = None
    if _is_collector_off:  # the thread that was about to turn it on is none of this process
        _is_collector_off = False
        gc.enable()


_offered: _Offer | None = None
_is_collector_off = False
os.register_at_fork(after_in_child=_forget)
