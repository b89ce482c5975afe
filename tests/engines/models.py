"""A Llama of one or two megabytes: as vLLM's folder, and as a trainer's model."""

import json
from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 500,  # no multiple of 64: vLLM pads it
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,  # nothing ends an answer early
}
PROMPTS = [[(seed * 37 + 11 * place) % 499 for place in range(40)] for seed in range(3)]
"""Longer than one block of vLLM's cache, so that an old one would be noticed."""

NEW_TOKENS = 12


def write_folder(folder: Path, **changes: Any) -> Path:
    """A model for ``load_format="dummy"``: its configuration alone."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", **SHAPE, **changes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def llama(**changes: Any) -> Any:
    """The trainer's, of transformers, with the same random weights each time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(**SHAPE | changes)).float()


def greedy(model: Any) -> list[list[int]]:
    """What ``generate`` of transformers says to the prompts."""
    import torch

    with torch.no_grad():
        return [
            model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)[
                0, len(prompt) :
            ].tolist()
            for prompt in PROMPTS
        ]


def switches_of(old: Any, new: Any, prompt: list[int], tokens: list[int]) -> list[int]:
    """How many tokens a model may have said before another one goes on: several numbers where both say the same.

    None at all: some token is what neither of them says there.
    """
    import torch

    with torch.no_grad():
        said = [
            model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
            for model in (old, new)
        ]
    return [
        number
        for number in range(len(tokens) + 1)
        if said[0][:number] == tokens[:number] and said[1][number:] == tokens[number:]
    ]
