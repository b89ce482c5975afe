"""`Ownership`: the owners in this process, and what they learn when one of their meshes fails or ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from skipper.control.model.failure import MeshFailure
from skipper.control.model.future import Future
from skipper.control.runtime.interfaces import Caller, OwnedMesh, Owner
from skipper.control.runtime.messages import ActorRef, Loss, Mail, OwnerRef
from skipper.control.runtime.requests import FAILURE, HANDLED, STOP_MESH
from skipper.control.wire.process_ref import ProcessRef

if TYPE_CHECKING:
    from skipper.control.runtime.actor_table import ActorTable
    from skipper.control.runtime.process_state import ProcessState
    from skipper.control.runtime.request_server import RequestServer
    from skipper.control.runtime.supervision import RootActor


class Ownership:
    """The owners of one process: its actors, and the script in the script's process. For any thread."""

    def __init__(
        self,
        state: ProcessState,
        actors: ActorTable,
        caller: Caller,
        requests: RequestServer,
        *,
        close_casts: Callable[[int], object],
    ) -> None:
        self.root: RootActor | None = None
        """The script, if this process is a script's, or has joined."""
        self._state = state
        self._actors = actors
        self._caller = caller
        self._close_casts = close_casts
        requests.serve(STOP_MESH, self._stop)
        requests.serve(FAILURE, self._failure)
        requests.serve(HANDLED, self._handled)

    def take_root(self, root: RootActor) -> None:
        """Make a script an owner, too."""
        self.root = root

    def find(self, uid: int) -> OwnedMesh | None:
        """A mesh that an actor of this process owns."""
        meshes = (owner.meshes.by_number.get(uid) for owner in self._owners())
        return next((mesh for mesh in meshes if mesh is not None), None)

    def disown(self, uid: int) -> None:
        """Forget a mesh that has ended, whichever actor of this process owns it."""
        self._close_casts(uid)
        for owner in self._owners():
            owner.meshes.forget(uid)
            if (number := owner.meshes.notices.pop(uid, None)) is not None:
                self._caller.ports.close(number)

    def report(self, owner: OwnerRef | None, failure: MeshFailure) -> None:
        """Bring a failure to the owner of the mesh."""
        if owner is None or self._state.closing:
            return
        if owner.process.id == self._state.me.id:
            self.take(owner, failure)
        else:
            self._caller.send(owner.process, FAILURE.message((owner, failure)))

    def take(self, owner: OwnerRef, failure: MeshFailure) -> None:
        """Take a failure for an actor of this process; it is dropped if the actor has ended."""
        root = self.root
        here = root if root is not None and root.uid == owner.uid else self._actors.get(owner.uid)
        if here is not None:
            here.owned_failed(failure)

    def handled(self, failure: MeshFailure) -> None:
        """Note that an actor of this process has handled a failure.

        If the failure is the end of a process, the script is told, since it may own the process: one owner need not
        handle what another has handled.
        """
        if not (source := failure.root_cause().source):
            return
        if (root := self.root) is not None:
            root.faults.hear(source)
        else:
            self._caller.send(self._state.root, HANDLED.message(source))

    def process_gone(self, peer: ProcessRef, loss: Loss, is_gone: Callable[[str], bool]) -> None:
        """End the actors that a lost process owned, and tell the owners of the members in it.

        Args:
            peer: the process.
            loss: why it is gone.
            is_gone: whether a process is known to be gone; a mesh is forgotten with its last process.
        """
        for actor in self._actors.live():
            if actor.owner is not None and actor.owner.process.id == peer.id:
                actor.orphan(f"the owner's {loss.reason}")
        if loss.kind is not None:
            for owner, failure in _failures_of(self._owners(), peer, loss):
                owner.owned_failed(failure)
        for owner in self._owners():
            owner.meshes.lose(peer.id, is_gone)

    def _owners(self) -> list[Owner]:
        owners: list[Owner] = list(self._actors.live())
        return owners if self.root is None else [self.root, *owners]

    # Requests to this process

    def _stop(self, mail: Mail, timeout: float) -> Future[None]:
        mesh = self.find(mail.message.target)
        return Future.of(None) if mesh is None else mesh.stop(timeout)

    def _failure(self, mail: Mail, told: tuple[OwnerRef, MeshFailure]) -> None:
        self.take(*told)

    def _handled(self, mail: Mail, source: str) -> None:
        if self.root is not None:
            self.root.faults.hear(source)


def _failures_of(owners: Iterable[Owner], process: ProcessRef, loss: Loss) -> Iterator[tuple[Owner, MeshFailure]]:
    """The failures that each owner gets when a process has died.

    An owner gets one for each of its actor meshes with a member there, and one for the mesh of processes only if there
    is none: one death is not reported under two names.
    """
    for owner in owners:
        hit = owner.meshes.with_member_in(process.id)
        told = [(mesh, rank) for mesh, rank in hit if mesh.has_actors] or hit
        for mesh, rank in told:
            member = ActorRef(process, mesh.uid, mesh.name, mesh.root_extent.point(rank))
            failure = member.death(loss)
            if failure is not None and not mesh.has_actors:
                failure = dataclasses.replace(failure, actor_id=process.id, message=f"{member}: {loss.reason}")
            if failure is not None:
                yield owner, failure
