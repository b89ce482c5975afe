"""Hold a version of a state dict and read blocks of its tensors, in any number of reads and in any order.

`get_state_dict` reads a version once, into a whole state dict. A reader that first looks at what is stored, and then
decides what to read and where to, pins the version. It stays readable until it is released, even if newer ones are put.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from skipper.control.model.bounds import check_seconds
from skipper.torchstore.algebra.layout import Box, Ints, Piece
from skipper.torchstore.algebra.manifest import BlockScaled, Path
from skipper.torchstore.clients.catalog import Catalog, Choose, Opened, Recalled
from skipper.torchstore.clients.destination import compile_targets, objects_of
from skipper.torchstore.clients.remote import RemoteStore
from skipper.torchstore.clients.transfer import Failover, Mover
from skipper.torchstore.errors import KeyNotFoundError, KindMismatchError
from skipper.torchstore.protocol.messages import Grant, Selector, Wanted
from skipper.torchstore.support.records import Cost
from skipper.torchstore.tensors.landing import lands
from skipper.torchstore.tensors.local_tensors import LocalTensor, fingerprint
from skipper.torchstore.tensors.plan import PlanCache
from skipper.torchstore.tensors.values import dtype_named
from skipper.torchstore.tensors.written import written


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a pinned version.

    Attributes:
        dtype: The dtype of its elements, as they are stored.
        shape: The shape of the whole tensor, in values.
        boxes: The parts in which it is stored, each once.
        scaled: How its values are stored, if it is quantized: a read into a tensor of a wider dtype gives the values.
    """

    dtype: torch.dtype
    shape: Ints
    boxes: tuple[Box, ...]
    scaled: BlockScaled | None

    @property
    def is_quantized(self) -> bool:
        """Whether a read into a tensor of a wider dtype gives its values."""
        return self.scaled is not None

    @property
    def stored_shape(self) -> Ints:
        """The shape in elements of `dtype`, of which one may hold several values."""
        if self.scaled is None:
            return self.shape
        return (*self.shape[:-1], self.shape[-1] // self.scaled.packed)


@dataclass(frozen=True, slots=True)
class PinnedBlock:
    """A block of a stored tensor, and the tensor that it is read into.

    Attributes:
        name: The name of the stored tensor.
        offsets: The offsets of the block's first element in it.
        into: A tensor with the block's shape and the stored dtype; any strides.
    """

    name: str
    offsets: Ints
    into: torch.Tensor


class PinnedVersion:
    """One version of one key; made by `LocalClient.pin`.

    Attributes:
        key: Its key.
        version: Its number.
        cost: The cost of all its reads together.
    """

    def __init__(
        self,
        recalled: Recalled,
        grant: Grant,
        remote: RemoteStore,
        catalog: Catalog,
        mover: Mover,
        failover: Failover,
        plans: PlanCache,
        cost: Cost,
    ) -> None:
        self.key = recalled.key
        self.version = grant.version
        self.cost = cost
        self._recalled = recalled
        self._grant = grant
        self._is_held = True
        self._remote = remote
        self._catalog = catalog
        self._mover = mover
        self._failover = failover
        self._plans = plans
        self._opened = catalog.open(recalled, grant, failover.choose())

    @staticmethod
    async def of(
        key: str,
        selector: Selector,
        remote: RemoteStore,
        catalog: Catalog,
        mover: Mover,
        failover: Failover,
        plans: PlanCache,
        timeout: float,
    ) -> PinnedVersion:
        """Pin a version.

        Raises:
            KeyNotFoundError: There is none.
            KindMismatchError: It is not a state dict.
            StoreError: It cannot be read.
        """
        recalled, cost = catalog.recall(key), Cost("get", time.perf_counter())
        with cost.spent_on("control"):
            if selector.beside is None:
                grant = await remote.acquire(key, selector, recalled.ids, timeout)
            else:
                (grant,) = await remote.acquire_batch((Wanted(key, selector, recalled.ids),), timeout)
        cost.wait_s = grant.waited_s
        cost.slowest_rank, cost.spread_s = grant.slowest_rank, grant.spread_s
        try:
            pinned = None
            if grant.shares:
                pinned = PinnedVersion(recalled, grant, remote, catalog, mover, failover, plans, cost)
            if pinned is None or pinned._opened.kind != "state_dict" or grant.item:
                raise KindMismatchError(key, "a single value is stored there: use get")
            if grant.overwritten:
                raise KindMismatchError(
                    f"{key}/{grant.overwritten[0]}",
                    f"it was put again by itself, so it is no longer a part of version {grant.version}: put the "
                    "state dict again, or say "
                    f"version={grant.version} to read it as it was put",
                )
        except BaseException:
            remote.release((grant,))
            raise
        return pinned

    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors to read, by name."""
        boxes: dict[str, dict[Box, None]] = {}
        for source in self._opened.sources:
            for name, item in source.manifest.tensors.items():
                boxes.setdefault(name, {}).update(dict.fromkeys(item.value_box(piece.box) for piece in item.pieces))
        return {
            name: StoredTensor(dtype_named(item.dtype), item.value_shape, tuple(boxes[name]), item.scaled)
            for name, item in self._opened.tensors().items()
        }

    def objects(self) -> dict[str, Any]:
        """The entries that are not tensors, by name."""
        return objects_of(self._opened)

    def paths(self) -> Mapping[str, Path]:
        """How the names lead back into the nested dict."""
        return {name: path for source in self._opened.sources for name, path in source.manifest.paths.items()}

    @property
    def lease(self) -> int:
        """The lease that holds the version. Other readers can pin the version by it."""
        return self._grant.lease

    async def read(self, blocks: Sequence[PinnedBlock], timeout: float, *, again: bool = False) -> None:
        """Read blocks, all of them in one batch.

        Args:
            blocks: The blocks, with their destinations.
            timeout: In seconds.
            again: The same blocks of other versions will be read into the same memory: keep the plan, which keeps the
                memory alive.

        Raises:
            KeyNotFoundError: No tensor of that name is stored.
            CoverageError: A block reaches out of its tensor.
            DTypeMismatchError: A destination has another dtype than what is stored.
            VolumeLostError: The bytes are gone.
            StoreTimeoutError: They did not come in time.
            ValueError: The version was released.
        """
        if not self._is_held:
            raise ValueError(f"version {self.version} of {self.key!r} was released: pin it again")
        end = time.perf_counter() + check_seconds("timeout", timeout)
        items = self._opened.tensors()
        targets: dict[str, LocalTensor] = {}
        stored: dict[str, str] = {}
        for number, block in enumerate(blocks):
            if block.name not in items:
                raise KeyNotFoundError(f"{self.key}/{block.name}")
            if block.into.numel() == 0:
                continue
            shape = tuple(block.into.shape)
            label = f"block {number}"
            piece = Piece(Box(block.offsets, shape), (0,) * len(shape))
            item = items[block.name]
            whole = item.value_shape if lands(item, block.into.dtype) else item.global_shape
            targets[label] = LocalTensor(block.into.detach(), whole, (piece,))
            stored[label] = block.name
        if not targets:
            return

        mark = ("blocks", *stored.values(), fingerprint(targets)) if again else None

        async def read(choose: Choose, until: float) -> None:
            opened: Opened = self._catalog.open(self._recalled, self._grant, choose)
            self.cost.mode = opened.mode
            plan = self._plans.find(self.key, mark, opened.ids) if again else None
            if plan is None:
                self.cost.hit = False
                with self.cost.spent_on("compile"):
                    plan = compile_targets(self.key, opened, targets, stored)
                if again:
                    self._plans.keep(self.key, mark, opened.ids, plan)
            await self._mover.run(self.key, opened, plan, self.cost, max(until - time.perf_counter(), 0.05))

        with written(block.into for block in blocks):
            await self._failover.read(Catalog.volumes(self._recalled, self._grant), end, read)

    def release(self) -> None:
        """Release the version; idempotent."""
        if self._is_held:
            self._is_held = False
            self._remote.release((self._grant,))
