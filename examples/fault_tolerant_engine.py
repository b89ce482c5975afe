"""Data-parallel training from one script, while replicas are killed in the middle of steps.

Each replica is a process with the whole network and its own part of every batch. A replica that dies is respawned
between two steps, gets weights and moments from one that is left, and the step that failed with it is done again. What
is learned is what a run learns to which nothing happens; both are trained here, and have to have the same losses.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

import torch
from torch import nn

from skipper.control import ProcMesh, SupervisionError, this_host
from skipper.tensor_engine import EngineClosedError, RemoteError, inspect, reduce, reduce_, rejoin, remote, restore

WIDTH, PART, TIMEOUT_S = 32, 8, 60.0
ENV = {"OMP_NUM_THREADS": "1"}


def make_network() -> nn.Module:
    """What is trained."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def batch_of(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a step, which follows from its number: a step that is done again gets the same one."""
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(step))
    return x, (x.sum(1, keepdim=True) / 3).tanh()


def optimizer_for(network: nn.Module) -> torch.optim.Optimizer:
    """AdamW has moments, which have to be restored with the weights."""
    return torch.optim.AdamW(network.parameters(), lr=0.01, fused=True)


@remote
def die(rank: torch.Tensor, victim: int) -> None:
    """Runs on every replica, and kills one of them at once."""
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)


class Replicas:
    """The network on the replicas.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int) -> None:
        self.mesh: ProcMesh = this_host().spawn_procs({"replicas": count}, env=ENV)
        self.network = self.mesh.place(make_network())
        self.optimizer = optimizer_for(self.network)

    def attempt(self, step: int, victim: int | None) -> float:
        """Do a step, unless a replica dies: then nothing has changed.

        Returns:
            The mean loss over all of the batch.

        Raises:
            SupervisionError: a replica is gone. The other two errors say the same.
        """
        mesh = self.mesh
        with mesh.activate():
            rank = mesh.rank_tensor("replicas")
            parts = (mesh.place(whole.view(mesh.size, PART, -1)) for whole in batch_of(step, mesh.size * PART))
            x, y = (part.index_select(0, rank.view(1)).squeeze(0) for part in parts)
        loss = (self.network(x) - y).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        if victim is not None:
            die(rank, victim)  # behind the backward pass, while the others reduce
        reduced: list[torch.Tensor] = [reduce(loss.detach(), "replicas", "avg")]
        for parameter in self.network.parameters():
            assert parameter.grad is not None
            reduced.append(reduce_(parameter.grad, "replicas", "avg").sum())
        # Whether all replicas have got all gradients: only then may the optimizer change weights.
        found = inspect(torch.stack(reduced), strict=True, timeout=TIMEOUT_S)
        self.optimizer.step()
        return found[0].item()

    def recover(self) -> tuple[int, ...]:
        """Respawn the replicas that are gone, and give them what the others have; their ranks."""
        spares = {position: this_host().spawn_procs(env=ENV) for position in self.mesh.lost()}
        self.mesh = self.mesh.with_successors(spares)
        ranks = rejoin(self.mesh)
        restore([self.network, self.optimizer], "replicas")
        return ranks


def train_replicated(count: int, steps: int, deaths: int) -> list[float]:
    """Train on replicas of which some die, evenly spread over the steps."""
    replicas = Replicas(count)
    fatal = {(2 * death + 1) * steps // (2 * deaths): death % count for death in range(deaths)}
    losses: list[float] = []
    while len(losses) < steps:
        step = len(losses)
        try:
            losses.append(replicas.attempt(step, fatal.pop(step, None)))
        except (SupervisionError, RemoteError, EngineClosedError):
            ranks = replicas.recover()
            if not ranks:
                raise  # nobody is gone: it is something else
            print(f"step {step}: killed and replaced: replica {', '.join(map(str, ranks))}")
    return losses


def train_here(size: int, steps: int) -> list[float]:
    """The run to which nothing happens: one process, and whole batches."""
    network = make_network()
    optimizer = optimizer_for(network)
    losses = []
    for step in range(steps):
        x, y = batch_of(step, size)
        loss = (network(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(arguments: Sequence[str] | None = None) -> int:
    """Train twice and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=3, help="processes, each with the whole network")
    parser.add_argument("--steps", type=int, default=20, help="training steps")
    parser.add_argument("--deaths", type=int, default=3, help="replicas that are killed in the middle of a step")
    given = parser.parse_args(arguments)
    if given.replicas < 2 or not 0 <= given.deaths <= given.steps:
        parser.error("it takes two replicas or more, and a step for each death")

    survived = train_replicated(given.replicas, given.steps, given.deaths)
    undisturbed = train_here(given.replicas * PART, given.steps)
    print(f"{'step':>4} {'replicas':>14} {'one process':>14}")
    for step, losses in enumerate(zip(survived, undisturbed, strict=True)):
        print(f"{step:>4}", *(f"{loss:>14.8f}" for loss in losses))
    difference = max(abs(one - other) for one, other in zip(survived, undisturbed, strict=True))
    print(f"largest difference: {difference:.1e}")
    if difference > 1e-5:
        print("the losses differ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
