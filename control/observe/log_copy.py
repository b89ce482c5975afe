"""`OutputCopy`: copies what processes of a host write to the output of their agent, and never waits for it."""

from __future__ import annotations

import contextlib
import os
import select
import stat

_ATOMIC_NBYTES = select.PIPE_BUF
"""How many bytes a writable pipe takes without waiting."""


class OutputCopy:
    """One of the standard streams of this process, for the readers of a pod's or an agent's log.

    A reader may be slow, or may have stopped reading. Text that does not fit then is left out, and a line before the
    next text that fits says how much is missing. It belongs to one thread.
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
    """A new open file description that does not block; None for a file, which never blocks, or if opening fails."""
    with contextlib.suppress(OSError):
        if not stat.S_ISREG(os.fstat(stream).st_mode):
            return os.open(f"/proc/self/fd/{stream}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    return None
