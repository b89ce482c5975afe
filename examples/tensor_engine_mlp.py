"""One small network trained three times from the same script: in it, data-parallel, and as a pipeline.

The training loops are ordinary PyTorch. Under ``with procs.activate()`` and on tensors that live on processes, its
operations run there; the script says where data go and what is reduced, and fetches only losses. All three runs have to
give the same ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import nn

from skipper.control import ProcMesh, this_host
from skipper.tensor_engine import fetch_shard, reduce, reduce_, to_mesh

WIDTH, CLASSES, SAMPLES, MICROBATCHES = 32, 4, 64, 4
RATE = 0.2


def make_task() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """A network of two halves, and what it is to learn: in which quarter of its range a sum lies."""
    torch.manual_seed(7)
    first = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh())
    second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    samples = torch.randn(SAMPLES, 8)
    sums = samples.sum(1)
    return nn.Sequential(first, second), samples, torch.bucketize(sums, sums.quantile(torch.tensor([0.25, 0.5, 0.75])))


def train_here(model: nn.Module, samples: torch.Tensor, labels: torch.Tensor, steps: int) -> list[float]:
    """The run that the others have to agree with: all in the script."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(samples), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_data_parallel(
    model: nn.Module, samples: torch.Tensor, labels: torch.Tensor, steps: int, mesh: ProcMesh
) -> list[float]:
    """Each process of the axis ``dp`` has the whole network and its own part of the samples."""
    model = mesh.place(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    with mesh.activate():
        mine = mesh.rank_tensor("dp").view(1)
        x = to_mesh(samples.view(mesh.size, -1, samples.shape[1]), mesh).index_select(0, mine).squeeze(0)
        y = to_mesh(labels.view(mesh.size, -1), mesh).index_select(0, mine).squeeze(0)
        fetched = []
        for _ in range(steps):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            reduce_([parameter.grad for parameter in model.parameters()], "dp", "avg")
            optimizer.step()
            fetched.append(fetch_shard(reduce(loss.detach(), "dp", "avg")))
    return [loss.get(60).item() for loss in fetched]  # the processes have been running behind the script


def train_pipelined(
    model: nn.Sequential, samples: torch.Tensor, labels: torch.Tensor, steps: int, mesh: ProcMesh
) -> list[float]:
    """The halves of the network live on two processes, which work on different parts of the samples at a time."""
    head, tail = mesh.slice(stage=0), mesh.slice(stage=1)
    first, second = head.place(model[0]), tail.place(model[1])
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=RATE, momentum=0.9)
    xs = [to_mesh(part, head) for part in samples.chunk(MICROBATCHES)]
    ys = [to_mesh(part, tail) for part in labels.chunk(MICROBATCHES)]
    fetched = []
    for _ in range(steps):
        # No process waits for the script: while the second half works on one part, the first is at the next.
        between = [to_mesh(first(x), tail) for x in xs]
        losses = [
            nn.functional.cross_entropy(second(hidden), y) / MICROBATCHES for hidden, y in zip(between, ys, strict=True)
        ]
        optimizer.zero_grad()
        for loss in losses:
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        fetched.append(fetch_shard(torch.stack(losses).detach().sum()))
    return [loss.get(60).item() for loss in fetched]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train three times and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="training steps of each run")
    steps = parser.parse_args(arguments).steps

    model, samples, labels = make_task()
    procs = this_host().spawn_procs({"gpus": 2}, env={"OMP_NUM_THREADS": "1"})
    runs = {
        "data-parallel": train_data_parallel(model, samples, labels, steps, procs.rename(gpus="dp")),
        "pipeline": train_pipelined(model, samples, labels, steps, procs.rename(gpus="stage")),
        "one process": train_here(model, samples, labels, steps),  # the last, since it changes the model itself
    }
    print(f"{'step':>4}", *(f"{name:>14}" for name in runs))
    for step, losses in enumerate(zip(*runs.values(), strict=True)):
        print(f"{step:>4}", *(f"{loss:>14.8f}" for loss in losses))

    difference = max(max(losses) - min(losses) for losses in zip(*runs.values(), strict=True))
    print(f"largest difference: {difference:.1e}")
    if difference > 1e-5:
        print("the losses differ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
