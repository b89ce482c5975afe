"""Process groups for remote functions: made by the script, real ones of `torch.distributed` on the workers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from skipper.control import ProcMesh
from skipper.tensor_engine.errors import MeshMismatchError
from skipper.tensor_engine.script.instruction_stream import InstructionStream
from skipper.tensor_engine.script.plans import mesh_axes, ranks_along
from skipper.tensor_engine.script.session import session_of
from skipper.tensor_engine.shared.remote_functions import ProcessGroupSpec

_numbers = itertools.count(1)


class RemoteProcessGroup:
    """The process groups of a mesh along some of its axes; made by `process_group`.

    A remote function gets it as the `torch.distributed.ProcessGroup` that the worker is a member of. Its ranks are
    those along the axes. It is not the default group: pass it to torch's functions as ``group=``, and name ranks by
    ``group_src=`` and ``group_dst=``.

    When one of its operations has failed, or a worker could not take part because its inputs had failed, the group is
    broken and its operations fail on every member: make a new one.

    Attributes:
        spec: its description for the workers.

    Example:
        ```python
        import torch
        import torch.distributed as dist

        from skipper.control import this_host
        from skipper.tensor_engine import RemoteProcessGroup, inspect, process_group, remote

        def total(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
            x = x.clone()
            dist.all_reduce(x, group=group)
            return x

        summed = remote(total, propagate=lambda x, group: torch.empty_like(x))
        procs = this_host().spawn_procs({"gpus": 2})
        with procs.activate():
            group: RemoteProcessGroup = process_group(procs, ("gpus",))
            x = summed(torch.ones(2), group)
        print(group.size(), inspect(x).tolist())  # 2 [2.0, 2.0]
        ```
    """

    def __init__(self, spec: ProcessGroupSpec, mesh: ProcMesh) -> None:
        self.spec = spec
        self._mesh = mesh

    def size(self) -> int:
        """The number of members."""
        return len(self.spec.groups[0])

    def check(self, instruction_stream: InstructionStream, mesh: ProcMesh) -> None:
        """Check that a function that runs on an instruction stream can use it.

        Raises:
            MeshMismatchError: a member does not take part, or a worker takes part that is not a member.
        """
        numbers = instruction_stream.session.numbers.by_rank
        here = {numbers[rank] for rank in instruction_stream.ranks}
        members = [set(group) for group in self.spec.groups]
        if any(group & here and not group <= here for group in members) or not here <= set().union(*members):
            raise MeshMismatchError(
                f"the process group is of {self._mesh!r}, and the function runs on {mesh!r}: all its members have to "
                "take part, and no other workers can. After a rejoin make a new one"
            )

    def __repr__(self) -> str:
        return f"<process group of {self.size()} on {self._mesh!r}>"


def process_group(mesh: ProcMesh, axes: str | Sequence[str] | None = None) -> RemoteProcessGroup:
    """A process group for remote functions: one group of the ranks along ``axes`` for each place on the other axes.

    The workers make it at its first use, and keep it until the engine is shut down.

    Args:
        mesh: the mesh of the processes.
        axes: the axes, the last one fastest; None for all of them.

    Raises:
        KeyError: the mesh has no such axis.
        ValueError: an axis is named twice.
    """
    names = mesh_axes(mesh, tuple(mesh.extent) if axes is None else axes)
    numbers = session_of(mesh).numbers.by_rank
    ranks = ranks_along(mesh, names)
    groups = tuple(tuple(numbers[rank] for rank in members) for members in ranks)
    return RemoteProcessGroup(ProcessGroupSpec(next(_numbers), groups, ranks), mesh)


def stand_in(spec: ProcessGroupSpec) -> dist.ProcessGroup:
    """A group that does nothing, for runs on fake tensors."""
    return _StandIn(0, len(spec.groups[0]))  # type: ignore[call-arg]  # torch declares one of two constructors


class _Done(dist.Work):
    """An operation that completes at once."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class _StandIn(dist.ProcessGroup):
    """A group whose operations leave all buffers as they are."""


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
