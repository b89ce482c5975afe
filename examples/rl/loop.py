"""The loop: generators sample with one version while the trainers compute the next.

    version        0            1            2
    trainers       |  train     |  train     |  train
    generators     |  sample    |  sample    |  sample
                  sync         sync         sync

In direct mode the generators read the trainers' own parameters, so one rule keeps the bytes right:
**no optimizer step while somebody reads**. The loop keeps it by its order: `train`, which ends in the
optimizer's step, is sent after every `pull` was awaited. The fence in front of that step makes sure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeVar

from torch import Tensor

import torchstore as ts
from control import this_host
from examples.process_group import ENVIRONMENT, connect
from examples.rl.generator import Generator
from examples.rl.settings import Settings
from examples.rl.task import Rollout
from examples.rl.trainer import Trainer

T = TypeVar("T")

START_TIMEOUT_S = 120.0
"""Bound on the start: every process imports torch, and all of them share few cores."""


@dataclass(frozen=True, slots=True)
class Sync:
    """One transfer of the weights: from the publication until the last generator has them.

    ``pull_seconds`` and ``transfer_seconds`` are the slowest generator's: for its whole part, and of that
    for moving bytes.
    """

    version: int
    nbytes: int
    seconds: float
    pull_seconds: float
    transfer_seconds: float
    mismatched: int


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of the loop: what was learned from (by which version sampled) and what it led to."""

    number: int
    sampled_by: int
    reward: float
    solved: float
    loss: float
    seconds: float
    sync: Sync

    @property
    def staleness(self) -> int:
        """How many versions older than the trained weights the sampling weights were."""
        return self.sync.version - 1 - self.sampled_by


@dataclass(slots=True)
class History:
    """What happened in a run; one sync comes before the first step, and also connects and plans."""

    parameters: int = 0
    start_seconds: float = 0.0
    steps: list[Step] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    final_reward: float = 0.0
    final_solved: float = 0.0
    compared: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that one sync brings to all generators together."""
        return self.syncs[-1].nbytes

    @property
    def mismatched(self) -> int:
        """Tensors that a generator received wrongly, over all steps; counted only while verifying."""
        return sum(sync.mismatched for sync in self.syncs)


def first(values: Sequence[T | None]) -> T:
    """The value that the first rank alone returns."""
    value = values[0]
    if value is None:
        raise RuntimeError("the first rank returned nothing")
    return value


class Loop:
    """Two meshes and the order of the messages that go to them."""

    def __init__(
        self,
        settings: Settings,
        *,
        trainers: int,
        generators: int,
        verify: bool,
        on_step: Callable[[Step], None],
    ) -> None:
        self.settings = settings
        self.verify = verify
        self.on_step = on_step
        self.history = History()
        # Processes bear the name of their mesh, in `ps` too.
        trainer_procs, generator_procs = (
            this_host().spawn_procs(per_host={"gpus": size}, env=ENVIRONMENT, name=name)
            for name, size in (("trainers", trainers), ("generators", generators))
        )
        self.trainers = trainer_procs.spawn("trainers", Trainer, settings)
        self.generators = generator_procs.spawn("generators", Generator, settings)

    async def run(self, steps: int) -> History:
        """Build both sides, then turn ``steps`` times.

        Raises:
            SupervisionError: A process of either mesh died.
            ActorError: An actor raised.
            TimeoutError: A step did not end in time.
        """
        begin = perf_counter()
        async with asyncio.timeout(START_TIMEOUT_S):
            await self._build()
        self.history.start_seconds = perf_counter() - begin
        async with asyncio.timeout(self.settings.timeout_s):
            await self._sync()
            rollout: Rollout = first(await self.generators.generate.call(0))
        for number in range(1, steps + 1):
            async with asyncio.timeout(self.settings.timeout_s):
                rollout = await self._turn(number, rollout)
        async with asyncio.timeout(self.settings.timeout_s):
            last: Rollout = first(await self.generators.generate.call(steps + 1))
        self.history.final_reward, self.history.final_solved = last.reward, last.solved
        return self.history

    async def _build(self) -> None:
        await ts.initialize()
        timeout_s = self.settings.timeout_s
        await asyncio.gather(connect(self.trainers, timeout_s=timeout_s), connect(self.generators, timeout_s=timeout_s))
        parameters = self.trainers.build.call()
        await self.generators.build.call()
        self.history.parameters = (await parameters)[0]

    async def _turn(self, number: int, rollout: Rollout) -> Rollout:
        begin = perf_counter()
        sampling = self.generators.generate.call(number)  # with version v, while ...
        learned = await self.trainers.train.call(rollout)  # ... the trainers compute v + 1,
        sampled: Rollout = first(await sampling)
        sync = await self._sync()  # and nobody trains while the generators read v + 1.
        step = Step(
            number,
            sampled_by=rollout.version,
            reward=rollout.reward,
            solved=rollout.solved,
            loss=sum(part.loss for part in learned) / len(learned),
            seconds=perf_counter() - begin,
            sync=sync,
        )
        self.history.steps.append(step)
        self.on_step(step)
        return sampled

    async def _sync(self) -> Sync:
        begin = perf_counter()
        (version, *_) = await self.trainers.publish.call()
        pulls = await self.generators.pull.call(version)
        seconds = perf_counter() - begin
        mismatched = 0
        if self.verify:
            whole: dict[str, Tensor] = first(await self.trainers.gather.call())
            wrong = await self.generators.check.call(whole)
            mismatched = sum(map(len, wrong))
            self.history.compared += len(whole) * len(wrong)
        sync = Sync(
            version,
            nbytes=sum(pull.nbytes for pull in pulls),
            seconds=seconds,
            pull_seconds=max(pull.seconds for pull in pulls),
            transfer_seconds=max(pull.transfer_s for pull in pulls),
            mismatched=mismatched,
        )
        self.history.syncs.append(sync)
        return sync
