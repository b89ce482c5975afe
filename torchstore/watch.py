"""Learn at once that a process has died: a pidfd becomes readable, nothing is polled."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from torchstore.process import ProcessId


class ProcessWatch:
    """Calls ``on_death(process)``, once, in the event loop in which the process was added.

    Processes of other hosts have no pidfd here and are not watched.
    """

    def __init__(self, on_death: Callable[[ProcessId], None]) -> None:
        self._on_death = on_death
        self._fds: dict[ProcessId, int] = {}

    def add(self, process: ProcessId) -> None:
        """Watch a process; again is free. One that is dead already is reported soon."""
        if process in self._fds or not process.is_local:
            return
        loop = asyncio.get_running_loop()
        try:
            fd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            loop.call_soon(self._on_death, process)
            return
        if not process.is_alive():  # the id has been given to somebody else before the pidfd was opened
            os.close(fd)
            loop.call_soon(self._on_death, process)
            return
        self._fds[process] = fd
        loop.add_reader(fd, self._report, process)

    def _report(self, process: ProcessId) -> None:
        self._forget(process)
        self._on_death(process)

    def _forget(self, process: ProcessId) -> None:
        fd = self._fds.pop(process)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)

    def close(self) -> None:
        """Stop watching; call it in the same event loop."""
        for process in list(self._fds):
            self._forget(process)
