"""`context()`: the actor and process in which the running code is."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from skipper.control.api.mesh import ProcMesh, this_proc
from skipper.control.model.shape import Extent, Point
from skipper.control.runtime import context as runtime
from skipper.control.runtime.context import BaseActorInstance, BaseContext


class ActorInstance(BaseActorInstance):
    """The running actor, as its own code sees it. The script's is named ``root``.

    The example of `Context` shows one.

    Attributes:
        name: name of its mesh, as given to ``spawn``.
        actor_id: unique in the job.
        rank: its position in its mesh, even if a message was sent to a slice of the mesh.
        creator: the actor that spawned it; None for the script.
    """

    @property
    def proc(self) -> ProcMesh:
        """The process of the actor, as a mesh of one, on which siblings can be spawned."""
        return this_proc()


class Context(BaseContext):
    """The actor and the process in which the calling code runs: what `context` returns.

    Attributes:
        actor_instance: the actor whose code runs.

    Example:
        ```python
        from skipper.control import Actor, ActorInstance, Creator, context, endpoint, this_host

        class Worker(Actor):
            @endpoint
            def who(self) -> tuple[str, int, str]:
                me: ActorInstance = context().actor_instance
                by: Creator | None = me.creator
                return me.name, me.rank.rank, by.name if by else ""

        workers = this_host().spawn_procs({"gpus": 2}).spawn("workers", Worker)
        print(workers.slice(gpus=1).who.call_one().get(timeout=60))  # ('workers', 1, 'root')
        ```
    """

    __slots__ = ()

    if TYPE_CHECKING:
        actor_instance: ActorInstance

    @property
    def proc(self) -> ProcMesh:
        """The process that the code runs in, as a mesh of one."""
        return self.actor_instance.proc


def context() -> Context:
    """The actor and process of the running code: an endpoint or ``__init__`` of an actor, or else the script.

    Raises:
        NoActorContextError: this thread was started by an actor's code, without the actor's context; run the thread's
            function in a copy of that context (`contextvars.copy_context`).
    """
    return cast(Context, runtime.context())


def current_rank() -> Point:
    """The position of this actor in the mesh that the current message was sent to: ``context().message_rank``."""
    return context().message_rank


def current_actor_name() -> str:
    """The id of the actor whose code runs, unique in the job: ``context().actor_instance.actor_id``."""
    return context().actor_instance.actor_id


def current_size() -> Extent:
    """Axes and sizes of the mesh that the current message was sent to."""
    return context().message_rank.extent
