"""Meshes of actors, of processes and of hosts: the objects that a script works with."""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, Self, TypeAlias, TypeVar, cast

from skipper.control.api.actor import Actor
from skipper.control.api.endpoint import Endpoint, PlainMethod
from skipper.control.api.mesh_base import MeshBase, actors_of
from skipper.control.api.namespaces import environment
from skipper.control.api.spawn_progress import report_actors, report_procs
from skipper.control.api.tensor_engine_plugin import engine, is_for_engine
from skipper.control.model.actor import ActorInterface, check_construction, interface_of
from skipper.control.model.bounds import MAX_PROCESSES, check_count, check_seconds
from skipper.control.model.errors import ControlError, PayloadError
from skipper.control.model.failure import MeshFailure
from skipper.control.model.future import Future, Promise, both
from skipper.control.model.shape import Extent, MeshLayout, Point, Shape
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime import progress_reports, tracing
from skipper.control.runtime.context import context, local_actor
from skipper.control.runtime.interfaces import OwnedMesh
from skipper.control.runtime.messages import ROOT_UID, ActorRef, LaunchOrder, OwnerRef, SpawnRequest
from skipper.control.runtime.port import PortReceiver, open_channel
from skipper.control.runtime.ports import watch
from skipper.control.runtime.procs.binding import CpuBinding
from skipper.control.runtime.requests import CONTROLLER, PING, READY, SPAWN, STOP_ACTOR, STOP_MESH
from skipper.control.runtime.stops import HANDED_DOWN, OWNED
from skipper.control.wire.addresses import host_of
from skipper.control.wire.messages import Payload, ProcessRequest
from skipper.control.wire.packed_members import AnyMembers, opened, to_send
from skipper.control.wire.payload import pack, pack_construction, pack_inert
from skipper.control.wire.process_ref import ProcessRef

if TYPE_CHECKING:
    from skipper.control.api import views
    from skipper.control.runtime.process import Process


A = TypeVar("A", bound=Actor)
T = TypeVar("T")
P = ParamSpec("P")

Arguments: TypeAlias = AbstractContextManager[tuple[tuple[Any, ...], dict[str, Any]]]
"""Positional and keyword arguments, which stay valid as long as ``__init__`` needs them."""

HOST_NAME = "host "
"""The beginning of the name of a process that represents a job on a host; the address of its agent follows."""

_HOSTS = "hosts"
_LOOPBACK = "127.0.0.1"


class ActorMesh(MeshBase, Generic[A]):
    """Actors of one class, one in each process of a mesh; a reference to them, which may be sent to other actors.

    Its endpoints are attributes: ``mesh.step.call(...)`` (see `Endpoint`). Only the actor that spawned a mesh owns it;
    all code that has a reference may call it.

    Example:
        ```python
        from skipper.control import Actor, endpoint, this_host

        class Worker(Actor):
            @endpoint
            def double(self, value: int) -> int:
                return 2 * value

        workers = this_host().spawn_procs({"gpus": 4}).spawn("workers", Worker)
        print(workers.double.call(21).get())  # [42, 42, 42, 42]
        print(workers.slice(gpus=slice(0, 2)).double.call(1).get())  # [2, 2]
        print(workers.split(gpus={"pairs": 2, "gpus": 2}).sizes)  # {'pairs': 2, 'gpus': 2}
        ```
    """

    has_actors = True

    def __init__(
        self,
        uid: int,
        name: str,
        members: AnyMembers,
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
        """A future that ends when every actor of the mesh has been constructed, or with the first error."""
        return self._ask_all(READY, self._actors())

    def stop(self, timeout: float | None = None) -> Future[None]:
        """Stop these actors: each handles what it has received so far, accepts nothing more, and cleans up.

        Stopping is not a failure. Later calls end with `SupervisionError`. It may be called again.

        After 70 % of the time, an actor that is still running is interrupted: a coroutine is cancelled, a thread gets
        an exception, so that ``finally`` blocks and ``__cleanup__`` run. An actor that has not ended in time is given
        up: the future says so, and the actor's thread keeps running.

        Args:
            timeout: seconds that the stop may take, including the stops of what the actors own; None means
                `Settings.stop_timeout_s`.

        Returns:
            A future that ends when all of them have ended. It raises `StopTimeoutError` if one was interrupted or given
            up, and `SupervisionError` if a ``__cleanup__`` raised.

        Raises:
            ValueError: the timeout is negative.
        """
        process = runtime.current()
        bound_s = _bound(process, timeout)
        future = process.request_all(self._view_members(), STOP_ACTOR, HANDED_DOWN * bound_s, target=self._uid)
        who = f"{self!r} did not stop within {bound_s:g} s"
        process.stops.bounded(
            future, bound_s, f"{who}: one of its processes does not answer; stop the processes, by procs.stop()"
        )
        if self._view == Shape.whole(self._root):
            future.add_done_callback(lambda _: process.owners.disown(self._uid))
        return future

    def over(self, procs: ProcMesh) -> ActorMesh[A]:
        """The actors of the mesh that run in ``procs``: the mesh of processes that it was spawned on, or a slice of it.

        Raises:
            ValueError: the mesh was not spawned on the whole mesh of which ``procs`` is a part.
        """
        if procs.root_members != self._members:
            raise ValueError(f"{self!r} was not spawned on the whole mesh of which {procs!r} is a part")
        return self._with_view(procs._view)

    def with_successors(self, procs: ProcMesh, /, *args: Any, **kwargs: Any) -> views.ActorMesh[A]:
        """The same mesh, with new actors on the processes that have replaced others. Returns at once.

        References to the mesh as it was stay valid for the actors that have stayed.

        Args:
            procs: what `ProcMesh.with_successors` has made of the processes that these actors were spawned on.
            *args: arguments of ``__init__`` of the new actors.
            **kwargs: keyword arguments of ``__init__`` of the new actors.

        Raises:
            ValueError: the actors were spawned on other processes than those of ``procs``.
            LookupError: this reference was received from another process, without the class.
            TypeError: the arguments do not fit ``__init__``.
            PayloadError: (a `TypeError`) an argument cannot be pickled.
        """
        if procs.root_extent.sizes != self._root.sizes:
            raise ValueError(f"{self!r} was not spawned on the processes that {procs!r} replaces")
        cls = self._actor_class
        if cls is None:
            raise LookupError(
                f"{self!r}: this reference was sent here, and a sent reference does not carry the class of its "
                "actors: use the reference of the process that spawned them"
            )
        check_construction(cls, args, kwargs)
        body = pack_construction(cls, args, kwargs)
        members, before = tuple(procs.root_members), self._members
        mesh: ActorMesh[A] = ActorMesh(
            self._uid, self._name, members, self._root, self._view, self._interface, self._actor_class
        )
        fresh = [rank for rank, member in enumerate(members) if member.id != before[rank].id]
        _make_actors(mesh, self._interface, body, [(rank, members[rank]) for rank in fresh])
        return cast("views.ActorMesh[A]", mesh)

    def _with_view(self, view: Shape) -> ActorMesh[A]:
        return ActorMesh(self._uid, self._name, self._all, self._root, view, self._interface, self._actor_class)

    # Type checkers do not know which names are endpoints: an argument of `as_endpoint` passes as one, too.
    def __getattr__(self, name: str) -> Endpoint[..., Any]:
        # Reached for names that are no attribute, so once per endpoint: the object is kept.
        interface = self.__dict__.get("_interface")
        spec = interface.endpoints.get(name) if interface is not None else None
        if spec is None:
            if interface is not None and name in interface.methods:
                return cast("Endpoint[..., Any]", PlainMethod(self, name, interface, self._actor_class))
            known = ", ".join(sorted(interface.endpoints)) if interface is not None else ""
            class_name = interface.class_name if interface is not None else "actor"
            raise AttributeError(f"{class_name} has no endpoint {name!r}; it has: {known or 'none'}")
        endpoint: Endpoint[..., Any] = Endpoint(self, spec, self._actor_class)
        self.__dict__[name] = endpoint
        return endpoint

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._interface.endpoints, *self._interface.methods]

    def __reduce__(self) -> tuple[Any, ...]:
        return (ActorMesh, (self._uid, self._name, self._all, self._root, self._view, self._interface))


def interface_in(mesh: Any) -> ActorInterface:
    """The interface of a mesh's actors; a function, since a method would take that name from an endpoint."""
    return cast("ActorMesh[Any]", mesh)._interface


class ProcMesh(MeshBase):
    """Processes on which actors are spawned; a reference to them, which may be sent to other actors.

    Example:
        ```python
        import os

        from skipper.control import Actor, endpoint, this_host

        class Worker(Actor):
            @endpoint
            def pid(self) -> int:
                return os.getpid()

        procs = this_host().spawn_procs({"replicas": 2, "gpus": 2})
        workers = procs.slice(replicas=0).spawn("workers", Worker)  # on two of the four
        assert len(set(workers.pid.call().get())) == 2
        procs.stop().get(timeout=30)
        ```
    """

    has_actors = False

    def __init__(
        self,
        uid: int,
        name: str,
        members: AnyMembers,
        root: Extent,
        view: Shape,
        launcher: ProcessRef,
        *,
        attached: bool = False,
        given_up: tuple[ProcessRef, ...] = (),
        successors: tuple[ProcMesh, ...] = (),
    ) -> None:
        super().__init__(uid, name, members, root, view)
        self._launcher = launcher
        self._attached = attached
        self._given_up = given_up
        self._successors = successors

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
        if not self._attached:
            return HostMesh()
        hosts = {member.launcher.id: member.launcher for member in self._view_members() if member.launcher is not None}
        return HostMesh(tuple(hosts.values()))

    @property
    def initialized(self) -> Future[Any]:
        """A future that ends when every process is up and answers, or with the first error."""
        return self._ask_all(PING)

    @property
    def ended(self) -> Future[None]:
        """A future that ends when one of these processes has ended, on any host and for any reason; nothing is polled.

        For a process on another host this can also mean that it has sent no heartbeat for too long.
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
            *args: arguments of ``__init__``. If it raises, calls to the actor fail and the mesh has a failure.
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
            return cast("views.ActorMesh[A]", engine().spawn(self, name, cast("type[A]", cls), args, kwargs))
        return self._spawn(name, cls, interface, body)

    def spawn_with(self, name: str, cls: type[A], arguments: Callable[[], Arguments]) -> views.ActorMesh[A]:
        """`spawn`, with arguments for ``__init__`` that each process makes itself.

        Args:
            name: name of the mesh, for people.
            cls: a subclass of `Actor`.
            arguments: called in each process on the thread of the actor; it returns a context manager, which yields
                positional and named arguments and exits when ``__init__`` has returned or raised.

        Raises:
            ActorDefinitionError: (a `TypeError`) the class cannot be spawned.
            PayloadError: (a `TypeError`) the class or ``arguments`` cannot be pickled.
        """
        return self._spawn(name, cls, interface_of(cls), pack((cls, arguments)))

    def _spawn(self, name: str, cls: Callable[..., A], interface: ActorInterface, body: Payload) -> views.ActorMesh[A]:
        members = self._view_members()
        mesh: ActorMesh[A] = ActorMesh(
            secrets.randbits(63), name, members, self.extent, Shape.whole(self.extent), interface, cast(type, cls)
        )
        _make_actors(mesh, interface, body, list(enumerate(members)))
        return cast("views.ActorMesh[A]", mesh)

    def lost(self, *, timeout: float = 30.0) -> tuple[int, ...]:
        """Which of these processes are lost, by their position in this mesh or slice.

        Args:
            timeout: in seconds, for all of them; one that does not answer in time counts as lost. One that is frozen
                counts as lost after the bound of the heartbeat (see `configure`).
        """
        process = runtime.current()
        deadline = time.monotonic() + timeout
        gone = []
        for position, answer in enumerate([process.request(member, PING) for member in self._view_members()]):
            try:
                answer.get(max(deadline - time.monotonic(), 0))
            except ControlError:
                gone.append(position)
        return tuple(gone)

    def with_successors(self, successors: Mapping[int, ProcMesh]) -> ProcMesh:
        """The same mesh, in which other processes replace some of its processes from now on.

        The number of the mesh stays: the two references are equal. Older references to it, and actors that were
        spawned on it, still refer to the old processes (see `ActorMesh.with_successors`). `stop` of the returned mesh
        also stops the replaced processes, and the meshes that the new ones were spawned as.

        Args:
            successors: by the position in this mesh or slice, a mesh or slice of the one process that takes that place.
                It may be on any host.

        Returns:
            This mesh or slice. The calling actor owns it, like all meshes that it spawns.

        Raises:
            ValueError: a successor is not one process.
            IndexError: a position is out of range.
        """
        ranks, members = self.ranks, list(self._members)
        for position, successor in successors.items():
            if successor.size != 1:
                raise ValueError(f"the successor of a process is one process, and {successor!r} has {successor.size}")
            if not 0 <= position < len(ranks):
                raise IndexError(f"{self!r} has no process at position {position}")
            members[ranks[position]] = successor.members[0]
        roots = {each.uid: each for each in (*self._successors, *(each.root for each in successors.values()))}
        given_up = [before for before, now in zip(self._members, members, strict=True) if before.id != now.id]
        mesh = ProcMesh(
            self._uid,
            self._name,
            tuple(members),
            self._root,
            self._view,
            self._launcher,
            attached=self._attached or any(mesh._attached for mesh in successors.values()),
            given_up=(*self._given_up, *given_up),
            successors=tuple(roots.values()),
        )
        _owned(mesh.root)
        return mesh

    def within(self, mesh: ProcMesh) -> ProcMesh:
        """This mesh or slice, with the processes of ``mesh``: see `with_successors`.

        Raises:
            ValueError: ``mesh`` is not a reference to the same mesh.
        """
        if mesh.uid != self._uid:
            raise ValueError(f"{mesh!r} is another mesh than {self!r}")
        return mesh._with_view(self._view)

    def activate(self) -> AbstractContextManager[ProcMesh]:
        """Run torch's operations in these processes: ``with procs.activate(): x = torch.ones(3)``.

        It works for a slice as for the whole mesh, and may be nested. See the documentation of `tensor_engine`.

        Raises:
            EngineMissingError: no tensor engine is installed.
        """
        return engine().activate(self)

    def place(self, what: T) -> T:
        """A copy of a module, a state dict or any pytree, with its tensors in these processes: all get the same values.

        Raises:
            EngineMissingError: no tensor engine is installed.
        """
        return engine().place(self, what)

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
        """Stop the actors in these processes and then the processes; this is not a failure. It may be called again.

        Actors get most of the time, and are then interrupted (see `ActorMesh.stop`); the rest is for ``atexit``
        handlers and threads. Processes that have not ended in time are killed.

        Args:
            timeout: seconds that the stop may take; None means `Settings.stop_timeout_s`.

        Returns:
            A future that ends when all processes have ended.

        Raises:
            ValueError: this is a slice: processes are stopped as a whole mesh; or the timeout is negative.
        """
        if self._view.extent.nelements != self._root.nelements:
            raise ValueError("a slice of a mesh of processes cannot be stopped alone: stop the whole mesh")
        process = runtime.current()
        bound_s = _bound(process, timeout)
        if self._launcher.id != process.me.id:
            return process.request_all((self._launcher,), STOP_MESH, HANDED_DOWN * bound_s, target=self._uid)
        future = process.remote_launch.stop_mesh(self._uid, (*self._members, *self._given_up), bound_s)
        for successor in self._successors:
            future = both(future, successor.stop(timeout))
        future.add_done_callback(lambda _: process.owners.disown(self._uid))
        return future

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        """Stop the processes at the end of ``async with procs:``; they may have been stopped before."""
        await self.stop()

    def _with_view(self, view: Shape) -> ProcMesh:
        return ProcMesh(
            self._uid,
            self._name,
            self._all,
            self._root,
            view,
            self._launcher,
            attached=self._attached,
            given_up=self._given_up,
            successors=self._successors,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        args = (self._uid, self._name, self._all, self._root, self._view, self._launcher)
        return (functools.partial(ProcMesh, attached=self._attached), args)


class HostMesh(MeshLayout):
    """Hosts on which processes are spawned: the host of the calling process (`this_host`), or attached ones.

    Attached hosts have the axis ``hosts``; the calling process' own host is one host, without axes.

    Args:
        hosts: the processes that represent the job on attached hosts; none for the calling process' own host.
        view: which of them; None: all.

    Example:
        ```python
        from skipper.control import this_host

        host = this_host()  # or the hosts of a job, or of attach_to_hosts
        procs = host.spawn_procs({"gpus": 2}, name="trainers")
        print(procs.sizes)  # {'gpus': 2}
        procs.stop().get(timeout=30)
        ```
    """

    def __init__(self, hosts: AnyMembers = (), view: Shape | None = None) -> None:
        self._all = to_send(hosts)
        if view is None:
            view = Shape.whole(Extent((_HOSTS,), (len(self._hosts),)) if self._hosts else Extent())
        self._view = view

    @property
    def initialized(self) -> Future[bool]:
        """A future with the result True, which has ended: hosts are attached before there is a mesh of them."""
        return Future.of(True)

    @property
    def names(self) -> tuple[str, ...]:
        """The addresses that attached hosts were attached with, in rank order."""
        return tuple(host.name.removeprefix(HOST_NAME) for host in self._members())

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        bootstrap: Callable[[], object] | None = None,
        proc_bind: Sequence[Mapping[str, str]] | None = None,
        name: str = "procs",
    ) -> ProcMesh:
        """Start processes, owned by the calling actor. Returns at once; messages wait for them.

        On this host they are children of the calling process and never outlive it, however it ends; they can import
        what the caller can import. On attached hosts they are children of the process that represents the job there.
        They end when that process cannot reach the script, or when their owner's process is gone; they import from the
        same paths. The script shows what they print, with their names (see ``SKIPPER_LOGS`` in `observe.logs`).

        Args:
            per_host: axes and sizes, such as ``{"gpus": 8}``; None starts one process. The axes of the hosts (``hosts``
                for attached ones) come first.
            env: environment variables for them, in addition to those of the caller, or on an attached host those of its
                agent.
            bootstrap: called in each of them before anything else, and awaited there if it is ``async``; an exception
                ends the process.
            proc_bind: what each process of a host is bound to, in rank order: a mapping with the lists ``cpus``,
                ``cpunodebind`` and ``membind``, such as ``{"cpus": "0-3", "membind": "0"}`` (see `CpuBinding.of`).
            name: name of the mesh, for people.

        Raises:
            ValueError: an axis has a size below 1, or ``proc_bind`` names CPUs or nodes that this host does not have.
            TypeError: an axis, a size or an environment variable has the wrong type.
            PayloadError: ``bootstrap`` cannot be pickled.
        """
        extent = Extent.of(per_host or {})
        check_count("the number of processes per host", extent.nelements, 0, MAX_PROCESSES)
        variables = {**environment(), **tracing.environment(), **progress_reports.environment(), **(env or {})}
        for variable, value in variables.items():
            if not isinstance(variable, str) or not isinstance(value, str):
                raise TypeError(f"environment variables are strings, not {variable!r}={value!r}")
        if proc_bind is not None and len(proc_bind) != extent.nelements:
            raise ValueError(f"proc_bind describes {len(proc_bind)} processes, {extent!r} has {extent.nelements}")
        packed = () if bootstrap is None else pack_inert(bootstrap, name="the bootstrap")
        if self._hosts:
            return self._spawn_afar(extent, LaunchOrder((), variables, packed, tuple(map(dict, proc_bind or ()))), name)
        bindings = (
            [CpuBinding()] * extent.nelements if proc_bind is None else [CpuBinding.of(bound) for bound in proc_bind]
        )
        process = runtime.current()
        whole = self._with_hosts(extent)
        members = tuple(
            runtime.new_process_ref(f"{name}{point!r}" if point else name, process.me) for point in whole.points()
        )
        mesh = _owned(ProcMesh(secrets.randbits(63), name, members, whole, Shape.whole(whole), process.me))
        process.children.launch(members, variables, packed, bindings)
        report_procs(mesh)
        return mesh

    def stop(self) -> Future[None]:
        """Detach these hosts: stop what the calling actor owns there, and then the processes of the job there.

        The agents stay, for this job and for others. It may be called again.

        Returns:
            A future that ends when that is done.

        Raises:
            ValueError: this is the host of the calling process, which cannot be detached.
        """
        if not self._hosts:
            raise ValueError("the host of this process cannot be stopped")
        hosts = self._members()
        owner = local_actor(context().actor_instance)
        ids = {host.id for host in hosts}
        there = [
            mesh
            for mesh in owner.meshes.all()
            if any(member.launcher is not None and member.launcher.id in ids for member in mesh.root_members)
        ]
        return _let_go(hosts, there)

    def lost(self, *, timeout: float = 30.0) -> tuple[int, ...]:
        """Which of these hosts are lost, by their position in this mesh; in the script that attached them.

        Args:
            timeout: in seconds, for all of them; a host that cannot be reached counts as lost after the bound of the
                heartbeat (see `configure`).

        Raises:
            ValueError: these hosts were not attached by this process.
        """
        return _attachments().lost(self._members(), timeout)

    def with_successors(self, successors: Mapping[int, HostMesh]) -> HostMesh:
        """The same mesh, in which other hosts replace some of its hosts from now on; in the script that attached them.

        Args:
            successors: by the position of each host that is replaced, a mesh of the one host that takes its place.

        Raises:
            ValueError: these hosts were not attached by this process, or a successor is not one host.
            IndexError: a position is out of range.
        """
        if any(len(mesh._members()) != 1 for mesh in successors.values()):
            raise ValueError("the successor of a host is one attached host")
        fresh = {position: mesh._members()[0] for position, mesh in successors.items()}
        return HostMesh(_attachments().succeed(self._members(), fresh))

    def reattach(self, *, timeout: float = 30.0) -> HostMesh:
        """The same hosts, after attaching those again that have been lost; in the script that attached them.

        Processes that were lost with a host stay lost: spawn new ones on the returned mesh.

        Args:
            timeout: in seconds, for all of them.

        Raises:
            HostUnreachableError: the agent of one of them does not answer.
            HostError: its agent refuses.
            ValueError: these hosts were not attached by this process.
        """
        return HostMesh(_attachments().reattach(self._members(), timeout))

    def latest(self) -> HostMesh:
        """The same hosts as they were attached last, along the axis ``hosts``; useful in the script, which attaches."""
        if not _has_attached():
            return HostMesh(self._members())
        return HostMesh(tuple(map(_attachments().latest, self._members())))

    def alive(self) -> list[bool]:
        """For each of these hosts, False if this process knows that it is lost, else True."""
        process = runtime.current()
        links = [process.transport.find(host.id) for host in self._members()]
        return [link is None or link.lost is None for link in links] or [True]

    def _with_hosts(self, per_host: Extent) -> Extent:
        """The extent of processes: the axes of the hosts, then those of the processes of a host."""
        for axis in per_host.axes:
            if axis in self.extent:
                raise ValueError(f"{axis!r} is the axis of the hosts themselves")
        return Extent((*self.extent.axes, *per_host.axes), (*self.extent.sizes, *per_host.sizes))

    def _spawn_afar(self, extent: Extent, order: LaunchOrder, name: str) -> ProcMesh:
        whole = self._with_hosts(extent)
        hosts, points = self._members(), list(whole.points())
        parts = [points[first : first + extent.nelements] for first in range(0, len(points), extent.nelements)]
        members = [
            tuple(runtime.new_process_ref(f"{name}{point!r}" if point else name, host) for point in part)
            for host, part in zip(hosts, parts, strict=True)
        ]
        process = runtime.current()
        everyone = tuple(member for part in members for member in part)
        shape = Shape.whole(whole)
        mesh = _owned(ProcMesh(secrets.randbits(63), name, everyone, whole, shape, process.me, attached=True))
        for host, part in zip(hosts, members, strict=True):
            there = LaunchOrder(part, order.env, order.bootstrap, order.proc_bind)
            process.remote_launch.launch_afar(host, mesh.uid, there)
        report_procs(mesh)
        return mesh

    def _with_view(self, view: Shape) -> HostMesh:
        return HostMesh(self._all, view)

    @property
    def _hosts(self) -> tuple[ProcessRef, ...]:
        return opened(self._all)

    def _members(self) -> tuple[ProcessRef, ...]:
        hosts = self._hosts
        return tuple(hosts[rank] for rank in self._view.ranks()) if hosts else ()

    def __reduce__(self) -> tuple[object, ...]:
        return (HostMesh, (self._all, self._view))

    def __repr__(self) -> str:
        return f"<HostMesh {', '.join(self.names)}>" if self._hosts else "<HostMesh this_host>"


def this_proc() -> ProcMesh:
    """This process, as a mesh of one on which actors can be spawned; each gets a thread of its own."""
    process = runtime.current()
    whole = Shape.whole(Extent())
    return ProcMesh(process.state.uid, process.me.name, (process.me,), Extent(), whole, process.me)


def joined(meshes: Sequence[HostMesh]) -> HostMesh:
    """One mesh of all attached hosts of several, in their order."""
    return HostMesh(tuple(host for mesh in meshes for host in mesh._members()))


def this_host() -> HostMesh:
    """The host that this process runs on."""
    return HostMesh()


def own_address() -> str:
    """The IP at which other hosts of the job reach this process; the loopback IP if there are none."""
    return host_of(runtime.current().me.address) or _LOOPBACK


def _bound(process: Process, timeout: float | None) -> float:
    """The seconds that a stop may take."""
    if timeout is None:
        return process.settings.stop_timeout_s
    seconds = check_seconds("timeout", timeout)
    if seconds < 0:
        raise ValueError(f"the timeout of a stop must not be negative, got {timeout:g}")
    return seconds


def _let_go(hosts: Sequence[ProcessRef], meshes: Sequence[OwnedMesh]) -> Future[None]:
    """See `HostMesh.stop`: stop these meshes, then the job's processes on the hosts."""
    done: Promise[None] = Promise()

    def run() -> None:
        process = runtime.current()
        deadline = time.monotonic() + process.settings.stop_timeout_s
        # The actors first: their stop arrives after their messages. Their processes get it from their host.
        for has_actors in (True, False):
            left_s = OWNED * max(deadline - time.monotonic(), 0.0)
            for end in [mesh.stop(left_s) for mesh in meshes if mesh.has_actors is has_actors]:
                try:
                    end.get(max(deadline - time.monotonic(), 0.0))
                except ControlError:
                    continue  # it is dead, or does not end: its host will end it
        with contextlib.suppress(ControlError):  # their agents end those that do not end by themselves
            left_s = max(deadline - time.monotonic(), 0.0)
            process.remote_launch.let_go(hosts, left_s).get(left_s)
        if _attached is not None:
            _attached.forget(hosts)
        done.set_result(None)

    threading.Thread(target=run, name="control-detach", daemon=True).start()
    return done


def _make_actors(
    mesh: ActorMesh[Any], interface: ActorInterface, body: Payload, places: Sequence[tuple[int, ProcessRef]]
) -> None:
    """Create actors in these processes, each with its rank in the mesh; the calling actor owns the mesh."""
    process = runtime.current()
    creator = context().actor_instance
    owner = local_actor(creator)
    request = SpawnRequest(mesh.uid, mesh.name, mesh.root_extent, OwnerRef(process.me, owner.uid), creator.as_creator())
    payload = SPAWN.pack(((request, interface.is_async), body))
    owner.own(mesh)
    for rank, member in places:
        process.send(member, ProcessRequest(mesh.uid, 0, rank, SPAWN.name, payload=payload))
    report_actors(mesh, places)


def _owned(mesh: ProcMesh) -> ProcMesh:
    owner = local_actor(context().actor_instance)
    owner.own(mesh)
    return mesh


class HostAttachments(Protocol):
    """The hosts that the script has attached; kept by `control.cluster.hosts`, which registers it by `keeps_hosts`."""

    @property
    def process(self) -> Process:
        """The script's."""

    def latest(self, host: ProcessRef) -> ProcessRef:
        """The process that represents the job on a host now."""

    def lost(self, hosts: Sequence[ProcessRef], timeout: float) -> tuple[int, ...]:
        """See `HostMesh.lost`."""

    def succeed(self, hosts: Sequence[ProcessRef], successors: Mapping[int, ProcessRef]) -> tuple[ProcessRef, ...]:
        """See `HostMesh.with_successors`."""

    def reattach(self, hosts: Sequence[ProcessRef], timeout: float) -> tuple[ProcessRef, ...]:
        """See `HostMesh.reattach`."""

    def forget(self, hosts: Sequence[ProcessRef]) -> None:
        """Close the connections to the agents of hosts that the job has detached."""


_attached: HostAttachments | None = None


def keeps_hosts(attachments: HostAttachments) -> None:
    """Make meshes of hosts use these attachments."""
    global _attached
    _attached = attachments


def _has_attached() -> bool:
    return _attached is not None and _attached.process is runtime.current()


def _attachments() -> HostAttachments:
    if _attached is None or not _has_attached():
        raise ValueError("these hosts were not attached by this process")
    return _attached


def get_or_spawn_controller(
    name: str, cls: Callable[P, A], /, *args: P.args, **kwargs: P.kwargs
) -> Future[views.ActorMesh[A]]:
    """The one actor of the job called ``name``, from anywhere in the job; the first call creates it.

    It runs in the script's process and is owned by the script. If its ``__init__`` raises, the callers get the error,
    and the next call tries again.

    Raises:
        TypeError: the arguments do not fit ``__init__``.
        ActorDefinitionError: (a `TypeError`) the class cannot be spawned.
        PayloadError: (a `TypeError`) the class or an argument cannot be pickled.
    """
    interface = interface_of(cls)
    check_construction(cls, args, kwargs)
    body = pack_construction(cls, args, kwargs)
    process = runtime.current()
    request = SpawnRequest(secrets.randbits(63), name, Extent(), OwnerRef(process.root, ROOT_UID), None)
    answer = process.request(process.root, CONTROLLER, ((name, request, interface), body))
    result: Promise[views.ActorMesh[A]] = Promise()

    def open_mesh() -> views.ActorMesh[A]:
        found, found_interface = answer.get(0)
        whole = Shape.whole(Extent())
        mesh: ActorMesh[A] = ActorMesh(found.uid, found.name, (process.root,), Extent(), whole, found_interface)
        return cast("views.ActorMesh[A]", mesh)

    answer.add_done_callback(lambda _: result.settle_by(open_mesh))
    return result


def subscribe(mesh: views.ActorMesh[Any] | ProcMesh) -> PortReceiver[MeshFailure]:
    """Receive every failure of a member of a mesh or slice, also if another actor owns it or handles the failure.

    Failures arrive as they happen. A member that was stopped is not a failure. When all members have ended, the
    channel closes, so that a receive raises `ChannelClosedError`.
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
    """A failure received from a subscription; it counts as seen."""
    if process.root_actor is not None:
        process.root_actor.faults.hear(failure.origin())
    return failure
