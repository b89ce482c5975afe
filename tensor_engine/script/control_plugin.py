"""What `control` finds by the entry point ``tensor_engine``: what its meshes and endpoints do with tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TypeVar

from skipper.control import ProcMesh
from skipper.tensor_engine.script import activation, sharded_modules, torch_functions
from skipper.tensor_engine.script.actor_calls import rref, send, spawn
from skipper.tensor_engine.script.issue import dispatch
from skipper.tensor_engine.script.place import place as tensor_engine_place
from skipper.tensor_engine.script.ranks import rank_tensors
from skipper.tensor_engine.script.tensor import Tensor

T = TypeVar("T")

__all__ = ["activate", "place", "rank_tensor", "rank_tensors", "rref", "send", "spawn"]


def activate(mesh: ProcMesh) -> AbstractContextManager[ProcMesh]:
    """`ProcMesh.activate`."""
    torch_functions.wrap()
    sharded_modules.offer()
    return activation.activate(mesh, dispatch)


def place(mesh: ProcMesh, what: T) -> T:
    """`ProcMesh.place`."""
    return tensor_engine_place(what, mesh)


def rank_tensor(mesh: ProcMesh, axis: str) -> Tensor:
    """`ProcMesh.rank_tensor`."""
    return rank_tensors(mesh, (axis,))[axis]
