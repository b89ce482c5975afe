"""A file in memory into which a process writes its stacks when it is sent a signal, whatever it is doing.

`faulthandler` writes them from the signal's handler, so that the interpreter lock may be held for ever. The file has no
path: whoever may look into the process finds it among its descriptors (see `control.observe.stacks`).
"""

from __future__ import annotations

import faulthandler
import os
import signal

SIGNAL = signal.SIGRTMIN + 7
"""One of those that nobody uses for anything by itself."""

NAME = "skipper-stacks"


def offer() -> None:
    """Be ready to write the stacks of this process; again is free."""
    global _fd
    if _fd is None:
        _fd = os.memfd_create(NAME)
        os.fchmod(_fd, 0o600)
        faulthandler.register(SIGNAL, file=_fd, all_threads=True)


def _forget() -> None:
    """A forked copy shares the file with its parent: it gets one of its own."""
    global _fd
    if _fd is not None:
        os.close(_fd)
        _fd = None


_fd: int | None = None
os.register_at_fork(after_in_child=_forget)
