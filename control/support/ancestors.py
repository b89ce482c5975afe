"""`ancestors`: the processes from which this one descends."""

from __future__ import annotations

import os
from pathlib import Path


def ancestors() -> frozenset[int]:
    """The process ids of this process, its parent, and so on; without those that cannot be seen from here."""
    pid, found = os.getpid(), set[int]()
    while pid > 0 and pid not in found:
        found.add(pid)
        pid = _parent_of(pid)
    return frozenset(found)


def _parent_of(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:  # it has just ended
        return 0
    return int(stat.rpartition(b")")[2].split()[1])  # ppid of proc_pid_stat(5): a name may have brackets
