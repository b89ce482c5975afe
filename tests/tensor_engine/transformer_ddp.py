"""A transformer trained data-parallel over the engine, and by DistributedDataParallel over gloo in the same processes.

    python -m tests.tensor_engine.transformer_ddp --steps 50 --compile

prints the losses of both, which have to agree within float tolerance, and how fast the engine is in comparison. Blocks
of steps of the two take turns, so that both meet the same machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from skipper import tensor_engine
from skipper.control import Actor, ProcMesh, context, endpoint, this_host
from skipper.tensor_engine import fetch_shard, inspect, reduce, to_mesh

_LOOPBACK = "127.0.0.1"
_TIMEOUT_S = 300.0  # a compiler on the workers takes its time

BLOCK = 5
"""Steps of one side before it is the other's turn."""


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of what each rank sees in a step."""

    layers: int = 6
    width: int = 128
    heads: int = 4
    vocabulary: int = 64
    length: int = 64
    batch: int = 8
    rate: float = 0.1


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each behind a norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norms = nn.ModuleList(nn.LayerNorm(config.width) for _ in range(2))
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.feed = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norms[1](x))


class Transformer(nn.Module):
    """A small language model."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.places = nn.Parameter(torch.randn(config.length, config.width) * 0.02)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places)))  # type: ignore[no-any-return]


def make_model(config: Config) -> Transformer:
    """The same weights wherever it is called."""
    torch.manual_seed(0)
    return Transformer(config)


def make_data(config: Config, ranks: int, batches: int = 4) -> torch.Tensor:
    """Sequences that count up from somewhere in steps of some size: (batches, ranks, batch, length + 1)."""
    drawn = torch.Generator().manual_seed(1)
    shape = (batches, ranks, config.batch, 1)
    begin = torch.randint(config.vocabulary, shape, generator=drawn)
    step = torch.randint(1, 4, shape, generator=drawn)
    return (begin + step * torch.arange(config.length + 1)) % config.vocabulary


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Of predicting the next token."""
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class Reference(Actor):
    """A rank of the plain run."""

    def __init__(self, config: Config, size: int, port: int) -> None:
        torch.set_num_threads(1)
        rank = context().actor_instance.rank.rank
        store = dist.TCPStore(_LOOPBACK, port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        self.model = DistributedDataParallel(make_model(config))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config.rate, momentum=0.9)
        self.batches = make_data(config, size)[:, rank]
        self.done = 0

    @endpoint
    def train(self, steps: int) -> list[float]:
        """The losses of this rank."""
        losses = []
        for _ in range(steps):
            loss = loss_of(self.model, self.batches[self.done % len(self.batches)])
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            losses.append(loss.detach())
            self.done += 1
        return [loss.item() for loss in losses]

    def __cleanup__(self, error: Exception | None) -> None:
        dist.destroy_process_group()


class Engine:
    """The run over the engine."""

    def __init__(self, config: Config, mesh: ProcMesh, *, compiled: bool, backend: str | None) -> None:
        self.mesh = mesh
        self.run_step = tensor_engine.compile(self.step, worker_compile=backend) if compiled else self.step
        self.model = make_model(config)
        for part in self.model.modules():
            for name, parameter in list(part.named_parameters(recurse=False)):
                part.register_parameter(name, nn.Parameter(to_mesh(parameter.detach(), mesh)))
        self.parameters = list(self.model.parameters())
        self.counts = [parameter.numel() for parameter in self.parameters]
        self.optimizer = torch.optim.SGD(self.parameters, lr=config.rate, momentum=0.9)
        rank = mesh.rank_tensor("dp").view(1)
        data = to_mesh(make_data(config, mesh.size), mesh)
        self.batches = data.index_select(1, rank).squeeze(1).unbind(0)
        self.done = 0
        inspect(rank)  # the workers have imported all of torch, which two actors of a process cannot do at a time

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """One step of every rank; its loss."""
        loss = loss_of(self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        # One reduction in place of one for each parameter, as DistributedDataParallel has it.
        gradients = [parameter.grad.view(-1) for parameter in self.parameters if parameter.grad is not None]
        total = reduce(torch.cat(gradients), "dp", "avg")
        for parameter, gradient in zip(self.parameters, total.split(self.counts), strict=True):
            parameter.grad = gradient.view(parameter.shape)
        self.optimizer.step()
        return loss.detach()

    def train(self, steps: int) -> list[list[float]]:
        """The losses of every rank."""
        fetched: list[list[Any]] = []
        with self.mesh.activate():
            for _ in range(steps):
                loss = self.run_step(self.batches[self.done % len(self.batches)])
                fetched.append([fetch_shard(loss, dp=rank) for rank in range(self.mesh.size)])
                self.done += 1
        return [[loss.get(_TIMEOUT_S).item() for loss in losses] for losses in zip(*fetched, strict=True)]


@dataclass(frozen=True)
class Result:
    """What came out.

    Attributes:
        reference: losses by rank and step.
        engine: the same.
        speed: of the engine, as a fraction of the reference's.
    """

    reference: list[list[float]]
    engine: list[list[float]]
    speed: float

    @property
    def difference(self) -> float:
        """The largest between two losses."""
        ranks = zip(self.reference, self.engine, strict=True)
        return max(abs(one - other) for rank in ranks for one, other in zip(*rank, strict=True))


def compare(procs: ProcMesh, config: Config, steps: int, *, compiled: bool, backend: str | None = None) -> Result:
    """Train both in these processes, the one over the engine by `tensor_engine.compile` or without."""
    mesh = procs.flatten("dp")
    meeting = dist.TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    engine = Engine(config, mesh, compiled=compiled, backend=backend)
    reference = procs.spawn("reference", Reference, config, procs.size, meeting.port)
    losses: tuple[list[list[float]], list[list[float]]] = (
        [[] for _ in range(mesh.size)],
        [[] for _ in range(mesh.size)],
    )
    times_s: tuple[list[float], list[float]] = ([], [])
    for begin in range(0, steps, BLOCK):
        count = min(BLOCK, steps - begin)
        for side, train in enumerate((lambda n: list(reference.train.call(n).get(120)), engine.train)):
            began = time.perf_counter()
            found = train(count)
            times_s[side].append((time.perf_counter() - began) / count)
            for rank, more in enumerate(found):
                losses[side][rank] += more
    reference.stop().get(60)
    first = 1 if len(times_s[0]) > 1 else 0  # the first block of each also makes connections and learns operations
    speed = statistics.median(times_s[0][first:]) / statistics.median(times_s[1][first:])
    return Result(*losses, speed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, and fail if the losses differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--width", type=int, default=Config.width)
    parser.add_argument("--length", type=int, default=Config.length)
    parser.add_argument("--batch", type=int, default=Config.batch, help="sequences per rank and step")
    parser.add_argument("--compile", action="store_true", help="replay the step of the engine as a program")
    parser.add_argument(
        "--worker-compile", metavar="BACKEND", help="of torch.compile, for the program; needs --compile"
    )
    options = parser.parse_args(arguments)
    config = Config(width=options.width, length=options.length, batch=options.batch)
    procs = this_host().spawn_procs({"gpus": 2}, env={"OMP_NUM_THREADS": "1"})
    result = compare(procs, config, options.steps, compiled=options.compile, backend=options.worker_compile)
    print(f"{'step':>4} {'DistributedDataParallel':>25} {'tensor_engine':>25}")
    for step, losses in enumerate(zip(*result.reference, *result.engine, strict=True)):
        print(f"{step:>4}", *(f"{loss:>12.7f}" for loss in losses))
    print(f"largest difference {result.difference:.1e}; the engine runs at {result.speed:.2f} of the speed")
    tensor_engine.shutdown()
    return 0 if result.difference < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
