"""Process groups for remote functions: made by the script, real ones of `torch.distributed` on the workers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as registry

from skipper.control import ProcMesh
from skipper.tensor_engine.errors import CommunicationError, MeshMismatchError
from skipper.tensor_engine.worker.communication import worker_number
from skipper.tensor_engine.worker.groups import Groups
from skipper.tensor_engine.worker.interpreter import Interpreter

if TYPE_CHECKING:
    from skipper.tensor_engine.script.instruction_stream import Lane

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Told:
    """What workers are told of a process group.

    Attributes:
        number: unique in the script.
        groups: the numbers of the workers of each group.
        ranks: for each of these, the worker's rank in its root mesh.
    """

    number: int
    groups: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[int, ...], ...]


class RemoteProcessGroup:
    """The process groups of a mesh along some of its axes: `process_group` makes it.

    As an argument of a remote function it is the `torch.distributed.ProcessGroup` of which the worker is a member. Its
    ranks are those along the axes. It is no default group: give it to torch's functions as ``group=``, and name ranks
    by ``group_src=`` and ``group_dst=``.

    Once an operation of it has failed, or a worker could not take part since its inputs had failed, the group is broken
    and its operations fail on every member: make a new one.
    """

    def __init__(self, told: Told, mesh: ProcMesh | None) -> None:
        self._told = told
        self._mesh = mesh

    @classmethod
    def of(cls, told: Told) -> RemoteProcessGroup:
        """What stands for it on a worker."""
        return cls(told, None)

    def told(self) -> Told:
        """What workers are told of it."""
        return self._told

    def size(self) -> int:
        """The number of members."""
        return len(self._told.groups[0])

    def check(self, lane: Lane, mesh: ProcMesh) -> None:
        """See whether a function that runs on a lane can use it.

        Raises:
            MeshMismatchError: a member does not take part, or somebody who takes part is no member.
        """
        here = {worker_number(lane.session.number, rank) for rank in lane.ranks}
        members = [set(group) for group in self._told.groups]
        if any(group & here and not group <= here for group in members) or not here <= set().union(*members):
            raise MeshMismatchError(
                f"the process group is of {self._mesh!r}, and the function runs on {mesh!r}: all its members have to "
                "take part, and nobody else can"
            )

    def stand_in(self) -> dist.ProcessGroup:
        """A group that does nothing, for runs on fake tensors."""
        return _StandIn(0, self.size())  # type: ignore[call-arg]  # torch declares one of two constructors

    def __repr__(self) -> str:
        return f"<process group of {self.size()} on {self._mesh!r}>"


def process_group(mesh: ProcMesh, axes: str | Sequence[str] | None = None) -> RemoteProcessGroup:
    """A process group for remote functions: one group of the ranks along ``axes`` for each place on the other axes.

    The workers make it with its first use, and keep it until the engine is shut down.

    Args:
        mesh: whose processes.
        axes: the axes, the last one fastest; None for all of them.

    Raises:
        KeyError: the mesh has no such axis.
        ValueError: an axis is named twice.
    """
    from skipper.tensor_engine.script.plans import mesh_axes
    from skipper.tensor_engine.script.session import session_of

    names = mesh_axes(mesh, tuple(mesh.extent) if axes is None else axes)
    session = session_of(mesh).number
    grouped: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
    for rank, point in zip(mesh.ranks, mesh.extent.points(), strict=True):
        others = tuple(point[axis] for axis in mesh.extent if axis not in names)
        grouped.setdefault(others, []).append((tuple(point[axis] for axis in names), rank))
    ranks = tuple(tuple(rank for _, rank in sorted(members)) for members in grouped.values())
    groups = tuple(tuple(worker_number(session, rank) for rank in members) for members in ranks)
    return RemoteProcessGroup(Told(next(_numbers), groups, ranks), mesh)


class WorkerGroups:
    """The process groups that functions on a worker have got; kept by the worker's interpreter."""

    def __init__(self, worker: Interpreter) -> None:
        self._number = worker_number(worker.session, worker.rank)
        self._stream = worker.stream
        self._made: dict[int, dist.ProcessGroup | None] = {}

    @staticmethod
    def of(worker: Interpreter) -> WorkerGroups:
        """Those of a worker."""
        kept: WorkerGroups | None = worker.own.get("process groups")
        if kept is None:
            kept = worker.own["process groups"] = WorkerGroups(worker)
        return kept

    def get(self, handle: RemoteProcessGroup) -> dist.ProcessGroup:
        """The group of this worker; the first time, all its members make it.

        Raises:
            CommunicationError: it is broken, or members are gone.
        """
        told = handle.told()
        if told.number not in self._made:
            self._made[told.number] = self._make(told)
        made = self._made[told.number]
        if made is None:
            raise CommunicationError("the process group is broken: a member has failed; make a new one")
        return made

    def abandon(self, handle: RemoteProcessGroup) -> None:
        """Break it: this worker cannot take part, and the others must not wait for it."""
        try:
            self.get(handle)  # to tell them, it has to meet them first
        except CommunicationError:
            return
        self._drop(handle.told().number)

    def close(self) -> None:
        """Close the connections of all of them."""
        for number in list(self._made):
            self._drop(number)

    def _make(self, told: Told) -> dist.ProcessGroup:
        index = next(index for index, group in enumerate(told.groups) if self._number in group)
        members, ranks = told.groups[index], told.ranks[index]
        devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() and dist.is_nccl_available() else [])
        rank = members.index(self._number)
        group: Any = None
        meeting: Any = None
        for device in devices:
            name = f"user/{told.number}/{self._stream}/{device}"
            groups = Groups(self._number, stream=name, device=device)
            store, backend = groups.new_backend(members)
            if group is None:
                group, meeting = dist.ProcessGroup(store, rank, len(members)), store
            kind = dist.ProcessGroup.BackendType.GLOO if device == "cpu" else dist.ProcessGroup.BackendType.NCCL
            group._register_backend(torch.device(device), kind, backend)
            if device == "cpu":
                group._set_default_backend(kind)
        registered: Any = registry._world
        name = f"user/{told.number}/{self._stream}/{index}"
        group._set_group_name(name)
        registered.pg_group_ranks[group] = {place: number for number, place in enumerate(ranks)}
        registered.pg_map[group] = ("gloo", meeting)
        registered.pg_names[group] = name
        made: dist.ProcessGroup = group
        return made

    def _drop(self, number: int) -> None:
        group, self._made[number] = self._made.get(number), None
        for known in (registry._world.pg_group_ranks, registry._world.pg_map, registry._world.pg_names):
            known.pop(group, None)  # type: ignore[arg-type]
        # That was the last reference: the connections are closed, so that the others fail at once. `abort` alone would
        # leave those of gloo open.


class _Done(dist.Work):
    """What has been done at once."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class _StandIn(dist.ProcessGroup):
    """Takes part in nothing: buffers stay as they are."""


def _do_nothing(self: _StandIn, *args: Any, **kwargs: Any) -> _Done:
    return _Done()


for _name in (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "broadcast",
    "gather",
    "scatter",
    "alltoall",
    "alltoall_base",
    "barrier",
    "send",
    "recv",
    "recv_anysource",
):
    setattr(_StandIn, _name, _do_nothing)
