"""The bounds of the runtime, set once by the script and handed down to every process."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from skipper.control.model.bounds import LONGEST_S, check_count

PRELOAD_VARIABLE = "SKIPPER_PRELOAD"
"""Environment variable with the modules to preload, separated by commas, where `configure` has not named any."""

_MOST = 1 << 62
"""The largest value of limits that are counts."""

_LEAST = {"max_unhandled": 256, "max_unhandled_nbytes": 16 << 20, "tree_threshold": 1, "tree_fanout": 2}
"""Room is given back in batches; a limit has to leave space for some of them. A tree has to branch."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits of the runtime. Values whose names end in ``_s`` are seconds.

    Attributes:
        heartbeat_s: a process that sends no heartbeat for this long counts as dead, unless the operating system shows
            that it is alive: not stopped, but without CPU time or without the GIL.
        unresponsive_s: such a process counts as dead after this long, without the time in which it could not run;
            None: ten times `heartbeat_s`.
        connect_timeout_s: time for a process to become reachable after its launch.
        init_timeout_s: time for the ``__init__`` of an actor, which may load a model.
        stop_timeout_s: time for a `stop`: actors handle their messages and clean up, also in the meshes that they own,
            and processes end. When most of the time has passed, what still runs is interrupted.
        exit_grace_s: the same at the end of the script. Afterwards processes are killed.
        fault_exit_s: time for the main thread to end, with its ``finally`` blocks, after it was interrupted for a
            failure that nobody has heard of. Afterwards the process ends without it.
        send_timeout_s: how long a sender waits for room in the mailbox of an actor.
        max_unhandled: unhandled messages from one process to one actor before senders wait; 256 or more.
        max_unhandled_nbytes: the same in bytes of payload; 16 MiB or more.
        tree_threshold: a cast to more actors than this goes down a tree of their processes; 1 or more.
        tree_fanout: maximum number of processes to which a node of the tree forwards, the sender included; 2 or more.
        preload: modules that processes have already imported when they start, because they are forked from a process
            that has; None: those of the environment variable ``SKIPPER_PRELOAD``, if it is set.

    Example:
        ```python
        from skipper import control
        from skipper.control import Settings

        settings: Settings = control.configure(heartbeat_s=5.0, preload=["statistics"])
        print(settings.heartbeat_s, settings.unresponsive(), settings.preload)  # 5.0 50.0 ('statistics',)
        ```
    """

    heartbeat_s: float = 10.0
    unresponsive_s: float | None = None
    connect_timeout_s: float = 60.0
    init_timeout_s: float = 600.0
    stop_timeout_s: float = 30.0
    exit_grace_s: float = 1.0
    fault_exit_s: float = 30.0
    send_timeout_s: float = 30.0
    max_unhandled: int = 10_000
    max_unhandled_nbytes: int = 256 << 20
    tree_threshold: int = 16
    tree_fanout: int = 8
    preload: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if name == "preload":
                _check_modules(value)
                continue
            if name == "unresponsive_s" and value is None:
                continue
            least = _LEAST.get(name)
            if least is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise TypeError(f"{name} must be an int, not {value!r}")
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise TypeError(f"{name} must be a number of seconds, not {value!r}")
            if least is not None:
                check_count(name, value, least, _MOST)
                continue
            if not 0 < value <= LONGEST_S:
                raise ValueError(f"{name} must be positive and at most {LONGEST_S:g}, got {value}")

    def unresponsive(self) -> float:
        """How long a process that the operating system shows as alive may be silent; at least `heartbeat_s`."""
        bound = 10 * self.heartbeat_s if self.unresponsive_s is None else self.unresponsive_s
        return max(bound, self.heartbeat_s)

    def preloaded(self) -> tuple[str, ...]:
        """The modules to preload, by these settings or else by the environment."""
        if self.preload is not None:
            return self.preload
        named = (name.strip() for name in os.environ.get(PRELOAD_VARIABLE, "").split(","))
        return tuple(name for name in named if name)


def _check_modules(names: tuple[str, ...] | None) -> None:
    for name in names or ():
        if not isinstance(name, str):
            raise TypeError(f"preload must be names of modules, not {name!r}")
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"preload: {name!r} is not a name of a module")


_settings = Settings()
_take_over: Callable[[Settings], Sequence[str] | None] | None = None
_OF_THE_CALLER = {"exit_grace_s", "fault_exit_s", "tree_threshold", "tree_fanout", "preload"}
"""Bounds for the process that ends its job, casts or launches: running processes need not know them."""
_OF_THE_JOB = "heartbeat_s"
"""Both ends of a link need the same value."""
_NAMES = 8


def configure(
    *,
    heartbeat_s: float | None = None,
    unresponsive_s: float | None = None,
    connect_timeout_s: float | None = None,
    init_timeout_s: float | None = None,
    stop_timeout_s: float | None = None,
    exit_grace_s: float | None = None,
    fault_exit_s: float | None = None,
    send_timeout_s: float | None = None,
    max_unhandled: int | None = None,
    max_unhandled_nbytes: int | None = None,
    tree_threshold: int | None = None,
    tree_fanout: int | None = None,
    preload: Sequence[str] | None = None,
) -> Settings:
    """Change limits for this process from now on, and for processes spawned later; None keeps a limit.

    Call it in the script before the first mesh is spawned: processes that already run keep the limits that they started
    with, and the whole job keeps its ``heartbeat_s``; a `RuntimeWarning` names them. ``stop_timeout_s`` holds at once
    for all that this process stops.

    Returns:
        The settings in force.

    Raises:
        ValueError: a limit is not positive, or too small, or an element of ``preload`` is not the name of a module.
        TypeError: a limit is not a number, or ``preload`` is not a sequence of names.
    """
    global _settings
    given: dict[str, Any] = {
        "heartbeat_s": heartbeat_s,
        "unresponsive_s": unresponsive_s,
        "connect_timeout_s": connect_timeout_s,
        "init_timeout_s": init_timeout_s,
        "stop_timeout_s": stop_timeout_s,
        "exit_grace_s": exit_grace_s,
        "fault_exit_s": fault_exit_s,
        "send_timeout_s": send_timeout_s,
        "max_unhandled": max_unhandled,
        "max_unhandled_nbytes": max_unhandled_nbytes,
        "tree_threshold": tree_threshold,
        "tree_fanout": tree_fanout,
        "preload": _names(preload),
    }
    before = _settings
    _settings = dataclasses.replace(before, **{name: bound for name, bound in given.items() if bound is not None})
    if _settings != before and _take_over is not None and (running := _take_over(_settings)) is not None:
        _warn_of_the_late(before, _settings, running)
    return _settings


def on_change(take_over: Callable[[Settings], Sequence[str] | None]) -> None:
    """Register a function that gets new bounds.

    Args:
        take_over: applies them if it can; returns the names of the processes that keep the old ones, or None if
            no job runs.
    """
    global _take_over
    _take_over = take_over


def _warn_of_the_late(before: Settings, after: Settings, running: Sequence[str]) -> None:
    changed = [name for name in Settings.__slots__ if getattr(before, name) != getattr(after, name)]
    late = [f"{name}={getattr(before, name)}" for name in changed if name not in {*_OF_THE_CALLER, _OF_THE_JOB}]
    said = []
    if _OF_THE_JOB in changed:
        said.append(f"the running job keeps {_OF_THE_JOB}={before.heartbeat_s:g} to its end")
    if late and running:
        others = f" and {len(running) - _NAMES} others" if len(running) > _NAMES else ""
        said.append(f"{', '.join(running[:_NAMES])}{others} are already running and keep {', '.join(late)}")
    if said:
        what = f"configure was called too late: {'; '.join(said)}. Call it before the first process is spawned."
        warnings.warn(what, RuntimeWarning, stacklevel=3)


def _names(modules: Sequence[str] | None) -> tuple[str, ...] | None:
    if isinstance(modules, str):
        raise TypeError(f"preload must be a sequence of names, not the string {modules!r}")
    return None if modules is None else tuple(modules)


def settings() -> Settings:
    """The settings in force."""
    return _settings


def adopt(settings: Settings) -> None:
    """Take over the settings of the process that launched this one."""
    global _settings
    _settings = settings
