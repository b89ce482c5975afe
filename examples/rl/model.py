"""A small decoder-only transformer, written so that FSDP2 and tensor parallelism both fit it.

The projections are separate ``nn.Linear`` modules: tensor parallelism cuts query, key, value and
the MLP's first layer by output features (whole heads), and the two layers that follow them by
input features. Nothing in here knows about processes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the transformer. ``heads`` is the most ways that tensor parallelism can cut it."""

    vocabulary: int
    positions: int
    width: int = 256
    heads: int = 4
    layers: int = 3


class Cache:
    """Keys and values of the tokens seen so far, so that sampling computes each position once."""

    def __init__(self, layers: int) -> None:
        self._past: list[tuple[Tensor, Tensor] | None] = [None] * layers

    @property
    def length(self) -> int:
        """Number of positions seen."""
        first = self._past[0]
        return 0 if first is None else first[0].shape[2]

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append ``layer``'s new (batch, heads, time, head width) tensors; return all so far."""
        past = self._past[layer]
        if past is not None:
            key = torch.cat((past[0], key), dim=2)
            value = torch.cat((past[1], value), dim=2)
        self._past[layer] = (key, value)
        return key, value


class Attention(nn.Module):
    """Causal self-attention over however many heads this process holds."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_width = config.width // config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        """Attend from ``x`` (batch, time, width) to itself and to what the cache holds."""
        batch, time, _ = x.shape
        query, key, value = (
            projection(x).view(batch, time, -1, self.head_width).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
        # A single new token may see everything before it; several see the past and one another causally.
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=time > 1)
        merged: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, time, -1))
        return merged


class Block(nn.Module):
    """Attention and an MLP, each behind a layer norm and around a residual connection."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config, layer)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        """Transform ``x`` (batch, time, width)."""
        x = x + self.attention(self.attention_norm(x), cache)
        hidden: Tensor = self.down(functional.gelu(self.up(self.mlp_norm(x))))
        return x + hidden


class Transformer(nn.Module):
    """Tokens in, next-token logits out; it starts as the uniform policy."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.positions, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.5)
        nn.init.normal_(self.positions.weight, std=0.5)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Logits (batch, time, vocabulary) for ``tokens`` (batch, time).

        With a cache, ``tokens`` follow those that it holds (all of them first, then one at a time).
        """
        start = 0 if cache is None else cache.length
        where = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(where)
        for block in self.blocks:
            x = block(x, cache)
        logits: Tensor = self.head(self.norm(x))
        return logits
