"""A small model that PEFT has adapted, and the same without PEFT."""

from typing import Any

import torch


class Block(torch.nn.Module):
    """Two projections and an embedding, as transformers name them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(12, 8)
        self.q_proj = torch.nn.Linear(8, 16, bias=False)
        self.o_proj = torch.nn.Linear(16, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.o_proj(torch.relu(self.q_proj(self.embed(tokens))))


def block_of(seed: int = 0) -> Block:
    torch.manual_seed(seed)
    return Block()


def adapted(seed: int = 0, **options: Any) -> Any:
    """A `Block` with an adapter whose factors are none of them zero."""
    import peft

    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "o_proj", "embed"], rank_pattern={"o_proj": 2}, **options
    )
    model = peft.get_peft_model(block_of(), config)
    redraw(model, seed)
    return model


def redraw(model: torch.nn.Module, seed: int) -> None:
    """Other factors, as a step of an optimizer would make them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "lora_" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
