"""Tensors with each rank's coordinates."""

from __future__ import annotations

import torch

from skipper.control import ProcMesh
from skipper.tensor_engine.script import activation
from skipper.tensor_engine.script.instruction_stream import StreamKey
from skipper.tensor_engine.script.issue import issue_call
from skipper.tensor_engine.script.session import session_of
from skipper.tensor_engine.script.tensor import Tensor
from skipper.tensor_engine.shared.metadata import metadata


def rank_tensors(
    mesh: ProcMesh, axes: tuple[str, ...] | None = None, stream: StreamKey | None = None
) -> dict[str, Tensor]:
    """`ProcMesh.rank_tensors`, on a stream; None: on the active one."""
    if stream is None:
        stream = activation.current_stream()
    instruction_stream = session_of(mesh).instruction_stream(mesh, stream)
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
