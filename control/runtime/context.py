"""Which actor runs the current code. `control.api.context` makes the public classes from it."""

from __future__ import annotations

import logging
import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from skipper.control.model.errors import NoActorContextError
from skipper.control.model.shape import Extent, Point
from skipper.control.runtime import running
from skipper.control.runtime.messages import Creator

if TYPE_CHECKING:
    from skipper.control.model.future import Future
    from skipper.control.runtime.interfaces import LocalActor


class BaseActorInstance:
    """An actor as it sees itself; the script's own one is called ``root``.

    Attributes:
        name: name of its mesh, as given to ``spawn``.
        actor_id: unique in the job.
        rank: its position in its mesh, whichever slice of it a message was sent to.
        creator: who spawned it; None for the script.
    """

    def __init__(self, state: LocalActor, creator: Creator | None) -> None:
        self._state = state
        self.name = state.name
        self.actor_id = state.actor_id
        self.rank = state.rank
        self.creator = creator

    @property
    def proc_id(self) -> str:
        """The id of its process."""
        return self._state.ref.process.id

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
        """This actor, as the actors that it spawns see it."""
        return Creator(self.name, self.actor_id, self.rank, self.proc_id, self.creator)

    def abort(self, reason: str) -> None:
        """Fail this actor now: its owner gets a `MeshFailure` with this reason."""
        self._state.abort(reason)

    def __repr__(self) -> str:
        return f"<actor {self.actor_id}>"


class BaseContext:
    """What `context` returns.

    Attributes:
        actor_instance: the actor whose code runs.
    """

    __slots__ = ("_extent", "_rank", "actor_instance")

    def __init__(self, actor_instance: BaseActorInstance, rank: int, extent: Extent) -> None:
        self.actor_instance = actor_instance
        self._rank = rank
        self._extent = extent

    @property
    def message_rank(self) -> Point:
        """Position of this actor in the mesh, or slice, that the current message was sent to."""
        return Point(self._rank, self._extent)


_instance_class: type[BaseActorInstance] = BaseActorInstance
_context_class: type[BaseContext] = BaseContext


def make_with(instance_class: type[BaseActorInstance], context_class: type[BaseContext]) -> None:
    """Use these classes for the actors and contexts that are made from now on."""
    global _instance_class, _context_class
    _instance_class, _context_class = instance_class, context_class


def new_instance(actor: LocalActor, creator: Creator | None) -> BaseActorInstance:
    """An actor, or the script, as it sees itself."""
    return _instance_class(actor, creator)


def context_class() -> type[BaseContext]:
    """The class of contexts."""
    return _context_class


def local_actor(instance: BaseActorInstance) -> LocalActor:
    """The runtime's object for an actor, given the object by which the actor sees itself."""
    return instance._state


current_context: ContextVar[BaseContext | None] = ContextVar("current_context", default=None)


def context() -> BaseContext:
    """Where the running code is: in an endpoint or ``__init__`` of an actor, or else in the script.

    Raises:
        NoActorContextError: on a thread that an actor's code started by itself; run the thread's function in a copy
            of the actor's context (`contextvars.copy_context`) to take it along.
    """
    here = current_context.get()
    if here is not None:
        return here
    root = running.current().root_actor
    if root is None:
        raise NoActorContextError(
            "this thread belongs to no actor; start it with contextvars.copy_context().run to give it the context of "
            "the actor"
        )
    return context_class()(root.instance, 0, root.rank.extent)


_lock = threading.Lock()
_is_installed = False


def name_actors_in_records() -> None:
    """Have records of `logging` say which actor they are from; from any thread; the second time changes nothing.

    The runtime calls it where the first actor of a process starts. It wraps the factory of records, and leaves loggers,
    levels, handlers and formats as they are. Records get the fields

    * ``actor_name``: name of the actor's mesh, as given to ``spawn``; empty outside of actors;
    * ``actor_rank``: its position there, a `Point`; None outside of actors;
    * ``actor_prefix``: both for people, such as ``"[actor=trainer{'gpus': 1}] "``; empty outside of actors.

    They can be used in formats and filters: ``logging.basicConfig(format="%(actor_prefix)s%(message)s")``.
    """
    global _is_installed
    with _lock:
        if _is_installed:
            return
        _is_installed = True
        make = logging.getLogRecordFactory()

        def make_with_actor(*args: Any, **kwargs: Any) -> logging.LogRecord:
            record = make(*args, **kwargs)
            here = current_context.get()
            if here is None:
                record.actor_name, record.actor_rank, record.actor_prefix = "", None, ""
                return record
            actor = here.actor_instance
            record.actor_name, record.actor_rank = actor.name, actor.rank
            record.actor_prefix = f"[actor={actor.name}{actor.rank!r}] " if actor.rank else f"[actor={actor.name}] "
            return record

        logging.setLogRecordFactory(make_with_actor)
