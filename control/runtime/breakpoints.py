"""What `breakpoint()` does in a process of a job: in an actor it parks that, in a script it does what it always did."""

from __future__ import annotations

import os
import sys
from typing import Any

_VARIABLE = "PYTHONBREAKPOINT"


def install() -> None:
    """Let `breakpoint()` park actors; void where the environment names another debugger, or none. Again is free."""
    global _before
    if not os.environ.get(_VARIABLE) and sys.breakpointhook is not _hook:
        _before = sys.breakpointhook
        sys.breakpointhook = _hook


def _hook(*args: Any, **kwargs: Any) -> Any:
    from skipper.control.runtime import current_runtime
    from skipper.control.runtime.context import current_context

    is_a_scripts = current_context.get() is None and (
        not current_runtime.is_running() or current_runtime.current().root_actor is not None
    )
    if is_a_scripts:  # there is somebody to type into a debugger, and it may be a notebook's own
        return _before(*args, **kwargs)
    from skipper.control.observe.debugger import park

    park(sys._getframe(1))
    return None


_before: Any = sys.__breakpointhook__
