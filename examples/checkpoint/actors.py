"""The two sides: processes that hold a checkpoint in one layout, and processes that want another."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from examples.checkpoint.files import Checkpoint
from examples.checkpoint.layouts import as_dtensor, local_box, mesh_shape, placements_for
from examples.process_group import GroupMember
from examples.verify import nbytes_held, same_bits
from skipper import dataplane
from skipper import torchstore as ts
from skipper.control import endpoint

KEY = "checkpoint"
"""The name of the weights in the store."""


class Holder(GroupMember):
    """One process with its part of every tensor."""

    def __init__(self, path: Path, layout: str) -> None:
        super().__init__()
        self.checkpoint = Checkpoint(path)
        self.layout = layout
        self.weights: dict[str, DTensor] = {}

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The device mesh of the layout; there is one after `join`, and every rank must ask for it."""
        return self.device_mesh(*mesh_shape(self.layout, self.size))

    def hold(self, parts: dict[str, Tensor], *, shared: bool) -> None:
        """Take ``parts``, read from disk, as this process' part of the weights; ``shared`` for readers."""
        for name, part in parts.items():
            # Only memory that peers may map is worth allocating specially, and nothing needs none.
            share = shared and part.numel() > 0
            local = dataplane.empty(part.shape, part.dtype) if share else torch.empty_like(part)
            local.copy_(part)
            shape = self.checkpoint.shapes[name]
            self.weights[name] = as_dtensor(local, shape, self.mesh, placements_for(self.layout, shape))

    def read_parts(self) -> dict[str, Tensor]:
        """This process' part of every tensor, fresh from the files."""
        return self.checkpoint.read(
            {
                name: local_box(shape, self.mesh, placements_for(self.layout, shape))
                for name, shape in self.checkpoint.shapes.items()
            }
        )


class Trainer(Holder):
    """Has the weights, cut by rows."""

    @endpoint
    async def load(self) -> int:
        """Read this rank's part into memory that the generators can map; its number of bytes."""
        self.hold(self.read_parts(), shared=True)
        return nbytes_held(self.weights)

    @endpoint
    async def publish(self, version: int) -> None:
        """Make the weights readable where they lie."""
        await ts.put_state_dict(self.weights, KEY, mode="direct", version=version)


class Generator(Holder):
    """Wants the weights, in its own layout and in its own memory."""

    @endpoint
    async def allocate(self) -> int:
        """Make room for this rank's part; the number of bytes."""
        self.hold(self.read_parts(), shared=False)
        return nbytes_held(self.weights)

    @endpoint
    async def spoil(self) -> None:
        """Overwrite every byte, so that only a transfer can make `check` succeed."""
        for value in self.weights.values():
            value.to_local().view(-1).view(torch.uint8).fill_(0xA5)

    @endpoint
    async def pull(self, version: int, timeout_s: float) -> float:
        """Read the weights into the memory that is there; the seconds spent on moving bytes."""
        await ts.get_state_dict(KEY, self.weights, version=version, timeout=timeout_s)
        record = ts.last_sync()
        return record.transfer_s if record is not None else 0.0

    @endpoint
    async def check(self) -> list[str]:
        """Names of the tensors whose part here is not, bit for bit, what the files hold."""
        parts = self.read_parts()
        return [name for name, value in self.weights.items() if not same_bits(value.to_local(), parts[name])]
