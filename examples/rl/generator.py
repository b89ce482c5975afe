"""The actor that answers: one rank of a replica of the generator service, tensor parallel within the replica."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from examples.process_group import GroupMember
from examples.rl.model import Transformer
from examples.rl.mortal import Mortal
from examples.rl.policy import sample
from examples.rl.settings import WEIGHTS, Settings
from examples.rl.task import Rollout, make_prompts
from examples.verify import mismatched_names
from skipper import torchstore as ts
from skipper.control import ActorMesh, concurrent_endpoint, endpoint, idempotent, this_proc


def tensor_parallel_plan(layers: int) -> dict[str, ParallelStyle]:
    """Which way each linear layer is cut; all other parameters stay whole in every process."""
    plan: dict[str, ParallelStyle] = {"head": ColwiseParallel(output_layouts=Replicate())}
    for layer in range(layers):
        block = f"blocks.{layer}"
        plan |= {f"{block}.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        plan |= {f"{block}.attention.output": RowwiseParallel()}
        plan |= {f"{block}.up": ColwiseParallel(), f"{block}.down": RowwiseParallel()}
    return plan


class Generator(GroupMember):
    """Holds a slice of the heads and of the MLP, in another layout than any trainer's."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.device)
        self.settings = settings
        self.version = -1
        self._mortal = this_proc().spawn("mortal", Mortal)

    @concurrent_endpoint
    async def set_up(self, members: Any) -> None:
        """Become a replica, first or successor: meet the other ranks, make the policy, fetch the newest weights."""
        await self.meet(members, self.settings.timeout_s)
        policy = Transformer(self.settings.model).to(self.device).requires_grad_(False)
        parallelize_module(policy, self.device_mesh(), tensor_parallel_plan(self.settings.model.layers))
        self.policy = policy
        self.weights = policy.state_dict()
        await self._catch_up()

    @endpoint
    async def load(self, version: int) -> ts.SyncRecord:
        """Read ``version`` straight from the trainers' memory into this policy's own; what it took."""
        await ts.get_state_dict(WEIGHTS, self.weights, version=version, timeout=self.settings.timeout_s)
        self.version = version
        record = ts.last_sync()
        if record is None:
            raise RuntimeError("the store kept no record of the transfer")
        return record

    @endpoint
    @idempotent
    async def generate(self, batch: int) -> Rollout | None:
        """Answer the prompts of ``batch`` with the weights that are there; ``None`` but on the first rank."""
        settings = self.settings
        seed = settings.seed * 1_000_003 + batch
        chance = torch.Generator().manual_seed(seed)
        prompts = make_prompts(settings.prompts, settings.digits, chance).to(self.device)
        if self.device.type == "cuda":  # which draws by generators of its own
            chance = torch.Generator(self.device).manual_seed(seed)
        rollout = sample(
            self.policy,
            prompts,
            version=self.version,
            group=settings.group,
            layers=settings.model.layers,
            generator=chance,
            agree=lambda tokens: dist.broadcast(tokens, src=0),
        )
        return rollout.to("cpu") if self.rank == 0 else None

    @endpoint
    async def check(self, version: int, whole: dict[str, Tensor]) -> list[str] | None:
        """Names of the parameters whose part here is not, bit for bit, that part of ``whole``.

        ``None`` where another version is loaded, which a replica may have that has come up just now.
        """
        return mismatched_names(self.weights, whole) if self.version == version else None

    @endpoint
    async def mortal(self) -> ActorMesh[Mortal]:
        """For whoever wants to end this process."""
        return self._mortal

    async def _catch_up(self) -> None:
        """Fetch the newest version there is, or the first that there will be; the same one on all ranks."""
        versions: list[int] = []
        while len(set(versions)) != 1:  # the trainers may have published between one rank's reading and another's
            # The newest that is there, or else the first that comes.
            await ts.get_state_dict(WEIGHTS, self.weights, version=("newer_than", -1), timeout=self.settings.timeout_s)
            record = ts.last_sync()
            if record is None:
                raise RuntimeError("the store kept no record of the transfer")
            versions = [0] * self.size
            dist.all_gather_object(versions, record.version)
        self.version = versions[0]
