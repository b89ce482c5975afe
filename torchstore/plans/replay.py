"""Fill a model by a plan: each region is read into its place, or through a staging buffer of bounded size."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from skipper.control.model.bounds import check_seconds
from skipper.torchstore.algebra.layout import Ints
from skipper.torchstore.clients.local_client import LocalClient
from skipper.torchstore.clients.pinning import PinnedBlock, PinnedVersion
from skipper.torchstore.clients.registry import DEFAULT_STORE_NAME, run
from skipper.torchstore.clients.remote import DEFAULT_TIMEOUT_S
from skipper.torchstore.clients.requests import VersionSelector
from skipper.torchstore.errors import LoadPlanMismatchError
from skipper.torchstore.plans.load_plan import LoadPlan, tensors_of
from skipper.torchstore.plans.recorder import LoadWeights
from skipper.torchstore.plans.regions import RecordedTensor, RegionCopy, dtype_of, region_of
from skipper.torchstore.support.coroutines import public
from skipper.torchstore.tensors.values import new_tensor
from skipper.torchstore.tensors.written import writing_mode, written

DEFAULT_STAGING_NBYTES = 64 << 20

_ALIGNMENT = 64  # of each block in the staging buffer, in bytes: a cache line
_LEAST_S = 0.05  # enough for a version that exists already


@public
async def load_by_plan(
    key: str,
    plan: LoadPlan,
    model: torch.nn.Module,
    store_name: str = DEFAULT_STORE_NAME,
    *,
    load_weights: LoadWeights | None = None,
    version: VersionSelector = "latest",
    staging_nbytes: int = DEFAULT_STAGING_NBYTES,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> int:
    """Fill a model with one version of a state dict, as its own `load_weights` would.

    Of each checkpoint tensor it reads only the elements that belong to this rank's model according to the plan. They go
    directly into the parameters, in one transfer, if dtypes are the same and rows stay rows; elements that are cast or
    transposed go through a staging buffer. Checkpoint tensors that the plan lists as ``whole`` are read completely,
    into new tensors, and passed to `load_weights`, group by group, before everything else. All of it is of one version.
    It counts as one get in `last_sync` and the metrics.

    Args:
        key: The key of the state dict: its names are the checkpoint's, and its tensors are not nested.
        plan: A plan that was recorded for this rank's model.
        model: The model to fill in place, under `torch.no_grad`; it holds a mixture of weights if the call fails.
        store_name: Name of the store.
        load_weights: The function, if the model has no method of that name; called in the caller's thread, on its event
            loop.
        version: "latest", a number, or ("newer_than", number), which waits for the next version.
        staging_nbytes: Size of the staging buffer, on each device, and of the whole tensors that are read together. A
            single row or whole tensor may be larger.
        timeout: In seconds, including the wait for a version.

    Returns:
        The version's number.

    Raises:
        LoadPlanMismatchError: The plan is for another model or checkpoint; nothing has been read.
        KeyNotFoundError, KindMismatchError: There is no such version, or it is not a state dict.
        StoreTimeoutError: It did not come, or was not read, in time.
        SourceChangedError, PublisherLostError, VolumeLostError, ChecksumError: As for `get_state_dict`.
        TypeError: The plan has ``whole`` tensors, and there is no `load_weights`.
        ValueError: ``staging_nbytes`` is below 1.
    """
    if isinstance(staging_nbytes, bool) or not isinstance(staging_nbytes, int):
        raise TypeError(f"staging_nbytes is a whole number, not {staging_nbytes!r}")
    if staging_nbytes < 1:
        raise ValueError(f"a staging buffer has at least one byte, not {staging_nbytes}")
    load = load_weights if load_weights is not None else getattr(model, "load_weights", None)
    if plan.whole and not callable(load):
        raise TypeError(f"the plan needs load_weights of {type(model).__name__} for {plan.whole[0].names[0]!r}")
    plan.check(model)
    end = time.perf_counter() + check_seconds("timeout", timeout)
    replay = _Replay(plan, tensors_of(model), load, staging_nbytes, end)
    into = {name: replay.tensors[name] for name in plan.parameters}
    return await run(
        store_name, timeout, LocalClient.with_pinned, key, replay.fill, into, version=version, timeout=timeout
    )


@dataclass(frozen=True, slots=True)
class _StagedBlock:
    """A box that is read into the staging buffer, and its destination.

    Attributes:
        into: The part of the parameter that it fills, in the box' shape.
        nbytes: Its size in the buffer, in the checkpoint's dtype.
    """

    copy: RegionCopy
    offsets: Ints
    into: torch.Tensor
    nbytes: int


class _Replay:
    """One call of `load_by_plan`.

    Attributes:
        tensors: The model's tensors, by name.
    """

    def __init__(
        self,
        plan: LoadPlan,
        tensors: Mapping[str, torch.Tensor],
        load: Any,
        staging_nbytes: int,
        end: float,
    ) -> None:
        self.tensors = tensors
        self._plan = plan
        self._load = load
        self._staging_nbytes = staging_nbytes
        self._end = end

    async def fill(self, pinned: PinnedVersion) -> None:
        """Fill the model from a pinned version."""
        _check_stored(self._plan, pinned)
        for names in self._groups():
            whole = {name: self._new(self._plan.checkpoint[name]) for name in names}
            blocks = [PinnedBlock(name, (0,) * tensor.ndim, tensor) for name, tensor in whole.items()]
            await pinned.read(blocks, self._left())
            with torch.no_grad():
                self._load(list(whole.items()))
        for fill in self._plan.fills:
            tensor = self.tensors[fill.parameter]
            with writing_mode(tensor):
                region_of(tensor, fill.into).fill_(fill.value)
        direct, staged = self._blocks()
        filled = {copy.parameter: self.tensors[copy.parameter] for copy in self._plan.copies}
        with written(filled.values()):
            await pinned.read(direct, self._left(), again=True)
            for device, blocks_there in staged.items():
                await self._through_buffer(pinned, blocks_there, device)

    def _groups(self) -> Iterator[list[str]]:
        """The whole tensors that are read together: as many groups as fit into the staging buffer."""
        names: list[str] = []
        filled = 0
        for group in self._plan.whole:
            nbytes = sum(self._plan.checkpoint[name].nbytes for name in group.names)
            if names and filled + nbytes > self._staging_nbytes:
                yield names
                names, filled = [], 0
            names += group.names
            filled += nbytes
        if names:
            yield names

    def _new(self, recorded: RecordedTensor) -> torch.Tensor:
        return new_tensor(recorded.shape, recorded.dtype)

    def _blocks(self) -> tuple[list[PinnedBlock], dict[torch.device, list[_StagedBlock]]]:
        """The blocks that are read directly into parameters, and those that go through the buffer of each device."""
        direct: list[PinnedBlock] = []
        staged: dict[torch.device, list[_StagedBlock]] = {}
        for copy in self._plan.copies:
            tensor, shape = self.tensors[copy.parameter].detach(), self._plan.checkpoint[copy.checkpoint].shape
            for block in copy.blocks(shape):
                into = region_of(tensor, block.into)
                if not copy.casts and _has_rows(into):
                    direct.append(PinnedBlock(copy.checkpoint, block.offsets, into))
                else:
                    found = staged.setdefault(tensor.device, [])
                    found += _cut(copy, block.offsets, into, self._itemsize(copy), self._staging_nbytes)
        return direct, staged

    def _itemsize(self, copy: RegionCopy) -> int:
        return dtype_of(self._plan.checkpoint[copy.checkpoint].dtype).itemsize

    async def _through_buffer(self, pinned: PinnedVersion, blocks: list[_StagedBlock], device: torch.device) -> None:
        sizes = [-(-block.nbytes // _ALIGNMENT) * _ALIGNMENT for block in blocks]
        room = min(max(self._staging_nbytes, max(sizes)), sum(sizes))
        buffer = torch.empty(room, dtype=torch.uint8, device=device)
        while blocks:
            offset, number = 0, 0
            while number < len(blocks) and offset + sizes[number] <= room:
                offset += sizes[number]
                number += 1
            await self._round(pinned, blocks[:number], sizes[:number], buffer)
            blocks, sizes = blocks[number:], sizes[number:]

    async def _round(
        self, pinned: PinnedVersion, blocks: list[_StagedBlock], sizes: list[int], buffer: torch.Tensor
    ) -> None:
        """Read as many blocks as fit into the buffer, and copy them to their destinations."""
        offset, arrived = 0, []
        for block, size in zip(blocks, sizes, strict=True):
            dtype = dtype_of(self._plan.checkpoint[block.copy.checkpoint].dtype)
            arrived.append(buffer[offset : offset + block.nbytes].view(dtype).view(block.into.shape))
            offset += size
        reads = [
            PinnedBlock(block.copy.checkpoint, block.offsets, tensor)
            for block, tensor in zip(blocks, arrived, strict=True)
        ]
        await pinned.read(reads, self._left())
        with pinned.cost.spent_on("cast"):
            await asyncio.to_thread(_place, blocks, arrived)

    def _left(self) -> float:
        return max(self._end - time.perf_counter(), _LEAST_S)


def _place(blocks: list[_StagedBlock], arrived: list[torch.Tensor]) -> None:
    for block, values in zip(blocks, arrived, strict=True):
        with writing_mode(block.into):
            for cast in block.copy.casts[:-1]:
                values = values.to(dtype_of(cast))
            block.into.copy_(values)
    if blocks[0].into.is_cuda:  # other streams will fill the buffer again
        torch.cuda.synchronize(blocks[0].into.device)


def _cut(copy: RegionCopy, offsets: Ints, into: torch.Tensor, itemsize: int, room: int) -> Iterator[_StagedBlock]:
    """A box in pieces that fit into the staging buffer, along its first long dims; a row stays whole."""
    nbytes = into.numel() * itemsize
    long = [dim for dim, size in enumerate(into.shape) if size > 1]
    if nbytes <= room or len(long) <= 1:
        yield _StagedBlock(copy, offsets, into, nbytes)
        return
    dim, size = long[0], into.shape[long[0]]
    step = max(room * size // nbytes, 1)
    for start in range(0, size, step):
        moved = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
        yield from _cut(copy, moved, into.narrow(dim, start, min(step, size - start)), itemsize, room)


def _has_rows(tensor: torch.Tensor) -> bool:
    """Whether neighbours along the last long dim are adjacent in memory; if not, each element would move separately."""
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return not strides or strides[-1] == 1


def _check_stored(plan: LoadPlan, pinned: PinnedVersion) -> None:
    """Check that the stored state dict is the one that the plan was recorded for.

    Raises:
        LoadPlanMismatchError: A tensor is missing, or has another shape or dtype.
    """
    stored, differences = pinned.tensors(), []
    for name, recorded in plan.checkpoint.items():
        found = stored.get(name)
        if found is None:
            differences.append(f"{name!r} is not stored")
        elif found.shape != recorded.shape or (str(found.dtype) != recorded.dtype and not found.is_quantized):
            there = RecordedTensor.of(found.shape, found.dtype)
            differences.append(f"{name!r} is stored as {there}, recorded as {recorded}")
    if differences:
        raise LoadPlanMismatchError(pinned.key, tuple(differences))
