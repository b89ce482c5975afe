"""`OutputCopy`: what processes of a host write goes to the output of their agent, too, and never waits for it."""

from __future__ import annotations

import contextlib
import os
import select
import stat

_ATOMIC_NBYTES = select.PIPE_BUF
"""What a pipe that can be written to takes without waiting."""


class OutputCopy:
    """One of the standard streams of this process, for who looks at a pod or at an agent's log.

    Whoever reads it may be slow, or may have stopped reading. What does not fit then is left out, and the next text
    that fits is preceded by a line that says how much is missing. It belongs to one thread.
    """

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._poller = select.poll()
        self._poller.register(stream, select.POLLOUT)
        self._fd = _opened(stream)
        self._left_out = 0

    def write(self, chunk: bytes) -> None:
        """Write as much of it as fits."""
        if self._left_out:
            missing = f"\n[skipper] {self._left_out:,} bytes are missing here: they were not read in time\n".encode()
            if self._written(missing) < len(missing):
                self._left_out += len(chunk)
                return
            self._left_out = 0
        self._left_out = len(chunk) - self._written(chunk)

    def close(self) -> None:
        """Close what was opened for it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _written(self, data: bytes) -> int:
        view = memoryview(data)
        with contextlib.suppress(OSError):  # it is full, or nobody can read it any more
            while view:
                if self._fd is not None:
                    view = view[os.write(self._fd, view) :]
                elif self._poller.poll(0):
                    view = view[os.write(self._stream, view[:_ATOMIC_NBYTES]) :]
                else:
                    break
        return len(data) - len(view)


def _opened(stream: int) -> int | None:
    """A description of its own that does not block; ``None`` for a file, which never does, and what can't be opened."""
    with contextlib.suppress(OSError):
        if not stat.S_ISREG(os.fstat(stream).st_mode):
            return os.open(f"/proc/self/fd/{stream}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    return None
