"""Parameters that are sharded over the ranks of a mesh, and gathered for their use: see `sharded_modules`."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from skipper.control import ProcMesh
from skipper.tensor_engine.errors import MisuseError
from skipper.tensor_engine.script import activation
from skipper.tensor_engine.script.communicate import end_to_end, reduce
from skipper.tensor_engine.script.device_meshes import axes_of_dim, joined, own_part, parts_of
from skipper.tensor_engine.script.place import place
from skipper.tensor_engine.script.tensor import Tensor, local_of, version_of
from skipper.tensor_engine.shared.reductions import STACK

GROUP = "_skipper_group"
"""The attribute of a module that has its group."""


@dataclass(frozen=True, slots=True)
class ShardingLayout:
    """The layout of the parameters of a group.

    Attributes:
        mesh: of one dim, along which they are sharded, or of two, with copies along the first.
        procs: its processes.
        shard_axes: the axes along which they are sharded.
        copy_axes: the axes along which there are copies.
    """

    mesh: DeviceMesh
    procs: ProcMesh
    shard_axes: tuple[str, ...]
    copy_axes: tuple[str, ...]

    @staticmethod
    def of(mesh: DeviceMesh) -> ShardingLayout:
        """The layout along a device mesh.

        Raises:
            MisuseError: it has more than two dims.
        """
        if mesh.ndim > 2:
            raise MisuseError(f"fully_shard takes a device mesh of one dim, or of two (copies, shards), not {mesh}")
        procs, shard_axes = axes_of_dim(mesh, mesh.ndim - 1)
        return ShardingLayout(mesh, procs, shard_axes, axes_of_dim(mesh, 0)[1] if mesh.ndim == 2 else ())

    @property
    def count(self) -> int:
        """The number of shards."""
        return self.mesh.size(self.mesh.ndim - 1)


@dataclass(slots=True)
class ShardingOptions:
    """The options of a call of `fully_shard`.

    Attributes:
        reshards: whether whole tensors are freed after forward; None: except in the outermost module.
        placement: returns the `Shard` of a parameter, or None for the usual one.
        policy: the policy for mixed precision.
        ignored: parameters that are not sharded.
        divide_by: gradients are their sum divided by this, and not the average.
    """

    reshards: bool | None
    placement: Callable[[torch.nn.Parameter], Any]
    policy: Any
    ignored: set[torch.nn.Parameter]
    divide_by: float | None = None

    @staticmethod
    def of(options: dict[str, Any]) -> ShardingOptions:
        """Read the keyword arguments of `fully_shard`.

        Raises:
            MisuseError: one of them is not supported for tensors of a mesh.
        """
        given = {name: value for name, value in options.items() if value is not None}
        reshards = given.pop("reshard_after_forward", None)
        placement = given.pop("shard_placement_fn", lambda _: None)
        fsdp = importlib.import_module("torch.distributed.fsdp")
        policy = given.pop("mp_policy", None) or fsdp.MixedPrecisionPolicy()
        ignored = given.pop("ignored_params", set())
        if type(given.pop("offload_policy", None)) not in (type(None), fsdp.OffloadPolicy):
            raise MisuseError("fully_shard for tensors of a mesh has no offload_policy: they stay where they are")
        if given:
            raise MisuseError(f"fully_shard for tensors of a mesh does not take {', '.join(sorted(given))}")
        return ShardingOptions(None if reshards is None else bool(reshards), placement, policy, ignored)


class ShardedParameter:
    """A parameter of a group.

    Attributes:
        slots: the modules and names that have it; several if it is tied.
        parameter: the DTensor.
        dim: the dim along which it is sharded, or None if all ranks have it whole.
        local_shape: the shape of each rank's part.
        model_parallel: the device mesh, placements, shape and strides of its earlier DTensor, or None.
    """

    def __init__(self, slots: list[tuple[torch.nn.Module, str]], group: ShardedGroup) -> None:
        distributed = importlib.import_module("torch.distributed.tensor")
        module, name = slots[0]
        original: Any = module.get_parameter(name)
        self.slots = slots
        self.model_parallel: tuple[Any, ...] | None = None
        layout, local = group.layout, original.detach()
        before: tuple[Any, ...] = ()
        mesh = layout.mesh
        if isinstance(original, distributed.DTensor):
            local = original.detach().to_local()
            mesh, before = joined(layout.mesh, original.device_mesh), original.placements
            self.model_parallel = (original.device_mesh, before, original.shape, original.stride())
        elif not isinstance(original, Tensor):
            local = place(local, layout.procs)
        self.dim = _dim(local.shape, layout.count, group.options.placement(original))
        if self.dim is None:
            cut: Any = distributed.Replicate()
        else:
            local = own_part(local, self.dim, layout.mesh, layout.mesh.ndim - 1)
            cut = distributed.Shard(self.dim)
            cuts = [original.device_mesh.size(dim) for dim, each in enumerate(before) if each.is_shard(self.dim)]
            if cuts:
                kinds = importlib.import_module("torch.distributed.tensor.placement_types")
                cut = kinds._StridedShard(self.dim, split_factor=math.prod(cuts))
        self.local_shape = local.shape
        copies = [distributed.Replicate()] * bool(layout.copy_axes)
        made = _dtensor(local.contiguous(), mesh, [*copies, cut, *before], original.shape, original.stride())
        self.parameter = torch.nn.Parameter(made, original.requires_grad)

    def fill(self, tensor: Any) -> None:
        """Put a tensor where the modules look for the parameter."""
        for module, name in self.slots:
            module._parameters[name] = tensor

    @property
    def local(self) -> torch.Tensor:
        """Each rank's part of it, whose gradient becomes a part of the DTensor's."""
        local: torch.Tensor = cast(Any, self.parameter).to_local()
        return local

    def whole_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole tensor, in the module's form."""
        if self.model_parallel is None:
            return tensor
        return _dtensor(tensor, *self.model_parallel)


class ShardedGroup:
    """The parameters of the modules of one call, and whether they are whole at the moment."""

    def __init__(self, modules: Sequence[torch.nn.Module], layout: ShardingLayout, options: ShardingOptions) -> None:
        self.layout = layout
        self.options = options
        self.parts: list[ShardedParameter] = []
        self._entered = 0
        self._is_outermost: bool | None = None
        self._kept: list[torch.Tensor] | None = None
        """The whole tensors, if they are still kept for backward, or gathered again; none with autograd history."""
        self._saved: dict[int, int] = {}
        """The numbers of the whole tensors of the running forward pass, by their storage."""
        slots: dict[int, list[tuple[torch.nn.Module, str]]] = {}
        owned = {id(each) for each in options.ignored}
        for module in modules:
            for each in module.modules():
                inner = each.__dict__.get(GROUP)
                if inner is not None:
                    owned.update(id(part.parameter) for part in inner.parts)
        for module in modules:
            for each in module.modules():
                for name, parameter in each.named_parameters(recurse=False, remove_duplicate=False):
                    if id(parameter) not in owned:
                        places = slots.setdefault(id(parameter), [])
                        if (each, name) not in places:
                            places.append((each, name))
                for name, buffer in list(each.named_buffers(recurse=False, remove_duplicate=False)):
                    if not isinstance(buffer, Tensor):
                        setattr(each, name, place(buffer, layout.procs))
        self.parts = [ShardedParameter(places, self) for places in slots.values()]
        self.reshard()

    def reshard(self) -> None:
        """Give the modules the parts, and forget the whole tensors."""
        for part in self.parts:
            part.fill(part.parameter)
        self._kept = None
        self._saved = {}

    def unshard(self) -> None:
        """Give the modules the whole tensors, as leaves that backward does not fill."""
        kept = self._for_backward()
        for part, tensor in zip(self.parts, kept, strict=True):
            # When a checkpoint recomputes, autograd must save as much as before.
            part.fill(part.whole_of(tensor.detach().requires_grad_(part.parameter.requires_grad)))

    @contextmanager
    def running(self, is_outermost: bool) -> Iterator[None]:
        """Run a module of the group in this context, with whole parameters that autograd tracks."""
        if self._entered or not self.parts:
            yield
            return
        whole = self._gather()
        for part, tensor in zip(self.parts, whole, strict=True):
            part.fill(part.whole_of(tensor))
        if self._is_outermost is None:  # once: a checkpoint that recomputes does so without the outer modules
            self._is_outermost = is_outermost
        reshards = not self._is_outermost if self.options.reshards is None else self.options.reshards
        kept = [tensor.detach() for tensor in whole] if torch.is_grad_enabled() and not reshards else None
        self._saved = {id(cast(Tensor, tensor).remote_value.storage): at for at, tensor in enumerate(whole)}
        self._entered += 1
        try:
            with self._noting() if reshards and torch.is_grad_enabled() else nullcontext():
                yield
        finally:
            self._entered -= 1
            self.reshard()
            self._kept = kept

    def _noting(self) -> AbstractContextManager[None]:
        """Make autograd record whole tensors, and views of them, instead of keeping them."""
        outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        saved = self._saved

        def pack(tensor: Any) -> Callable[[], torch.Tensor]:
            local: Any = local_of(tensor)
            at = saved.get(id(local.remote_value.storage)) if isinstance(local, Tensor) else None
            if at is not None:
                again = functools.partial(self._again, at, local.shape, local.stride(), local.storage_offset())
                if local is tensor:
                    return again
                known = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
                return functools.partial(_distributed, again, *known)
            if outer is not None:
                return functools.partial(outer[1], outer[0](tensor))
            return functools.partial(_unchanged, tensor, version_of(tensor))

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed())

    def _again(self, at: int, shape: torch.Size, stride: tuple[int, ...], offset: Any) -> torch.Tensor:
        """A whole tensor, or a view of it, gathered again for backward."""
        whole = self._for_backward()[at]
        if (whole.shape, whole.stride(), whole.storage_offset()) == (shape, stride, offset):
            return whole
        return whole.as_strided(shape, stride, offset)

    def _for_backward(self) -> list[torch.Tensor]:
        if self._kept is None:
            with torch.no_grad():
                self._kept = self._gather()
        return self._kept

    def _gather(self) -> list[torch.Tensor]:
        """The whole tensors."""
        with activation.no_mesh():
            return list(_Unshard.apply(self, *(part.local for part in self.parts)))  # type: ignore[no-untyped-call]

    def begin_backward(self) -> None:
        """Note that backward has reached an output."""
        self.unshard()
        # Frozen parameters may be needed after the gradients of the others.
        torch.autograd.Variable._execution_engine.queue_callback(self.reshard)


def _distributed(local: Callable[[], torch.Tensor], *known: Any) -> torch.Tensor:
    return _dtensor(local(), *known)


def _dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: torch.Size, stride: tuple[int, ...]
) -> torch.Tensor:
    made: torch.Tensor = importlib.import_module("torch.distributed.tensor").DTensor.from_local(
        local, mesh, placements, run_check=False, shape=shape, stride=stride
    )
    return made


def _unchanged(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """Check what autograd has saved for changes: with hooks on saved tensors, it does not check by itself."""
    now = version_of(tensor)
    if now != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {list(tensor.shape)} is at version {now}; expected version {version} instead"
        )
    return tensor


def _dim(shape: torch.Size, count: int, wanted: Any) -> int | None:
    """The dim along which a parameter is sharded: the first that can be cut evenly, unless one is requested."""
    if wanted is not None:
        if not hasattr(wanted, "dim"):
            raise MisuseError(f"shard_placement_fn gives a Shard or None, for tensors of a mesh; not {wanted!r}")
        return cast(int, wanted.dim) % len(shape)
    return next((dim for dim, size in enumerate(shape) if size and size % count == 0), None)


def _gathered(group: ShardedGroup, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    dtype, layout = group.options.policy.param_dtype, group.layout
    cast_ = [part if dtype is None or not part.is_floating_point() else part.to(dtype) for part in parts]
    whole: list[torch.Tensor] = list(cast_)
    for numbers in _by_dtype(cast_, [at for at, part in enumerate(group.parts) if part.dim is not None]):
        flat = torch.cat([cast_[at].reshape(-1) for at in numbers])
        stacked = reduce(flat, layout.shard_axes, STACK)
        for at, piece in zip(numbers, _cut(stacked, [cast_[at].numel() for at in numbers]), strict=True):
            dim = cast(int, group.parts[at].dim)
            whole[at] = end_to_end(piece.reshape(layout.count, *cast_[at].shape), dim)
    # Autograd distinguishes them by their storage, and modules must not change the parts.
    return [tensor.clone() if _shares(tensor, part) else tensor for tensor, part in zip(whole, parts, strict=True)]


def _cut(rows: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Cut the second dim into pieces."""
    ends = list(accumulate(sizes))
    return [rows[:, end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return cast(Tensor, one).remote_value.storage is cast(Tensor, other).remote_value.storage


def _by_dtype(tensors: Sequence[torch.Tensor | None], numbers: Sequence[int]) -> list[list[int]]:
    """These numbers, grouped by the dtype of their tensors."""
    together: dict[torch.dtype, list[int]] = {}
    for at in numbers:
        tensor = tensors[at]
        if tensor is not None:
            together.setdefault(tensor.dtype, []).append(at)
    return list(together.values())


class _Unshard(torch.autograd.Function):
    """The whole tensors of parts; the gradients of the parts are averages over all ranks."""

    @staticmethod
    def forward(ctx: Any, group: ShardedGroup, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        whole = tuple(_gathered(group, parts))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(tensor for tensor, part in zip(whole, parts, strict=True) if not part.requires_grad)
        )
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        group: ShardedGroup = ctx.group
        group.reshard()
        with activation.no_mesh():
            return None, *_averaged(group, gradients)


def _averaged(group: ShardedGroup, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    layout, options = group.layout, group.options
    reduction = "avg" if options.divide_by is None else "sum"
    wanted = options.policy.reduce_dtype
    cast_ = [each if each is None or wanted is None else each.to(wanted) for each in gradients]
    mine: list[torch.Tensor | None] = list(cast_)
    for numbers in _by_dtype(cast_, [at for at, part in enumerate(group.parts) if part.dim is not None]):
        rows = []
        for at in numbers:
            dim, whole = cast(int, group.parts[at].dim), cast(torch.Tensor, cast_[at])
            cut = parts_of(whole, dim, layout.mesh, layout.mesh.ndim - 1)
            rows.append(cut.movedim(dim, 0).reshape(layout.count, -1))
        part = reduce(torch.cat(rows, 1), layout.shard_axes, reduction, scatter=True)
        if layout.copy_axes:
            part = reduce(part, layout.copy_axes, reduction)
        for at, piece in zip(numbers, _cut(part, [row.shape[1] for row in rows]), strict=True):
            mine[at] = piece.reshape(group.parts[at].local_shape)
    everyone = [at for at, part in enumerate(group.parts) if part.dim is None and cast_[at] is not None]
    axes = (*layout.copy_axes, *layout.shard_axes)
    for at, gradient in zip(everyone, reduce([cast_[at] for at in everyone], axes, reduction), strict=True):
        mine[at] = gradient
    return [
        None if each is None else _finished(each, group.parts[at].parameter.dtype, options.divide_by)
        for at, each in enumerate(mine)
    ]


def _finished(gradient: torch.Tensor, dtype: torch.dtype, divide_by: float | None) -> torch.Tensor:
    return (gradient if divide_by is None else gradient / divide_by).to(dtype)
