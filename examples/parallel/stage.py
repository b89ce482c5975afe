"""The side that learns: one rank of one pipeline stage, whose parameters FSDP2 has cut into rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - everybody calls it F
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from examples.parallel.model import Sizes, Stage
from examples.process_group import GroupMember
from skipper import torchstore as ts
from skipper.control import endpoint


def key_of(stage: int) -> str:
    """Where a stage publishes: each is a mesh of its own, and so makes versions of its own."""
    return f"policy/stage{stage}"


class StageRank(GroupMember):
    """Holds 1/size of every parameter of its layers.

    Args:
        stage: Which one.
        stages: Of how many.
        sizes: Of the whole model.
    """

    def __init__(self, stage: int, stages: int, sizes: Sizes) -> None:
        super().__init__()
        self.stage, self.stages, self.sizes = stage, stages, sizes
        self._in = self._out = torch.empty(0)

    @endpoint
    async def build(self) -> int:
        """Make the stage, after `join`; its number of parameters."""
        torch.manual_seed(self.stage)  # the same on every rank, until they are cut
        self.model = Stage(self.stage, self.stages, self.sizes)
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        for layer in self.model.layers.values():
            fully_shard(layer, mesh=self.device_mesh())
        fully_shard(self.model, mesh=self.device_mesh())
        ts.share_memory_(self.model)  # so that generators on this host can map the shards
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        return parameters

    @endpoint
    async def forward(self, inputs: list[Tensor]) -> Tensor:
        """Run this rank's part of the batch through the stage's layers."""
        self._in = inputs[self.rank]
        self._in.requires_grad_(self._in.is_floating_point())
        self._out = self.model(self._in)
        return self._out.detach()

    @endpoint
    async def loss(self, tokens: list[Tensor]) -> float:
        """On the last stage, after `forward`: how badly the next tokens were foreseen."""
        logits, wanted = self._out[:, :-1], tokens[self.rank][:, 1:]
        self._out = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        return self._out.item()

    @endpoint
    async def backward(self, gradients: list[Tensor] | None) -> Tensor:
        """Go back through the layers; the gradient of what came in, for the stage before."""
        self._out.backward(None if gradients is None else gradients[self.rank])  # type: ignore[no-untyped-call]
        gradient = self._in.grad
        return torch.empty(0) if gradient is None else gradient

    @endpoint
    async def update(self) -> None:
        """The optimizer's step, when no generator reads any more."""
        await ts.fence(key_of(self.stage))
        self.optimizer.step()
        self.optimizer.zero_grad()

    @endpoint
    async def publish(self, version: int) -> None:
        """Let the generators read this version where it lies. No weight is copied."""
        await ts.put_state_dict(self.model.state_dict(), key_of(self.stage), mode="direct", version=version)

    @endpoint
    async def whole(self) -> dict[str, Tensor]:
        """Every parameter of the stage, gathered by DTensor: what generators are compared with."""
        weights = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in self.model.state_dict().items()
        }
        return weights if self.rank == 0 else {}
