"""Single-controller distributed tensors: ordinary PyTorch code in one script runs on every process of a mesh.

Example:
    ```python
    import torch

    from skipper.control import this_host
    from skipper.tensor_engine import inspect

    procs = this_host().spawn_procs({"gpus": 2})
    with procs.activate():
        x = torch.ones(3) * procs.rank_tensor("gpus")
    print(inspect(x, gpus=1))  # tensor([1., 1., 1.])
    ```
"""

if __name__ != "skipper.tensor_engine":  # imported by the folder's own name, as a second copy of the package
    raise ImportError(
        "write `from skipper import tensor_engine`, or `from skipper.tensor_engine import ...`", name=__name__
    )


# First, and as a whole. A thread that imports a module within torch holds the lock of that module while it waits
# for torch. Another thread may import torch, and wait for that module. Python ends such a deadlock with an error.
import torch  # noqa: F401

from skipper.tensor_engine.errors import (
    BorrowedTensorError,
    CheckpointTargetError,
    CommunicationError,
    CommunicationTimeoutError,
    CompileError,
    DroppedTensorError,
    EngineClosedError,
    LocalTensorError,
    MemberLostError,
    MeshMismatchError,
    MisuseError,
    NoActiveMeshError,
    NotPropagatableError,
    ReductionError,
    RemoteError,
    RespawnedError,
    RestoreError,
    StreamMismatchError,
    TensorEngineError,
    UnevenShardError,
    UnreachableMembersError,
)
from skipper.tensor_engine.script import random
from skipper.tensor_engine.script.activation import get_active_mesh, get_active_stream, no_mesh
from skipper.tensor_engine.script.communicate import all_gather, all_to_all, reduce, reduce_, slice_mesh, to_mesh
from skipper.tensor_engine.script.compiled import CompiledFunction, compile
from skipper.tensor_engine.script.fetch import Fetched, fetch_shard, inspect, show
from skipper.tensor_engine.script.grad_function import grad_function
from skipper.tensor_engine.script.opaque import OpaqueModule, OpaqueObject, opaque_method
from skipper.tensor_engine.script.place import place
from skipper.tensor_engine.script.process_groups import RemoteProcessGroup, process_group
from skipper.tensor_engine.script.rejoin import rejoin, restore
from skipper.tensor_engine.script.remote import RemoteFunction, call_on_shard_and_fetch, remote
from skipper.tensor_engine.script.session import shutdown
from skipper.tensor_engine.script.streams import Borrow, Stream
from skipper.tensor_engine.script.tensor import Tensor
from skipper.tensor_engine.script.wiring import wire
from skipper.tensor_engine.shared.opaque_ref import OpaqueRef

wire()

__all__ = [
    # tensors
    "Tensor",
    "no_mesh",
    "get_active_mesh",
    # streams
    "Stream",
    "Borrow",
    "get_active_stream",
    # communication
    "reduce",
    "reduce_",
    "all_gather",
    "all_to_all",
    "to_mesh",
    "place",
    "slice_mesh",
    # the user's own code on the workers
    "remote",
    "RemoteFunction",
    "call_on_shard_and_fetch",
    "OpaqueRef",
    "OpaqueObject",
    "OpaqueModule",
    "opaque_method",
    "grad_function",
    "random",
    "process_group",
    "RemoteProcessGroup",
    # fetching
    "fetch_shard",
    "inspect",
    "show",
    "Fetched",
    # programs
    "compile",
    "CompiledFunction",
    # the engine
    "rejoin",
    "restore",
    "shutdown",
    # errors
    "TensorEngineError",
    "NoActiveMeshError",
    "MisuseError",
    "MeshMismatchError",
    "StreamMismatchError",
    "LocalTensorError",
    "DroppedTensorError",
    "BorrowedTensorError",
    "CheckpointTargetError",
    "NotPropagatableError",
    "CompileError",
    "ReductionError",
    "RemoteError",
    "RespawnedError",
    "RestoreError",
    "CommunicationError",
    "CommunicationTimeoutError",
    "MemberLostError",
    "UnevenShardError",
    "UnreachableMembersError",
    "EngineClosedError",
]
