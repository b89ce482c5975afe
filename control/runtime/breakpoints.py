"""What `breakpoint()` does in a process of a job: it parks an actor; in a script it does what it always does."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from skipper.control.runtime import running
from skipper.control.runtime.context import current_context

_VARIABLE = "PYTHONBREAKPOINT"


def install() -> None:
    """Let `breakpoint()` park actors, unless the environment names another debugger. May be called again."""
    global _before
    if not os.environ.get(_VARIABLE) and sys.breakpointhook is not _hook:
        _before = sys.breakpointhook
        sys.breakpointhook = _hook


def _hook(*args: Any, **kwargs: Any) -> Any:
    is_a_scripts = current_context.get() is None and (
        not running.is_running() or running.current().root_actor is not None
    )
    if is_a_scripts:  # a person can type into a debugger, which may be a notebook's own
        return _before(*args, **kwargs)
    _park(sys._getframe(1))
    return None


def park_by(park: Callable[[FrameType], object]) -> None:
    """Set the function that parks the thread of an actor at a breakpoint; it gets the frame there."""
    global _park
    _park = park


def _go_on(frame: FrameType) -> None:
    """Continue: without a debugger a breakpoint does nothing."""


_before: Any = sys.__breakpointhook__
_park: Callable[[FrameType], object] = _go_on
