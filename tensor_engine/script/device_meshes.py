"""`DeviceMesh` and `DTensor` of torch in a script: their ranks are the processes of the active mesh.

While a mesh is active, `init_device_mesh` lays its processes out along dims, and `distribute_tensor`,
`distribute_module` and `parallelize_module` work on tensors of the mesh. A `DTensor` is torch's own; its local tensor
is a tensor of the mesh. So torch decides how operations are split and when a tensor must be redistributed. Only what
differs between ranks is done here: the methods of placements below take over if the local tensor is one of a mesh. They
use the engine's reductions and moves, since the script belongs to no process group.

All ranks of a mesh have tensors of one shape. So dims are cut evenly, or the operation is refused.

The methods are private ones of torch, the same from PyTorch 2.8 to 2.13.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import device_mesh as of_torch
from torch.distributed.device_mesh import DeviceMesh

from skipper.control import Extent, ProcMesh
from skipper.tensor_engine.errors import MeshMismatchError, MisuseError, UnevenShardError
from skipper.tensor_engine.script import activation
from skipper.tensor_engine.script.communicate import end_to_end, laid_out, reduce, slice_mesh, to_mesh
from skipper.tensor_engine.script.fetch import fetch_first
from skipper.tensor_engine.script.instruction_stream import StreamKey
from skipper.tensor_engine.script.ranks import rank_tensors
from skipper.tensor_engine.script.tensor import Tensor, left_to_their_class, value_of
from skipper.tensor_engine.shared.distributed import DistributedLayout
from skipper.tensor_engine.shared.reductions import STACK

_PROCS = "_skipper_procs"
"""The attribute of a device mesh with its processes; other meshes, as in programs of torchrun, do not have it."""
_NO_GROUP = "none"
_AXES = "_skipper_axes"
"""The attribute with the axes of the processes for each requested dim."""

_MASKS_BEFORE_2_13 = "torch.distributed.tensor._ops._embedding_ops"
_beginning = threading.Lock()
_numbers: dict[tuple[str, ...], int] = {}
_is_in_use = False


class _Making(threading.local):
    """The processes from which this thread makes device meshes."""

    procs: ProcMesh | None = None


_making = _Making()
on_first_use: list[Callable[[], None]] = []
"""Functions to call when the first device mesh of processes is made."""


def wrap() -> None:
    """Make device meshes that are created while a mesh is active consist of its processes. Runs once."""
    of_torch_init, of_torch_group, of_torch_rank = DeviceMesh.__init__, DeviceMesh.get_group, dist.get_rank

    @functools.wraps(of_torch_init)
    def init(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        active = activation.current()
        procs = _making.procs or (None if active is None else active.mesh)
        if procs is None:
            of_torch_init(self, *args, **kwargs)
            return
        is_root = _making.procs is None
        if dist.is_initialized():
            raise MisuseError(
                "the script is a rank of torch.distributed itself, so a DeviceMesh under `with mesh.activate():` could "
                "be of either: make it outside for the ranks, or end the script's process group before"
            )
        _begin()
        with _made_of(procs):
            kwargs["_init_backend"] = False  # the script is not a rank, so there are no process groups
            of_torch_init(self, *map(_here, args), **{name: _here(value) for name, value in kwargs.items()})
            # Submeshes take theirs from these.
            self._dim_group_names = [_NO_GROUP] * self.ndim  # type: ignore[list-item]  # a str, to torch before 2.13
            setattr(self, _PROCS, _laid_out_as(procs, self) if is_root else procs)
            self._thread_id, self._hash = _number_of(procs), None

    @functools.wraps(of_torch_group)
    def get_group(self: DeviceMesh, mesh_dim: int | str | None = None) -> Any:
        if is_of_processes(self):
            raise MisuseError(
                f"{self} has no process groups in the script, which is none of its ranks: use redistribute of DTensor, "
                "reduce and to_mesh, or a process_group in a remote function"
            )
        return of_torch_group(self, mesh_dim)

    @functools.wraps(of_torch_rank)
    def get_rank(group: Any = None) -> int:
        return 0 if _is_in_use and not dist.is_initialized() else of_torch_rank(group)

    setattr(of_torch, "get_rank", get_rank)  # noqa: B010  (it has imported the name)
    DeviceMesh.__init__ = init  # type: ignore[method-assign]
    DeviceMesh.get_group = get_group  # type: ignore[method-assign]
    for name in ("__getitem__", "_flatten", "_unflatten"):
        if hasattr(DeviceMesh, name):
            setattr(DeviceMesh, name, _deriving(getattr(DeviceMesh, name)))


def _number_of(procs: ProcMesh) -> int:
    """A number for these processes, for comparisons: device meshes with the same ranks would be equal otherwise.

    torch caches the device mesh of a result by those of the arguments.
    """
    processes = tuple(member.id for member in procs.members)
    with _beginning:
        return _numbers.setdefault(processes, len(_numbers) + 1)


def _deriving(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make the device meshes that a method creates consist of the same processes."""

    @functools.wraps(method)
    def run(self: DeviceMesh, *args: Any, **kwargs: Any) -> Any:
        procs = getattr(self, _PROCS, None)
        if procs is None:
            return method(self, *args, **kwargs)
        with _made_of(procs):
            return method(self, *args, **kwargs)

    return run


@contextmanager
def _made_of(procs: ProcMesh) -> Iterator[None]:
    """Make device meshes from these processes in this thread. torch works with tensors of the script there."""
    before, _making.procs = _making.procs, procs
    try:
        with activation.no_mesh():
            yield
    finally:
        _making.procs = before


def _here(argument: Any) -> Any:
    """An argument of `DeviceMesh` as a tensor of the script: with an active mesh, a tensor of ranks is on that mesh."""
    return fetch_first(argument.remote_value) if isinstance(argument, Tensor) else argument


def _laid_out_as(procs: ProcMesh, made: DeviceMesh) -> ProcMesh:
    """The processes along the dims of a device mesh."""
    ranks = made.mesh.flatten().tolist()
    if ranks != list(range(procs.size)):
        raise MeshMismatchError(
            f"a device mesh of {procs!r} has all its {procs.size} processes, in their order; this one has {ranks}. "
            "Activate a slice of the mesh, or one with its axes in another order"
        )
    names = made.mesh_dim_names or tuple(f"dim_{dim}" for dim in range(made.ndim))
    sizes = dict(zip(names, made.mesh.shape, strict=True))
    if dict(procs.extent) == sizes:
        return procs
    return procs.flatten("ranks").split(ranks=sizes)


def is_of_processes(mesh: DeviceMesh) -> bool:
    """Whether a device mesh consists of processes of the script; otherwise it is torch's."""
    return hasattr(mesh, _PROCS)


def joined(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """The device mesh with the dims of two submeshes of one mesh.

    Raises:
        MisuseError: they are no such submeshes, or their dims have no names.
    """
    names = (*(first.mesh_dim_names or ()), *(second.mesh_dim_names or ()))
    try:
        if len(names) == first.ndim + second.ndim:
            if hasattr(first, "_get_root_mesh"):
                return first._get_root_mesh()[names]
            return of_torch._mesh_resources.get_root_mesh(first)[names]  # before torch 2.10
    except KeyError:
        pass
    raise MisuseError(f"{first} and {second} are not dims of one device mesh, with names")


def axes_of_dim(mesh: DeviceMesh, dim: int) -> tuple[ProcMesh, tuple[str, ...]]:
    """The processes of a device mesh, and their axes that one of its dims covers."""
    procs: ProcMesh | None = getattr(mesh, _PROCS, None)
    if procs is None:
        raise MeshMismatchError(f"{mesh} is none of processes of the script: make it where their mesh is active")
    known: dict[int, tuple[str, ...]] = mesh.__dict__.setdefault(_AXES, {})
    if dim not in known:
        with activation.no_mesh():
            first = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim))[0].tolist()
        known[dim] = _axes_of(procs, tuple(first))
    return procs, known[dim]


def _axes_of(procs: ProcMesh, members: tuple[int, ...]) -> tuple[str, ...]:
    """The axes along which these are the members, at the first place on the other axes."""
    names = tuple(procs.extent)
    places = tuple(procs.extent.points())
    for count in range(1, len(names) + 1):
        for axes in itertools.combinations(names, count):
            if members == tuple(
                rank for rank, place in enumerate(places) if not any(place[name] for name in names if name not in axes)
            ):
                return axes
    raise MeshMismatchError(f"the ranks {members} do not lie along axes of {procs!r}")


def _begin() -> None:
    """Replace what placements do with tensors of a mesh. It costs the import of torch's distributed tensors."""
    global _is_in_use
    with _beginning:
        if _is_in_use:
            return
        _is_in_use = True
        types = importlib.import_module("torch.distributed.tensor.placement_types")
        masks = types if hasattr(types, "_MaskPartial") else importlib.import_module(_MASKS_BEFORE_2_13)
        for owner, name, ours in (
            (types.Shard, "_shard_tensor", _shard),
            (types.Shard, "_replicate_to_shard", _replicate_to_shard),
            (types.Shard, "_to_replicate_tensor", _shard_to_replicate),
            (types.Shard, "_to_new_shard_dim", _shard_to_shard),
            (types.Shard, "_reduce_shard_tensor", _partial_to_shard),
            (types.Replicate, "_replicate_tensor", _replicate),
            (types.Partial, "_reduce_value", _partial_to_replicate),
            (types._StridedShard, "_shard_tensor", _refuse_strided),
            (types._StridedShard, "_to_replicate_tensor", _strided_to_replicate),
            (types._StridedShard, "_replicate_to_strided_shard", _refuse_strided),
            (masks._MaskPartial, "_partition_value", _masked_part),
            (masks._MaskPartial, "_reduce_value", _masked_to_replicate),
        ):
            if hasattr(owner, name):
                setattr(owner, name, _for_meshes(getattr(owner, name), ours))
        if hasattr(types.Replicate, "_make_replicate_tensor"):  # a class method
            made = types.Replicate._make_replicate_tensor.__func__
            types.Replicate._make_replicate_tensor = classmethod(_for_meshes(made, _replicate))
        # Metadata of results are computed on tensors without values, which do not concern workers.
        propagator = importlib.import_module("torch.distributed.tensor._sharding_prop").ShardingPropagator
        propagate = propagator._propagate_tensor_meta_non_cached
        propagator._propagate_tensor_meta_non_cached = activation.in_the_script(propagate)
        for begin in on_first_use:
            begin()
        left_to_their_class.add(importlib.import_module("torch.distributed.tensor").DTensor)


def taken_apart(
    tensor: Any, places: dict[tuple[ProcMesh, StreamKey], list[Tensor]]
) -> tuple[Tensor, list[Tensor], DistributedLayout]:
    """A DTensor in the form for workers: see `distributed.put_together`.

    ``places`` has the place tensors of the meshes and streams whose DTensors are sent along: making one costs the
    workers time.
    """
    mesh: DeviceMesh = tensor.device_mesh
    axes = [axes_of_dim(mesh, dim) for dim in range(mesh.ndim)]
    procs, names = axes[0][0], list(axes[0][0].extent)
    layout = DistributedLayout(
        tuple(procs.extent.values()),
        tuple(tuple(names.index(axis) for axis in along) for _, along in axes),
        mesh.mesh_dim_names,
        mesh.device_type,
        tuple(tensor.placements),
        tensor.shape,
        tensor.stride(),
        tensor.requires_grad,
    )
    stream = _stream_of(tensor._local_tensor)
    if (procs, stream) not in places:
        places[procs, stream] = list(rank_tensors(procs, stream=stream).values())
    return laid_out(tensor._local_tensor, procs), places[procs, stream], layout


def _for_meshes(method: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (ours if isinstance(tensor, Tensor) else method)(self, tensor, *args, **kwargs)

    return run


def _shard(self: Any, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, src_data_rank: int | None = 0) -> torch.Tensor:
    """`distribute_tensor`: every rank along a dim gets its part of the tensor at ``src_data_rank``."""
    return own_part(_replicate(self, tensor, mesh, mesh_dim, src_data_rank), self.dim, mesh, mesh_dim)


def _replicate(
    self: Any, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, src_data_rank: int | None = 0
) -> torch.Tensor:
    """`distribute_tensor`: every rank along a dim gets the tensor at ``src_data_rank``."""
    procs, axes = axes_of_dim(mesh, mesh_dim)
    there = laid_out(tensor, procs)
    if src_data_rank is None:
        return there.contiguous()
    source = Extent(axes, tuple(procs.extent[axis] for axis in axes)).point(src_data_rank)
    return to_mesh(slice_mesh(there, **source), procs)


def _replicate_to_shard(
    self: Any, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, shard_index: object
) -> torch.Tensor:
    return own_part(tensor, self.dim, mesh, mesh_dim)


def _shard_to_replicate(
    self: Any, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, current_logical_shape: object
) -> torch.Tensor:
    procs, axes = axes_of_dim(mesh, mesh_dim)
    stacked = reduce(laid_out(tensor, procs), axes, STACK)
    return end_to_end(stacked, self.dim)


def _strided_to_replicate(
    self: Any, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, current_logical_shape: object
) -> torch.Tensor:
    """Gather a dim that was first cut along another dim of the mesh, with its pieces interleaved as before."""
    procs, axes = axes_of_dim(mesh, mesh_dim)
    stacked = reduce(laid_out(tensor, procs), axes, STACK)
    after = stacked.shape[self.dim + 2 :]
    pieces = stacked.reshape(*stacked.shape[: self.dim + 1], self.split_factor, -1, *after).movedim(0, self.dim + 1)
    return pieces.flatten(self.dim, self.dim + 2).contiguous()


def _shard_to_shard(
    self: Any,
    tensor: Tensor,
    mesh: DeviceMesh,
    mesh_dim: int,
    current_logical_shape: object,
    new_shard_dim: int,
) -> torch.Tensor:
    procs, axes = axes_of_dim(mesh, mesh_dim)
    parts = parts_of(laid_out(tensor, procs), new_shard_dim, mesh, mesh_dim).movedim(new_shard_dim, 0)
    got = reduce(parts.contiguous(), axes, STACK, scatter=True)  # from each rank its part for this one
    return end_to_end(got, self.dim)


def _partial_to_shard(self: Any, tensor: Tensor, mesh: DeviceMesh, reduce_op: str, mesh_dim: int) -> torch.Tensor:
    procs, axes = axes_of_dim(mesh, mesh_dim)
    parts = parts_of(laid_out(tensor, procs), self.dim, mesh, mesh_dim).movedim(self.dim, 0)
    mine: torch.Tensor = reduce(parts.contiguous(), axes, reduce_op, scatter=True)
    return mine.squeeze(0)


def _partial_to_replicate(self: Any, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
    procs, axes = axes_of_dim(mesh, mesh_dim)
    return reduce(laid_out(tensor, procs), axes, self.reduce_op)


def _masked_part(self: Any, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
    """Indices into each rank's rows of an embedding that is sharded along its rows."""
    count = mesh.size(mesh_dim)
    rows = self.offset_shape[self.offset_dim]
    _check_even(rows, count)
    first = _place(mesh, mesh_dim, _stream_of(tensor)) * (rows // count)
    mask = (tensor < first) | (tensor >= first + rows // count)
    self.mask_buffer.materialize_mask(mask)
    indices: torch.Tensor = (tensor - first).masked_fill(mask, 0)
    return indices


def _masked_to_replicate(self: Any, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
    self.mask_buffer.apply_mask(tensor)
    self.mask_buffer.release_mask()
    return _partial_to_replicate(self, tensor, mesh, mesh_dim)


def _refuse_strided(self: Any, tensor: Tensor, *args: object, **kwargs: object) -> NoReturn:
    raise MisuseError(
        f"{self} is not for tensors of a mesh of processes: distribute them over the dims in their order, as "
        "[Shard(0), Shard(1)]"
    )


def own_part(tensor: torch.Tensor, dim: int, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
    """Each rank's part of its tensor, along a dim."""
    parts = parts_of(laid_out(tensor, axes_of_dim(mesh, mesh_dim)[0]), dim, mesh, mesh_dim)
    return parts.index_select(dim, _place(mesh, mesh_dim, _stream_of(tensor)).reshape(1)).squeeze(dim)


def parts_of(tensor: torch.Tensor, dim: int, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
    """A dim cut into one part per rank: as two dims, the part and the index within it."""
    count = mesh.size(mesh_dim)
    _check_even(tensor.shape[dim], count)
    return tensor.reshape(*tensor.shape[:dim], count, tensor.shape[dim] // count, *tensor.shape[dim + 1 :])


def _check_even(size: int, count: int) -> None:
    if size % count:
        raise UnevenShardError(size, count)


def _stream_of(tensor: torch.Tensor) -> StreamKey:
    return value_of(tensor).instruction_stream.stream


def _place(mesh: DeviceMesh, mesh_dim: int, stream: StreamKey) -> torch.Tensor:
    """On each rank, its coordinate along a dim."""
    procs, axes = axes_of_dim(mesh, mesh_dim)
    ranks = rank_tensors(procs, axes, stream)
    place: torch.Tensor = ranks[axes[0]]
    for axis in axes[1:]:
        place = place * procs.extent[axis] + ranks[axis]
    return place
