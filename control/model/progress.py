"""Progress of what takes long: the library reports it, programs follow it by `on_progress`, a terminal shows it.

While nobody follows, `begin` returns None and nothing is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from skipper.control.model.progress_feed import (
    INTERVAL_S,
    Follower,
    Progress,
    ProgressFeed,
    ProgressSubscription,
    ProgressTask,
)

__all__ = [
    "Progress",
    "ProgressSubscription",
    "ProgressTask",
    "begin",
    "follow_progress",
    "is_followed",
    "on_progress",
    "take",
    "track_progress",
]

_log = logging.getLogger("skipper.control")

_feed = ProgressFeed()


def is_followed() -> bool:
    """Whether anybody follows the tasks of this process."""
    return bool(_feed.followers)


def begin(description: str, total: int | None, unit: str, names: Iterable[str] = ()) -> ProgressTask | None:
    """Begin a task, if anybody follows.

    Args:
        description: what is done, as an order: ``spawn trainers``.
        total: how much there is to do, in ``unit``; None if that is not known.
        unit: what is counted.
        names: names of the counted things, if they have names.
    """
    return _feed.begin(description, total, unit, names) if _feed.followers else None


def take(progress: Progress) -> None:
    """Take a report of another process about one of its tasks."""
    _feed.take(progress)


def follow_progress(
    follow: Follower,
    *,
    after_s: float = 0.0,
    interval_s: float = INTERVAL_S,
) -> ProgressSubscription:
    """Call a function of the library itself with the tasks of this process.

    Args:
        follow: called on a thread of its own, never twice at the same time. It must not raise.
        after_s: shorter tasks are not reported.
        interval_s: seconds between two calls about running tasks.
    """
    subscription = ProgressSubscription(_feed, follow, after_s=after_s, interval_s=interval_s)
    _feed.follow(subscription)
    return subscription


def on_progress(callback: Callable[[Progress], object]) -> ProgressSubscription:
    """Call a function with the progress of long tasks, for a program that shows it in its own way.

    It reports the spawn of processes and actors, the attachment of hosts, folders that `sync_workspace` sends, puts and
    gets of `torchstore` from 64 MiB on, and the tasks of the program's own `track_progress`. Tasks of actors, in
    processes that are spawned from now on, are reported to the script if they take half a second or longer.

    Args:
        callback: called with a `Progress` when a task begins, about ten times a second while it runs, and when it has
            ended. It runs on a thread of its own, so it may be slow, and never twice at the same time; after a slow
            call it gets the newest state. It must not wait for the reported task. If it raises, the traceback is
            logged, and it is not called again.

    Returns:
        The subscription; `ProgressSubscription.close`, or the end of its ``with`` block, ends it.

    Raises:
        TypeError: ``callback`` cannot be called.
    """
    if not callable(callback):
        raise TypeError(f"on_progress takes a function, not {type(callback).__name__}")

    subscription = ProgressSubscription(_feed, lambda batch: call_each(batch), after_s=0.0, interval_s=INTERVAL_S)

    def call_each(batch: Sequence[Progress]) -> None:
        for progress in batch:
            if subscription not in _feed.followers:  # closed in the meantime
                return
            try:
                callback(progress)
            except Exception:  # noqa: BLE001  (a user's function may raise anything)
                _log.exception("a callback of on_progress raised, and is not called again")
                subscription.close()

    _feed.follow(subscription)
    return subscription


def track_progress(
    description: str, total: int | None = None, unit: str = "steps", *, names: Iterable[str] = ()
) -> ProgressTask:
    """Report a task of the program itself; it is shown like those of the library.

    Args:
        description: what the task does, such as ``train``.
        total: how much there is to do, in ``unit``; None if it is not known.
        unit: what is counted; for ``bytes``, sizes and rates are shown in GB.
        names: names of the counted things, if they have names: those that are not done yet are shown.

    Returns:
        The task, a context manager: `ProgressTask.advance` counts, the end of the block ends it.
    """
    return _feed.begin(description, total, unit, names)
