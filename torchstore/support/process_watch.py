"""Learn that a process has died: a pidfd becomes readable, or control tells of another host's. Nothing is polled."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from skipper.control import ProcMesh
from skipper.torchstore.support.process import ProcessId


class DeathNotice:
    """Calls ``on_death(process)``, once, in the event loop in which the process was added.

    Processes of other hosts have no pidfd here: control knows of their ends, as far as it knows them.
    """

    def __init__(self, on_death: Callable[[ProcessId], None]) -> None:
        self._on_death = on_death
        self._fds: dict[ProcessId, int] = {}
        self._afar: set[ProcessId] = set()

    def add(self, process: ProcessId, procs: ProcMesh | None = None) -> None:
        """Watch a process; again is free. One that is dead already is reported soon.

        Args:
            process: Which.
            procs: The same for control, without which one of another host is not watched.
        """
        if not process.is_local:
            if procs is not None:
                self._watch_from_afar(process, procs)
            return
        if process in self._fds:
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

    def _watch_from_afar(self, process: ProcessId, procs: ProcMesh) -> None:
        if process in self._afar:
            return
        loop = asyncio.get_running_loop()
        self._afar.add(process)

        def ended(_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._report_from_afar, process)

        procs.ended.add_done_callback(ended)

    def _report_from_afar(self, process: ProcessId) -> None:
        if process in self._afar:
            self._afar.discard(process)
            self._on_death(process)

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
        self._afar.clear()
