"""One rank of an inference engine for any model of transformers, that fuses as vLLM's models do.

Which parameter a checkpoint tensor goes into is told by its name and shape. Fused are q, k and v, and gate and up;
experts are stacked; the vocabulary is padded. What leads out of attention or an MLP is cut by columns, what leads in by
rows. What the checkpoint has fused is taken apart, cut, and fused again. Decay rates of state spaces are computed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
Part = Callable[[Tensor], Tensor]

PADDED_TO = 64
_EMBEDDINGS = re.compile(r"(embed_tokens|wte|word_embeddings|embed_in|embed_out|lm_head|embeddings)\.weight$")
_REPLICATED = re.compile(
    r"norm|ln_|layernorm|router|\.gate\.|q_a_proj|kv_a_proj|position|wpe|patch|relative|shared_expert_gate"
)
_BY_COLUMNS = re.compile(
    r"(o_proj|out_proj|down_proj|c_proj|dense|dense_4h_to_h|fc2|fc_out|w2|wo|output_linear)\.(weight|bias)$"
)
_EXPERT = re.compile(r"experts\.(\d+)\.(\w+)\.weight$")
_FUSED = {
    "q_proj": ("qkv", 0),
    "k_proj": ("qkv", 1),
    "v_proj": ("qkv", 2),
    "gate_proj": ("gate_up", 0),
    "w1": ("gate_up", 0),
    "up_proj": ("gate_up", 1),
    "w3": ("gate_up", 1),
}
_IN_BY_OUT = ("gpt2", "openai-gpt")
"""Their linear layers, called Conv1D, have matrices of (in, out)."""


@dataclass(frozen=True)
class Move:
    """What of a checkpoint tensor goes where: `part` of it is the `order`-th of what is fused into a parameter.

    Attributes:
        rows: What the parameter has for it; 0: as many as there are.
        expert: Which of the stacked matrices; None: they are not stacked.
    """

    parameter: str
    order: int
    part: Part
    rows: int = 0
    expert: int | None = None


@dataclass(frozen=True)
class Place:
    """The rows of a parameter that a move fills."""

    parameter: str
    start: int
    rows: int
    part: Part
    expert: int | None

    def fill(self, parameters: Mapping[str, nn.Parameter], tensor: Tensor) -> None:
        """Put a checkpoint tensor's part there, and zeros behind it."""
        into, part = parameters[self.parameter].data, self.part(tensor)
        if self.expert is not None:
            into = into[self.expert]
        if part.ndim == 0:
            into.copy_(part)
            return
        into = into.narrow(0, self.start, self.rows)
        into[: part.shape[0]].copy_(part)
        into[part.shape[0] :].zero_()


class FusingEngine(nn.Module):
    """The parameters of one rank, and a `load_weights`.

    Args:
        checkpoint: Shapes and dtypes by name.
        config: Of the model, as transformers has it.
        rank: In the tensor-parallel group.
        ranks: Of the group.
    """

    def __init__(self, checkpoint: Shapes, config: Any, rank: int, ranks: int) -> None:
        super().__init__()
        text = config.get_text_config()
        self.rank, self.ranks, self.kind = rank, ranks, config.model_type
        self.heads = getattr(text, "num_attention_heads", 0)  # state space models have none
        self.hidden, self.vocabulary = text.hidden_size, text.vocab_size
        self.weights = nn.ParameterDict()
        self.places: dict[str, list[Place]] = {name: [] for name in checkpoint}
        parts: dict[str, list[tuple[str, Move, Tensor]]] = {}
        for name, (shape, dtype) in checkpoint.items():
            whole = torch.empty(shape, dtype=dtype, device="meta")
            for move in self.moves(name, whole):
                parts.setdefault(move.parameter, []).append((name, move, move.part(whole)))
        for parameter, moved in parts.items():
            self.add(parameter, moved)

    def add(self, parameter: str, moved: list[tuple[str, Move, Tensor]]) -> None:
        """Make the parameter that these are fused into."""
        rows = {move.order: move.rows or (part.shape[0] if part.ndim else 1) for _, move, part in moved}
        stacked = [move.expert + 1 for _, move, _ in moved if move.expert is not None]
        first = moved[0][2]
        shape = (*([max(stacked)] if stacked else []), *([sum(rows.values())] if first.ndim else []), *first.shape[1:])
        self.weights[parameter] = nn.Parameter(torch.full(shape, 7, dtype=first.dtype), requires_grad=False)
        for name, move, _ in moved:
            start = sum(count for order, count in rows.items() if order < move.order)
            self.places[name].append(Place(parameter, start, rows[move.order], move.part, move.expert))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """As engines do."""
        for name, tensor in weights:
            for place in self.places[name]:
                place.fill(self.weights, tensor)

    def moves(self, name: str, tensor: Tensor) -> list[Move]:
        """Where a checkpoint tensor goes."""
        key, dims = name.replace(".", "_"), tensor.ndim
        *_, layer, kind = ["", *name.split(".")]
        if _EMBEDDINGS.search(name) and dims == 2 and tensor.shape[0] == self.vocabulary:
            return [self.padded(key)]
        if name.endswith("A_log"):
            return [Move(key, 0, lambda t: -torch.exp(self.mine(t, 0).float()))]
        if expert := _EXPERT.search(name):
            return [self.of_expert(name[: expert.start()], int(expert[1]), expert[2])]
        if "experts" in name and dims == 3:
            return self.of_stacked(key, kind, tensor)
        if layer in _FUSED and not _REPLICATED.search(name):
            fused, order = _FUSED[layer]
            return [Move(key.replace(layer, fused), order, lambda t: self.mine(t, 0))]
        if layer in ("query_key_value", "qkv", "qkv_proj", "c_attn", "Wqkv", "gate_up_proj"):
            return self.of_fused(key, layer, tensor)
        if dims == 0 or _REPLICATED.search(name) or (dims == 1 and _BY_COLUMNS.search(name)):
            return [Move(key, 0, lambda t: t)]
        if _BY_COLUMNS.search(name):
            return [Move(key, 0, lambda t: self.mine(self.out_by_in(t), 1))]
        return [Move(key, 0, lambda t: self.mine(self.out_by_in(t), 0))]

    def mine(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's share of a dim; all of one that cannot be shared out."""
        size, rest = divmod(tensor.shape[dim], self.ranks)
        return tensor if rest else tensor.narrow(dim, self.rank * size, size)

    def out_by_in(self, tensor: Tensor) -> Tensor:
        """A matrix of a linear layer with a row for each output."""
        return tensor.t() if self.kind in _IN_BY_OUT and tensor.ndim == 2 else tensor

    def padded(self, key: str) -> Move:
        """Rows of the vocabulary, which is padded so that each rank has as many."""
        rows = -(-self.vocabulary // (PADDED_TO * self.ranks)) * PADDED_TO
        start = min(self.rank * rows, self.vocabulary)
        return Move(key, 0, lambda t: t[start : start + rows], rows=rows)

    def of_expert(self, before: str, expert: int, layer: str) -> Move:
        """One matrix of one expert."""
        before = before.replace(".", "_")
        if layer in _FUSED:
            return Move(f"{before}w13", _FUSED[layer][1], lambda t: self.mine(t, 0), expert=expert)
        return Move(f"{before}{layer}", 0, lambda t: self.mine(t, t.ndim - 1), expert=expert)

    def of_stacked(self, key: str, kind: str, tensor: Tensor) -> list[Move]:
        """Matrices of all experts; some models have them with a row for each input."""
        fused = "gate_up" in key or "w13" in key or "input_linear" in key
        by_input = tensor.shape[1 if fused else 2] == self.hidden and tensor.shape[2 if fused else 1] != self.hidden

        def turned(t: Tensor) -> Tensor:
            return t.transpose(1, 2) if by_input else t

        if not fused:
            return [Move(key, 0, lambda t: self.mine(turned(t), 2))]

        def halves(t: Tensor) -> Tensor:
            experts, rows, columns = t.shape
            if self.kind == "gpt_oss":  # gate and up alternate
                t = t.view(experts, rows // 2, 2, columns).transpose(1, 2)
            else:
                t = t.view(experts, 2, rows // 2, columns)
            return self.mine(t, 2).reshape(experts, -1, columns)

        return [Move(key, 0, lambda t: halves(turned(t)))]

    def of_fused(self, key: str, layer: str, tensor: Tensor) -> list[Move]:
        """What the checkpoint has fused: parts one after another, or alternating by heads."""
        count, rest = (2 if layer == "gate_up_proj" else 3), tensor.shape[1:]
        rows = self.out_by_in(tensor).shape[0]
        if rows % (count * self.ranks):  # fewer heads of keys and values than of queries: by rows
            return [Move(key, 0, lambda t: self.mine(self.out_by_in(t), 0))]
        if layer == "query_key_value":

            def part(t: Tensor) -> Tensor:
                by_head = self.mine(t.view(self.heads, count, -1, *rest), 0)
                return by_head.transpose(0, 1).reshape(prod(by_head.shape[:3]), *rest)

            return [Move(key, 0, part)]
        return [
            Move(key, order, lambda t, order=order: self.mine(self.out_by_in(t).chunk(count)[order], 0))  # type: ignore[misc]
            for order in range(count)
        ]
