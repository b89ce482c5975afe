"""How far the run is: in the line of progress on a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console

from examples.rl.loop import Step
from skipper.control import ProgressTask, track_progress

PLAIN_LINES = 10
"""How many lines a run prints where there is no terminal."""


class StepLine:
    """Shows each step of a run; a context manager."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._task: ProgressTask | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.end(failed=error is not None)

    def update(self, step: Step) -> None:
        """Show ``step``."""
        text = (
            f"reward {step.reward:.3f}  solved {step.solved:.3f}  version {step.sync.version} "
            f"(from {step.sampled_by})  sync {step.sync.seconds * 1e3:.1f} ms"
        )
        if self._task is None:  # until now the processes have started, which has lines of its own
            self._task = track_progress("train", self._steps)
        self._task.describe(f"train (reward {step.reward:.3f}, sync {step.sync.seconds * 1e3:.0f} ms)")
        self._task.advance()
        every = max(self._steps // PLAIN_LINES, 1)
        wanted = step.number % every == 0 or step.number in (1, self._steps)
        if wanted and not sys.stderr.isatty():
            self._console.print(f"step {step.number}/{self._steps}  {text}", highlight=False)

    def tell(self, news: str) -> None:
        """Print a line of its own."""
        self._console.print(news, highlight=False, soft_wrap=True)
