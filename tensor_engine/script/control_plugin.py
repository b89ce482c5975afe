"""What `control` finds by the entry point ``tensor_engine``: what its meshes and endpoints do with tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TypeVar

import torch

from skipper.control import ProcMesh
from skipper.tensor_engine.script import activation, torch_functions
from skipper.tensor_engine.script.actor_calls import rref, send, spawn
from skipper.tensor_engine.script.issue import dispatch, issue_call
from skipper.tensor_engine.script.place import place as tensor_engine_place
from skipper.tensor_engine.script.session import session_of
from skipper.tensor_engine.script.tensor import Tensor
from skipper.tensor_engine.shared.metadata import metadata

T = TypeVar("T")

__all__ = ["activate", "place", "rank_tensor", "rank_tensors", "rref", "send", "spawn"]


def activate(mesh: ProcMesh) -> AbstractContextManager[ProcMesh]:
    """`ProcMesh.activate`."""
    torch_functions.wrap()
    return activation.activate(mesh, dispatch)


def place(mesh: ProcMesh, what: T) -> T:
    """`ProcMesh.place`."""
    return tensor_engine_place(what, mesh)


def rank_tensor(mesh: ProcMesh, axis: str) -> Tensor:
    """`ProcMesh.rank_tensor`."""
    return rank_tensors(mesh, (axis,))[axis]


def rank_tensors(mesh: ProcMesh, axes: tuple[str, ...] | None = None) -> dict[str, Tensor]:
    """`ProcMesh.rank_tensors`."""
    instruction_stream = session_of(mesh).instruction_stream(mesh, activation.current_stream())
    tensors: dict[str, Tensor] = {}
    for axis in mesh.extent if axes is None else axes:
        if axis not in mesh.extent:
            raise KeyError(f"no axis {axis!r} in {mesh.extent!r}")
        places = tuple((rank, point[axis]) for rank, point in zip(mesh.ranks, mesh.extent.points(), strict=True))
        tensors[axis] = issue_call(
            "skipper.tensor_engine.worker.data:place",
            (),
            (metadata((), torch.int64),),
            instruction_stream=instruction_stream,
            mesh=mesh,
            name=f"rank_tensor({axis!r})",
            static=places,
        )[0]
    return tensors
