"""`Notice`: what an actor is told of a broadcast of its own that could not be delivered."""

from __future__ import annotations

import itertools

from skipper.control.model.errors import ControlError, LinkError, SupervisionError
from skipper.control.model.failure import FailureKind, MeshFailure
from skipper.control.runtime.interfaces import LocalActor, Ports
from skipper.control.runtime.messages import Loss
from skipper.control.runtime.replies import open_reply
from skipper.control.wire.envelope import NOTICE, Kind, Payload

_numbers = itertools.count(NOTICE)


def notice_number(ports: Ports, sender: LocalActor, mesh_uid: int, mesh_name: str) -> int:
    """What broadcasts of this actor to that mesh have for `Envelope.reply_to`."""
    number = sender.meshes.notice(mesh_uid)
    if number is None:
        number = next(_numbers)
        number = sender.meshes.set_notice(mesh_uid, number)
        ports.open_at(number, Notice(sender, mesh_uid, mesh_name))
    return number


class Notice:
    """The port for what comes back when a broadcast was not delivered: its sender fails."""

    __slots__ = ("_mesh_name", "_mesh_uid", "_sender")

    def __init__(self, sender: LocalActor, mesh_uid: int, mesh_name: str) -> None:
        self._sender = sender
        self._mesh_uid = mesh_uid
        self._mesh_name = mesh_name

    def deliver(self, rank: int, kind: Kind, payload: Payload) -> bool:
        """Take the reason why it was not delivered."""
        try:
            open_reply(kind, payload)
        except ControlError as error:
            cause = error.failure if isinstance(error, SupervisionError) else None
            self._undelivered(error, cause)
        return False

    def lost(self, loss: Loss) -> None:
        """Note that the process is gone that a broadcast was for."""
        cause = None
        if loss.kind is not None:
            cause = MeshFailure(self._mesh_name, self._mesh_name, None, loss.kind, loss.reason, source=loss.process_id)
        self._undelivered(SupervisionError(loss.reason, cause), cause)

    def process_lost(self, process_id: str, loss: Loss) -> bool:
        """Nothing ends here: the next broadcast to the process is what counts."""
        return False

    def entrust(self, rank: int) -> None:
        """Nothing to do: this port is never passed on."""

    def lapse(self, rank: int, error: LinkError) -> bool:
        """Nothing to do: no actor is linked to this port."""
        return False

    def _undelivered(self, error: ControlError, cause: MeshFailure | None) -> None:
        if cause is not None and self._sender.meshes.has_spawned(self._mesh_uid):
            return  # it owns the mesh and is told of that failure: once is enough
        message = f"a broadcast to {self._mesh_name} was not delivered: {str(error).splitlines()[0]}"
        self._sender.fail_by_itself(FailureKind.UNDELIVERED, message, cause, error)
