"""Single-controller distributed tensors: ordinary PyTorch code in one script runs on every process of a mesh.

>>> with procs.activate():
...     x = torch.ones(3) * procs.rank_tensor("gpus")
>>> inspect(x, gpus=1)
tensor([1., 1., 1.])
"""

# First, and by its own name: a thread that asks for a module within torch holds that one's lock while it waits for
# torch itself, which another thread may just be importing, and that one needs the module. Python gives up then.
import torch  # noqa: F401

from tensor_engine import activation, issue, random, tensor
from tensor_engine.activation import get_active_mesh, no_mesh
from tensor_engine.borrow import Borrow
from tensor_engine.communicate import all_to_all, reduce, reduce_, slice_mesh, to_mesh
from tensor_engine.compiled import CompiledFunction, compile
from tensor_engine.errors import (
    BorrowedTensorError,
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
    StreamMismatchError,
    TensorEngineError,
    UnreachableMembersError,
)
from tensor_engine.fetch import Fetched, fetch_first, fetch_shard, inspect, show
from tensor_engine.grad_function import grad_function
from tensor_engine.opaque import OpaqueModule, OpaqueObject, opaque_method
from tensor_engine.opaque_ref import OpaqueRef
from tensor_engine.process_groups import RemoteProcessGroup, process_group
from tensor_engine.remote import Remote, call_on_shard_and_fetch, remote
from tensor_engine.session import shutdown
from tensor_engine.streams import Stream, get_active_stream
from tensor_engine.tensor import Tensor

tensor.connect(issue.dispatch, issue.drop, fetch_first)
activation.connect(issue.dispatch)

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
    "all_to_all",
    "to_mesh",
    "slice_mesh",
    # the user's own code on the workers
    "remote",
    "Remote",
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
    "NotPropagatableError",
    "CompileError",
    "ReductionError",
    "RemoteError",
    "CommunicationError",
    "CommunicationTimeoutError",
    "MemberLostError",
    "UnreachableMembersError",
    "EngineClosedError",
]
