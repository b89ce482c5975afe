"""The tensors of a decoder-only language model, and how trainers and generators cut them.

The shapes are those of Qwen2.5-0.5B (its ``config.json``): grouped-query attention with biases on q, k and v, a gated
MLP, tied embeddings; 290 tensors, 494 million elements, .99 GB in bfloat16.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Protocol

from skipper.torchstore.algebra.layout import Ints, Layout, Placement, Replicate, Shard

__all__ = ["Model", "Tensors", "fsdp", "tensor_parallel"]

_ROW_PARALLEL = re.compile(r"(o_proj|out_proj|down_proj|c_proj|dense_4h_to_h|fc2|w2|wo)(\.weight)?$")


class Tensors(Protocol):
    """Which tensors a model has."""

    def shapes(self) -> dict[str, Ints]:
        """The shape of every tensor, by name."""

    def numel(self) -> int:
        """Elements of all tensors together."""


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a model; the defaults are Qwen2.5-0.5B."""

    layers: int = 24
    hidden: int = 896
    intermediate: int = 4864
    key_value: int = 128
    vocabulary: int = 151_936

    def shapes(self) -> dict[str, Ints]:
        """The shape of every tensor, by name."""
        shapes: dict[str, Ints] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for number in range(self.layers):
            layer = f"model.layers.{number}"
            for letter, rows in (("q", self.hidden), ("k", self.key_value), ("v", self.key_value)):
                shapes[f"{layer}.self_attn.{letter}_proj.weight"] = (rows, self.hidden)
                shapes[f"{layer}.self_attn.{letter}_proj.bias"] = (rows,)
            shapes[f"{layer}.self_attn.o_proj.weight"] = (self.hidden, self.hidden)
            shapes[f"{layer}.mlp.gate_proj.weight"] = (self.intermediate, self.hidden)
            shapes[f"{layer}.mlp.up_proj.weight"] = (self.intermediate, self.hidden)
            shapes[f"{layer}.mlp.down_proj.weight"] = (self.hidden, self.intermediate)
            shapes[f"{layer}.input_layernorm.weight"] = (self.hidden,)
            shapes[f"{layer}.post_attention_layernorm.weight"] = (self.hidden,)
        shapes["model.norm.weight"] = (self.hidden,)
        return shapes

    def numel(self) -> int:
        """Elements of all tensors together."""
        return sum(map(prod, self.shapes().values()))


def fsdp(shapes: dict[str, Ints], ranks: int) -> dict[str, Layout]:
    """Every tensor in rows over the ranks, as ``fully_shard`` cuts it."""
    return {name: Layout(shape, (ranks,), (Shard(0) if shape else Replicate(),)) for name, shape in shapes.items()}


def tensor_parallel(shapes: dict[str, Ints], ranks: int) -> dict[str, Layout]:
    """Column-parallel into attention and MLP, row-parallel out of them, norms whole on every rank."""
    return {name: Layout(shape, (ranks,), (_cut(name, len(shape)),)) for name, shape in shapes.items()}


def _cut(name: str, dims: int) -> Placement:
    row_parallel = bool(_ROW_PARALLEL.search(name))
    if not dims or "norm" in name or (dims == 1 and row_parallel):
        return Replicate()
    # The matrices of experts are stacked: what is a dim of a matrix is one further on there.
    return Shard(dims - 1 if row_parallel else max(dims - 2, 0))
