"""A small Llama, whole in one process, or in stages of which each is cut over the axis ``gpus`` of its mesh."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from skipper.control import ProcMesh
from skipper.tensor_engine import inspect, reduce, reduce_
from tests.control.conftest import PATIENCE_S

VOCABULARY, WIDTH, HEADS, HIDDEN, LENGTH, EPSILON = 32, 16, 4, 32, 8, 1e-6
COLUMNS, ROWS = ("q", "k", "v", "gate", "up"), ("o", "down")
"""Which matrices are cut by their outputs, and which by their inputs."""

Weights = dict[str, torch.Tensor]


def made(layers: int, seed: int) -> list[Weights]:
    """The weights of so many layers, the first with the embedding and the last with the head."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / rows**0.5

    found: list[Weights] = [
        {
            **{name: matrix(WIDTH, WIDTH) for name in ("q", "k", "v", "o")},
            **{name: matrix(WIDTH, HIDDEN) for name in ("gate", "up")},
            "down": matrix(HIDDEN, WIDTH),
            **{name: torch.ones(WIDTH) for name in ("before attention", "before hidden")},
        }
        for _ in range(layers)
    ]
    found[0]["embedding"] = matrix(VOCABULARY, WIDTH)
    found[-1] |= {"at the end": torch.ones(WIDTH), "head": matrix(WIDTH, VOCABULARY)}
    return found


def layer(
    x: torch.Tensor, weights: Mapping[str, torch.Tensor], add_up: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """One layer; ``add_up`` gives what all that have parts of it have computed."""
    y = functional.rms_norm(x, (WIDTH,), weights["before attention"], EPSILON)
    q, k, v = ((y @ weights[name]).unflatten(-1, (-1, WIDTH // HEADS)).transpose(-3, -2) for name in ("q", "k", "v"))
    mixed = functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
    x = x + add_up(mixed.transpose(-3, -2).flatten(-2) @ weights["o"])
    y = functional.rms_norm(x, (WIDTH,), weights["before hidden"], EPSILON)
    return x + add_up((functional.silu(y @ weights["gate"]) * (y @ weights["up"])) @ weights["down"])


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions."""
    half = x.shape[-1] // 2
    angles = torch.arange(LENGTH)[:, None] * 100.0 ** (-torch.arange(half) / half)
    first, second = x.chunk(2, -1)
    return torch.cat((first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()), -1)


def loss_of(x: torch.Tensor, weights: Mapping[str, torch.Tensor], wanted: torch.Tensor) -> torch.Tensor:
    """What the last layer's output is worth."""
    scores = functional.rms_norm(x, (WIDTH,), weights["at the end"], EPSILON) @ weights["head"]
    return functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())


def trained_alone(layers: Sequence[Weights], batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """The losses of one process."""
    layers = [{name: tensor.clone().requires_grad_() for name, tensor in weights.items()} for weights in layers]
    optimizer = torch.optim.AdamW([tensor for weights in layers for tensor in weights.values()], lr=0.01)
    losses = []
    for words, wanted in batches:
        x = layers[0]["embedding"][words]
        for weights in layers:
            x = layer(x, weights, lambda part: part)
        loss = loss_of(x, layers[-1], wanted)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


@dataclass
class Stage:
    """One layer on a mesh of the axes ``hosts``, along which it is copied, and ``gpus``, along which it is cut.

    Attributes:
        mesh: where it is.
        weights: of each rank, its own parts.
    """

    mesh: ProcMesh
    weights: Weights

    @staticmethod
    def of(weights: Weights, mesh: ProcMesh) -> "Stage":
        """Those parts of a whole layer's weights that each rank needs."""
        parts, rank = mesh.extent["gpus"], mesh.rank_tensor("gpus").view(1)
        there = {}
        for name, tensor in weights.items():
            if name in COLUMNS or name in ROWS:
                stacked = torch.stack(tensor.chunk(parts, 1 if name in COLUMNS else 0))
                there[name] = mesh.place(stacked).index_select(0, rank).squeeze(0)
            else:
                there[name] = mesh.place(tensor)
        return Stage(mesh, {name: tensor.requires_grad_() for name, tensor in there.items()})

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Its output on each rank."""
        with self.mesh.activate():
            return layer(x, self.weights, lambda part: reduce(part, "gpus"))

    def whole(self) -> Weights:
        """The layer's weights, put together in the script."""
        found = {}
        for name, tensor in self.weights.items():
            ranks = range(self.mesh.extent["gpus"] if name in COLUMNS or name in ROWS else 1)
            parts = [inspect(tensor.detach(), gpus=rank, timeout=PATIENCE_S) for rank in ranks]
            found[name] = torch.cat(parts, 1 if name in COLUMNS else 0)
        return found

    def add_up_gradients(self) -> None:
        """Of all copies, and of all ranks that have the same weights."""
        for name, tensor in self.weights.items():
            assert tensor.grad is not None
            reduce_(tensor.grad, "hosts" if name in COLUMNS or name in ROWS else ("hosts", "gpus"))


class Pipeline:
    """Two stages, with data that differ along ``hosts``."""

    def __init__(self, layers: Sequence[Weights], meshes: Sequence[ProcMesh]) -> None:
        self.first, self.last = (Stage.of(weights, mesh) for weights, mesh in zip(layers, meshes, strict=True))
        self.optimizers = [
            torch.optim.AdamW(stage.weights.values(), lr=0.01, fused=True) for stage in (self.first, self.last)
        ]

    def step(self, words: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Train; the mean loss, on each rank of the last stage."""
        first, last = self.first, self.last
        x = first.run(first.weights["embedding"][own_part(words, first.mesh)])
        loss = loss_of(last.run(x.to_mesh(last.mesh)), last.weights, own_part(wanted, last.mesh))  # type: ignore[attr-defined]
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        (loss / last.mesh.extent["hosts"]).slice_mesh(gpus=0).backward()
        for stage, optimizer in zip((first, last), self.optimizers, strict=True):
            stage.add_up_gradients()
            optimizer.step()
        return reduce(loss.detach(), "hosts", "avg")


def own_part(batch: torch.Tensor, mesh: ProcMesh) -> torch.Tensor:
    """The part of a batch that each rank along ``hosts`` works on."""
    parts = torch.stack(batch.chunk(mesh.extent["hosts"]))
    return mesh.place(parts).index_select(0, mesh.rank_tensor("hosts").view(1)).squeeze(0)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Words, and the ones that are to follow them."""
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(VOCABULARY, (4, LENGTH + 1), generator=generator) for _ in range(count)]
    return [(text[:, :-1], text[:, 1:]) for text in texts]
