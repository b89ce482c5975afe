"""The progress of a run, on a terminal: the current part, and its syncs. On a pipe: nothing."""

from __future__ import annotations

import sys
from types import TracebackType

from skipper.control import ProgressTask, track_progress
from skipper.control.observe import terminal_line

__all__ = ["SyncProgress"]


class SyncProgress:
    """What the line of progress says, for as long as this is entered."""

    def __init__(self) -> None:
        self._task: ProgressTask | None = None

    def __enter__(self) -> SyncProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def stage(self, name: str, syncs: int | None = None) -> None:
        """A part begins, with that many syncs; None: the number is not known, or there are none."""
        self._end()
        self._task = track_progress(name, syncs, "syncs")

    def synced(self) -> None:
        """One more sync is complete."""
        if self._task is not None:
            self._task.advance()

    def say(self, line: str) -> None:
        """A line that stays, on a terminal."""
        if terminal_line.is_shown():
            print(line, file=sys.stderr, flush=True)

    def _end(self) -> None:
        if self._task is not None:
            self._task.end()
