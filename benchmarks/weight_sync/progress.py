"""How far a run is, on a terminal: the stage, and how many bytes of those that it will move. On a pipe: nothing."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["SyncProgress"]


class SyncProgress:
    """One line on standard error, for as long as it is entered."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
        self._shown = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal, refresh_per_second=2
        )
        self._line = self._shown.add_task("", total=None)

    def __enter__(self) -> SyncProgress:
        self._shown.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.stop()

    def stage(self, name: str, nbytes: int | None = None) -> None:
        """Something else begins, that will move so many bytes; None: that is not known, or nothing."""
        self._shown.reset(self._line, description=name, total=nbytes)

    def moved(self, nbytes: int) -> None:
        """So many more bytes have come."""
        self._shown.advance(self._line, nbytes)

    def say(self, line: str) -> None:
        """A line that stays, above."""
        if not self._shown.disable:
            self._shown.console.print(line, highlight=False)
