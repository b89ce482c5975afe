"""`context()`: where the running code is, as an actor among others."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

from skipper.control.model.errors import NoActorContextError
from skipper.control.model.shape import Extent, Point
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime.messages import Creator

if TYPE_CHECKING:
    from skipper.control.api.mesh import ProcMesh
    from skipper.control.model.future import Future
    from skipper.control.runtime.actor_state import ActorState
    from skipper.control.runtime.supervision import RootActor


class ActorInstance:
    """An actor as it sees itself; the script's own one is called ``root``.

    Attributes:
        name: name of its mesh, as given to ``spawn``.
        actor_id: unique in the job.
        rank: its position in its mesh, whichever slice of it a message was sent to.
        creator: who spawned it; None for the script.
    """

    def __init__(self, state: ActorState | RootActor, creator: Creator | None) -> None:
        self._state = state
        self.name = state.name
        self.actor_id = state.actor_id
        self.rank = state.rank
        self.creator = creator

    @property
    def proc(self) -> ProcMesh:
        """The process that the actor lives in, as a mesh of one, on which siblings can be spawned."""
        from skipper.control.api.mesh import this_proc

        return this_proc()

    @property
    def proc_id(self) -> str:
        """The id of that process."""
        return self._state.process.me.id

    @property
    def mesh_uid(self) -> int:
        """The number of its mesh: `ActorMesh.uid`."""
        return self._state.ref.uid

    def stop(self) -> Future[None]:
        """Stop this actor once it has handled what it has received so far.

        Returns:
            A future that ends with the actor; waiting for it within the actor would never end.
        """
        return self._state.stop_itself()

    def as_creator(self) -> Creator:
        """This actor, as those see it that it spawns."""
        return Creator(self.name, self.actor_id, self.rank, self.proc_id, self.creator)

    def abort(self, reason: str) -> None:
        """Fail this actor now: its owner gets a `MeshFailure` with this reason."""
        self._state.abort(reason)

    def __repr__(self) -> str:
        return f"<actor {self.actor_id}>"


class Context:
    """What `context` returns.

    Attributes:
        actor_instance: the actor whose code runs.
    """

    __slots__ = ("_extent", "_rank", "actor_instance")

    def __init__(self, actor_instance: ActorInstance, rank: int, extent: Extent) -> None:
        self.actor_instance = actor_instance
        self._rank = rank
        self._extent = extent

    @property
    def message_rank(self) -> Point:
        """Position of this actor in the mesh, or slice, that the current message was sent to."""
        return Point(self._rank, self._extent)

    @property
    def proc(self) -> ProcMesh:
        """The process that the code runs in, as a mesh of one."""
        return self.actor_instance.proc


current_context: ContextVar[Context | None] = ContextVar("current_context", default=None)


def context() -> Context:
    """Where the running code is: in an endpoint or ``__init__`` of an actor, or else in the script.

    Raises:
        NoActorContextError: on a thread that an actor's code started by itself; run the thread's function in a copy
            of the actor's context (`contextvars.copy_context`) to take it along.
    """
    here = current_context.get()
    if here is not None:
        return here
    root = runtime.current().root_actor
    if root is None:
        raise NoActorContextError(
            "this thread belongs to no actor; start it with contextvars.copy_context().run to take the actor's along"
        )
    return Context(root.instance, 0, root.rank.extent)


def current_rank() -> Point:
    """The position of this actor in the mesh that the current message was sent to: ``context().message_rank``."""
    return context().message_rank


def current_actor_name() -> str:
    """The id of the actor whose code runs, unique in the job: ``context().actor_instance.actor_id``."""
    return context().actor_instance.actor_id


def current_size() -> Extent:
    """Axes and sizes of the mesh that the current message was sent to."""
    return context().message_rank.extent
