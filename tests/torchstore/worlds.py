"""Ranks of process groups that know nothing of each other: one of them puts, another one gets."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from skipper import torchstore as ts
from skipper.control import Actor, current_rank, endpoint
from tests.torchstore.oracle import bits

Side = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape of a mesh, and the dim that each axis of it shards."""

VOCABULARY, HIDDEN, HEADS, GROUPS, INTERMEDIATE, LAYERS = 67, 32, 4, 2, 44, 3


class Block(torch.nn.Module):
    """A layer of a Llama: grouped queries, a gated MLP, RMS norms; no biases."""

    def __init__(self) -> None:
        super().__init__()
        head = HIDDEN // HEADS
        self.self_attn = torch.nn.ModuleDict(
            {
                "q_proj": torch.nn.Linear(HIDDEN, HIDDEN, bias=False),
                "k_proj": torch.nn.Linear(HIDDEN, GROUPS * head, bias=False),
                "v_proj": torch.nn.Linear(HIDDEN, GROUPS * head, bias=False),
                "o_proj": torch.nn.Linear(HIDDEN, HIDDEN, bias=False),
            }
        )
        self.mlp = torch.nn.ModuleDict(
            {
                "gate_proj": torch.nn.Linear(HIDDEN, INTERMEDIATE, bias=False),
                "up_proj": torch.nn.Linear(HIDDEN, INTERMEDIATE, bias=False),
                "down_proj": torch.nn.Linear(INTERMEDIATE, HIDDEN, bias=False),
            }
        )
        self.input_layernorm = torch.nn.RMSNorm(HIDDEN)
        self.post_attention_layernorm = torch.nn.RMSNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, at = self.input_layernorm(x), self.self_attn

        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(-2, -3)

        mixed = torch.nn.functional.scaled_dot_product_attention(
            heads(at["q_proj"](h)), heads(at["k_proj"](h)), heads(at["v_proj"](h)), is_causal=True, enable_gqa=True
        )
        x = x + at["o_proj"](mixed.transpose(-2, -3).flatten(-2))
        h = self.post_attention_layernorm(x)
        gated: torch.Tensor = self.mlp["down_proj"](
            torch.nn.functional.silu(self.mlp["gate_proj"](h)) * self.mlp["up_proj"](h)
        )
        return x + gated


class CausalModel(torch.nn.Module):
    """A small model under the names that Hugging Face gives to a Llama."""

    def __init__(self) -> None:
        super().__init__()
        layers = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        embed = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.model = torch.nn.ModuleDict({"embed_tokens": embed, "layers": layers, "norm": torch.nn.RMSNorm(HIDDEN)})
        self.lm_head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.register_buffer("inv_freq", torch.arange(4.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.model["embed_tokens"](tokens)
        for layer in self.model["layers"]:  # type: ignore[union-attr]
            x = layer(x)
        logits: torch.Tensor = self.lm_head(self.model["norm"](x))
        return logits


class WorldRank(Actor):
    """One rank of a world; each world has its own process group, and none where it is one process."""

    def __init__(self, size: int, folder: Path) -> None:
        torch.set_num_threads(1)
        self.rank = current_rank().rank
        os.environ["LOCAL_RANK"] = str(self.rank)
        self.size = size
        if size > 1:
            folder.mkdir(exist_ok=True)
            dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=self.rank, world_size=size)

    def _shard(self, full: torch.Tensor, side: Side) -> DTensor:
        shape, dims = side
        mesh = init_device_mesh("cpu", shape)
        return distribute_tensor(full, mesh, [Shard(dim) for dim in dims], src_data_rank=None)

    @endpoint
    async def put(self, key: str, full: torch.Tensor, side: Side) -> None:
        await ts.put(key, self._shard(full, side))

    @endpoint
    async def get(self, key: str, full: torch.Tensor, side: Side) -> bool:
        """Get this rank's shard; whether it is what `distribute_tensor` cuts, and the whole is the whole."""
        mine = self._shard(torch.zeros_like(full), side)
        assert await ts.get(key, mine) is mine
        expected = self._shard(full, side)
        whole = torch.equal(mine.full_tensor(), full)
        return whole and torch.equal(bits(mine.to_local()), bits(expected.to_local()))

    @endpoint
    async def train(self, seed: int, steps: int) -> None:
        """A model that has been trained for some steps, sharded as a whole where there are several ranks."""
        torch.manual_seed(seed)
        self.model = CausalModel()
        if self.size > 1:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (self.size,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        for step in range(steps):
            tokens = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(step))
            logits = self.model(tokens[:, :-1])
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    @endpoint
    async def put_model(self, key: str) -> int:
        return await ts.put_state_dict(self._state(), key)

    @endpoint
    async def get_model(self, key: str) -> None:
        """Into the tensors of this world's model and optimizer, wherever they are."""
        got = await ts.get_state_dict(key, self._state())
        self.optimizer.load_state_dict(got["optimizer"])

    @endpoint
    async def gather(self) -> dict[str, torch.Tensor]:
        """Every tensor of model and optimizer, whole, and the logits."""
        state = self._state()
        found = dict(state["model"])
        for number, slots in state["optimizer"]["state"].items():
            found |= {f"{number}.{name}": value for name, value in slots.items()}
        whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
        with torch.no_grad():
            whole["logits"] = self.model(torch.arange(8)[None])
        return {name: value.detach().clone() for name, value in whole.items()}

    @endpoint
    async def put_large(self, key: str, numel: int) -> None:
        await ts.put(key, torch.arange(numel, dtype=torch.int32))

    @endpoint
    async def get_large(self, key: str, numel: int, *, in_place: bool) -> bool:
        """Whether all elements are those that were put; some at a time, for the memory's sake."""
        got = await ts.get(key, torch.zeros(numel, dtype=torch.int32) if in_place else None)
        step = 1 << 24
        return got.shape == (numel,) and all(
            torch.equal(got[start : start + step], torch.arange(start, min(start + step, numel), dtype=torch.int32))
            for start in range(0, numel, step)
        )
