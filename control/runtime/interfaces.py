"""What the parts of one runtime see of each other. `control.runtime.assembly` builds the parts and joins them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from skipper.control.model.errors import LinkError
from skipper.control.model.failure import FailureKind, MeshFailure
from skipper.control.model.future import Future
from skipper.control.model.shape import Extent, Point
from skipper.control.runtime.messages import ActorRef, Loss, Mail, OwnerRef
from skipper.control.wire.messages import Call, Kind, Message, OfTree, Payload, ProcessRequest
from skipper.control.wire.process_ref import ProcessRef

if TYPE_CHECKING:
    from skipper.control.runtime.requests import Request

A = TypeVar("A")
A_contra = TypeVar("A_contra", contravariant=True)
R = TypeVar("R")


# Sending


class Sender(Protocol):
    """Sends messages; for any thread."""

    def send(self, to: ProcessRef, message: Message) -> None:
        """Send a message; if ``to`` is lost, the caller that waits for its answer is told."""

    def pass_on(self, to: ProcessRef, message: OfTree) -> bool:
        """Post a message that belongs to a tree; False, and nothing happens, if ``to`` is lost."""


class Replier(Protocol):
    """Answers messages that have come; for any thread."""

    def reply(self, mail: Mail, kind: Kind, payload: Payload) -> None:
        """Answer a message for an actor."""

    def reply_to(self, sender: ProcessRef, message: Call | ProcessRequest, kind: Kind, payload: Payload) -> None:
        """Answer a message, if its sender wants that."""


class Requester(Protocol):
    """Sends requests to other processes (see `control.runtime.requests`); for any thread."""

    @overload
    def request(self, to: ProcessRef, request: Request[None, R], *, target: int = 0) -> Future[R]: ...
    @overload
    def request(self, to: ProcessRef, request: Request[A, R], argument: A, *, target: int = 0) -> Future[R]: ...

    @overload
    def request_all(
        self, to: Sequence[ProcessRef], request: Request[None, None], *, target: int = 0
    ) -> Future[None]: ...
    @overload
    def request_all(
        self, to: Sequence[ProcessRef], request: Request[A, None], argument: A, *, target: int = 0
    ) -> Future[None]: ...


class Ports(Protocol):
    """The places in this process where answers arrive."""

    def open(self, reply: ReplyHandler) -> int:
        """The number of a new port; never 0."""

    def open_owed(self, reply: OwedReply) -> int:
        """The number of a new port for an answer that one process owes."""

    def open_at(self, number: int, reply: ReplyHandler) -> None:
        """Open a port with a number of the caller's choice."""

    def close(self, number: int) -> None:
        """Forget a port; later messages for it are dropped."""

    def link_error(self, number: int) -> LinkError | None:
        """What a receiver at a port gets if nothing has arrived: an error if all linked actors are dead."""


class Caller(Protocol):
    """Sends something and waits for the answer at a port."""

    @property
    def ports(self) -> Ports:
        """Where answers arrive."""

    def send(self, to: ProcessRef, message: Message) -> None:
        """See `Sender.send`."""


class ReplyHandler(Protocol):
    """The object behind a port."""

    def deliver(self, rank: int, kind: Kind, payload: Payload) -> bool:
        """Take a reply, on the thread that brought it; True if nothing more is expected."""

    def process_lost(self, process_id: str, loss: Loss) -> bool:
        """Give up on the replies of a process; True if nothing more is expected."""

    def entrust(self, rank: int) -> None:
        """Note that another process may send the reply of this rank: from now on links tell whether one can."""

    def lapse(self, rank: int, error: LinkError) -> bool:
        """Note that every actor linked for this rank is dead; True if nothing more is expected."""


class OwedReply(ReplyHandler, Protocol):
    """The object behind a port for the answer of one process."""

    def ids(self) -> tuple[str, ...]:
        """The ids of that process, and of the actor there, if the answer is about one."""


# Owning


class OwnedMesh(Protocol):
    """A mesh as its owner sees it."""

    @property
    def uid(self) -> int:
        """Its number."""

    @property
    def name(self) -> str:
        """As given to ``spawn``."""

    @property
    def root_extent(self) -> Extent:
        """The extent of the whole mesh."""

    @property
    def root_members(self) -> Sequence[ProcessRef]:
        """The processes of all members, in rank order."""

    @property
    def has_actors(self) -> bool:
        """Whether its members are actors rather than processes."""

    def stop(self, timeout: float | None = None) -> Future[None]:
        """Stop every member, in so many seconds."""


class MeshPlaces:
    """In which processes a mesh has members, so that the end of a process need not search all of them.

    Attributes:
        mesh: the mesh.
        rank_of: its first member in each process.
        lost: the processes of whose end it was told. That of one that was forgotten since may be learned once more.
    """

    __slots__ = ("_alive", "lost", "mesh", "rank_of")

    def __init__(self, mesh: OwnedMesh) -> None:
        self.mesh = mesh
        self.rank_of: dict[str, int] = {}
        for rank, member in enumerate(mesh.root_members):
            self.rank_of.setdefault(member.id, rank)
        self._alive: set[str] | None = None
        self.lost: set[str] = set()

    def lose(self, process_id: str, is_gone: Callable[[str], bool]) -> bool:
        """Note that a process is gone; returns whether it was the last."""
        if self._alive is None:
            self._alive = {each for each in self.rank_of if not is_gone(each)}
        self._alive.discard(process_id)
        if process_id in self.rank_of:
            self.lost.add(process_id)
        return not self._alive


class OwnedMeshes:
    """The meshes of one owner. For any thread.

    Attributes:
        by_number: the meshes that it owns.
        notices: the number of the port for broadcasts that were not delivered, by the number of the target mesh, which
            it need not own.
    """

    def __init__(self) -> None:
        self.by_number: dict[int, OwnedMesh] = {}
        self.notices: dict[int, int] = {}
        self._spawned: set[int] = set()
        """Numbers of all meshes that it has ever owned."""
        self._places: dict[int, MeshPlaces] = {}
        """Where the members of each mesh are, once one was lost. On the loop thread."""

    def add(self, mesh: OwnedMesh) -> None:
        """Take a mesh that has just been spawned."""
        self.by_number[mesh.uid] = mesh
        self._spawned.add(mesh.uid)

    def all(self) -> list[OwnedMesh]:
        """The meshes that it owns, oldest first."""
        return list(self.by_number.values())

    def has_spawned(self, uid: int) -> bool:
        """Whether it has ever owned this mesh."""
        return uid in self._spawned

    def forget(self, uid: int) -> None:
        """Forget a mesh that has ended."""
        self.by_number.pop(uid, None)
        self._places.pop(uid, None)

    def with_member_in(self, process_id: str) -> list[tuple[OwnedMesh, int]]:
        """The meshes that have members in a process and have not lost it, with its first rank. On the loop thread."""
        places = [self._places_of(mesh) for mesh in self.all()]
        found = [(each.mesh, each.rank_of.get(process_id)) for each in places if process_id not in each.lost]
        return [(mesh, rank) for mesh, rank in found if rank is not None]

    def lose(self, process_id: str, is_gone: Callable[[str], bool]) -> None:
        """Forget the meshes whose last process this was. On the loop thread.

        Args:
            process_id: of a process that is gone.
            is_gone: whether another process is known to be gone.
        """
        for mesh in self.all():
            if self._places_of(mesh).lose(process_id, is_gone):
                self.forget(mesh.uid)

    def _places_of(self, mesh: OwnedMesh) -> MeshPlaces:
        places = self._places.get(mesh.uid)
        if places is None or places.mesh is not mesh:  # another mesh has its number, and its place, by now
            places = self._places[mesh.uid] = MeshPlaces(mesh)
        return places


class Owner(Protocol):
    """An actor that may own meshes."""

    @property
    def meshes(self) -> OwnedMeshes:
        """What it owns."""

    def own(self, mesh: OwnedMesh) -> None:
        """Take a mesh that it has just spawned."""

    def owned_failed(self, failure: MeshFailure) -> None:
        """Note the failure of an owned mesh; from any thread."""


class LocalActor(Owner, Protocol):
    """An actor of this process, or its script.

    Attributes:
        uid: its number in this process.
        name: name of its mesh.
        actor_id: unique in the job.
        rank: its position in its mesh.
        ref: how others refer to it.
    """

    uid: int
    name: str
    actor_id: str
    rank: Point

    @property
    def ref(self) -> ActorRef:
        """How others refer to it."""

    def stop_itself(self) -> Future[None]:
        """Stop cleanly; from any thread."""

    def abort(self, reason: str) -> None:
        """End with a failure, at its own request."""

    def fail_by_itself(
        self, kind: FailureKind, message: str, cause: MeshFailure | None, error: BaseException | None = None
    ) -> None:
        """Fail because of something that it has done itself. From any thread."""


class Owners(Protocol):
    """Knows the owners in this process, and informs owners in others."""

    def report(self, owner: OwnerRef | None, failure: MeshFailure) -> None:
        """Bring a failure to the owner of the mesh."""

    def handled(self, failure: MeshFailure) -> None:
        """Note that an actor of this process has handled a failure."""


class Actors(Protocol[A_contra]):
    """The table of the actors of this process, as its actors see it. For any thread."""

    def get(self, uid: int) -> Any:
        """A live actor; None where there is none."""

    def end(self, actor: A_contra, failure: MeshFailure | None = None) -> bool:
        """Let an actor take no more messages; False if it has ended or failed before."""

    def stop(self, uid: int, timeout: float) -> Future[None]:
        """Stop an actor in good order, and by force after ``timeout`` seconds."""

    def forget(self, actor: A_contra) -> None:
        """Bury an actor that has wound up."""
