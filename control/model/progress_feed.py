"""Tasks that take long, and who follows them: `ProgressFeed` reports the tasks of a process to its followers.

Followers are called on one thread of their own, so that a slow follower delays no work; the next call reports only
the newest state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic as _now
from typing import Final, Literal, Self

INTERVAL_S: Final = 0.1
"""How often a running task is reported to followers."""

SILENCE_S: Final = 5.0
"""A task of another process counts as failed if no report of it comes for this long."""

MOST_NAMES: Final = 16
"""How many of the things that a task waits for are named."""

_MOST_ENDED = 4096
"""How many ends of tasks are kept for a slow follower; the oldest are dropped."""
_CLOSE_S = 5.0
"""How long `ProgressSubscription.close` waits for a callback that runs."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a task.

    Attributes:
        task_id: the number of the task, unique in its process.
        process: the name of the process that does it, such as ``trainers{'gpus': 3}``; empty for this one.
        description: what the task does, such as ``spawn trainers`` or ``get policy``.
        completed: how much is done, in ``unit``.
        total: how much there is to do; None if it is not known.
        unit: what is counted: ``processes``, ``actors``, ``hosts``, ``bytes``, or a word that the program chooses.
        elapsed_s: seconds since the task began.
        waiting_for: names that are not done yet, at most 16, if the counted things have names.
        state: ``running``; in the last report of a task ``finished`` or ``failed``.

    Example:
        ```python
        import threading

        from skipper import control
        from skipper.control import Progress, ProgressSubscription, ProgressTask

        ended = threading.Event()

        def show(progress: Progress) -> None:
            if progress.state == "finished":
                print(progress.description, progress.completed, progress.total, progress.unit)
                ended.set()

        subscription: ProgressSubscription = control.on_progress(show)
        task: ProgressTask
        with control.track_progress("tokenize", total=3, unit="files") as task:
            for _ in range(3):
                task.advance()
        ended.wait(60)  # tokenize 3 3 files
        subscription.close()
        ```
    """

    task_id: int
    process: str
    description: str
    completed: int
    total: int | None
    unit: str
    elapsed_s: float
    waiting_for: tuple[str, ...] = ()
    state: Literal["running", "finished", "failed"] = "running"

    @property
    def rate(self) -> float:
        """Units per second, on average since the task began."""
        return self.completed / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the task ends, at this rate; None if that is not known."""
        if self.total is None or not self.completed or self.elapsed_s <= 0:
            return None
        return max(self.total - self.completed, 0) / self.rate


Follower = Callable[[Sequence[Progress]], None]
"""Takes the newest state of each running task, and of those that have ended since the last call."""


class ProgressTask:
    """A task whose progress the program reports; a context manager. Any thread may use it.

    The example of `Progress` shows one.
    """

    def __init__(
        self, feed: ProgressFeed, number: int, description: str, total: int | None, unit: str, names: Iterable[str]
    ) -> None:
        self._feed = feed
        self._number = number
        self._description = description
        self._total = total
        self._unit = unit
        self._completed = 0
        self._waiting = dict.fromkeys(names)
        self._begin_s = _now()
        self._state: Literal["running", "finished", "failed"] = "running"

    @property
    def number(self) -> int:
        """The number of the task, unique in its process."""
        return self._number

    def advance(self, amount: int = 1, *, name: str | None = None) -> None:
        """Count this much more as done; ``name``: the name of the thing that is done now."""
        with self._feed.lock:
            self._completed += amount
            if name is not None:
                self._waiting.pop(name, None)

    def describe(self, description: str) -> None:
        """Change the description of the task."""
        self._description = description

    def end(self, *, failed: bool = False) -> None:
        """End the task; calling it again does nothing."""
        self._feed.end(self, "failed" if failed else "finished")

    def seen(self) -> Progress:
        """How far the task is; the caller holds the feed's lock."""
        waiting = tuple(name for name, _ in zip(self._waiting, range(MOST_NAMES), strict=False))
        return Progress(
            self._number,
            "",
            self._description,
            self._completed,
            self._total,
            self._unit,
            _now() - self._begin_s,
            waiting,
            self._state,
        )

    def conclude(self, state: Literal["finished", "failed"]) -> Progress | None:
        """How the task has ended; None if that was reported already. The caller holds the feed's lock."""
        if self._state != "running":
            return None
        self._state = state
        return self.seen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.end(failed=kind is not None)


class ProgressSubscription:
    """What `on_progress` returns: it calls the function until it is closed; a context manager.

    The example of `Progress` shows one.

    Attributes:
        interval_s: seconds between two calls about running tasks.
    """

    def __init__(self, feed: ProgressFeed, follow: Follower, *, after_s: float, interval_s: float) -> None:
        self.interval_s = interval_s
        self._feed = feed
        self._follow = follow
        self._after_s = after_s
        self._told_s = float("-inf")

    def close(self) -> None:
        """Stop calling the function, after the ends of all ended tasks were reported to it. It may be called again.

        If the function is running, this waits some seconds for it, unless it is called from within the function.
        """
        self._feed.unfollow(self)

    def tell(self, running: Sequence[Progress], ended: Sequence[Progress], now_s: float) -> None:
        """Call the function, if there is something to report; for the feed."""
        batch = [each for each in ended if each.elapsed_s >= self._after_s]
        if batch or now_s - self._told_s >= self.interval_s:
            self._told_s = now_s
            batch += (each for each in running if each.elapsed_s >= self._after_s)
        if batch:
            self._follow(batch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ProgressFeed:
    """The tasks of a process, its own and those that others report, and their followers.

    Attributes:
        lock: guards all of it, the tasks included; held for short.
        followers: the followers.
    """

    def __init__(self) -> None:
        self.followers: tuple[ProgressSubscription, ...] = ()
        self._is_watching_forks = False
        self._clear()

    def _clear(self) -> None:
        self.lock = threading.Lock()
        self.followers = ()
        self._begun = threading.Condition(self.lock)
        self._telling = threading.RLock()
        self._is_telling = False
        self._tasks: dict[int, ProgressTask] = {}
        self._elsewhere: dict[tuple[str, int], tuple[Progress, float]] = {}
        self._ended: deque[Progress] = deque(maxlen=_MOST_ENDED)
        self._number = 0
        self._thread: threading.Thread | None = None
        self._pause = threading.Event()
        """The wait between two rounds of reports; set when there may be nothing to wait for."""

    def begin(self, description: str, total: int | None, unit: str, names: Iterable[str]) -> ProgressTask:
        """Begin a task."""
        with self.lock:
            self._number += 1
            task = self._tasks[self._number] = ProgressTask(self, self._number, description, total, unit, names)
            self._wake()
        return task

    def end(self, task: ProgressTask, state: Literal["finished", "failed"]) -> None:
        """End a task."""
        with self.lock:
            self._tasks.pop(task.number, None)
            if (end := task.conclude(state)) is None or not self.followers:
                return
            self._ended.append(end)
            if not self._tasks:
                self._pause.set()

    def take(self, progress: Progress) -> None:
        """Take a report of another process about one of its tasks."""
        with self.lock:
            if not self.followers:
                return
            key = progress.process, progress.task_id
            if progress.state == "running":
                self._elsewhere[key] = progress, _now() + SILENCE_S
            else:
                self._elsewhere.pop(key, None)
                self._ended.append(progress)
            self._wake()

    def follow(self, subscription: ProgressSubscription) -> None:
        """Add a follower."""
        with self.lock:
            if not self._is_watching_forks:
                self._is_watching_forks = True
                os.register_at_fork(after_in_child=self._clear)  # a forked copy has no thread and no followers
            self.followers = (*self.followers, subscription)
            self._wake()

    def unfollow(self, subscription: ProgressSubscription) -> None:
        """See `ProgressSubscription.close`."""
        is_free = self._telling.acquire(timeout=_CLOSE_S)
        try:
            if is_free and not self._is_telling and subscription in self.followers:
                self.tell()
            with self.lock:
                self.followers = tuple(each for each in self.followers if each is not subscription)
                if not self.followers:
                    self._elsewhere.clear()
                    self._ended.clear()
        finally:
            if is_free:
                self._telling.release()

    def tell(self) -> None:
        """Report to all followers what is new."""
        with self._telling:
            now_s = _now()
            with self.lock:
                ended = list(self._ended)
                self._ended.clear()
                for key, (progress, until_s) in list(self._elsewhere.items()):
                    if now_s > until_s:
                        del self._elsewhere[key]
                        ended.append(dataclasses.replace(progress, state="failed"))
                running = [task.seen() for task in self._tasks.values()]
                running += (progress for progress, _ in self._elsewhere.values())
                followers = self.followers
            self._is_telling = True
            try:
                for follower in followers:
                    follower.tell(running, ended, now_s)
            finally:
                self._is_telling = False

    def _wake(self) -> None:
        """Wake the thread, which is started with the first task that is followed. With the lock."""
        if not self.followers or not (self._tasks or self._elsewhere or self._ended):
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="control-progress", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter ends, or cannot start a thread: no reports
                self._thread.start()
        self._begun.notify_all()

    def _run(self) -> None:
        while True:
            with self.lock:
                self._begun.wait_for(lambda: bool(self.followers and (self._tasks or self._elsewhere or self._ended)))
            self.tell()
            followers = self.followers
            self._pause.wait(min((each.interval_s for each in followers), default=INTERVAL_S))
            self._pause.clear()
