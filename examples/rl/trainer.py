"""The actor that learns: one rank of an FSDP2 group, whose shards the generators read in place."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from examples.process_group import GroupMember
from examples.rl.model import Transformer
from examples.rl.policy import loss
from examples.rl.settings import WEIGHTS, Settings
from examples.rl.task import Rollout
from skipper import torchstore as ts
from skipper.control import endpoint


@dataclass(frozen=True, slots=True)
class Learned:
    """What one training step reports: the version that it made, its loss and its time."""

    version: int
    loss: float
    seconds: float


class Trainer(GroupMember):
    """Holds 1/size of every parameter (Shard(0)) and of the optimizer's state."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.device)
        self.settings = settings
        self.version = 0

    @endpoint
    async def build(self) -> int:
        """Make the policy, after `join`; returns its number of parameters."""
        torch.manual_seed(self.settings.seed)
        self.policy = Transformer(self.settings.model).to(self.device)
        parameters = sum(parameter.numel() for parameter in self.policy.parameters())
        mesh = self.device_mesh()
        for block in self.policy.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.policy, mesh=mesh)
        # Move the shards to where same-host readers can map them, before the optimizer looks at them.
        ts.share_memory_(self.policy)
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=self.settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        return parameters

    @endpoint
    async def publish(self) -> int:
        """Let the generators know of this version. No weight is copied: they will read these shards."""
        await ts.put_state_dict(self.policy.state_dict(), WEIGHTS, mode="direct", version=self.version)
        return self.version

    @endpoint
    async def train(self, rollout: Rollout) -> Learned:
        """Make the next version from what an older one has sampled."""
        begin = perf_counter()
        mine = rollout.part(self.rank, self.size).to(self.device)
        # FSDP averages the gradients over ranks; scaled so, that is the mean over all tokens.
        value = loss(self.policy, mine) * (self.size / rollout.answers.numel())
        torch.autograd.backward(value)
        nn.utils.clip_grad_norm_(self.policy.parameters(), max_norm=1.0)
        # The step overwrites what the generators read: close this version, wait for whoever still reads it.
        await ts.fence(WEIGHTS, timeout=self.settings.timeout_s)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1
        return Learned(self.version, value.item(), perf_counter() - begin)

    @endpoint
    async def gather(self) -> dict[str, Tensor] | None:
        """The whole weights, gathered by torch's own collectives; on the first rank, else ``None``."""
        whole = {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).cpu()
            for name, value in self.policy.state_dict().items()
        }
        return whole if self.rank == 0 else None
