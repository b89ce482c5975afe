"""Small models of transformers, each made within a moment from its config alone: no weights, no network."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from tests.torchstore.plans.fusing_engine import Shapes

TEXT = [
    "llama",
    "mistral",
    "ministral",
    "cwm",
    "qwen2",
    "qwen3",
    "smollm3",
    "seed_oss",
    "arcee",
    "helium",
    "apertus",
    "granite",
    "ernie4_5",
    "hunyuan_v1_dense",
    "internlm3",
    "exaone4",
    "nanochat",
    "bitnet",
    "gemma",
    "gemma2",
    "gemma3_text",
    "olmo",
    "olmo2",
    "olmo3",
    "cohere",
    "cohere2",
    "glm",
    "glm4",
    "phi",
    "phi3",
    "diffllama",
    "doge",
    "starcoder2",
    "stablelm",
    "nemotron",
    "persimmon",
    "minicpm3",
    "gpt2",
    "gpt_neox",
    "gpt_bigcode",
    "gptj",
    "bloom",
    "falcon",
    "opt",
    "mpt",
    "codegen",
    "biogpt",
    "xglm",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "flex_olmo",
    "phimoe",
    "granitemoe",
    "granitemoeshared",
    "minimax_m2",
    "jetmoe",
    "llama4_text",
    "gpt_oss",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "dots1",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "mamba",
    "falcon_mamba",
    "bamba",
    "jamba",
    "lfm2",
    "rwkv",
    "recurrent_gemma",
]
WITH_VISION = [
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "llava",
    "llava_next",
    "gemma3",
    "internvl",
    "mistral3",
    "idefics3",
    "paligemma",
    "aya_vision",
    "glm4v",
    "glm4v_moe",
]

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 130,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    # As GPT-2's relatives call them.
    "n_embd": 64,
    "d_model": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 96,
    "n_positions": 64,
    **dict.fromkeys(("n_layer", "n_layers"), 2),
    **dict.fromkeys(("n_head", "n_heads"), 4),
    # Experts.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    "num_experts_per_tok": 2,
    # Latent attention.
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # State spaces.
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "state_size": 8,
}
VISION: dict[str, Any] = {
    **dict.fromkeys(("depth", "num_hidden_layers", "spatial_merge_size"), 2),
    **dict.fromkeys(("num_heads", "num_attention_heads"), 4),
    **dict.fromkeys(("hidden_size", "embed_dim", "out_hidden_size", "projection_dim"), 64),
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [1],
    "intermediate_size": 96,
    "image_size": 28,
    "patch_size": 14,
    "num_channels": 3,
    "num_position_embeddings": 16,
}


def made(kind: str) -> tuple[Any, Shapes]:
    """The config of a small model, and the shapes and dtypes of what it has in bfloat16.

    Args:
        kind: The ``model_type``, one of TEXT and WITH_VISION.
    """
    import transformers  # takes seconds, which other tests are spared

    config_class = transformers.CONFIG_MAPPING[kind]
    if kind in WITH_VISION:
        usual = config_class()
        parts = {"text_config": (usual.text_config, SIZES), "vision_config": (usual.vision_config, VISION)}
        inner = {name: {"model_type": of.model_type, **known(type(of), sizes)} for name, (of, sizes) in parts.items()}
        config, maker = config_class(**inner), transformers.AutoModelForImageTextToText
    else:
        config, maker = config_class(**known(config_class, SIZES)), transformers.AutoModelForCausalLM
    with torch.device("meta"):
        tensors = maker.from_config(config).bfloat16().state_dict()
    return config, {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def known(config_class: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """Those sizes that a config has, each by one of its names."""
    names = {*inspect.signature(config_class.__init__).parameters, *getattr(config_class, "__dataclass_fields__", ())}
    others = config_class.attribute_map
    return {
        name: size for name, size in sizes.items() if name in names or (name in others and others[name] not in sizes)
    }
