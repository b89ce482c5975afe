"""Processes of benchmarks that do not outlive the process that started them."""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["follow_parent"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def follow_parent(parent: int, number: signal.Signals) -> bool:
    """Have the kernel send this process a signal when its parent ends, for any reason.

    Args:
        parent: The process id of the parent.
        number: The signal.

    Returns:
        Whether the parent lives: it may have ended before this took effect.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    return os.getppid() == parent
