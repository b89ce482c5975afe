"""Meshes of processes and of actors: what a script is written in terms of."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeAlias, TypeVar, cast

from skipper.control.api.endpoint import Endpoint, PlainMethod
from skipper.control.api.mesh_base import MeshBase
from skipper.control.api.tensor_engine_plugin import engine, is_for_engine
from skipper.control.model.actor import Actor, ActorInterface, check_construction, interface_of
from skipper.control.model.bounds import check_seconds
from skipper.control.model.errors import PayloadError
from skipper.control.model.future import Future, Promise
from skipper.control.model.shape import Extent, Point, Shape
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime.context import context, local_actor
from skipper.control.runtime.death_watch import watch
from skipper.control.runtime.messages import ROOT_UID, ActorRef, OwnerRef, SpawnRequest
from skipper.control.runtime.requests import PING, READY, SPAWN, STOP_ACTOR, STOP_MESH
from skipper.control.runtime.stops import HANDED_DOWN
from skipper.control.wire.envelope import Envelope, Kind, Payload, ProcessRef
from skipper.control.wire.payload import pack, pack_construction

if TYPE_CHECKING:
    from skipper.control.api import views
    from skipper.control.cluster.hosts import HostMesh
    from skipper.control.runtime.process import Process

A = TypeVar("A", bound=Actor)
P = ParamSpec("P")

Arguments: TypeAlias = AbstractContextManager[tuple[tuple[Any, ...], dict[str, Any]]]
"""Positional and named arguments, for as long as ``__init__`` needs them."""


class ActorMesh(MeshBase, Generic[A]):
    """Actors of one class, one in each process of a mesh; a reference to them, which may be sent to other actors.

    Its endpoints are attributes: ``mesh.step.call(...)`` (see `Endpoint`). Only the actor that spawned a mesh owns it;
    everybody who holds a reference may call it.
    """

    has_actors = True

    def __init__(
        self,
        uid: int,
        name: str,
        members: tuple[ProcessRef, ...],
        root: Extent,
        view: Shape,
        interface: ActorInterface,
        actor_class: type | None = None,
    ) -> None:
        super().__init__(uid, name, members, root, view)
        self._interface = interface
        self._actor_class = actor_class

    @property
    def initialized(self) -> Future[Any]:
        """A future that ends when every actor of the mesh has been constructed, or in the first error."""
        return self._ask_all(READY, self._actors())

    def stop(self, timeout: float | None = None) -> Future[None]:
        """Stop these actors: each handles what it has received so far, takes nothing more, and cleans up.

        Stopping is no failure. Calls that come later end with `SupervisionError`. It may be called again.

        After most of its time, seven tenths, what an actor still does is cut short: a coroutine is cancelled, a thread
        gets an exception, so that ``finally`` blocks and ``__cleanup__`` run. An actor that has not ended in time is
        given up: those who wait for it are told, and its thread is left behind.

        Args:
            timeout: seconds that the stop may take, with that of whatever the actors own; None means
                `Settings.stop_timeout_s`.

        Returns:
            A future that ends when all of them have ended; in a `StopTimeoutError` where one was cut short or given up,
            and in a `SupervisionError` where a ``__cleanup__`` raised.

        Raises:
            ValueError: the timeout is negative.
        """
        process = runtime.current()
        bound_s = _bound(process, timeout)
        future = process.request_all(self._view_members(), STOP_ACTOR, HANDED_DOWN * bound_s, target=self._uid)
        who = f"{self!r} did not stop within {bound_s:g} s"
        process.stops.bounded(future, bound_s, f"{who}: a process of it does not answer; stop its processes")
        if self._view == Shape.whole(self._root):
            future.add_done_callback(lambda _: process.owners.disown(self._uid))
        return future

    def over(self, procs: ProcMesh) -> ActorMesh[A]:
        """Those actors of the mesh that live in ``procs``: the mesh of processes that it was spawned on, or a slice.

        Raises:
            ValueError: the mesh was not spawned on the whole mesh of which ``procs`` is a part.
        """
        if procs.root_members != self._members:
            raise ValueError(f"{self!r} was not spawned on the whole mesh of which {procs!r} is a part")
        return self._with_view(procs._view)

    def _with_view(self, view: Shape) -> ActorMesh[A]:
        return ActorMesh(self._uid, self._name, self._members, self._root, view, self._interface, self._actor_class)

    # Which names are endpoints is not known to type checkers: what is for `as_endpoint` passes as one, too.
    def __getattr__(self, name: str) -> Endpoint[..., Any]:
        # Reached for names that are no attribute, so once per endpoint: the object is kept.
        interface = self.__dict__.get("_interface")
        spec = interface.endpoints.get(name) if interface is not None else None
        if spec is None:
            if interface is not None and name in interface.methods:
                return cast("Endpoint[..., Any]", PlainMethod(self, name))
            known = ", ".join(sorted(interface.endpoints)) if interface is not None else ""
            class_name = interface.class_name if interface is not None else "actor"
            raise AttributeError(f"{class_name} has no endpoint {name!r}; it has: {known or 'none'}")
        endpoint: Endpoint[..., Any] = Endpoint(self, spec)
        self.__dict__[name] = endpoint
        return endpoint

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._interface.endpoints, *self._interface.methods]

    def __reduce__(self) -> tuple[Any, ...]:
        return (ActorMesh, (self._uid, self._name, self._members, self._root, self._view, self._interface))


class ProcMesh(MeshBase):
    """Processes on which actors are spawned; a reference to them, which may be sent to other actors."""

    has_actors = False

    def __init__(
        self,
        uid: int,
        name: str,
        members: tuple[ProcessRef, ...],
        root: Extent,
        view: Shape,
        launcher: ProcessRef,
        *,
        attached: bool = False,
    ) -> None:
        super().__init__(uid, name, members, root, view)
        self._launcher = launcher
        self._attached = attached

    @property
    def root(self) -> ProcMesh:
        """The whole mesh, of which this may be a slice."""
        return self._with_view(Shape.whole(self._root))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that the processes of this slice have in the whole mesh, in the order of the slice."""
        return self._view.ranks()

    @property
    def host_mesh(self) -> HostMesh:
        """The hosts of these processes."""
        from skipper.control.cluster.hosts import HostMesh

        if not self._attached:
            return HostMesh()
        hosts = {member.launcher.id: member.launcher for member in self._view_members() if member.launcher is not None}
        return HostMesh(tuple(hosts.values()))

    @property
    def initialized(self) -> Future[Any]:
        """A future that ends when every process is up and answers, or in the first error."""
        return self._ask_all(PING)

    @property
    def ended(self) -> Future[None]:
        """A future that ends when one of these processes has, on whichever host and however it came; nothing is polled.

        Where it is on another host that can mean that there has been no sign of life from it for too long.
        """
        ended: Promise[None] = Promise()
        for member in self._view_members():
            whole = ActorRef(member, ROOT_UID, self._name, Point(0, Extent()))
            watch(runtime.current(), whole).add_done_callback(lambda _: ended.set_result(None))
        return ended

    def spawn(self, name: str, cls: Callable[P, A], /, *args: P.args, **kwargs: P.kwargs) -> views.ActorMesh[A]:
        """Make an actor of class ``cls`` in each process, owned by the calling actor. Returns at once.

        Args:
            name: name of the mesh, for people.
            cls: a subclass of `Actor`.
            *args: for ``__init__``. An exception there ends the calls to the actor and is a failure of the mesh.
                Tensors of this mesh (see `activate`) may be among them: each actor gets its own shard (see `Endpoint`).
            **kwargs: for ``__init__``.

        Returns:
            The mesh. Messages sent to it wait for ``__init__`` to return.

        Raises:
            TypeError: the arguments do not fit ``__init__``.
            ActorDefinitionError: (a `TypeError`) the class cannot be spawned.
            PayloadError: (a `TypeError`) the class or an argument cannot be pickled.
        """
        interface = interface_of(cls)
        check_construction(cls, args, kwargs)
        try:
            body = pack_construction(cls, args, kwargs)
        except PayloadError as error:
            if not is_for_engine(error):
                raise
            return engine().spawn(self, name, cast("type[A]", cls), args, kwargs)
        return self._spawn(name, cls, interface, body)

    def spawn_with(self, name: str, cls: type[A], arguments: Callable[[], Arguments]) -> views.ActorMesh[A]:
        """`spawn`, where each process has arguments of its own for ``__init__``.

        Args:
            name: name of the mesh, for people.
            cls: a subclass of `Actor`.
            arguments: called in each process on the thread of the actor; it returns a context manager, which gives
                positional and named arguments and is left when ``__init__`` has returned or raised.

        Raises:
            ActorDefinitionError: (a `TypeError`) the class cannot be spawned.
            PayloadError: (a `TypeError`) the class or ``arguments`` cannot be pickled.
        """
        return self._spawn(name, cls, interface_of(cls), pack((cls, arguments)))

    def _spawn(self, name: str, cls: Callable[..., A], interface: ActorInterface, body: Payload) -> views.ActorMesh[A]:
        process = runtime.current()
        creator = context().actor_instance
        owner = local_actor(creator)
        members = self._view_members()
        mesh: ActorMesh[A] = ActorMesh(
            secrets.randbits(63), name, members, self.extent, Shape.whole(self.extent), interface, cast(type, cls)
        )
        request = SpawnRequest(mesh.uid, name, self.extent, OwnerRef(process.me, owner.uid), creator.as_creator())
        payload = SPAWN.pack(((request, interface.is_async), body))
        owner.own(mesh)
        for rank, member in enumerate(members):
            process.send(member, Envelope(Kind.AGENT, mesh.uid, payload, SPAWN.name, 0, rank))
        return cast("views.ActorMesh[A]", mesh)

    def activate(self) -> AbstractContextManager[ProcMesh]:
        """Have torch's operations run in these processes: ``with procs.activate(): x = torch.ones(3)``.

        For a slice as for the whole mesh; may be nested. What `tensor_engine` does with them, its documentation says.

        Raises:
            EngineMissingError: no tensor engine is installed.
        """
        return engine().activate(self)

    def rank_tensor(self, axis: str) -> Any:
        """A tensor of this mesh, 0-dimensional and of 64-bit integers: each process' index along ``axis``.

        Raises:
            KeyError: there is no such axis.
            EngineMissingError: no tensor engine is installed.
        """
        return engine().rank_tensor(self, axis)

    def rank_tensors(self) -> dict[str, Any]:
        """`rank_tensor` of every axis."""
        return engine().rank_tensors(self)

    def stop(self, timeout: float | None = None) -> Future[None]:
        """Stop the actors in these processes and then the processes, which is no failure. It may be called again.

        Actors get the greater part of the time, and are then cut short (see `ActorMesh.stop`); what is left is for
        ``atexit`` handlers and threads. Processes that have not ended in time are killed.

        Args:
            timeout: seconds that the stop may take; None means `Settings.stop_timeout_s`.

        Returns:
            A future that ends when all processes have ended.

        Raises:
            ValueError: this is a slice: processes are stopped as a whole mesh; or the timeout is negative.
        """
        if self._view.extent.nelements != self._root.nelements:
            raise ValueError("a slice of a mesh of processes cannot be stopped by itself: stop the whole mesh")
        process = runtime.current()
        bound_s = _bound(process, timeout)
        if self._launcher.id != process.me.id:
            return process.request_all((self._launcher,), STOP_MESH, HANDED_DOWN * bound_s, target=self._uid)
        future = process.remote_launch.stop_mesh(self._uid, self._members, bound_s)
        future.add_done_callback(lambda _: process.owners.disown(self._uid))
        return future

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        """Stop the processes at the end of ``async with procs:``; again is no error."""
        await self.stop()

    def _with_view(self, view: Shape) -> ProcMesh:
        launcher, attached = self._launcher, self._attached
        return ProcMesh(self._uid, self._name, self._members, self._root, view, launcher, attached=attached)

    def __reduce__(self) -> tuple[Any, ...]:
        args = (self._uid, self._name, self._members, self._root, self._view, self._launcher)
        return (functools.partial(ProcMesh, attached=self._attached), args)


def _bound(process: Process, timeout: float | None) -> float:
    """The seconds that a stop may take."""
    if timeout is None:
        return process.settings.stop_timeout_s
    seconds = check_seconds("timeout", timeout)
    if seconds < 0:
        raise ValueError(f"the timeout of a stop must not be negative, got {timeout:g}")
    return seconds


def this_proc() -> ProcMesh:
    """This process, as a mesh of one on which actors can be spawned; each gets a thread of its own."""
    process = runtime.current()
    whole = Shape.whole(Extent())
    return ProcMesh(process.uid, process.me.name, (process.me,), Extent(), whole, process.me)
