"""`Ending`: how the runtime of a process ends, that of a script and that of a child."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from control.errors import ControlError

if TYPE_CHECKING:
    from control.runtime.loop import LoopThread
    from control.runtime.process import Process

CLOSE_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 5.0


class Ending:
    """The end of one process' runtime.

    Attributes:
        before: what is to be called first when the script's job ends, or a process leaves the job that it has joined.
        settled: what is to be called once the actors have ended, as long as there are links to other processes.
        after: what is to be called last.
    """

    def __init__(self, process: Process, loop_thread: LoopThread) -> None:
        self.before: list[Callable[[], None]] = []
        self.settled: list[Callable[[], None]] = []
        self.after: list[Callable[[], None]] = []
        self._process = process
        self._loop_thread = loop_thread

    def shutdown(self, *, grace_s: float) -> None:
        """Stop what the script owns, in good order where that takes no longer than ``grace_s``; then leave the job."""
        process = self._process
        if process.closing:
            return
        deadline = time.monotonic() + grace_s
        for call in self.before:
            call()
        if process.root_cell is not None:
            process.root_cell.stop_owned(deadline)
        process.closing = True
        self._stop_cells(deadline)
        process.children.hurry()
        children = process.children.alive()
        process.children.kill([child.ref.id for child in children], "was killed because the script ends")
        for child in children:
            child.ended.get(KILL_TIMEOUT_S)
        process.children.close()
        for call in list(self.settled):
            call()
        process.loans.clear()
        self._loop_thread.run(process.transport.close(), timeout=CLOSE_TIMEOUT_S)
        for call in self.after:
            call()

    def exit_in_good_order(self, acknowledge: Callable[[], None]) -> None:
        """End a worker process: its actors first. Returns at once."""
        threading.Thread(target=self._exit, args=(acknowledge,), name="control-exit", daemon=True).start()

    def _exit(self, acknowledge: Callable[[], None]) -> None:
        process = self._process
        self._stop_cells(time.monotonic() + process.settings.stop_timeout_s)
        process.trees.branches.flush()
        for call in list(self.settled):
            call()
        process.closing = True
        acknowledge()
        self._loop_thread.run(process.transport.close(), timeout=CLOSE_TIMEOUT_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _stop_cells(self, deadline: float) -> None:
        cells = self._process.cells
        stopped = [cells.stop(cell.uid) for cell in reversed(cells.live())]
        # Those, too, that somebody has stopped before: they may be in the middle of their cleanup.
        for end in [*stopped, *(cell.ended for cell in cells.ending_in_good_order())]:
            try:
                end.get(max(deadline - time.monotonic(), 0))
            except ControlError:
                continue  # it did not end in time, or its cleanup raised, which was logged: the process ends anyway
