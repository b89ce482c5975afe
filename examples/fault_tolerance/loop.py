"""The run as the script drives it: steps, deaths meanwhile, and the same steps without any."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from examples.fault_tolerance.chaos import Chaos
from examples.fault_tolerance.coordinator import Coordinator, Plan, Step
from examples.fault_tolerance.group import ENVIRONMENT, START_S
from examples.fault_tolerance.record import Held, Record
from examples.fault_tolerance.task import Task
from examples.fault_tolerance.worker import Worker
from skipper.control import ActorMesh, HostMesh, this_host, this_proc
from skipper.control.cluster.jobs import Job
from skipper.control.cluster.recovery import AttachedHosts, RecoveryPolicy, ReplaceHost, Restart

RESTART = Restart(attempts=100, within_s=60.0, backoff_s=0.0)
"""Of each group: many, since here they are what is tried out."""

RESTART_BEFORE_REPLACING = Restart(attempts=20, within_s=20.0, backoff_s=0.01, longest_backoff_s=0.2)
"""Where another host can be had."""

LOOK_S = 0.5
"""How often the script asks for the deaths that there were."""

STEP_TIMEOUT_S = 120.0
RECOVERY_TIMEOUT_S = 120.0
"""A death that nobody has recovered from within this was not noticed, and fails the run."""

WARM_DEATHS = 20
"""Deaths after which growth is counted: by then all code is loaded and all pools are filled."""

REPLAYED_AT_ONCE = 500


class UnnoticedError(RuntimeError):
    """A process died, and no other took its place."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Of a run.

    Attributes:
        task: what is learned.
        steps: so many at least; more if the deaths take longer.
        groups: replica groups.
        procs: processes of each.
        deaths: how many; 0: none.
        kinds: in which ways.
        at_once: so many groups in the same moment.
        every_s: from one such moment to the next.
        deadline_s: after which a process counts as frozen.
        pace_s: from one step to the next, at least.
        checkpoint_every: see `Plan`.
    """

    task: Task
    steps: int
    groups: int
    procs: int
    deaths: int
    kinds: tuple[str, ...]
    at_once: int
    every_s: float
    deadline_s: float
    pace_s: float
    checkpoint_every: int

    def plan(self, hosts: HostMesh, policy: RecoveryPolicy) -> Plan:
        """What the coordinator is to lead."""
        return Plan(self.task, self.groups, self.procs, hosts, policy, self.deadline_s, self.checkpoint_every)


def policy_of(job: Job | None, hosts: HostMesh) -> RecoveryPolicy:
    """What is done when a group fails: on hosts of a job, on hosts that were attached, on this one."""
    if job is None and not hosts.names:
        return RecoveryPolicy(process=RESTART)
    replacer = AttachedHosts(hosts) if job is None else job
    return RecoveryPolicy(process=RESTART_BEFORE_REPLACING, host=ReplaceHost(replacer, attempts=20))


@dataclass(frozen=True, slots=True)
class Learned:
    """What a run has come to: the number of its last step, and weights and moments in every process."""

    step: int
    states: list[Tensor]


async def train(
    settings: Settings, hosts: HostMesh, policy: RecoveryPolicy, record: Record, on_step: Callable[[Step, int], None]
) -> Learned:
    """Train while processes die.

    Raises:
        ActorError: everything was lost, or an actor raised.
        SupervisionError: groups failed more often than the policy allows.
        UnnoticedError: nobody recovered from a death.
        TimeoutError: a step did not end in time.
    """
    coordinator: ActorMesh[Any] = this_proc().spawn("coordinator", Coordinator, settings.plan(hosts, policy))
    async with asyncio.timeout(START_S):
        await coordinator.up.call_one()
    chaos: ActorMesh[Any] | None = None
    if settings.deaths:
        chaos = this_proc().spawn(
            "chaos",
            Chaos,
            coordinator,
            groups=settings.groups,
            kinds=settings.kinds,
            at_once=settings.at_once,
            every_s=settings.every_s,
            seed=settings.task.seed,
        )
        chaos.run.broadcast(settings.deaths)
    await _step_on(settings, coordinator, chaos, record, on_step)
    learned = await coordinator.learned.call_one()
    standings = await coordinator.standings.call_one()
    record.replaced = sum(standing.life for standing in standings)
    if chaos is not None:
        await chaos.stop()
    await coordinator.stop()
    return Learned(learned[0][0], [state for _, state in learned])


async def _step_on(
    settings: Settings,
    coordinator: ActorMesh[Any],
    chaos: ActorMesh[Any] | None,
    record: Record,
    on_step: Callable[[Step, int], None],
) -> None:
    """Make steps until there were enough, and as many deaths, and all groups are back."""
    looked_s = time.monotonic()
    while True:
        begun_s = time.monotonic()
        async with asyncio.timeout(STEP_TIMEOUT_S):
            made: Step = await coordinator.step.call_one()
        record.note(made)
        on_step(made, len(record.faults))
        if chaos is not None and begun_s - looked_s > LOOK_S:
            looked_s = begun_s
            record.faults += await chaos.faults.call_one(len(record.faults))
            _require_noticed(record)
        is_over = made.number >= settings.steps and len(record.faults) >= settings.deaths
        if is_over and made.members == settings.groups and not record.pending(time.monotonic()):
            record.held.append(Held.now())
            return
        if len(record.faults) >= min(WARM_DEATHS, settings.deaths) and not record.held:
            record.held.append(Held.now())
        await asyncio.sleep(max(begun_s + settings.pace_s - time.monotonic(), 0.0))


def _require_noticed(record: Record) -> None:
    for fault in record.pending(time.monotonic() - RECOVERY_TIMEOUT_S):
        raise UnnoticedError(
            f"group {fault.group} has not come back within {RECOVERY_TIMEOUT_S:g} s after a death by {fault.kind!r}"
        )


async def undisturbed(settings: Settings, steps: int) -> tuple[list[float], Tensor]:
    """The same steps in one process to which nothing happens: all losses, and weights and moments in the end."""
    procs = this_host().spawn_procs(env=ENVIRONMENT, name="undisturbed")
    worker: ActorMesh[Any] = procs.spawn("undisturbed", Worker, settings.task, settings.deadline_s)
    losses: list[float] = []
    while len(losses) < steps:
        async with asyncio.timeout(STEP_TIMEOUT_S):
            losses += await worker.replay.call_one(min(REPLAYED_AT_ONCE, steps - len(losses)))
    _, state = await worker.learned.call_one()
    await procs.stop()
    return losses, state
