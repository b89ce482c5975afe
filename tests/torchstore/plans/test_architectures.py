"""Checkpoints of real architectures, from their configurations alone, loaded as vLLM loads them."""

import re
from collections.abc import Iterable
from math import prod
from typing import Any

import pytest
import torch
from torch import nn

from skipper import torchstore as ts
from skipper.torchstore.plans.plan_lines import PlanParts, write

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 130,
}
RANKS = 2
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up", "up_proj": "gate_up"}
BY_COLUMNS = re.compile(r"(o_proj|down_proj|out_proj|fc2)\.weight$")
REPLICATED = re.compile(r"norm|(o_proj|down_proj|out_proj|fc2)\.bias$|mlp\.gate\.weight$|router")


class TensorParallel(nn.Module):
    """Any model of linear layers, one rank's part of it: rows of what is fused, columns of what follows it."""

    def __init__(self, checkpoint: dict[str, torch.Tensor], rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.weights = nn.ParameterDict()
        self.places: dict[str, tuple[str, int]] = {}
        shapes: dict[str, list[int]] = {}
        for name, tensor in checkpoint.items():
            target, shape = self.fused(name), list(self.mine(name, tensor).shape)
            before = shapes.get(target)
            self.places[name] = (target, before[0] if before else 0)
            shapes[target] = shape if before is None else [before[0] + shape[0], *shape[1:]]
        for name, shape in shapes.items():
            self.weights[name] = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)

    def fused(self, name: str) -> str:
        part = name.split(".")[-2] if "." in name else ""
        return name.replace(part, FUSED[part]).replace(".", "_") if part in FUSED else name.replace(".", "_")

    def mine(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if REPLICATED.search(name):
            return tensor
        dim = 1 if BY_COLUMNS.search(name) else tensor.ndim - 2 if tensor.ndim > 2 else 0
        return tensor.chunk(RANKS, dim)[self.rank]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            target, start = self.places[name]
            mine = self.mine(name, tensor)
            self.weights[target].data.narrow(0, start, mine.shape[0]).copy_(mine)


@pytest.mark.parametrize(
    ("config", "model", "options"),
    [
        ("LlamaConfig", "LlamaForCausalLM", {}),
        ("MistralConfig", "MistralForCausalLM", {}),
        ("Qwen2Config", "Qwen2ForCausalLM", {}),
        ("Qwen3Config", "Qwen3ForCausalLM", {}),
        ("Gemma2Config", "Gemma2ForCausalLM", {}),
        ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"num_experts": 4, "moe_intermediate_size": 32}),
        ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4}),
    ],
)
def test_each_rank_of_an_architecture_needs_the_bytes_of_its_parameters(
    config: str, model: str, options: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")  # takes seconds, which other tests are spared
    configuration = getattr(transformers, config)(**SMALL, **options, pad_token_id=0)
    with torch.device("meta"):
        checkpoint = getattr(transformers, model)(configuration).bfloat16().state_dict()
    for rank in range(RANKS):
        mine = TensorParallel(checkpoint, rank)
        plan = ts.record_plan(mine, checkpoint)
        assert not plan.whole
        assert not plan.skipped
        assert all('"strides"' not in line for line in plan_text(plan))
        assert plan.nbytes == 2 * sum(prod(weight.shape) for weight in mine.parameters())


def plan_text(plan: ts.LoadPlan) -> list[str]:
    """The copies of a plan as its file has them."""
    parts = PlanParts(plan.parameters, plan.checkpoint, plan.copies, plan.fills, plan.whole, plan.skipped)
    return write(parts).splitlines()
