"""Processes that stand still."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_PATIENCE_S = 20.0


def freeze(pid: int) -> None:
    """SIGSTOP, and wait until the last thread stands still: until then the process may still answer."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + _PATIENCE_S
    while not all(map(_stands_still, Path(f"/proc/{pid}/task").iterdir())):
        assert time.monotonic() < end, f"process {pid} does not stop"
        time.sleep(0.001)


def _stands_still(task: Path) -> bool:
    """Whether a thread is in state T, or gone: proc(5)."""
    try:
        stat = (task / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat[stat.rindex(")") + 2] == "T"
