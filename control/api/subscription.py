"""`subscribe`: failures of a mesh, for those who hold a reference to it and do not own it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from skipper.control.api.mesh import ProcMesh
from skipper.control.api.mesh_base import actors_of
from skipper.control.model.failure import MeshFailure
from skipper.control.model.future import Future
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime.port import PortReceiver, open_channel
from skipper.control.runtime.ports import watch

if TYPE_CHECKING:
    from skipper.control.api.views import ActorMesh
    from skipper.control.runtime.process import Process


def subscribe(mesh: ActorMesh[Any] | ProcMesh) -> PortReceiver[MeshFailure]:
    """Be told of every failure of a member of a mesh or slice, whoever owns it and whether it is handled or not.

    Failures come as they happen. Members that are stopped in good order are no failures. Once all members have ended,
    the channel closes, so that a receive raises `ChannelClosedError`.
    """
    process = runtime.current()
    inbox, _, receiver = open_channel()
    members = actors_of(mesh)
    missing = len(members)
    lock = threading.Lock()

    def ended(end: Future[MeshFailure | None]) -> None:
        nonlocal missing
        with lock:
            missing -= 1
            is_last = missing == 0
        if (failure := end.get(0)) is not None:
            inbox.push(lambda: _taken(process, failure))
        if is_last:
            inbox.close()

    for member in members:
        watch(process, member).add_done_callback(ended)
    return receiver


def _taken(process: Process, failure: MeshFailure) -> MeshFailure:
    """A failure that somebody takes from a subscription, and so has heard of."""
    if process.root_actor is not None:
        process.root_actor.faults.hear(failure.origin())
    return failure
