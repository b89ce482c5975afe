"""The errors of the tensor engine.

TensorEngineError
├── NoActiveMeshError       (also RuntimeError)  an operation that needs an active mesh, and there is none
├── MisuseError             (also ValueError)    the arguments do not fit the tensors; raised where they are given
│   ├── MeshMismatchError                        tensors of different meshes in one operation
│   ├── StreamMismatchError                      tensors of different streams in one operation
│   ├── LocalTensorError                         a tensor of the script where one of the mesh is needed, or reversed
│   │   └── PickleError                          a tensor of a mesh cannot be pickled (also control's OnWorkersError)
│   ├── UnevenShardError                         a dim that cannot be cut into equal parts for all ranks
│   ├── DroppedTensorError                       a tensor after its `drop`, with the line of that
│   └── BorrowedTensorError                      a tensor that is lent, or was given back, with the line
├── NotPropagatableError    (also RuntimeError)  the script cannot know the shape of what an operation returns
├── CompileError            (also RuntimeError)  a function that cannot be compiled, with the reason
├── CheckpointTargetError   (also TypeError)     a checkpoint cannot be loaded into tensors of a mesh
├── ReductionError          (also TypeError)     a reduction that is not defined for the dtype
├── RemoteError             (also RuntimeError)  an operation failed on a worker, or depends on one that did
│   └── RespawnedError                           another process has replaced the one that had the value
├── RestoreError            (also RuntimeError)  no rank is left that has what others have lost
├── CommunicationError      (also RuntimeError)  workers could not exchange what an operation needs
│   ├── CommunicationTimeoutError                the others did not take part in time (also TimeoutError)
│   ├── MemberLostError                          a worker has ended that other workers wait for
│   └── UnreachableMembersError                  members of a group are on hosts that do not reach each other
└── EngineClosedError       (also RuntimeError)  the engine was shut down, or its workers are gone

No operation raises a `TypeError`. Where an operator raises one, Python tries the other operand, and then reports an
error of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from skipper.control.api import tensor_engine_plugin


class TensorEngineError(Exception):
    """Base class of the errors of the tensor engine."""


class NoActiveMeshError(TensorEngineError, RuntimeError):
    """There is no active mesh: `with mesh.activate():` makes one."""


class MisuseError(TensorEngineError, ValueError):
    """The arguments do not fit the tensors, or each other."""


class MeshMismatchError(MisuseError):
    """An operation combines tensors of different meshes."""


class StreamMismatchError(MisuseError):
    """An operation combines tensors of different streams."""


class LocalTensorError(MisuseError):
    """A tensor of the script was given where one of a mesh is needed, or the other way round."""


class UnevenShardError(MisuseError):
    """A dim cannot be cut into equal parts: the tensors of a mesh have one shape on all ranks.

    Attributes:
        size: size of the dim.
        count: number of the ranks.
    """

    def __init__(self, size: int, count: int) -> None:
        super().__init__(
            f"a dim of size {size} cannot be cut into {count} equal parts, and the tensors of a mesh have one shape on "
            "all ranks: pad it, or choose another dim or placement"
        )
        self.size = size
        self.count = count


class PickleError(LocalTensorError, tensor_engine_plugin.OnWorkersError):
    """An object on the workers cannot be pickled. When this is raised, arguments of endpoints go through the engine."""


class DroppedTensorError(MisuseError):
    """The tensor has been dropped: its memory on the workers is gone. The message names the line that dropped it."""


class BorrowedTensorError(MisuseError):
    """The tensor is lent to another stream, or was borrowed and given back; then the message names the line."""


class NotPropagatableError(TensorEngineError, RuntimeError):
    """The script cannot know what an operation returns without running it."""


class CompileError(TensorEngineError, RuntimeError):
    """The function cannot be compiled; the message says why."""


class CheckpointTargetError(TensorEngineError, TypeError):
    """`torch.distributed.checkpoint` cannot load into tensors of a mesh, whose memory is on the workers."""


class ReductionError(TensorEngineError, TypeError):
    """The reduction is not defined for tensors of that dtype."""


class CommunicationError(TensorEngineError, RuntimeError):
    """Workers could not exchange what an operation needs: a worker or a connection is gone."""


class CommunicationTimeoutError(CommunicationError, TimeoutError):
    """The other workers did not take part in time."""


class MemberLostError(CommunicationError):
    """A worker has ended while other workers wait for it.

    Attributes:
        worker: its process.
    """

    def __init__(self, worker: str) -> None:
        super().__init__(worker)
        self.worker = worker

    def __str__(self) -> str:
        return f"{self.worker} has ended, and cannot take part in what other workers wait for"


class UnreachableMembersError(CommunicationError):
    """Members of a group are on several hosts or network namespaces, and some have no address that others can reach.

    Attributes:
        places: where each of them is, in the order of their ranks.
    """

    def __init__(self, places: tuple[str, ...]) -> None:
        super().__init__(places)
        self.places = places

    def __str__(self) -> str:
        who = ", ".join(f"rank {rank} is {place}" for rank, place in enumerate(self.places))
        return (
            f"these workers cannot all reach each other: {who}. Tensors in CPU memory go between hosts through the "
            "data plane, which must be open to other hosts: attach the hosts before you spawn processes on this host, "
            "and pass data_plane=True if you use certificates"
        )


class EngineClosedError(TensorEngineError, RuntimeError):
    """The engine has been shut down, or its workers are gone."""


class RemoteError(TensorEngineError, RuntimeError):
    """An operation failed on a worker, or depends on one that did.

    Attributes:
        rank: where it failed: the rank in the mesh of processes that the worker belongs to.
        operation: what failed there.
        summary: type and message of the exception there.
        script_stack: where the script issued that operation, as text; empty if that is no longer known.
        worker_stack: the traceback on the worker, as text.
    """

    def __init__(self, rank: int, operation: str, summary: str, script_stack: str, worker_stack: str) -> None:
        self.rank = rank
        self.operation = operation
        self.summary = summary
        self.script_stack = script_stack
        self.worker_stack = worker_stack
        lines: Sequence[str] = (
            f"{operation} failed on rank {rank}: {summary}",
            "Where the script issued it (most recent call last):",
            script_stack.rstrip() or "  (no longer known)",
            f"Where it failed on rank {rank}:",
            worker_stack.rstrip(),
        )
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return (RemoteError, (self.rank, self.operation, self.summary, self.script_stack, self.worker_stack))


class RespawnedError(RemoteError):
    """The value was in a process that another one has replaced, or depends on such a value.

    Attributes:
        rank: the rank that has been respawned, in the mesh of processes that the worker belongs to.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(rank, "the rejoin", "its process has ended, and its tensors are lost", "", "")

    def __str__(self) -> str:
        return (
            f"rank {self.rank} was respawned, and the tensors of its old process are lost: copy the value there by "
            "tensor_engine.restore, or create it again"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (RespawnedError, (self.rank,))


class RestoreError(TensorEngineError, RuntimeError):
    """No rank is left that has what others have lost.

    Attributes:
        ranks: the ranks that cannot be restored, in the mesh of processes that their workers belong to.
    """

    def __init__(self, ranks: Sequence[int], axes: Sequence[str]) -> None:
        super().__init__(tuple(ranks), tuple(axes))
        self.ranks = tuple(ranks)
        self._axes = tuple(axes)

    def __str__(self) -> str:
        who = ", ".join(map(str, self.ranks))
        return (
            f"ranks {who} have been respawned, and so have all other ranks along {', '.join(self._axes)}: restore "
            "their tensors from a copy in the script, by restore(..., source=copy)"
        )
