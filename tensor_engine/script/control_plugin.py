"""What `control` finds by the entry point ``tensor_engine``: what its meshes and endpoints do with tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TypeVar

from torch.utils._pytree import tree_leaves

from skipper.control import ProcMesh
from skipper.control.api.tensor_engine_plugin import OnMesh
from skipper.tensor_engine.script import activation, recording, sharded_modules, torch_functions
from skipper.tensor_engine.script.actor_calls import rref, send, spawn
from skipper.tensor_engine.script.issue import dispatch
from skipper.tensor_engine.script.place import place as tensor_engine_place
from skipper.tensor_engine.script.ranks import rank_tensors
from skipper.tensor_engine.script.tensor import Tensor, local_of

T = TypeVar("T")

__all__ = ["activate", "on_mesh", "place", "rank_tensor", "rank_tensors", "rref", "send", "spawn"]


def activate(mesh: ProcMesh) -> AbstractContextManager[ProcMesh]:
    """`ProcMesh.activate`."""
    torch_functions.wrap()
    sharded_modules.offer()
    return activation.activate(mesh, dispatch)


def place(mesh: ProcMesh, what: T) -> T:
    """`ProcMesh.place`."""
    return tensor_engine_place(what, mesh)


def on_mesh(what: object) -> OnMesh | None:
    """See `control.api.tensor_engine_plugin.on_mesh`."""
    mesh: ProcMesh | None = None
    for leaf in tree_leaves(what):
        local = local_of(leaf)
        if isinstance(local, Tensor):
            recording.refuse("to hand out tensors of a mesh", "put them into a store beside the compiled function")
            mesh = mesh or local.remote_value.mesh
            if local is not leaf:
                return OnMesh(mesh, is_whole=True)
    return None if mesh is None else OnMesh(mesh, is_whole=mesh.size == 1)


def rank_tensor(mesh: ProcMesh, axis: str) -> Tensor:
    """`ProcMesh.rank_tensor`."""
    return rank_tensors(mesh, (axis,))[axis]
