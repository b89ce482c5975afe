"""The entry point ``tensor_engine`` for `control`: what its meshes and endpoints do with tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from skipper.control import ProcMesh
from skipper.control.api.tensor_engine_plugin import OnMesh
from skipper.tensor_engine.script import activation, recording, sharded_modules, torch_functions
from skipper.tensor_engine.script.actor_calls import rref, send, spawn
from skipper.tensor_engine.script.instruction_stream import InstructionStream
from skipper.tensor_engine.script.issue import dispatch
from skipper.tensor_engine.script.place import place as tensor_engine_place
from skipper.tensor_engine.script.ranks import rank_tensors
from skipper.tensor_engine.script.tensor import Tensor, local_of, refuse_mixture, value_of
from skipper.tensor_engine.script.value import Value

T = TypeVar("T")

__all__ = ["activate", "by_mesh", "place", "rank_tensor", "rank_tensors", "rref", "send", "spawn"]


def activate(mesh: ProcMesh) -> AbstractContextManager[ProcMesh]:
    """`ProcMesh.activate`."""
    torch_functions.wrap()
    sharded_modules.offer()
    return activation.activate(mesh, dispatch)


def place(mesh: ProcMesh, what: T) -> T:
    """`ProcMesh.place`."""
    return tensor_engine_place(what, mesh)


def by_mesh(tensors: Mapping[str, object]) -> Sequence[OnMesh]:
    """See `control.api.tensor_engine_plugin.TensorEngine.by_mesh`.

    Raises:
        CompileError: a function is being compiled.
        MeshMismatchError: two meshes share processes.
        StreamMismatchError: tensors of one mesh are of several streams.
        DroppedTensorError, BorrowedTensorError: a tensor cannot be used.
        EngineClosedError: the workers of one are gone.
    """
    found: dict[InstructionStream, tuple[ProcMesh, list[str]]] = {}
    users: dict[str, tuple[str, Value]] = {}
    for name, tensor in tensors.items():
        local = local_of(tensor)
        if not isinstance(local, Tensor):
            continue
        recording.refuse("to hand out tensors of a mesh", "put them into a store outside of the compiled function")
        value = value_of(local)
        stream = value.instruction_stream
        if stream not in found:
            stream.session.check()
            found[stream] = mesh, _ = (
                value.mesh.within(stream.session.procs),
                [],
            )  # with processes that rejoined
            for member in mesh.members:
                other, first = users.setdefault(member.id, (name, value))
                if first is not value:
                    refuse_mixture(f"{other!r} and {name!r}: tensors", first, value)
        found[stream][1].append(name)
    return [OnMesh(mesh, tuple(names)) for mesh, names in found.values()]


def rank_tensor(mesh: ProcMesh, axis: str) -> Tensor:
    """`ProcMesh.rank_tensor`."""
    return rank_tensors(mesh, (axis,))[axis]
