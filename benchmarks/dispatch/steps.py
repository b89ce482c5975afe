"""A step of data-parallel training: by the engine, by its replays, and by torch's own DDP in two plain processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from skipper import control, tensor_engine
from skipper.control import Actor, HostMesh, ProcMesh, endpoint
from skipper.tensor_engine import Tensor
from skipper.tensor_engine.script.fetch import ask
from skipper.tensor_engine.script.session import session_of

__all__ = ["USUAL_NETWORK", "DdpRank", "EngineStep", "TrainedNetwork", "ddp_steps", "messages_per_step"]

TIMEOUT_S = 120.0
_ENV = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class TrainedNetwork:
    """What is trained.

    Attributes:
        layers: how many linear layers it has.
        width: how many features each has.
        samples: how many samples each replica has in a batch.
    """

    layers: int = 4
    width: int = 256
    samples: int = 64

    def make(self) -> nn.Module:
        """The network."""
        layers = [layer for _ in range(self.layers) for layer in (nn.Linear(self.width, self.width), nn.Tanh())]
        return nn.Sequential(*layers)

    def batch(self) -> torch.Tensor:
        """What a replica trains on."""
        return torch.randn(self.samples, self.width)


def _optimizer(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)


USUAL_NETWORK = TrainedNetwork()


class DdpRank(Actor):
    """One rank of plain DDP over gloo, in a process of its own; its steps are a loop of that process.

    Args:
        meeting: path of a file that does not exist yet; the ranks find each other by it.
        network: what is trained.
    """

    def __init__(self, meeting: str, network: TrainedNetwork) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        rank = control.context().actor_instance.rank
        size = rank.extent.nelements
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank.rank, world_size=size)
        self._model = DistributedDataParallel(network.make())
        self._optimizer = _optimizer(self._model)
        self._x = network.batch()

    @endpoint
    def steps(self, count: int) -> float:
        """Train; nanoseconds of a step."""
        dist.barrier()
        begin = perf_counter_ns()
        for _ in range(count):
            self._optimizer.zero_grad()
            (self._model(self._x) - self._x).square().mean().backward()
            self._optimizer.step()
        return (perf_counter_ns() - begin) / count

    def __cleanup__(self, error: Exception | None) -> None:
        """Let go of the model first: one that outlives its group can wait for it."""
        del self._model, self._optimizer
        dist.destroy_process_group()


def ddp_steps(
    stack: contextlib.ExitStack, replicas: int, count: int, network: TrainedNetwork
) -> Callable[[], list[float]]:
    """Start the ranks of plain DDP; the returned function trains that many steps, and says how long one took."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="skipper-ddp-"))
    procs = control.this_host().spawn_procs({"replicas": replicas}, env=_ENV, name="ddp")
    ranks = procs.spawn("ddp", DdpRank, str(Path(folder) / "meeting"), network)
    stack.callback(lambda: procs.stop().get(TIMEOUT_S))
    return lambda: [max(ranks.steps.call(count).get(TIMEOUT_S))]


class EngineStep:
    """The same step by the engine.

    Args:
        procs: the replicas, all of the mesh.
        network: what is trained.
    """

    def __init__(self, procs: ProcMesh, network: TrainedNetwork) -> None:
        self.procs = procs
        self._axes = tuple(procs.extent)
        self._network = procs.place(network.make())
        self._optimizer = _optimizer(self._network)
        with procs.activate():
            self._x = network.batch()
        self._compiled = tensor_engine.compile(self._step)

    def plain(self, count: int) -> list[float]:
        """Train; nanoseconds of a step until the replicas have done all of them."""
        return self._run(self._step, count)

    def compiled(self, count: int) -> list[float]:
        """The same as one program."""
        return self._run(self._compiled, count)

    def _run(self, step: Callable[[Tensor], None], count: int) -> list[float]:
        assert isinstance(self._x, Tensor)  # it was made under activate
        session = session_of(self.procs)
        session.synchronize(TIMEOUT_S)
        begin = perf_counter_ns()
        for _ in range(count):
            step(self._x)
        session.synchronize(TIMEOUT_S)
        return [(perf_counter_ns() - begin) / count]

    def _step(self, x: Tensor) -> None:
        self._optimizer.zero_grad()
        (self._network(x) - x).square().mean().backward()
        gradients = [parameter.grad for parameter in self._network.parameters()]
        tensor_engine.reduce_(gradients, self._axes, "avg")
        self._optimizer.step()

    def heard_from_elsewhere(self) -> list[int]:
        """How many messages have come to each process from those of other hosts, this question's own included."""
        assert isinstance(self._x, Tensor)
        value = self._x.remote_value
        there = "skipper.benchmarks.dispatch.workers:heard_from_elsewhere"
        answers = [ask(value, rank, there) for rank in range(self.procs.size)]
        return [int(answer.get(TIMEOUT_S)) for answer in answers]


def messages_per_step(hosts: HostMesh, per_host: int, count: int) -> dict[str, list[float]]:
    """How many messages come to each host for a step, from the script and from other hosts.

    All messages of control count; tensors that ranks exchange do not go through control.

    Returns:
        For each host one number: of plain and of compiled steps, where a batch of instructions goes to each rank, and
        where it goes to each host and is passed on there (``delegated``).
    """
    procs = hosts.spawn_procs({"gpus": per_host}, env=_ENV)
    step = EngineStep(procs, USUAL_NETWORK)
    found = {}
    threshold = control.configure().tree_threshold
    kinds = (("step", step.plain), ("compiled_step", step.compiled))
    try:
        for (name, run), delegates in itertools.product(kinds, (False, True)):
            control.configure(tree_threshold=1 if delegates else max(threshold, procs.size))
            came = _heard_in(step, run, count)
            ranks = [came[first : first + per_host] for first in range(0, procs.size, per_host)]
            found[f"{name}_delegated" if delegates else name] = [sum(each) / count for each in ranks]
    finally:
        control.configure(tree_threshold=threshold)
    procs.stop().get(TIMEOUT_S)
    return found


def _heard_in(step: EngineStep, run: Callable[[int], object], count: int) -> list[int]:
    """How many messages each process gets from other hosts in that many steps."""
    run(3)  # the first ones make groups and programs
    asked = _difference(step.heard_from_elsewhere(), step.heard_from_elsewhere())
    before = step.heard_from_elsewhere()
    run(count)
    return _difference(asked, _difference(before, step.heard_from_elsewhere()))


def _difference(before: list[int], after: list[int]) -> list[int]:
    return [late - early for early, late in zip(before, after, strict=True)]
