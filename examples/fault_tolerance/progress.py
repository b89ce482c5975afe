"""The line that shows how far the run is: live on a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from examples.fault_tolerance.coordinator import Step
from examples.fault_tolerance.loop import Settings

PLAIN_EVERY_S = 10.0
"""Between two lines where there is no terminal to redraw."""


class ProgressLine:
    """Shows steps and deaths of a run; a context manager."""

    def __init__(self, console: Console, settings: Settings) -> None:
        self._console, self._settings = console, settings
        self._printed_s = time.monotonic() - PLAIN_EVERY_S
        self._bar = Progress(
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("starting", total=settings.deaths or settings.steps)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, step: Step, deaths: int) -> None:
        """Show a step, and how many have died so far."""
        text = f"step {step.number:,}  loss {step.loss:.6f}  groups {step.members}  deaths {deaths:,}"
        self._bar.update(self._task, completed=deaths if self._settings.deaths else step.number, description=text)
        if time.monotonic() - self._printed_s >= PLAIN_EVERY_S and not self._console.is_terminal:
            self._printed_s = time.monotonic()
            self._console.print(text)

    def say(self, news: str) -> None:
        """Show what is done when all steps are made."""
        self._bar.update(self._task, description=news)
