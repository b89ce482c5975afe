"""Weights of a small transformer as two projects name and shape them: one tensor each, and fused for inference.

`vllm_expected` says in plain torch what a tensor-parallel rank holds; it shares no code with
`torchstore.tensors.naming`.
"""

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from skipper import torchstore as ts

HEAD, QUERIES, KEY_VALUES = 6, 8, 4  # the size of a head, and how many there are
HIDDEN, INTERMEDIATE, VOCABULARY = 20, 24, 41
ROWS = {"q": HEAD * QUERIES, "k": HEAD * KEY_VALUES, "v": HEAD * KEY_VALUES}
QKV_ROWS = sum(ROWS.values())
LAYERS = 2


def huggingface() -> dict[str, torch.Tensor]:
    """Random weights; the embedding is tied, so there is no head."""
    torch.manual_seed(3)
    weights = {"model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN)}
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        for part, rows in ROWS.items():
            weights[f"{layer}.self_attn.{part}_proj.weight"] = torch.randn(rows, HIDDEN)
            weights[f"{layer}.self_attn.{part}_proj.bias"] = torch.randn(rows)
        weights[f"{layer}.self_attn.o_proj.weight"] = torch.randn(HIDDEN, ROWS["q"])
        weights[f"{layer}.mlp.gate_proj.weight"] = torch.randn(INTERMEDIATE, HIDDEN)
        weights[f"{layer}.mlp.up_proj.weight"] = torch.randn(INTERMEDIATE, HIDDEN)
        weights[f"{layer}.mlp.down_proj.weight"] = torch.randn(HIDDEN, INTERMEDIATE)
        weights[f"{layer}.input_layernorm.weight"] = torch.randn(HIDDEN)
    return weights


def vllm_expected(full: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    """What rank ``rank`` of ``size`` tensor-parallel ranks holds, computed by hand."""

    def mine(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return tensor.chunk(size, dim)[rank]

    head = full["model.embed_tokens.weight"]
    held = {"language_model.embed_tokens.weight": mine(head), "lm_head.weight": mine(head)}
    for number in range(LAYERS):
        ours, theirs = f"language_model.layers.{number}", f"model.layers.{number}"
        for kind in ("weight", "bias"):
            parts = [mine(full[f"{theirs}.self_attn.{part}_proj.{kind}"]) for part in "qkv"]
            held[f"{ours}.self_attn.qkv_proj.{kind}"] = torch.cat(parts)
        held[f"{ours}.self_attn.o_proj.weight"] = mine(full[f"{theirs}.self_attn.o_proj.weight"], 1)
        gate_up = [mine(full[f"{theirs}.mlp.{part}_proj.weight"]) for part in ("gate", "up")]
        held[f"{ours}.mlp.gate_up_proj.weight"] = torch.cat(gate_up)
        held[f"{ours}.mlp.down_proj.weight"] = mine(full[f"{theirs}.mlp.down_proj.weight"], 1)
        held[f"{ours}.input_layernorm.weight"] = full[f"{theirs}.input_layernorm.weight"]
    return held


def vllm_tensors(rank: int, size: int) -> dict[str, torch.Tensor]:
    """Room for that, and for a buffer that is not stored at all."""
    held = {name: torch.zeros_like(tensor) for name, tensor in vllm_expected(huggingface(), rank, size).items()}
    return held | {"language_model.rotary.inverse_frequencies": torch.zeros(5)}


def vllm_sharded(size: int) -> dict[str, tuple[torch.Tensor, tuple[Placement, ...]]]:
    """Whole tensors, to be distributed over a mesh of replicas of ``size`` tensor-parallel ranks."""
    sharded: dict[str, tuple[torch.Tensor, tuple[Placement, ...]]] = {}
    for name, tensor in vllm_expected(huggingface(), 0, size).items():
        if name.endswith("layernorm.weight"):
            sharded[name] = (torch.zeros_like(tensor), (Replicate(), Replicate()))
            continue
        dim = int(name.endswith(("o_proj.weight", "down_proj.weight")))
        shape = list(tensor.shape)
        shape[dim] = VOCABULARY if "embed" in name or "lm_head" in name else size * shape[dim]
        sharded[name] = (torch.zeros(shape), (Replicate(), Shard(dim)))
    return sharded


def names_of_shards(name: str) -> str | ts.Stack | None:
    """For DTensors, which say themselves which shard they hold."""
    if "rotary" in name:
        return None
    if name == "lm_head.weight":
        return "model.embed_tokens.weight"
    stored = name.replace("language_model.", "model.", 1)
    for fused, parts in (("qkv", ("q", "k", "v")), ("gate_up", ("gate", "up"))):
        if f"{fused}_proj" in stored:
            return ts.Stack(*(stored.replace(f"{fused}_proj", f"{part}_proj") for part in parts))
    return stored


class names_for:  # noqa: N801 - a function with arguments that compares equal to another of the same arguments
    """For plain tensors of one rank: each part is that rank's chunk."""

    def __init__(self, rank: int, size: int) -> None:
        self._chunk = (rank, size)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, names_for) and other._chunk == self._chunk

    def __hash__(self) -> int:
        return hash(self._chunk)

    def __call__(self, name: str) -> str | ts.Part | ts.Stack | None:
        answer = names_of_shards(name)
        if answer is None or name.endswith("layernorm.weight"):
            return answer
        dim = int(name.endswith(("o_proj.weight", "down_proj.weight")))
        if isinstance(answer, str):
            return ts.Part(answer, chunk=self._chunk, dim=dim)
        return ts.Stack(*(ts.Part(part.name, chunk=self._chunk) for part in answer.parts))


def names_of_whole(name: str) -> ts.Stack:
    """The three projections of the first layer as one tensor, which is sharded as if it had always been one."""
    return ts.Stack(*(f"model.layers.0.self_attn.{part}_proj.weight" for part in name), per_shard=False)
