"""DTensors as arguments from the script to the workers: how they are described, and created from that again."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import device_mesh as of_torch
from torch.distributed.device_mesh import DeviceMesh

from skipper.tensor_engine.errors import NotPropagatableError

_making = threading.Lock()
"""Held while `device_mesh.get_rank` is another function."""


@dataclass(frozen=True, slots=True)
class DistributedLayout:
    """The description of a DTensor, without its local tensors.

    Attributes:
        procs: the sizes of the axes of the processes, the last one fastest.
        axes: for each dim of the device mesh the axes that it covers, by number.
        names: names of these dims.
        device_type: device type of the device mesh.
        placements: one for each dim.
        shape: global shape.
        stride: global strides.
        requires_grad: whether it requires gradients.
    """

    procs: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]
    names: tuple[str, ...] | None
    device_type: str
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    requires_grad: bool


def put_together(local: torch.Tensor, places: Sequence[torch.Tensor], layout: DistributedLayout) -> torch.Tensor:
    """The DTensor, on a worker. Its device mesh has no process groups.

    Args:
        local: the local tensor of this rank.
        places: index of this rank along each axis of the processes.
        layout: the rest.

    Raises:
        NotPropagatableError: this is the script, which works out shapes on tensors without values.
    """
    from torch.distributed.tensor import DTensor

    try:
        own = tuple(int(place) for place in places)
    except RuntimeError as error:
        raise NotPropagatableError(
            "a DTensor is among the arguments of a function that is run on tensors without values: give "
            'propagate="inspect", a function, or none'
        ) from error
    mesh = _device_mesh(own, layout.procs, layout.axes, layout.names, layout.device_type)
    made: torch.Tensor = DTensor.from_local(
        local.detach(), mesh, layout.placements, run_check=False, shape=layout.shape, stride=layout.stride
    )
    return made.requires_grad_(layout.requires_grad)


@functools.lru_cache(maxsize=64)  # creating one takes longer than the rest, and there may be hundreds of DTensors
def _device_mesh(
    own: tuple[int, ...],
    procs: tuple[int, ...],
    along: tuple[tuple[int, ...], ...],
    names: tuple[str, ...] | None,
    device_type: str,
) -> DeviceMesh:
    """The device mesh of the ranks that have the same index as this one along all other axes."""
    everyone = torch.arange(torch.Size(procs).numel()).reshape(procs)
    rank = int(everyone[own])
    order = [axis for axes in along for axis in axes]
    others = [axis for axis in range(len(procs)) if axis not in order]
    sizes = [torch.Size(procs[axis] for axis in axes).numel() for axes in along]
    ranks = everyone.permute(*others, *order)[tuple(own[axis] for axis in others)].reshape(sizes)
    with _making:
        before = of_torch.get_rank  # type: ignore[attr-defined]  # which it has imported
        of_torch.get_rank = lambda group=None: rank  # type: ignore[attr-defined]
        try:
            return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False)
        finally:
            of_torch.get_rank = before  # type: ignore[attr-defined]
