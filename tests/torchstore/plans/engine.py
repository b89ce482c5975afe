"""A model as inference engines write them: one rank's part, fused, stacked, padded and transposed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

HIDDEN, HEADS, KV_HEADS, HEAD, FF, EXPERTS, LAYERS = 64, 8, 4, 16, 96, 4, 2
VOCABULARY, PADDED = 500, 512
DTYPE = torch.bfloat16

Weights = Iterable[tuple[str, torch.Tensor]]
Loader = Callable[..., None]


def checkpoint_shapes() -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What a training framework has of this model."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "model.embed_tokens.weight": ((VOCABULARY, HIDDEN), DTYPE)
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": ((HEADS * HEAD, HIDDEN), DTYPE),
            f"{at}.self_attn.k_proj.weight": ((KV_HEADS * HEAD, HIDDEN), DTYPE),
            f"{at}.self_attn.v_proj.weight": ((KV_HEADS * HEAD, HIDDEN), DTYPE),
            f"{at}.self_attn.o_proj.weight": ((HIDDEN, HEADS * HEAD), DTYPE),
            f"{at}.mlp.gate_proj.weight": ((FF, HIDDEN), DTYPE),
            f"{at}.mlp.up_proj.weight": ((FF, HIDDEN), DTYPE),
            f"{at}.mlp.down_proj.weight": ((HIDDEN, FF), DTYPE),
            f"{at}.input_layernorm.weight": ((HIDDEN,), DTYPE),
            f"{at}.router.weight": ((EXPERTS, HIDDEN), DTYPE),
            f"{at}.rotary_emb.inv_freq": ((HEAD // 2,), torch.float32),
        }
        for expert in range(EXPERTS):
            shapes |= {
                f"{at}.experts.{expert}.w1.weight": ((FF, HIDDEN), DTYPE),
                f"{at}.experts.{expert}.w3.weight": ((FF, HIDDEN), DTYPE),
                f"{at}.experts.{expert}.w2.weight": ((HIDDEN, FF), DTYPE),
            }
    shapes["model.scale"] = ((1,), torch.float32)
    shapes["model.head_bias"] = ((HIDDEN,), torch.float32)
    return shapes


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    """The same with values."""
    chance = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=chance, dtype=torch.float32).to(dtype)
        for name, (shape, dtype) in checkpoint_shapes().items()
    }


class EngineModel(nn.Module):
    """Parameters, and a `load_weights` with a loader on each of them.

    Args:
        rank: In the tensor-parallel group.
        ranks: Of the group.
        device: Of the parameters.
        quantize: Whether the output projections are quantized while they are loaded.
    """

    def __init__(self, rank: int = 0, ranks: int = 1, device: str = "cpu", *, quantize: bool = False) -> None:
        super().__init__()
        self.rank, self.ranks, self.device, self.quantize = rank, ranks, device, quantize
        self.padded = PADDED // ranks
        self.add("embed_tokens", (self.padded, HIDDEN), self.load_padded)
        for layer in range(LAYERS):
            rows, kv_rows = HEADS * HEAD // ranks, KV_HEADS * HEAD // ranks
            self.add(f"qkv_{layer}", (rows + 2 * kv_rows, HIDDEN), self.load_qkv)
            if quantize:
                self.add(f"o_{layer}", (HIDDEN, rows), self.load_quantized, dtype=torch.int8)
                self.add(f"o_scale_{layer}", (HIDDEN, 1), None, dtype=torch.float32)
            else:
                self.add(f"o_{layer}", (HIDDEN, rows), self.load_columns)
            self.add(f"gate_up_{layer}", (2 * FF // ranks, HIDDEN), self.load_gate_up)
            self.add(f"down_{layer}", (FF // ranks, HIDDEN), self.load_transposed)
            self.add(f"norm_{layer}", (HIDDEN,), self.load_whole, dtype=torch.float32)
            self.add(f"router_{layer}", (EXPERTS, HIDDEN), self.load_whole)
            self.add(f"w13_{layer}", (EXPERTS, 2 * FF // ranks, HIDDEN), self.load_expert)
            self.add(f"w2_{layer}", (EXPERTS, HIDDEN, FF // ranks), self.load_expert)
        self.add("scale", (), self.load_number, dtype=torch.float32)
        self.lm_head = self.embed_tokens  # tied
        self.loaded: list[str] = []

    def add(self, name: str, shape: tuple[int, ...], loader: Loader | None, dtype: torch.dtype = DTYPE) -> None:
        weight = nn.Parameter(torch.full(shape, 7, dtype=dtype, device=self.device), requires_grad=False)
        weight.weight_loader = loader  # type: ignore[attr-defined]  # as vLLM does
        setattr(self, name, weight)

    def load_weights(self, weights: Weights) -> set[str]:
        """As engines do: names are mapped, and the loader of the parameter does the rest."""
        for name, tensor in weights:
            self.loaded.append(name)
            if "rotary_emb" in name or name == "model.head_bias":
                continue
            self.load_one(name, tensor)
        return set(self.loaded)

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        parts = name.split(".")
        layer = parts[2] if parts[1] == "layers" else ""
        fused = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
        if "experts" in name:
            target = "w2" if parts[-2] == "w2" else "w13"
            self.load_expert(getattr(self, f"{target}_{layer}"), tensor, int(parts[4]), parts[-2])
        elif parts[-2] in fused:
            parameter = getattr(self, f"{fused[parts[-2]]}_{layer}")
            parameter.weight_loader(parameter, tensor, parts[-2])
        else:
            plain = {"o_proj": "o", "down_proj": "down", "input_layernorm": "norm", "router": "router"}
            own = f"{plain[parts[-2]]}_{layer}" if layer else {"scale": "scale"}.get(parts[1], "embed_tokens")
            parameter = getattr(self, own)
            parameter.weight_loader(parameter, tensor)

    def load_padded(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        start = self.rank * self.padded
        mine = tensor[start : min(start + self.padded, VOCABULARY)]
        parameter.data[: mine.shape[0]].copy_(mine)
        parameter.data[mine.shape[0] :].fill_(0)

    def load_qkv(self, parameter: nn.Parameter, tensor: torch.Tensor, which: str) -> None:
        rows, kv_rows = HEADS * HEAD // self.ranks, KV_HEADS * HEAD // self.ranks
        start, size = {"q_proj": (0, rows), "k_proj": (rows, kv_rows), "v_proj": (rows + kv_rows, kv_rows)}[which]
        if which != "v_proj":  # the two halves of a head alternate, as in GPT-J
            heads = tensor.shape[0] // HEAD
            tensor = tensor.view(heads, 2, HEAD // 2, HIDDEN).transpose(1, 2).reshape(heads * HEAD, HIDDEN)
        parameter.data.narrow(0, start, size).copy_(tensor.narrow(0, self.rank * size, size))

    def load_columns(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        size = parameter.shape[1]
        parameter.data.copy_(tensor.narrow(1, self.rank * size, size).to(parameter.device))

    def load_quantized(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        size = parameter.shape[1]
        mine = tensor.narrow(1, self.rank * size, size).float()
        scale = mine.abs().amax(1, keepdim=True) / 127
        layer = next(layer for layer in range(LAYERS) if parameter is getattr(self, f"o_{layer}"))
        parameter.data.copy_((mine / scale).round())
        getattr(self, f"o_scale_{layer}").data.copy_(scale)

    def load_gate_up(self, parameter: nn.Parameter, tensor: torch.Tensor, which: str) -> None:
        size = parameter.shape[0] // 2
        mine = torch.chunk(tensor, self.ranks)[self.rank]
        parameter.data[size * (which == "up_proj") :][:size] = mine

    def load_transposed(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        size = parameter.shape[0]
        parameter.data.copy_(tensor.t().contiguous()[self.rank * size : (self.rank + 1) * size])

    def load_whole(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        assert parameter.shape == tensor.shape
        parameter.data.copy_(tensor)

    def load_expert(self, parameter: nn.Parameter, tensor: torch.Tensor, expert: int, which: str) -> None:
        size = FF // self.ranks
        if which == "w2":
            parameter.data[expert] = tensor.narrow(1, self.rank * size, size)
        else:
            start = size * (which == "w3")
            parameter.data[expert].narrow(0, start, size).copy_(tensor.narrow(0, self.rank * size, size))

    def load_number(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        parameter.data.copy_(tensor.reshape(()))


class LookingModel(EngineModel):
    """Its scale is filled with a number, which takes a look at the value, as vLLM's default loader does."""

    def load_number(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        parameter.data.fill_(tensor.item())


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters, to be compared."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
