"""`JoinedProcesses`: the processes that have joined the job whose root this process is."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from skipper.control.model.future import Future, Promise
from skipper.control.runtime.interfaces import OwnedMesh
from skipper.control.runtime.messages import Mail
from skipper.control.runtime.requests import JOIN
from skipper.control.wire.process_ref import ProcessRef

if TYPE_CHECKING:
    from skipper.control.runtime.request_server import RequestServer

_log = logging.getLogger("skipper.control")


class JoinedProcesses:
    """The processes that have joined, and futures for their leaving. For any thread."""

    def __init__(self, requests: RequestServer) -> None:
        self._lock = threading.Lock()
        self._here: dict[str, tuple[OwnedMesh, Promise[str]]] = {}
        requests.serve(JOIN, self._join)

    def add(self, member: ProcessRef, mesh: OwnedMesh) -> None:
        """Note a process that has joined, which ``mesh`` refers to."""
        with self._lock:
            self._here.setdefault(member.id, (mesh, Promise()))

    def leave(self, member: ProcessRef, reason: str) -> None:
        """Note the end of a process, if it has joined."""
        with self._lock:
            known = self._here.pop(member.id, None)
        if known is not None:
            _log.info("%s has left the job: %s", member.name, reason)
            known[1].set_result(reason)

    def end_of(self, process_id: str) -> Future[str] | None:
        """A future that ends with the reason when this process leaves; None if it is not here."""
        with self._lock:
            known = self._here.get(process_id)
        return known[1] if known is not None else None

    def meshes(self) -> tuple[OwnedMesh, ...]:
        """Each of them as a mesh of one process, in the order in which they joined."""
        with self._lock:
            return tuple(mesh for mesh, _ in self._here.values())

    def _join(self, mail: Mail, mesh: OwnedMesh) -> Future[None]:
        self.add(mail.sender, mesh)
        return Future.of(None)
