"""Progress of spawns: if somebody follows it, each process or actor is asked to answer when it is up."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from skipper.control.api.mesh_base import MeshBase
from skipper.control.model import progress
from skipper.control.model.errors import ControlError
from skipper.control.model.future import Future, peek
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime.requests import PING, READY, Request

if TYPE_CHECKING:
    from skipper.control.wire.process_ref import ProcessRef


def report_procs(mesh: MeshBase) -> None:
    """Report how many processes of a mesh that is being spawned are up."""
    if progress.is_followed():
        _report(mesh, PING, "processes", mesh.members)


def report_actors(mesh: MeshBase, places: Iterable[tuple[int, ProcessRef]]) -> None:
    """Report how many actors of a mesh that is being spawned have been constructed; ``places``: by rank."""
    if progress.is_followed():
        _report(mesh, READY, "actors", [member for _, member in places])


def _report(mesh: MeshBase, request: Request[None, Any], unit: str, members: Iterable[ProcessRef]) -> None:
    asked = list(members)
    task = progress.begin(f"spawn {mesh.name}", len(asked), unit, (member.name for member in asked))
    if task is None:
        return
    process = runtime.current()
    spawn = _Spawn(task, len(asked))
    for member in asked:
        answer = process.request(member, request, target=mesh.uid)
        answer.add_done_callback(functools.partial(spawn.answered, member.name))


class _Spawn:
    """The members of a mesh that have not answered yet. For any thread: answers arrive on the threads of the links."""

    def __init__(self, task: progress.ProgressTask, size: int) -> None:
        self._task = task
        self._left = size
        self._has_failed = False
        self._lock = threading.Lock()

    def answered(self, name: str, answer: Future[Any]) -> None:
        """One member is up, or will never be."""
        try:
            peek(answer)
            self._task.advance(name=name)
        except ControlError:  # its owner, and those who wait for it, get the error in other ways
            self._has_failed = True
        with self._lock:
            self._left -= 1
            is_over = not self._left
        if is_over:
            self._task.end(failed=self._has_failed)
