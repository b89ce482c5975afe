"""`Ownership`: who in this process owns what, and what they are told when that fails or ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from skipper.control.model.failure import MeshFailure
from skipper.control.runtime.messages import Loss, OwnerRef
from skipper.control.runtime.supervision import Owner, failures_of, mesh_of
from skipper.control.wire.envelope import Envelope, Kind, ProcessRef
from skipper.control.wire.payload import pack

if TYPE_CHECKING:
    from skipper.control.runtime.process import Process
    from skipper.control.runtime.supervision import OwnedMesh


class Ownership:
    """The owners of one process: its actors, and the script where it is the script's. For any thread."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def find(self, uid: int) -> OwnedMesh | None:
        """A mesh that an actor of this process owns."""
        return mesh_of(self._owners(), uid)

    def disown(self, uid: int) -> None:
        """Forget a mesh that has ended, wherever in this process its owner is."""
        self._process.casts.close(uid)
        for owner in self._owners():
            owner.owned.pop(uid, None)
            if (number := owner.notices.pop(uid, None)) is not None:
                self._process.ports.close(number)

    def report(self, owner: OwnerRef | None, failure: MeshFailure) -> None:
        """Bring a failure to the owner of the mesh."""
        process = self._process
        if owner is None or process.closing:
            return
        if owner.process.id == process.me.id:
            self.take(owner, failure)
        else:
            process.send(owner.process, Envelope(Kind.AGENT, 0, pack((owner, failure)), "failure"))

    def take(self, owner: OwnerRef, failure: MeshFailure) -> None:
        """Take a failure for an actor of this process; void where that has ended."""
        root = self._process.root_actor
        here = root if root is not None and root.uid == owner.uid else self._process.actors.get(owner.uid)
        if here is not None:
            here.owned_failed(failure)

    def handled(self, failure: MeshFailure) -> None:
        """Take note that an actor of this process has handled a failure.

        Where that is the end of a process, the script is told, which may be the owner of the process: a death that is
        handled by one owner need not be handled by another.
        """
        if not (source := failure.root_cause().source):
            return
        if (root := self._process.root_actor) is not None:
            root.faults.hear(source)
        else:
            self._process.send(self._process.root, Envelope(Kind.AGENT, 0, pack(source), "handled"))

    def process_gone(self, peer: ProcessRef, loss: Loss, is_gone: Callable[[str], bool]) -> None:
        """End what a process owned that is gone, and tell the owners of what was there.

        Args:
            peer: the process.
            loss: why it is gone.
            is_gone: whether a process is known to be gone: a mesh is forgotten with its last.
        """
        for actor in self._process.actors.live():
            if actor.owner is not None and actor.owner.process.id == peer.id:
                actor.orphan(f"the owner's {loss.reason}")
        if loss.kind is not None:
            for owner, failure in failures_of(self._owners(), peer, loss):
                owner.owned_failed(failure)
        for owner in self._owners():
            for mesh in list(owner.owned.values()):
                if all(is_gone(member.id) for member in mesh.root_members):
                    owner.owned.pop(mesh.uid, None)

    def _owners(self) -> list[Owner]:
        owners: list[Owner] = list(self._process.actors.live())
        return owners if self._process.root_actor is None else [self._process.root_actor, *owners]
