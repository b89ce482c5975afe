"""`MeshBase`: what meshes of processes and of actors have in common: their axes, their slices and their members."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any, cast

from skipper.control.model.future import Future, Promise
from skipper.control.model.shape import Extent, MeshLayout, Shape
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime.messages import ActorRef
from skipper.control.runtime.ports import Awaited, MeshReply
from skipper.control.runtime.requests import Request
from skipper.control.wire.packed_members import AnyMembers, opened, to_send
from skipper.control.wire.process_ref import ProcessRef


class MeshBase(MeshLayout):
    """Members laid out along named axes. A slice is a view of the whole mesh, whose number and members it shares."""

    def __init__(self, uid: int, name: str, members: AnyMembers, root: Extent, view: Shape) -> None:
        self._uid = uid
        self._name = name
        self._all = to_send(members)
        self._root = root
        self._view = view

    @property
    def _members(self) -> tuple[ProcessRef, ...]:
        return opened(self._all)

    @property
    def uid(self) -> int:
        """Number of the mesh, shared by all its slices."""
        return self._uid

    @property
    def name(self) -> str:
        """As given when it was spawned."""
        return self._name

    @property
    def root_extent(self) -> Extent:
        """The extent of the whole mesh, of which this may be a slice."""
        return self._root

    @property
    def root_members(self) -> Sequence[ProcessRef]:
        """The processes of the whole mesh, in rank order."""
        return self._members

    @property
    def members(self) -> Sequence[ProcessRef]:
        """The processes of this mesh or slice, in rank order."""
        return self._view_members()

    def _view_members(self) -> tuple[ProcessRef, ...]:
        return tuple(self._members[rank] for rank in self._view.ranks())

    def _actors(self) -> list[ActorRef]:
        """The members one by one."""
        members, root = self._members, self._root
        return [ActorRef(members[rank], self._uid, self._name, root.point(rank)) for rank in self._view.ranks()]

    def _ask_all(self, request: Request[None, Any], actors: Sequence[ActorRef] = ()) -> Future[Any]:
        """Send a request to the process of each member; about its actor, if there are ``actors``."""
        process = runtime.current()
        members = self._view_members()
        awaited = [
            Awaited(member, f"{self._name}{point!r}" if point else self._name, request.name, actor, request)
            for member, point, actor in zip(members, self.extent.points(), actors or repeat(None), strict=False)
        ]
        future: Promise[Any] = Promise()
        port = process.ports.open(MeshReply(future, self.extent, awaited))
        for rank, member in enumerate(members):
            process.send(member, request.message(None, target=self._uid, port=port, rank=rank))
        return future

    def _key(self) -> tuple[object, ...]:
        return (self._uid, self._view)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, MeshBase) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name} {self.extent!r}>"


def actors_of(mesh: Any) -> list[ActorRef]:
    """The members of a mesh, one by one; a function, since a method would take that name from an endpoint."""
    return cast("MeshBase", mesh)._actors()
