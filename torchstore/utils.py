"""Helpers for scripts that were written for Meta's torchstore: actors in new processes, and pieces of tensors.

The store itself does not need them. New scripts spawn by ``this_host().spawn_procs(...)``, and `torchstore.get` cuts
and assembles tensors.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from skipper.control import Actor, ActorMesh, ProcMesh, this_host
from skipper.torchstore.algebra.layout import Box, uncovered
from skipper.torchstore.errors import CoverageError, LayoutMismatchError
from skipper.torchstore.transport import TensorSlice

A = TypeVar("A", bound=Actor)

_COLORS = {"r": 31, "g": 32, "y": 33, "b": 34, "m": 35, "c": 36}


async def spawn_actors(
    num_processes: int, actor_cls: type[A], name: str, mesh: ProcMesh | None = None, **init_args: Any
) -> ActorMesh[A]:
    """Spawn actors of a class in new processes of this host, one in each, along the axis ``gpus``.

    Args:
        num_processes: How many; ignored with ``mesh``.
        actor_cls: Their class.
        name: Name of the mesh of actors; a suffix makes it unique.
        mesh: Processes to spawn in, instead of new ones.
        **init_args: Arguments of ``actor_cls.__init__``.

    Returns:
        The actors. Until the mesh is sliced, ``_proc_mesh`` is the mesh of their processes, which scripts for Meta's
        torchstore use to stop them.

    Raises:
        TypeError: The arguments do not fit ``__init__``.
    """
    procs = this_host().spawn_procs(per_host={"gpus": num_processes}) if mesh is None else mesh
    actors: Any = procs.spawn(f"{name}_{secrets.token_hex(4)}", actor_cls, **init_args)
    actors._proc_mesh = procs
    found: ActorMesh[A] = actors
    return found


def get_local_tensor(
    global_tensor: torch.Tensor, local_shape: Sequence[int], global_offset: Sequence[int]
) -> torch.Tensor:
    """The part of a tensor that begins at ``global_offset`` and has ``local_shape``, as a view.

    Raises:
        LayoutMismatchError: (a `ValueError`) the numbers of dims differ, or the part reaches out of the tensor.
    """
    shape, offsets, whole = tuple(local_shape), tuple(global_offset), tuple(global_tensor.shape)
    if not len(shape) == len(offsets) == len(whole) or any(
        start < 0 or start + size > all_ for start, size, all_ in zip(offsets, shape, whole, strict=True)
    ):
        raise LayoutMismatchError(
            "", f"offsets {offsets} and shape {shape} are not a part of a tensor of shape {whole}"
        )
    return global_tensor[tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))]


def assemble_tensor(
    local_tensors: Sequence[torch.Tensor], global_shape: Sequence[int], global_offsets: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Assemble parts into one tensor: the smallest that contains them all, which may be less than ``global_shape``.

    Args:
        local_tensors: The parts.
        global_shape: The shape of the tensor that they are parts of.
        global_offsets: Where each of them begins in it.

    Raises:
        LayoutMismatchError: (a `ValueError`) there is no part, or not one offset for each.
        CoverageError: (a `ValueError`) the parts leave a hole; the message names it.
    """
    if not local_tensors or len(local_tensors) != len(global_offsets):
        raise LayoutMismatchError("", f"{len(local_tensors)} parts of a tensor with {len(global_offsets)} offsets")
    boxes = [
        Box(tuple(offsets), tuple(part.shape)) for part, offsets in zip(local_tensors, global_offsets, strict=True)
    ]
    if len({len(box.shape) for box in boxes} | {len(tuple(global_shape))}) != 1:
        raise LayoutMismatchError("", f"parts of a tensor of shape {tuple(global_shape)} with other numbers of dims")
    dims = range(len(boxes[0].shape))
    start = tuple(min(box.offsets[dim] for box in boxes) for dim in dims)
    end = tuple(max(box.offsets[dim] + box.shape[dim] for box in boxes) for dim in dims)
    shape = tuple(last - first for first, last in zip(start, end, strict=True))
    holes = uncovered(shape, frozenset(Box(box.relative_to(start), box.shape) for box in boxes))
    if holes:
        raise CoverageError("", tuple((hole.offsets, hole.shape) for hole in holes))
    whole = torch.empty(shape, dtype=local_tensors[0].dtype, device=local_tensors[0].device)
    for part, box in zip(local_tensors, boxes, strict=True):
        get_local_tensor(whole, box.shape, box.relative_to(start)).copy_(part)
    return whole


def get_slice_intersection(tensor_slice: TensorSlice, dtensor_slice: TensorSlice) -> TensorSlice | None:
    """The intersection of two slices of one tensor, with the mesh of the first; None if it is empty."""
    if tensor_slice.global_shape != dtensor_slice.global_shape:
        return None
    mine = Box(tensor_slice.offsets, tensor_slice.local_shape)
    common = mine.intersect(Box(dtensor_slice.offsets, dtensor_slice.local_shape))
    if common is None:
        return None
    return TensorSlice(
        common.offsets, tensor_slice.coordinates, tensor_slice.global_shape, common.shape, tensor_slice.mesh_shape
    )


def accelerator() -> str:
    """The kind of device that torch finds here: "cuda", "xpu" or "cpu"."""
    if torch.cuda.is_available():
        return "cuda"
    return "xpu" if hasattr(torch, "xpu") and torch.xpu.is_available() else "cpu"


def set_visible_devices(devices: str) -> None:
    """Make only these devices ("0", "0,1") visible to this process, for the ``bootstrap`` of `spawn_procs`.

    It sets CUDA_VISIBLE_DEVICES, or ZE_AFFINITY_MASK on Intel's devices; without any device it does nothing.
    """
    variable = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}.get(accelerator())
    if variable is not None:
        os.environ[variable] = devices


def color_print(text: str, color: str = "g") -> None:
    """Print a line in a colour: "r", "g", "y", "b", "m" or "c".

    Raises:
        ValueError: There is no such colour.
    """
    if color not in _COLORS:
        raise ValueError(f"a colour is one of {', '.join(_COLORS)}, not {color!r}")
    print(f"\033[{_COLORS[color]}m{text}\033[0m")  # noqa: T201  (its purpose)


__all__ = [
    "accelerator",
    "assemble_tensor",
    "color_print",
    "get_local_tensor",
    "get_slice_intersection",
    "set_visible_devices",
    "spawn_actors",
]
