"""The line of progress on the script's terminal."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from skipper.control.model import progress
from skipper.control.model.progress import Progress
from skipper.control.observe import terminal_line
from skipper.control.observe.log_lines import label_of
from skipper.control.runtime.progress_reports import AFTER_S

if TYPE_CHECKING:
    from skipper.control.runtime.messages import Mail
    from skipper.control.runtime.process import Process

_DRAW_S = 0.25
_LAST_S = 1.0
"""How long the end of the script waits for a terminal that may have been stopped (Ctrl-S)."""
_MOST_SHOWN_NAMES = 3
_SCALES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def show(process: Process) -> None:
    """In a script that starts: show long tasks on its terminal, if standard error is one."""

    def draw(batch: Sequence[Progress]) -> None:
        running = [each for each in batch if each.state == "running"]
        terminal_line.draw(lambda columns: text_of(running, columns))

    subscription = progress.follow_progress(draw, after_s=AFTER_S, interval_s=_DRAW_S)

    def end() -> None:
        subscription.close()
        eraser = threading.Thread(target=terminal_line.erase, name="control-progress-end", daemon=True)
        eraser.start()
        eraser.join(_LAST_S)

    process.ending.after.append(end)


def take(mail: Mail, told: Progress) -> None:
    """In the script: take a report of another process."""
    progress.take(told)


def text_of(tasks: Iterable[Progress], columns: int) -> str:
    """The line: the oldest task first; equal tasks of several processes are shown as one.

    Args:
        tasks: the running tasks.
        columns: its length at most.
    """
    alike: dict[str, list[Progress]] = {}
    for task in sorted(tasks, key=lambda task: -task.elapsed_s):
        before = alike.setdefault(task.description, [])
        if not before or before[0].unit == task.unit:  # not actors of processes that do not run yet
            before.append(task)
    text = " · ".join(_text(_sum_of(each), len({task.process for task in each})) for each in alike.values())
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= columns else f"{text[: columns - 1]}…"


def _sum_of(tasks: Sequence[Progress]) -> Progress:
    first = tasks[0]
    if len(tasks) == 1:
        return first
    totals = [task.total for task in tasks]
    return dataclasses.replace(
        first,
        completed=sum(task.completed for task in tasks),
        total=None if None in totals else sum(total for total in totals if total is not None),
        waiting_for=(),
    )


def _text(task: Progress, processes: int) -> str:
    """One task in words."""
    parts = [_amount(task)] if task.total is not None or task.completed else []
    if processes > 1:
        parts.append(f"{processes} processes")
    if task.unit == "bytes" and task.completed:
        parts.append(f"{task.rate / 1e9:.2f} GB/s")
    left_s = None if task.waiting_for else task.remaining_s  # tasks that run at the same time have no common rate
    parts.append(_seconds(task.elapsed_s) if left_s is None else f"{_seconds(left_s)} left")
    if task.waiting_for and task.completed:
        named = [label_of(name) for name in task.waiting_for[:_MOST_SHOWN_NAMES]]
        more = (task.total or 0) - task.completed - len(named)
        parts.append(f"waiting for {', '.join(named)}{f' and {more:,} more' if more > 0 else ''}")
    return f"{task.description}: {', '.join(parts)}"


def _amount(task: Progress) -> str:
    if task.unit != "bytes":
        of = "" if task.total is None else f" of {task.total:,}"
        return f"{task.completed:,}{of} {task.unit}"
    scale, unit = next((each for each in _SCALES if max(task.total or 0, task.completed) >= each[0]), (1.0, "bytes"))
    of = "" if task.total is None else f" of {task.total / scale:.1f}"
    return f"{task.completed / scale:.1f}{of} {unit}"


def _seconds(span: float) -> str:
    """A duration for people: 3 s, 2:05, 1:02:03."""
    whole = round(span)
    if whole < 60:
        return f"{whole} s"
    minutes, seconds = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
