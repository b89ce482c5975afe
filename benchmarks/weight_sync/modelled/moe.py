"""The tensors of a mixture-of-experts model of a trillion parameters, from its public description alone.

The defaults are the ``config.json`` of Kimi K2 (DeepSeek-V3's architecture): multi-head latent attention, one dense
layer, 60 layers of 384 experts and a shared one; 1.03e12 parameters. In FP8 every matrix of a layer has one float32
scale for each block of 128 x 128, as DeepSeek-V3's checkpoints have, which makes 139,000 tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from skipper.torchstore.algebra.layout import Ints

__all__ = ["ModelTensor", "MoEModel", "Precision"]

Precision = Literal["bf16", "fp8"]

_BLOCK = 128
_ITEMSIZES = {"torch.bfloat16": 2, "torch.float8_e4m3fn": 1, "torch.float32": 4}


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """One tensor of a model.

    Attributes:
        name: As in a checkpoint.
        shape: Shape of the whole tensor.
        dtype: As torch prints it.
        layer: The number of its layer: -1 before the first one, the number of layers after the last one.
        expert: Which expert it is of; None: of none.
        parallel_dim: The dim that tensor parallelism cuts; None: every rank has the whole of it.
    """

    name: str
    shape: Ints
    dtype: str
    layer: int
    expert: int | None = None
    parallel_dim: int | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _ITEMSIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class MoEModel:
    """Sizes of a model, in the terms of its config.

    Attributes:
        precision: Precision of the matrices of layers: bfloat16, or FP8 with scales. The rest is bfloat16.
    """

    layers: int = 61
    dense_layers: int = 1
    hidden: int = 7168
    intermediate: int = 18_432
    expert_intermediate: int = 2048
    experts: int = 384
    heads: int = 64
    query_rank: int = 1536
    key_value_rank: int = 512
    head_nope: int = 128
    head_rope: int = 64
    head_value: int = 128
    vocabulary: int = 163_840
    precision: Precision = "fp8"

    def tensors(self) -> Iterator[ModelTensor]:
        """All of them, layer by layer."""
        yield self._plain("model.embed_tokens.weight", (self.vocabulary, self.hidden), -1, 0)
        for layer in range(self.layers):
            yield from self._attention(layer)
            where = f"model.layers.{layer}.mlp"
            if layer < self.dense_layers:
                yield from self._gated(where, self.intermediate, layer)
                continue
            yield self._plain(f"{where}.gate.weight", (self.experts, self.hidden), layer)
            bias = f"{where}.gate.e_score_correction_bias"
            yield ModelTensor(bias, (self.experts,), "torch.float32", layer)
            yield from self._gated(f"{where}.shared_experts", self.expert_intermediate, layer)
            for expert in range(self.experts):
                yield from self._gated(f"{where}.experts.{expert}", self.expert_intermediate, layer, expert)
        yield self._plain("model.norm.weight", (self.hidden,), self.layers)
        yield self._plain("lm_head.weight", (self.vocabulary, self.hidden), self.layers, 0)

    def _attention(self, layer: int) -> Iterator[ModelTensor]:
        where, keys = f"model.layers.{layer}", self.head_nope + self.head_rope
        attention = f"{where}.self_attn"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield self._plain(f"{where}.{name}.weight", (self.hidden,), layer)
        yield self._plain(f"{attention}.q_a_layernorm.weight", (self.query_rank,), layer)
        yield self._plain(f"{attention}.kv_a_layernorm.weight", (self.key_value_rank,), layer)
        latent = self.key_value_rank + self.head_rope
        values = self.heads * (self.head_nope + self.head_value)
        matrices: tuple[tuple[str, Ints, int | None], ...] = (
            ("q_a_proj", (self.query_rank, self.hidden), None),
            ("q_b_proj", (self.heads * keys, self.query_rank), 0),
            ("kv_a_proj_with_mqa", (latent, self.hidden), None),
            ("kv_b_proj", (values, self.key_value_rank), 0),
            ("o_proj", (self.hidden, self.heads * self.head_value), 1),
        )
        for name, shape, dim in matrices:
            yield from self._matrix(f"{attention}.{name}", shape, layer, None, dim)

    def _gated(self, where: str, width: int, layer: int, expert: int | None = None) -> Iterator[ModelTensor]:
        for name, shape, dim in (
            ("gate_proj", (width, self.hidden), 0),
            ("up_proj", (width, self.hidden), 0),
            ("down_proj", (self.hidden, width), 1),
        ):
            yield from self._matrix(f"{where}.{name}", shape, layer, expert, dim)

    def _matrix(
        self, where: str, shape: Ints, layer: int, expert: int | None, dim: int | None
    ) -> Iterator[ModelTensor]:
        dtype = "torch.float8_e4m3fn" if self.precision == "fp8" else "torch.bfloat16"
        yield ModelTensor(f"{where}.weight", shape, dtype, layer, expert, dim)
        if self.precision == "fp8":
            scales = tuple(-(-size // _BLOCK) for size in shape)
            yield ModelTensor(f"{where}.weight_scale_inv", scales, "torch.float32", layer, expert, dim)

    @staticmethod
    def _plain(name: str, shape: Ints, layer: int, dim: int | None = None) -> ModelTensor:
        return ModelTensor(name, shape, "torch.bfloat16", layer, None, dim)
