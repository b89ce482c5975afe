"""The side that samples: one tensor-parallel rank, with fused projections, for all stages of the pipeline."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - everybody calls it F
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from examples.parallel.model import FUSED, ROW_PARALLEL, Sizes, attend, fused, generator_shapes
from examples.parallel.stage import key_of
from examples.process_group import GroupMember
from examples.verify import same_bits
from skipper import torchstore as ts
from skipper.control import endpoint


def placement_of(name: str) -> Placement:
    """Column-parallel into attention and MLP, row-parallel out of them; norms whole on every rank."""
    if "norm" in name:
        return Replicate()
    return Shard(1) if any(part in name for part in ROW_PARALLEL) else Shard(0)


class Generator(GroupMember):
    """Holds 1/size of every matrix.

    Args:
        stages: How many pipeline stages the weights come from.
        sizes: Of the model.
    """

    def __init__(self, stages: int, sizes: Sizes) -> None:
        super().__init__()
        self.stages, self.sizes = stages, sizes
        self.weights: dict[str, DTensor] = {}

    @endpoint
    async def allocate(self) -> int:
        """Make room, after `join`; bytes that this rank holds."""
        mesh = self.device_mesh()
        for stage in range(self.stages):
            for name, shape in generator_shapes(stage, self.stages, self.sizes).items():
                placement = placement_of(name)
                local = list(shape)
                if isinstance(placement, Shard):
                    local[placement.dim] //= self.size
                self.weights[name] = DTensor.from_local(torch.zeros(local), mesh, [placement], run_check=False)
        return sum(weight.to_local().nbytes for weight in self.weights.values())

    @endpoint
    async def pull(self, version: int) -> list[ts.SyncRecord]:
        """Read that version from every stage, in place; what each read did."""
        records = []
        for stage in range(self.stages):
            mine = {name: self.weights[name] for name in generator_shapes(stage, self.stages, self.sizes)}
            await ts.get_state_dict(key_of(stage), mine, names=fused, version=("newer_than", version - 1))
            record = ts.last_sync()
            if record is not None:
                records.append(record)
        return records

    @endpoint
    async def check(self, whole: dict[str, Tensor]) -> list[str]:
        """Names of the tensors that are not, bit for bit, made of what the trainers hold."""

        def mine(name: str, dim: int) -> Tensor:
            return whole[name].chunk(self.size, dim)[self.rank]

        wrong = []
        for name, weight in self.weights.items():
            place, _, last = name.rpartition(".weight")[0].rpartition(".")
            parts = [f"{place}.{part}.weight" if place else f"{part}.weight" for part in FUSED.get(last, (last,))]
            placement = placement_of(name)
            if isinstance(placement, Shard):
                expected = torch.cat([mine(part, placement.dim) for part in parts])
            else:
                expected = whole[name]
            if not same_bits(weight.to_local(), expected):
                wrong.append(name)
        return wrong

    @endpoint
    async def logits(self, tokens: Tensor) -> Tensor:
        """The next token's logits, computed by all ranks together: collectives run within this mesh only."""
        return self._forward(tokens)

    @torch.no_grad()
    def _forward(self, tokens: Tensor) -> Tensor:
        x = self._embed(tokens)
        for number in range(self.sizes.layers):
            layer = f"layers.{number}."
            y = F.rms_norm(x, (self.sizes.hidden,), self._local(layer + "attention_norm.weight"))
            q, k, v = F.linear(y, self._local(layer + "qkv_proj.weight")).chunk(3, -1)
            heads = attend(q, k, v, self.sizes.heads // self.size)
            x = x + self._sum(F.linear(heads, self._local(layer + "o_proj.weight")))
            y = F.rms_norm(x, (self.sizes.hidden,), self._local(layer + "mlp_norm.weight"))
            gate, up = F.linear(y, self._local(layer + "gate_up_proj.weight")).chunk(2, -1)
            x = x + self._sum(F.linear(F.silu(gate) * up, self._local(layer + "down_proj.weight")))
        x = F.rms_norm(x, (self.sizes.hidden,), self._local("norm.weight"))
        part = F.linear(x[:, -1], self._local("head.weight"))
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part)
        logits: Tensor = torch.cat(parts, -1)
        return logits

    def _local(self, name: str) -> Tensor:
        return self.weights[name].to_local()

    def _embed(self, tokens: Tensor) -> Tensor:
        rows = self._local("embed.weight")
        start = self.rank * len(rows)
        here = (tokens >= start) & (tokens < start + len(rows))
        found = F.embedding((tokens - start).clamp(0, len(rows) - 1), rows)
        return self._sum(found * here.unsqueeze(-1))

    def _sum(self, part: Tensor) -> Tensor:
        dist.all_reduce(part)
        return part
