"""A small transformer, cut two ways: into pipeline stages to train, into tensor-parallel ranks to generate.

Trainers name and shape their weights as checkpoints do (``layers.3.q_proj.weight``), generators fuse what is multiplied
with the same input (``layers.3.qkv_proj.weight``). `fused` is the map between the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - everybody calls it F
from torch import Tensor, nn

from skipper import torchstore as ts

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
ROW_PARALLEL = ("o_proj", "down_proj")
"""Matrices whose input, not output, is spread over the ranks."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the model; ``heads`` and ``vocabulary`` must be multiples of the number of generators."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    intermediate: int = 352
    vocabulary: int = 512


class Block(nn.Module):
    """Attention and a gated MLP."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden, wide = sizes.hidden, sizes.intermediate
        self.heads = sizes.heads
        self.attention_norm = nn.RMSNorm(hidden)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.mlp_norm = nn.RMSNorm(hidden)
        self.gate_proj, self.up_proj = nn.Linear(hidden, wide, bias=False), nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Activations of shape (batch, positions, hidden) to the same."""
        y = self.attention_norm(x)
        x = x + self.o_proj(attend(self.q_proj(y), self.k_proj(y), self.v_proj(y), self.heads))
        y = self.mlp_norm(x)
        mlp: Tensor = self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))
        return x + mlp


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Causal attention of ``heads`` heads."""
    q, k, v = (part.reshape(*part.shape[:2], heads, -1).transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def layers_of(stage: int, stages: int, sizes: Sizes) -> range:
    """The numbers of the layers that a stage holds."""
    share = -(-sizes.layers // stages)
    return range(min(stage * share, sizes.layers), min((stage + 1) * share, sizes.layers))


class Stage(nn.Module):
    """Some consecutive layers under the names that they have in the whole; the ends hold embedding and head."""

    def __init__(self, stage: int, stages: int, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.hidden) if stage == 0 else None
        self.layers = nn.ModuleDict({str(number): Block(sizes) for number in layers_of(stage, stages, sizes)})
        last = stage == stages - 1
        self.norm = nn.RMSNorm(sizes.hidden) if last else None
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or the activations of the stage before; to activations or logits."""
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def fused(name: str) -> str | ts.Stack:
    """What a generator's tensor is made of: each rank stacks its shards of the projections that are fused."""
    for whole, parts in FUSED.items():
        if whole in name:
            return ts.Stack(*(name.replace(whole, part) for part in parts))
    return name


def generator_shapes(stage: int, stages: int, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """The fused tensors that hold what a stage trains, by name."""
    with torch.device("meta"):
        weights = Stage(stage, stages, sizes).state_dict()
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in weights.items():
        whole = next((fuse for fuse, parts in FUSED.items() if name.split(".")[-2] in parts), None)
        if whole is None:
            shapes[name] = tuple(tensor.shape)
        else:
            *place, _, kind = name.split(".")
            name = ".".join([*place, whole, kind])
            shapes[name] = (shapes.get(name, (0,))[0] + tensor.shape[0], *tensor.shape[1:])
    return shapes
