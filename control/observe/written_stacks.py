"""`have_written`: makes a process of this host write its stacks itself, and reads them.

The request goes through its pipe (see `control.runtime.procs.stack_file`). It gets a signal only if it does not answer
and had enough CPU time: then a thread holds the interpreter lock in a C call. At other times a signal may end it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipper.control.runtime.procs.stack_file import ANSWERS, NAME, QUESTION_NBYTES, SIGNAL, THREAD, answer_to
from skipper.control.wire.vitals import Condition, Vitals, look_at

_SIGNAL_TIMEOUT_S = 2.0
_QUIET_S = 0.05
"""The text that the signal handler writes is complete once nothing was added for this long."""

_ASLEEP_S = 0.5
_RUNNING_S = 5.0
"""If no thread gets the interpreter lock for this long, a thread counts as holding it in a C call: while the process
sleeps, and while one thread runs. Time in which a thread waits for a CPU does not count. While several threads run,
they may take turns, and one of many may wait long for the lock: then no time is a proof."""

_RUNS = 0.1
"""A process runs if its threads together do for this part of the time."""
_OTHERS_RUN = 0.2
"""Several threads run if this part of the CPU time is not that of the thread that ran most."""
_WAKES = 0.003
_MANY = 200
"""A thread that waits for the lock wakes every 5 ms and runs for about 0.001 of the time. This much does not count,
unless there are so many threads that each may run Python code for as little."""

_STOPPED = "it was stopped before it wrote its stacks"
_UNSAFE = "several of its threads are running, or it lacks CPU time; a signal could end it then"
_ENDED = "it has ended in the meantime"

_LOOK_EVERY_S = 0.1
_POLL_EVERY_S = 0.005


@dataclass(frozen=True, slots=True)
class WrittenStacks:
    """The result of a request.

    Attributes:
        text: the stacks; None if there are none.
        how: how they were written, as the end of "it wrote this itself"; without ``text``, why they were not.
    """

    text: str | None
    how: str = ""


def have_written(pid: int, state: str, *, end: float) -> WrittenStacks:
    """Make a process write its stacks.

    Args:
        pid: the process, in this namespace.
        state: its state, as in `control.wire.vitals`.
        end: when to give up, by `time.monotonic`.
    """
    if state in "Tt":
        return WrittenStacks(None, "it handles no signal while it is stopped")
    if not _catches_signal(pid):
        return WrittenStacks(None, "it has not been prepared to write its stacks")
    try:
        with contextlib.ExitStack() as files:
            place = _Place(pid, files)
            if place.why_not:
                return WrittenStacks(None, place.why_not)
            return _Look(pid, place, end).text()
    except OSError as error:
        if look_at(pid).condition is Condition.ENDED:
            return WrittenStacks(None, _ENDED)
        return WrittenStacks(None, f"it cannot be asked ({error.strerror})")


class _Place:
    """The opened pipe and file of a process, for the request and the answer.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, pid: int, files: contextlib.ExitStack) -> None:
        links = _descriptors(pid)
        self.why_not = ""
        at_signal = next((path for link, path in links.items() if link.startswith(f"/memfd:{NAME}")), None)
        answers = next((link for link in links if link.startswith(f"/memfd:{ANSWERS}-")), None)
        if at_signal is None:
            self.why_not = "the file that it would write into is not accessible"
            return
        if answers is None:
            self.why_not = "it runs an earlier version of this library, which may crash when it writes its stacks"
            return
        owner, inode = answers.removeprefix(f"/memfd:{ANSWERS}-").split()[0].split("-")
        pipe = links.get(f"pipe:[{inode}]")
        if owner != _own_id(pid):
            self.why_not = f"it is a copy of process {owner}, which it was forked from, without the thread that answers"
        elif pipe is None:
            self.why_not = "it has closed the pipe in which it would be asked"
        else:
            self.questions = _opened(pipe, os.O_WRONLY | os.O_NONBLOCK, files)
            self.answers = _opened(links[answers], os.O_RDONLY, files)
            self.at_signal = _opened(at_signal, os.O_RDONLY, files)


class _Look:
    """A request to a running process, and its result."""

    def __init__(self, pid: int, place: _Place, end: float) -> None:
        self._pid = pid
        self._place = place
        self._end = end
        self._question = secrets.token_hex(QUESTION_NBYTES // 2)
        self._is_asked = False
        self._began = time.monotonic()
        self._first = look_at(pid)
        self._was_in_kernel = False

    def text(self) -> WrittenStacks:
        """Ask, and send the signal if that is needed and safe.

        Raises:
            OSError: neither is possible.
        """
        seen, previous = self._first, self._first
        while not self._holds_its_lock(seen, previous):
            if (text := self._answer(until=time.monotonic() + _LOOK_EVERY_S)) is not None:
                return WrittenStacks(text)
            if seen.condition is Condition.STOPPED:
                return WrittenStacks(None, _STOPPED)
            if seen.condition is Condition.ENDED:
                return WrittenStacks(None, _ENDED)
            if time.monotonic() > self._end - _SIGNAL_TIMEOUT_S:
                return WrittenStacks(
                    None, f"it did not answer within {time.monotonic() - self._began:.1f} s; {_UNSAFE}"
                )
            seen, previous = look_at(self._pid), seen
        return self._at_signal()

    def _answer(self, *, until: float) -> str | None:
        """The text that it writes, if it does so by then."""
        while True:
            if not self._is_asked:  # otherwise the pipe is full of the requests of others
                with contextlib.suppress(BlockingIOError):
                    os.write(self._place.questions, self._question.encode())
                    self._is_asked = True
            written = os.pread(self._place.answers, os.fstat(self._place.answers).st_size, 0)
            text = answer_to(self._question, written)
            if text is not None or time.monotonic() > until:
                return text
            time.sleep(_POLL_EVERY_S)

    def _holds_its_lock(self, seen: Vitals, previous: Vitals) -> bool:
        """Whether a thread must be holding the interpreter lock in a C call, during which no frame changes."""
        self._was_in_kernel |= any(thread.is_in_kernel for thread in seen.threads.values())
        if seen.condition is not Condition.ALIVE or seen is previous or seen.is_kept_waiting(previous):
            return False
        counted_s = time.monotonic() - self._began - seen.waited_s(self._first)
        if self._was_in_kernel or not seen.threads:
            return counted_s > _RUNNING_S
        slack_s = _WAKES * counted_s if len(seen.threads) <= _MANY else 0.0
        ran_s = [max(ran_s - slack_s, 0.0) for ran_s in seen.ran_s(self._first).values()]
        if sum(ran_s) <= _RUNS * counted_s:
            return counted_s > _ASLEEP_S
        return counted_s > _RUNNING_S and sum(ran_s) - max(ran_s) <= _OTHERS_RUN * sum(ran_s)

    def _at_signal(self) -> WrittenStacks:
        """Send the signal, and read what the handler writes.

        Raises:
            OSError: it cannot be sent.
        """
        file = self._place.at_signal
        while not _locked(file):  # one at a time, so that the text of one request is not taken for that of another
            if time.monotonic() > self._end - _SIGNAL_TIMEOUT_S:
                return WrittenStacks(None, "another process is already asking it for its stacks")
            time.sleep(_POLL_EVERY_S)
        os.lseek(file, 0, os.SEEK_END)
        if (text := self._answer(until=0)) is not None:
            return WrittenStacks(text)
        seen = look_at(self._pid)
        if seen.condition is Condition.STOPPED:
            return WrittenStacks(None, _STOPPED)
        if not _catches_signal(self._pid):
            return WrittenStacks(None, _ENDED)
        _send_signal(self._pid, self._handler_thread(seen))
        if written := _read_until_quiet(file):
            return WrittenStacks(written, " at a signal, since its interpreter lock is held")
        if (text := self._answer(until=0)) is not None:
            return WrittenStacks(text)
        return WrittenStacks(None, f"it did not handle a signal within {_SIGNAL_TIMEOUT_S:g} s")

    def _handler_thread(self, seen: Vitals) -> int:
        """The thread for the signal; 0 if any will do.

        A running thread may hold the lock: if it returns from C now, it runs the handler instead of Python code. While
        all sleep, it is the thread that would answer, which waits for the lock: in another thread, a C call that waits
        might return with EINTR.
        """
        ran_s = seen.ran_s(self._first)
        tid = max(ran_s, key=ran_s.__getitem__, default=0)
        if ran_s.get(tid, 0) < _RUNS * (time.monotonic() - self._began) or _blocks_signal(self._pid, tid):
            tid = _answering_thread(self._pid)
        return 0 if _blocks_signal(self._pid, tid) else tid


def _read_until_quiet(file: int) -> str:
    written, heard, deadline = b"", 0.0, time.monotonic() + _SIGNAL_TIMEOUT_S
    while (now := time.monotonic()) < deadline and not (written and now - heard > _QUIET_S):
        if more := os.read(file, 1 << 20):
            written, heard = written + more, now
        time.sleep(_POLL_EVERY_S)
    return written.decode("utf-8", "replace").strip()


def _send_signal(pid: int, tid: int) -> None:
    """Send it to a thread, or with 0 to one that the kernel chooses.

    Raises:
        OSError: it cannot be sent.
    """
    tgkill: Any = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)  # glibc has it since 2.30
    if tgkill is None or tid == 0:
        os.kill(pid, SIGNAL)
    elif tgkill(pid, tid, SIGNAL) != 0:
        number = ctypes.get_errno()
        if number != errno.ESRCH:
            raise OSError(number, os.strerror(number))
        os.kill(pid, SIGNAL)  # this thread has ended


def _answering_thread(pid: int) -> int:
    """The thread that `stack_file` has started in the process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for tid in os.listdir(f"/proc/{pid}/task"):
            if Path(f"/proc/{pid}/task/{tid}/comm").read_text(encoding="utf-8", errors="replace").strip() == THREAD:
                return int(tid)
    return 0


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _descriptors(pid: int) -> dict[str, str]:
    """The open files of a process, by the kernel's names; empty if permission is missing."""
    links: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{number}"
            with contextlib.suppress(OSError):
                links[os.readlink(path)] = path
    return links


def _opened(path: str, flags: int, files: contextlib.ExitStack) -> int:
    file = os.open(path, flags)
    files.callback(os.close, file)
    return file


def _own_id(pid: int) -> str:
    """The process id that a process sees itself: it is another one in a container."""
    return _status(f"/proc/{pid}/status").get("NSpid", str(pid)).split()[-1]


def _catches_signal(pid: int) -> bool:
    """Whether the process handles the signal, which would end it otherwise."""
    return _has(f"/proc/{pid}/status", "SigCgt")


def _blocks_signal(pid: int, tid: int) -> bool:
    return _has(f"/proc/{pid}/task/{tid}/status", "SigBlk")


def _has(status: str, signals: str) -> bool:
    """Whether the signal is in one of the sets of a process or thread: proc(5)."""
    return bool(int(_status(status).get(signals, "0"), 16) >> (SIGNAL - 1) & 1)


def _status(path: str) -> dict[str, str]:
    with contextlib.suppress(OSError):
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)
    return {}
