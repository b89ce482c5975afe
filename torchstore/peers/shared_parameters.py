"""Move a module's parameters into memory that same-host readers can map."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from skipper import dataplane
from skipper.torchstore.tensors.local_tensors import is_dtensor, with_local

Module = TypeVar("Module", bound=torch.nn.Module)


@torch.no_grad()
def share_memory_(module: Module) -> Module:
    """Move the parameters and buffers of a module into shared memory, in place.

    Readers on the same host then map them and copy at the speed of memory, instead of asking the kernel for
    every copy (direct mode). The parameters stay the same objects, so an optimizer keeps working; do it
    before handing out `data_ptr`s and before CUDA graphs or `torch.compile` have recorded addresses.

    It moves plain parameters, DTensors, and modules under FSDP2's ``fully_shard``. (FSDP2 gives its padded shards new
    memory whenever parameters are replaced, so these are moved as well. Before PyTorch 2.10 it also does so in the
    first forward pass: share the parameters after that.) Gradients stay where they are. Tensors that are already
    shared, are not on the CPU, or have no elements do not change.

    Args:
        module: Any module; tied parameters stay tied.

    Returns:
        The module.
    """
    wanted = {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}
    moved: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        # `_apply` also passes gradients, which must not be moved.
        if id(tensor) not in wanted:
            return tensor
        if id(tensor) not in moved:
            moved[id(tensor)] = _moved(tensor)
        return moved[id(tensor)]

    module._apply(move)  # type: ignore[no-untyped-call]  # as all of torch's `to`, `cuda`, `half` do
    for shard in _fsdp_shards(module):
        _move_padded(shard)
    return module


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in shared memory, of the same kind; the tensor itself if there is nothing to do."""
    if is_dtensor(tensor):
        local = tensor.to_local()
        copy = _moved(local)
        if copy is local:
            return tensor
        return with_local(tensor, copy)
    if tensor.device.type != "cpu" or tensor.numel() == 0 or dataplane.is_shared(tensor):
        return tensor
    return _shared_like(tensor).copy_(tensor.detach())


def _shared_like(tensor: torch.Tensor) -> torch.Tensor:
    """Shared memory with the same shape; strides are kept if the tensor is dense."""
    flat = dataplane.empty((tensor.numel(),), tensor.dtype)
    strides = torch.empty_like(tensor, device="meta").stride()
    return flat.as_strided(tensor.shape, strides)


def _fsdp_shards(module: torch.nn.Module) -> Iterator[Any]:
    """FSDP2's own records of the parameters that it has sharded."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())  # no class, if it is not imported
    for child in module.modules():
        if isinstance(child, kind):
            state = child._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # before torch 2.10 a module had one group
            for group in [state._fsdp_param_group] if groups is None else groups:
                yield from group.fsdp_params if group is not None else ()


def _move_padded(shard: Any) -> None:
    """FSDP2 pads shards of uneven size, in new memory: replace that by shared memory."""
    padded, local = shard._sharded_param_data, shard.sharded_param._local_tensor
    if padded.device.type != "cpu" or padded.numel() == 0 or dataplane.is_shared(padded):
        return
    shared = dataplane.empty((padded.numel(),), padded.dtype).copy_(padded)
    shard._sharded_param_data = shared
    shard.sharded_param._local_tensor = shared.as_strided(local.size(), local.stride(), local.storage_offset())
