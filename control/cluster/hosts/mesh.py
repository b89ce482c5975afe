"""Meshes of hosts, on which processes are started."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

from skipper.control.api.mesh import ProcMesh
from skipper.control.api.namespaces import environment
from skipper.control.model.bounds import MAX_PROCESSES, check_count
from skipper.control.model.future import Future
from skipper.control.model.mesh_layout import MeshLayout
from skipper.control.model.shape import Extent, Shape
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime import tracing
from skipper.control.runtime.context import context, local_actor
from skipper.control.runtime.messages import LaunchOrder
from skipper.control.runtime.procs.binding import Binding
from skipper.control.wire.addresses import host_of
from skipper.control.wire.envelope import ProcessRef
from skipper.control.wire.payload import pack_inert

AXIS = "hosts"

LOOPBACK = "127.0.0.1"

NAME = "host "
"""What the name of a process that stands for a job on a host begins with; the address of its agent follows."""


class HostMesh(MeshLayout):
    """Hosts on which processes are spawned: that of the calling process (`this_host`), or attached ones.

    Attached hosts lie along the axis ``hosts``; the calling process' own host is one, without axes.

    Args:
        hosts: the processes that stand for the job on attached hosts; none for the calling process' own host.
        view: which of them; None: all.
    """

    def __init__(self, hosts: tuple[ProcessRef, ...] = (), view: Shape | None = None) -> None:
        self._hosts = hosts
        whole = Extent((AXIS,), (len(hosts),)) if hosts else Extent()
        self._view = Shape.whole(whole) if view is None else view

    @property
    def initialized(self) -> Future[bool]:
        """A future that has ended, in True: hosts are attached before there is a mesh of them."""
        return Future.of(True)

    @property
    def names(self) -> tuple[str, ...]:
        """The addresses that attached hosts were attached with, in rank order."""
        return tuple(host.name.removeprefix(NAME) for host in self._members())

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

        On this host they are children of the calling process and never outlive it, however it ends; they import what
        the caller can import, and write to its standard output and error. On attached hosts they are children of the
        process that stands for the job there; they end when that is out of reach of the script, or their owner's
        process is gone; they import from the same paths, and write to the standard output and error of the agent.

        Args:
            per_host: axes and sizes, such as ``{"gpus": 8}``; None starts one process. The axes of the hosts,
                ``hosts`` of attached ones, come in front of these.
            env: environment variables for them, besides the caller's own, or on an attached host its agent's.
            bootstrap: called in each of them before anything else, and awaited there if it is ``async``; an exception
                is the process' end.
            proc_bind: what each process of a host is bound to, in rank order: a mapping with the lists ``cpus``,
                ``cpunodebind`` and ``membind``, such as ``{"cpus": "0-3", "membind": "0"}`` (see `Binding.of`).
            name: name of the mesh, for people.

        Raises:
            ValueError: an axis has a size below 1, or ``proc_bind`` names what this host has not.
            TypeError: an axis, a size or an environment variable has the wrong type.
            PayloadError: ``bootstrap`` cannot be pickled.
        """
        extent = Extent.of(per_host or {})
        check_count("the number of processes per host", extent.nelements, 0, MAX_PROCESSES)
        variables = {**environment(), **tracing.environment(), **(env or {})}
        for variable, value in variables.items():
            if not isinstance(variable, str) or not isinstance(value, str):
                raise TypeError(f"environment variables are strings, not {variable!r}={value!r}")
        if proc_bind is not None and len(proc_bind) != extent.nelements:
            raise ValueError(f"proc_bind describes {len(proc_bind)} processes, {extent!r} has {extent.nelements}")
        packed = () if bootstrap is None else pack_inert(bootstrap, name="the bootstrap")
        if self._hosts:
            return self._spawn_afar(extent, LaunchOrder((), variables, packed, tuple(map(dict, proc_bind or ()))), name)
        bindings = [Binding()] * extent.nelements if proc_bind is None else [Binding.of(bound) for bound in proc_bind]
        process = runtime.current()
        whole = self._with_hosts(extent)
        members = tuple(
            runtime.new_process_ref(f"{name}{point!r}" if point else name, process.me) for point in whole.points()
        )
        mesh = _owned(ProcMesh(secrets.randbits(63), name, members, whole, Shape.whole(whole), process.me))
        process.children.launch(members, variables, packed, bindings)
        return mesh

    def stop(self) -> Future[None]:
        """Let these attached hosts go: what the calling actor owns there is stopped, and then the job's part there.

        The agents stay, for this job and for others.

        Returns:
            A future that ends when that is done; it may be called again.

        Raises:
            ValueError: this host cannot be let go of.
        """
        from skipper.control.cluster.hosts import attachments

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
        return attachments.stop(hosts, there)

    def lost(self, *, timeout: float = 30.0) -> tuple[int, ...]:
        """Which of these hosts are lost, by their position in this mesh; in the script that attached them.

        Args:
            timeout: in seconds, for all of them; a host that is out of reach is known to be so after the heartbeat's
                bound (see `configure`).

        Raises:
            ValueError: these hosts were not attached by this process.
        """
        from skipper.control.cluster.hosts import attachments

        return attachments.lost(self._members(), timeout)

    def with_successors(self, successors: Mapping[int, HostMesh]) -> HostMesh:
        """The same hosts, but for some in whose places others are from now on; in the script that attached them.

        Args:
            successors: the position of each host that is given up, and the one host that takes its place.

        Raises:
            ValueError: these hosts were not attached by this process, or a successor is not one host.
            IndexError: a position is out of range.
        """
        from skipper.control.cluster.hosts import attachments

        if any(len(mesh._members()) != 1 for mesh in successors.values()):
            raise ValueError("the successor of a host is one attached host")
        fresh = {position: mesh._members()[0] for position, mesh in successors.items()}
        return HostMesh(attachments.succeed(self._members(), fresh))

    def reattach(self, *, timeout: float = 30.0) -> HostMesh:
        """The same hosts, where those that have been lost are attached again; in the script that attached them.

        Processes that were lost with a host stay lost: spawn others on the mesh that is returned.

        Args:
            timeout: in seconds, for all of them.

        Raises:
            HostUnreachableError: the agent of one of them does not answer.
            HostError: its agent refuses.
            ValueError: these hosts were not attached by this process.
        """
        from skipper.control.cluster.hosts import attachments

        return HostMesh(attachments.reattach(self._members(), timeout))

    def latest(self) -> HostMesh:
        """The same hosts as they were attached last, along the axis ``hosts``; of use in the script, which attaches."""
        from skipper.control.cluster.hosts import attachments

        return HostMesh(attachments.latest(self._members()))

    def alive(self) -> list[bool]:
        """For each of these hosts, whether it is not known here to be lost, as of one that nobody here deals with."""
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
        return mesh

    def _with_view(self, view: Shape) -> HostMesh:
        return HostMesh(self._hosts, view)

    def _members(self) -> tuple[ProcessRef, ...]:
        return tuple(self._hosts[rank] for rank in self._view.ranks()) if self._hosts else ()

    def __reduce__(self) -> tuple[object, ...]:
        return (HostMesh, (self._hosts, self._view))

    def __repr__(self) -> str:
        return f"<HostMesh {', '.join(self.names)}>" if self._hosts else "<HostMesh this_host>"


def joined(meshes: Sequence[HostMesh]) -> HostMesh:
    """One mesh of all attached hosts of several, in their order."""
    return HostMesh(tuple(host for mesh in meshes for host in mesh._members()))


def this_host() -> HostMesh:
    """The host that this process runs on."""
    return HostMesh()


def own_address() -> str:
    """The IP at which other hosts of the job reach this process; that of the loopback where none do."""
    return host_of(runtime.current().me.address) or LOOPBACK


def _owned(mesh: ProcMesh) -> ProcMesh:
    owner = local_actor(context().actor_instance)
    owner.own(mesh)
    return mesh
