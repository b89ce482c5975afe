"""Meshes of hosts, on which processes are started."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

from control.context import context
from control.mesh import ProcMesh
from control.runtime import job as runtime
from control.runtime.binding import Binding
from control.shape import Extent, Shape
from control.wire.payload import pack_inert


class HostMesh:
    """Hosts on which processes are spawned. There is one so far: the host of the calling process, ``this_host()``."""

    @property
    def extent(self) -> Extent:
        """Axes and sizes: none, which is one host."""
        return Extent()

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

        They are children of the calling process and never outlive it, however it ends. They import what the caller can
        import, and write to its standard output and error.

        Args:
            per_host: axes and sizes, such as ``{"gpus": 8}``; None starts one process.
            env: environment variables for them, besides the caller's own.
            bootstrap: called in each of them before anything else; an exception there is the process' end.
            proc_bind: what each process of a host is bound to, in rank order: a mapping with the lists ``cpus``,
                ``cpunodebind`` and ``membind``, such as ``{"cpus": "0-3", "membind": "0"}`` (see `Binding.of`).
            name: name of the mesh, for people.

        Raises:
            ValueError: an axis has a size below 1, or ``proc_bind`` names what the host has not.
            TypeError: an axis, a size or an environment variable has the wrong type.
            PayloadError: ``bootstrap`` cannot be pickled.
        """
        extent = Extent.of(per_host or {})
        variables = dict(env or {})
        for variable, value in variables.items():
            if not isinstance(variable, str) or not isinstance(value, str):
                raise TypeError(f"environment variables are strings, not {variable!r}={value!r}")
        bindings = [Binding()] * extent.nelements if proc_bind is None else [Binding.of(bound) for bound in proc_bind]
        if len(bindings) != extent.nelements:
            raise ValueError(f"proc_bind describes {len(bindings)} processes, {extent!r} has {extent.nelements}")
        packed = () if bootstrap is None else pack_inert(bootstrap)
        process = runtime.current()
        owner = context().actor_instance._cell
        members = tuple(
            runtime.new_process_ref(f"{name}{point!r}" if point else name, process.me) for point in extent.points()
        )
        mesh = ProcMesh(secrets.randbits(63), name, members, extent, Shape.whole(extent), process.me)
        owner.owned[mesh.uid] = mesh
        owner.spawned.add(mesh.uid)
        process.launch(members, variables, packed, bindings)
        return mesh

    def __repr__(self) -> str:
        return "<HostMesh this_host>"


def this_host() -> HostMesh:
    """The host that this process runs on."""
    return HostMesh()
