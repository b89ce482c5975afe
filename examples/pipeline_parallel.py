"""Pipeline parallelism from one script: stages on slices of a mesh, microbatches, and a stream that loads ahead.

The script issues, and no process waits for it: while one stage is at a microbatch, those before it are at the next
ones. No more microbatches are in flight than there are stages, so that a stage keeps the activations of so many and no
more. The losses have to be those of the same network trained in the script.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from skipper.control import ProcMesh, this_host
from skipper.tensor_engine import Borrow, Stream, fetch_shard, get_active_stream, to_mesh

FEATURES, WIDTH, CLASSES, ROWS = 8, 32, 4, 16
RATE = 0.1


class Block(nn.Module):
    """What the network is made of, again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Residual, as the blocks of a transformer."""
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def make_stages(count: int) -> list[nn.Sequential]:
    """The network in so many parts: what comes first, two blocks for each stage, and what comes last."""
    torch.manual_seed(7)
    stages = [[Block(), Block()] for _ in range(count)]
    first, last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
    return [
        nn.Sequential(*([first] if number == 0 else []), *blocks, *([last] if number == count - 1 else []))
        for number, blocks in enumerate(stages)
    ]


def make_data(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples and labels, with a leading dim for the microbatches: which quarter of its range a sum lies in."""
    samples = torch.randn(microbatches, ROWS, FEATURES) * 3 + 1
    sums = samples.sum(2)
    return samples, torch.bucketize(sums, sums.quantile(torch.tensor([0.25, 0.5, 0.75])))


def prepared(samples: torch.Tensor) -> torch.Tensor:
    """What a loader does to a microbatch before it is of use."""
    return (samples - samples.mean()) / samples.std()


def train_here(stages: Sequence[nn.Module], samples: torch.Tensor, labels: torch.Tensor, steps: int) -> list[float]:
    """The run that the pipeline has to agree with: all in the script, one microbatch after another."""
    model = nn.Sequential(*stages)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for x, y in zip(samples, labels, strict=True):
            loss = nn.functional.cross_entropy(model(prepared(x)), y) / len(samples)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        optimizer.step()
        losses.append(total.item())
    return losses


class Pipeline:
    """The stages of a network, each on its slice of the axis ``stage`` of a mesh."""

    def __init__(self, stages: Sequence[nn.Module], mesh: ProcMesh) -> None:
        self.meshes = [mesh.slice(stage=number) for number in range(len(stages))]
        self.modules = [where.place(module) for module, where in zip(stages, self.meshes, strict=True)]
        parameters = [parameter for module in self.modules for parameter in module.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=0.9)
        self.loader = Stream("loader")

    def load(self, samples: torch.Tensor) -> Iterator[Borrow]:
        """Microbatches on the first stage, made by a stream of their own, beside the stage's work."""
        main = get_active_stream()
        with self.meshes[0].activate(), self.loader.activate():
            ready = [prepared(to_mesh(part, self.meshes[0])) for part in samples]
        for batch in ready:
            yield main.borrow(batch)

    def step(self, samples: torch.Tensor, labels: Sequence[torch.Tensor]) -> torch.Tensor:
        """One step of the optimizer; the loss comes when the last stage has it."""
        self.optimizer.zero_grad()
        in_flight: deque[tuple[torch.Tensor, Borrow]] = deque()
        losses = []
        for borrow, y in zip(self.load(samples), labels, strict=True):
            x = borrow.tensor
            for module, where in zip(self.modules, self.meshes, strict=True):
                x = module(x if x.mesh == where else to_mesh(x, where))
            loss = nn.functional.cross_entropy(x, y) / len(samples)
            losses.append(loss.detach())
            in_flight.append((loss, borrow))
            if len(in_flight) == len(self.modules):
                self.go_back(*in_flight.popleft())
        while in_flight:
            self.go_back(*in_flight.popleft())
        self.optimizer.step()
        return torch.stack(losses).sum()

    def go_back(self, loss: torch.Tensor, borrow: Borrow) -> None:
        """The backward of one microbatch, through all stages; then its samples are the loader's again."""
        loss.backward()  # type: ignore[no-untyped-call]
        borrow.drop()


def train_pipelined(
    stages: Sequence[nn.Module], samples: torch.Tensor, labels: torch.Tensor, steps: int, mesh: ProcMesh
) -> list[float]:
    """The same by a pipeline."""
    pipeline = Pipeline(stages, mesh)
    on_last = [to_mesh(y, pipeline.meshes[-1]) for y in labels]
    fetched = [fetch_shard(pipeline.step(samples, on_last)) for _ in range(steps)]
    return [loss.get(60).item() for loss in fetched]  # the stages have been running behind the script


def main(arguments: Sequence[str] | None = None) -> int:
    """Train twice and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=3, help="processes, each with its part of the network")
    parser.add_argument("--microbatches", type=int, default=8, help="of each step")
    parser.add_argument("--steps", type=int, default=10, help="training steps")
    options = parser.parse_args(arguments)
    if min(options.stages, options.microbatches, options.steps) < 1:
        parser.error("there is at least one of each")

    stages = make_stages(options.stages)
    samples, labels = make_data(options.microbatches)
    procs = this_host().spawn_procs({"stage": options.stages}, env={"OMP_NUM_THREADS": "1"})
    pipelined = train_pipelined(stages, samples, labels, options.steps, procs)
    here = train_here(stages, samples, labels, options.steps)  # the last, since it changes the stages themselves

    print(f"{'step':>4} {'pipeline':>12} {'one process':>12}")
    for step, losses in enumerate(zip(pipelined, here, strict=True)):
        print(f"{step:>4}", *(f"{loss:>12.8f}" for loss in losses))
    difference = max(abs(one - other) for one, other in zip(pipelined, here, strict=True))
    print(f"largest difference: {difference:.1e}")
    if difference > 1e-5:
        print("the losses differ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
