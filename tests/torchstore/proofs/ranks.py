"""Ranks of a trainer and of readers, for the tests of proofs: each has its shards in a process of its own."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from skipper import torchstore as ts
from skipper.control import Actor, current_rank, endpoint

COLUMNS = ("down.weight",)
"""Weights that tensor parallelism cuts by columns; all others by rows."""


class Gated(torch.nn.Module):
    """Two layers whose widths no tile divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(130, 610)
        self.down = torch.nn.Linear(610, 130, bias=False)


class SplitRank(Actor):
    """One rank of a group: of FSDP2 as a trainer, of tensor parallelism as a reader."""

    def __init__(self, folder: Path, size: int) -> None:
        torch.set_num_threads(1)
        folder.mkdir(exist_ok=True)
        meeting = f"file://{folder / 'meeting'}"
        dist.init_process_group("gloo", init_method=meeting, rank=current_rank().rank, world_size=size)
        self.mesh = init_device_mesh("cpu", (size,))
        self.state: dict[str, torch.Tensor] = {}

    @endpoint
    async def train(self, seed: int) -> int:
        """Put a model as FSDP2 shards it."""
        torch.manual_seed(seed)
        model = Gated()
        fully_shard(model, mesh=self.mesh)
        return await ts.put_state_dict(model.state_dict(), "policy", certify=(torch.bfloat16,))

    @endpoint
    async def read(self) -> None:
        """Take this rank's rows or columns of each weight."""
        self.state = {
            name: distribute_tensor(
                torch.zeros_like(value), self.mesh, [Shard(1 if name in COLUMNS else 0)], src_data_rank=None
            )
            for name, value in Gated().state_dict().items()
        }
        await ts.get_state_dict("policy", self.state)

    @endpoint
    async def change(self, name: str) -> None:
        """Flip one bit of this rank's shard, in a tile that the ranks share."""
        value = self.state[name]
        assert isinstance(value, DTensor)
        value.to_local().view(torch.int32)[0, -1] ^= 1

    @endpoint
    async def prove(self, version: int, dtype: torch.dtype) -> ts.Proof:
        """What this rank has, in a dtype."""
        certificate = await ts.certificate("policy", version=version)
        return ts.prove({name: value.to(dtype) for name, value in self.state.items()}, certificate)

    @endpoint
    async def leave(self) -> None:
        dist.destroy_process_group()
