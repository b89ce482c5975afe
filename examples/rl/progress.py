"""The line that shows how far the run is: live on a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.rl.loop import Step

PLAIN_LINES = 10
"""How many lines a run prints where there is no terminal to redraw."""


class StepLine:
    """Shows each step of a run; a context manager."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            refresh_per_second=4,  # the processes at work need the cores more than the line does
        )
        self._task = self._bar.add_task("starting", total=steps)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, step: Step) -> None:
        """Show ``step``."""
        text = (
            f"reward {step.reward:.3f}  solved {step.solved:.3f}  version {step.sync.version} "
            f"(from {step.sampled_by})  sync {step.sync.seconds * 1e3:.1f} ms"
        )
        self._bar.update(self._task, completed=step.number, description=text)
        every = max(self._steps // PLAIN_LINES, 1)
        wanted = step.number % every == 0 or step.number in (1, self._steps)
        if wanted and not self._console.is_terminal:
            self._console.print(f"step {step.number}/{self._steps}  {text}", highlight=False)

    def tell(self, news: str) -> None:
        """Print a line of its own."""
        self._console.print(news, highlight=False, soft_wrap=True)
