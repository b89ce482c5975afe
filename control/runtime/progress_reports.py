"""Processes of a job tell the script of what takes them long, where it wants to know.

The wish goes with the environment of the processes that are spawned, as tracing's does, so that it comes to all hosts.
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
"""What takes less is neither shown on the terminal, nor told to the script."""
_TELL_S = 0.5
"""How often the script is told of a task that goes on."""

PROGRESS: Request[Progress, None] = Request("progress")
"""Take note of how far a task of another process is; nobody answers."""


def is_off() -> bool:
    """Whether the user wants no line on the terminal.

    Raises:
        ValueError: the variable holds another word.
    """
    mode = os.environ.get(VARIABLE, "")
    if mode not in ("", OFF, TELL):
        raise ValueError(f"{VARIABLE} is {OFF}, or not set, not {mode!r}")
    return mode == OFF


def is_to_tell() -> bool:
    """Whether this process, which somebody has spawned, is to tell its script."""
    return os.environ.get(VARIABLE) == TELL


def environment() -> dict[str, str]:
    """The variable for processes that are spawned now: whether anybody follows is known here."""
    if progress.is_followed():
        return {VARIABLE: TELL}
    return {VARIABLE: ""} if is_to_tell() else {}


def tell_script(process: Process) -> None:
    """Tell the script of the tasks of this process, which has just started."""

    def tell(batch: Sequence[Progress]) -> None:
        with contextlib.suppress(ControlError):  # there is nobody to tell any more
            for each in batch:
                if not process.closing:
                    process.send(process.root, PROGRESS.message(dataclasses.replace(each, process=process.me.name)))

    subscription = progress.follow_progress(tell, after_s=AFTER_S, interval_s=_TELL_S)
    process.ending.after.append(subscription.close)
