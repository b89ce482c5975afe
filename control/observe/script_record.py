"""The part of a recorded script (``skipper run``) itself: it writes what ended it, and waits for the last status.

The rest is done by the recorder, which visits the job (see `JobRecorder`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from skipper.control.model.exception_text import describe, summarize
from skipper.control.model.future import Future, Promise
from skipper.control.observe.log_files import about_job
from skipper.control.observe.record import MAX_NBYTES, SCRIPT, event_line
from skipper.control.observe.record_file import BoundedLines
from skipper.control.runtime.requests import Request

if TYPE_CHECKING:
    from skipper.control.runtime.messages import Mail
    from skipper.control.runtime.process import Process

JOB_ENDING: Request[None, None] = Request("job_ending", "has not ended")
"""Answer once the job is about to end, and wait a moment for the next request."""
LAST_LOOK: Request[None, None] = Request("last_look")
"""Note that the recorder has taken the last status of the job."""

ATTACH_S = 3.0
"""How long the end of a short script waits for the recorder, which may still be starting."""
LOOK_S = 2.0
"""How long it waits for the last status."""

_POLL_S = 0.02

_last_look: LastLook | None = None
_words: LastWords | None = None
_lock = threading.Lock()


class LastLook:
    """Lets the recorder take the status of the job once more before it ends.

    Args:
        process: the script's.
        awaited_pid: process id of the recorder; a recorder is the parent of the script that it records.
    """

    def __init__(self, process: Process, awaited_pid: object) -> None:
        self._process = process
        self._awaited_pid = awaited_pid
        self._recorder_id = ""
        self._is_ending: Promise[None] = Promise()
        self._attached, self._looked = threading.Event(), threading.Event()

    def attach(self, recorder_id: str) -> Future[None]:
        """Note a recorder; the future ends when the job is about to end."""
        self._recorder_id = recorder_id
        self._attached.set()
        return self._is_ending

    def done(self) -> None:
        """It has looked."""
        self._looked.set()

    def wait(self) -> None:
        """Announce that the job is about to end, and wait within the bounds, unless the recorder has gone."""
        deadline = time.monotonic() + ATTACH_S
        while os.getppid() == self._awaited_pid and time.monotonic() < deadline and not self._attached.wait(_POLL_S):
            pass
        if not self._attached.is_set():
            return
        self._is_ending.set_result(None)
        deadline = time.monotonic() + LOOK_S
        while not self._looked.wait(_POLL_S) and time.monotonic() < deadline:
            link = self._process.transport.find(self._recorder_id)
            if link is None or link.lost is not None:
                return


class LastWords:
    """Writes into the record what ends the script, as far as it is known here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lines = BoundedLines(folder, SCRIPT, MAX_NBYTES[SCRIPT])
        self._lock = threading.Lock()

    def crashed(self, report: str) -> str:
        """Note a failure that nobody has handled; returns the last line for its report."""
        first = report.partition("\n")[0]
        self._write("unhandled", first, report)
        return f"\nthe record of this run: {self.folder}"

    def raised(self, error: BaseException) -> None:
        """Note an exception that ends the script."""
        self._write("exception", summarize(error), describe(error))

    def _write(self, kind: str, message: str, traceback: str) -> None:
        with self._lock:
            self._lines.append(event_line(kind, "the script", message, traceback=traceback, pid=os.getpid()))


def begin(process: Process, folder: str) -> None:
    """In a script that starts below ``skipper run``."""
    global _last_look, _words
    assert process.root_actor is not None  # it belongs to the script
    with _lock:
        if _words is None:
            _words = LastWords(Path(folder))
            _note_exceptions(_words)
        # A script that this one has started finds the variable, too; the recorder is not its parent.
        _last_look = LastLook(process, about_job(Path(folder)).get("recorder"))
        process.root_actor.note_crash = _words.crashed
        process.ending.before.insert(0, _last_look.wait)  # as long as it can be found


def attached(mail: Mail, _: None) -> Future[None]:
    """Serve `JOB_ENDING`."""
    return Future.of(None) if _last_look is None else _last_look.attach(mail.sender.id)


def looked(mail: Mail, _: None) -> Future[None]:
    """Serve `LAST_LOOK`."""
    if _last_look is not None:
        _last_look.done()
    return Future.of(None)


def _note_exceptions(words: LastWords) -> None:
    before = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        words.raised(error)
        before(kind, error, trace)

    sys.excepthook = excepthook
