"""The loop: rollouts and training are tasks of one script that overlap; what they meet in is the replay buffer.

    rollouts, one task for each replica        training
    -----------------------------------        --------------------------------------
    buffer.reserve                             buffer.take
    generators.generate.route                  trainers.train.call  (ends in the optimizer's step)
    judges.grade.route                         trainers.publish.call
    buffer.put                                 generators.load.fanout, one replica after the other

In direct mode the generators read the trainers' own parameters, so one rule keeps the bytes right:
**no optimizer step while somebody reads**. The training task keeps it by its order: `train` is sent after the
`load` of every replica was awaited. A replica that comes up in place of a dead one reads when it likes, so there is
the fence in front of the step, which waits for it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

from torch import Tensor

from examples.process_group import ENVIRONMENT, connect
from examples.rl.buffer import ReplayBuffer
from examples.rl.generator import Generator
from examples.rl.judge import Judge
from examples.rl.mortal import Mortal
from examples.rl.placement import Placement
from examples.rl.settings import Settings
from examples.rl.task import Rollout
from examples.rl.trainer import Trainer
from skipper import torchstore as ts
from skipper.control import ActorMesh, ValueMesh, this_proc

T = TypeVar("T")

START_TIMEOUT_S = 120.0
"""Bound on the start: every process imports torch, and all of them share few cores."""

JUDGES = 2
"""Replicas of the judges' service."""


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
    """What happened in a run. The replicas fetch the first version by themselves when they come up."""

    parameters: int = 0
    start_seconds: float = 0.0
    steps: list[Step] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    final_reward: float = 0.0
    final_solved: float = 0.0
    compared: int = 0
    killed: int = 0
    """Processes of generators that were killed on purpose."""
    restarts: int = 0
    """Replicas of generators that were replaced."""
    lost: int = 0
    """Requests that died with their replica; others answered them."""
    hosts: int = 0
    """Hosts that were attached."""
    lost_hosts: int = 0
    """Hosts that were lost in the run."""
    returned_hosts: int = 0
    """Those of them that came back."""

    @property
    def nbytes(self) -> int:
        """Bytes that one sync brings to all generators together, when all of them are there."""
        return max(sync.nbytes for sync in self.syncs)

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
    """Who takes part, and who is asked for what.

    Args:
        settings: of the run.
        placement: on which hosts.
        trainers: processes that train together.
        generators: processes of one replica of the generators.
        replicas: of the generators.
        kill_at: the step in which a replica of the generators is killed; 0 for none.
        verify: whether to compare received weights.
        on_step: called after each step.
        tell: called with news for people.
    """

    def __init__(
        self,
        settings: Settings,
        placement: Placement,
        *,
        trainers: int,
        generators: int,
        replicas: int,
        kill_at: int,
        verify: bool,
        on_step: Callable[[Step], None],
        tell: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.placement = placement
        self.kill_at = kill_at
        self.verify = verify
        self.on_step = on_step
        self.tell = tell
        self.history = History(hosts=len(placement.everywhere.names))
        self.replicas = replicas
        self.batches = itertools.count()
        self.mortals: list[list[ActorMesh[Mortal]]] = []
        """Who can end the processes of the first replicas of the generators."""
        self._mending: asyncio.Task[None] | None = None
        # Processes bear the name of their mesh or service, in `ps` too.
        share = trainers // placement.trainers.size
        procs = placement.trainers.spawn_procs(per_host={"gpus": share}, env=ENVIRONMENT, name="trainers")
        self.trainers = procs.spawn("trainers", Trainer, settings)
        there = placement.generators
        self.generators = Generator.options(
            procs=generators, num_replicas=replicas, hosts=there, env=ENVIRONMENT, setup="set_up", drain_timeout_s=5.0
        ).as_service(settings, name="generators")
        self.judges = Judge.options(num_replicas=JUDGES, hosts=there).as_service(name="judges")
        self.buffer = this_proc().spawn("buffer", ReplayBuffer, replicas)

    async def run(self, steps: int) -> History:
        """Build everything, then turn ``steps`` times.

        Raises:
            SupervisionError: A trainer died, or a service could not be kept alive.
            ActorError: An actor raised.
            TimeoutError: A step did not end in time.
        """
        begin = perf_counter()
        async with asyncio.timeout(START_TIMEOUT_S):
            await self._build()
        self.history.start_seconds = perf_counter() - begin
        tasks = [asyncio.create_task(self._train(steps))]
        tasks += [asyncio.create_task(self._roll_out()) for _ in range(self.replicas)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # the training has ended, or something has failed
        finally:
            if self._mending is not None:
                tasks.append(self._mending)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(self.settings.timeout_s):
            last = await self._sample()
            states = await self.generators.metrics()
        self.history.final_reward, self.history.final_solved = last.reward, last.solved
        self.history.restarts = sum(state.restarts for state in states)
        self.history.lost = sum(state.lost for state in states)
        return self.history

    async def _build(self) -> None:
        await ts.initialize()
        await connect(self.trainers, timeout_s=self.settings.timeout_s)
        self.history.parameters = (await self.trainers.build.call())[0]
        await self.trainers.publish.call()  # version 0, for which the generators wait
        await self.generators.initialized
        await self.judges.initialized
        self.mortals = [_ranks(replica) for replica in await self.generators.mortal.fanout()]

    async def _roll_out(self) -> None:
        """Sample, judge and hand over, again and again; it waits where it is ahead of the training."""
        while True:
            await self.buffer.reserve.call_one()
            await self.buffer.put.call_one(await self._sample())

    async def _sample(self) -> Rollout:
        sampled: Rollout = first(_ranks(await self.generators.generate.route(next(self.batches))))
        return sampled.judged(await self.judges.grade.route(sampled.prompts.tolist(), sampled.answers.tolist()))

    async def _train(self, steps: int) -> None:
        async with asyncio.timeout(self.settings.timeout_s):
            await self._sync(0, since=perf_counter())
        for number in range(1, steps + 1):
            async with asyncio.timeout(self.settings.timeout_s):
                await self._turn(number)

    async def _turn(self, number: int) -> None:
        begin = perf_counter()
        rollout: Rollout = await self.buffer.take.call_one()  # which makes room, so that one more is sampled now
        if number == self.kill_at:
            await self._kill()
        learned = await self.trainers.train.call(rollout)  # while the generators sample with older weights
        learned_at = perf_counter()
        await self.trainers.publish.call()
        sync = await self._sync(number, since=learned_at)  # and nobody trains while they read these.
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
        if self._mending is None and (lost := self.placement.lost()):
            self._mending = asyncio.create_task(self._mend(lost))

    async def _sync(self, version: int, *, since: float) -> Sync:
        """Have every replica that is up load a version; one that comes up later fetches the newest by itself."""
        loaded = await self.generators.load.fanout(version, rolling=1, absent="skip")
        seconds = perf_counter() - since
        loads = [load for replica in loaded for load in _ranks(replica)]
        mismatched = await self._verify(version) if self.verify else 0
        sync = Sync(
            version,
            nbytes=sum(load.nbytes for load in loads),
            seconds=seconds,
            pull_seconds=max((load.seconds for load in loads), default=0.0),
            transfer_seconds=max((load.transfer_s for load in loads), default=0.0),
            mismatched=mismatched,
        )
        self.history.syncs.append(sync)
        return sync

    async def _verify(self, version: int) -> int:
        """Compare what the generators have with what the trainers hold; the number of tensors that differ."""
        whole: dict[str, Tensor] = first(await self.trainers.gather.call())
        checked = await self.generators.check.fanout(version, whole, absent="skip")
        wrong = [names for replica in checked for names in _ranks(replica) if names is not None]
        self.history.compared += len(whole) * len(wrong)
        return sum(map(len, wrong))

    async def _kill(self) -> None:
        """End one process of the replica that has the most to do, as a fault of its machine would."""
        busiest = max(await self.generators.metrics(), key=lambda metrics: metrics.outstanding)
        self.mortals[busiest.replica][-1].die.broadcast()
        self.history.killed += 1

    async def _mend(self, lost: list[int]) -> None:
        """Wait for hosts that are lost, and have the replicas go home that run elsewhere meanwhile."""
        hosts = self.placement.generators.size
        names = ", ".join(self.placement.generators.names[index] for index in lost)
        self.history.lost_hosts += len(lost)
        self.tell(f"lost: {names}")
        await self.placement.reattach()
        for replica in range(self.replicas):
            if replica % hosts in lost:
                await self.generators.drain(replica)
        self.history.returned_hosts += len(lost)
        self.tell(f"back: {names}")
        self._mending = None


def _ranks(replica: Any) -> list[Any]:
    """What each rank of a replica has answered; a replica of one process answers without a mesh."""
    return list(replica) if isinstance(replica, ValueMesh) else [replica]
