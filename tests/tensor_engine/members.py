"""Groups of workers without instructions: actors in which the tests run functions."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from skipper.control import Actor, ActorMesh, ProcMesh, context, endpoint
from skipper.tensor_engine.worker.groups import Groups

PATIENCE_S = 60.0
"""Bound on waits that take milliseconds where nothing is wrong; starting a worker takes seconds."""


class Member(Actor):
    """Runs functions of the tests, with the groups of its process."""

    def __init__(self, job: int, timeout_s: float) -> None:
        torch.set_num_threads(1)
        self._job = job
        self._timeout_s = timeout_s
        self._streams: dict[str, Groups] = {}

    @endpoint
    def run(self, function: Callable[..., Any], members: tuple[int, ...], stream: str, args: tuple[Any, ...]) -> Any:
        number = context().actor_instance.rank.rank
        if number not in members:
            return None
        groups = self._streams.get(stream)
        if groups is None:
            groups = Groups(number, stream=f"{self._job}/{stream}", timeout_s=self._timeout_s)
            self._streams[stream] = groups
        return function(groups.get(members), *args)

    @endpoint
    def run_without(self, function: Callable[..., Any], members: tuple[int, ...], absent: tuple[int, ...]) -> Any:
        """As `run`; some members do not take part."""
        return None if context().actor_instance.rank.rank in absent else self.run(function, members, "", ())

    @endpoint
    def run_both_ways(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """With the group of workers 0 and 1, and that of 1 and 0."""
        return self.run(lambda one: self.run(lambda other: function(one, other, *args), (1, 0), "", ()), (0, 1), "", ())


class Members:
    """What the tests see of them."""

    def __init__(self, procs: ProcMesh, mesh: ActorMesh[Member]) -> None:
        self.procs = procs
        self.mesh = mesh
        self.size = procs.size

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        members: Sequence[int] | None = None,
        stream: str = "main",
    ) -> list[Any]:
        """``function(group, *args)`` on each of ``members``; what they returned, in their order."""
        chosen = tuple(range(self.size)) if members is None else tuple(members)
        results = list(self.mesh.run.call(function, chosen, stream, args).get(PATIENCE_S))
        return [results[number] for number in chosen]

    def run_both_ways(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(group of 0 and 1, group of 1 and 0, *args)`` on both; what it returned on the first."""
        return next(iter(self.mesh.run_both_ways.call(function, args).get(10 * PATIENCE_S)))


_jobs = itertools.count()


def members_of(procs: ProcMesh, *, timeout_s: float = PATIENCE_S) -> Members:
    """One in each of these processes."""
    return Members(procs, procs.spawn("members", Member, next(_jobs), timeout_s))


def value(group_rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A value that differs between ranks, small enough for products, with both signs where there are any."""
    generator = torch.Generator().manual_seed(17 * group_rank + 1)
    drawn = torch.randint(-3, 4, tuple(shape), generator=generator)
    if dtype == torch.bool:
        return drawn > 0
    if dtype.is_complex:
        return torch.complex(drawn.float(), drawn.flip(0).float() if drawn.ndim else drawn.float()).to(dtype)
    if dtype.is_floating_point:
        return (drawn + torch.rand(tuple(shape), generator=generator)).to(dtype)
    return (drawn.abs() if dtype == torch.uint8 else drawn).to(dtype)
