"""Starts a command, and kills every process that it has left when it ends: ``python keeper.py COMMAND...``.

Peers start daemons in sessions of their own, and the daemons of a peer that was killed would stay. So the keeper is the
*subreaper* of all its descendants (prctl(2)): a process that loses its parent becomes the keeper's child. The keeper
passes its standard streams on, and kills the command on SIGTERM or when its own parent dies. Its exit code is that of
the command, and 128 + N if signal N ended it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["descendants", "main"]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_POLL_S = 0.01
_SWEEPS = 500  # five seconds for what does not end at once, such as a process that writes a core dump


def main(arguments: Sequence[str]) -> int:
    """Run the command to its end, then kill what is left of it."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getppid()
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, _stop)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before that took effect
        return 1
    code = -signal.SIGKILL
    try:
        with contextlib.suppress(SystemExit):  # from SIGTERM
            code = subprocess.Popen(arguments, start_new_session=True).wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _sweep()
    return code if code >= 0 else 128 - code


def descendants(root: int) -> Iterator[int]:
    """All descendants of ``root`` whose line of parents still lives."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):  # it has ended in the meantime
                # comm may hold anything, also a parenthesis: fields are counted after the last one.
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    for pid in parents:
        above = parents.get(pid)
        while above is not None and above != root:
            above = parents.get(above)
        if above == root:
            yield pid


def _stop(_number: int, _frame: object) -> None:
    raise SystemExit


def _sweep() -> None:
    """Kill until no process is left: one that is killed may just have started another."""
    for _ in range(_SWEEPS):
        left = list(descendants(os.getpid()))
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
