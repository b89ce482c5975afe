"""Processes of a job report long tasks to the script, if it wants to know.

The wish travels in the environment of spawned processes, like tracing's, so that it reaches all hosts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from skipper.control.model import progress
from skipper.control.model.errors import ControlError
from skipper.control.model.progress import Progress
from skipper.control.runtime.requests import Request

if TYPE_CHECKING:
    from skipper.control.runtime.process import Process

VARIABLE: Final = "SKIPPER_PROGRESS"
"""Environment variable: ``off`` shows no line of progress on the script's terminal."""
OFF, TELL = "off", "tell"

AFTER_S: Final = 0.5
"""Shorter tasks are neither shown on the terminal nor reported to the script."""
_TELL_S = 0.5
"""How often a running task is reported to the script."""

PROGRESS: Request[Progress, None] = Request("progress")
"""Note the progress of a task of another process; this request has no answer."""


def is_off() -> bool:
    """Whether the user wants no progress line on the terminal.

    Raises:
        ValueError: the variable has an unknown value.
    """
    mode = os.environ.get(VARIABLE, "")
    if mode not in ("", OFF, TELL):
        raise ValueError(f"{VARIABLE} is {OFF}, or not set, not {mode!r}")
    return mode == OFF


def is_to_tell() -> bool:
    """Whether this process, which was spawned, is to report to its script."""
    return os.environ.get(VARIABLE) == TELL


def environment() -> dict[str, str]:
    """The variable for processes that are spawned now: this process knows whether progress is followed."""
    if progress.is_followed():
        return {VARIABLE: TELL}
    return {VARIABLE: ""} if is_to_tell() else {}


def tell_script(process: Process) -> None:
    """Report the tasks of this process, which has just started, to the script."""

    def tell(batch: Sequence[Progress]) -> None:
        with contextlib.suppress(ControlError):  # the script is gone
            for each in batch:
                if not process.closing:
                    process.send(process.root, PROGRESS.message(dataclasses.replace(each, process=process.me.name)))

    subscription = progress.follow_progress(tell, after_s=AFTER_S, interval_s=_TELL_S)
    process.ending.after.append(subscription.close)
