"""`Coordinator`: the actor that owns the replica groups and leads them through the steps; the part to read first.

A step is made by a quorum: the groups that are up. Every process of a member computes the gradient of its share of the
batch; everybody reads all gradients and sums them; and when all have done so, everybody applies the sum. Whatever fails
before that moment voids the attempt, and the step is tried again with those who are left and a batch cut anew. What
fails after it concerns nobody else. So a step is made by all members or by none, and with the same gradient whoever
they are.

A group that has come up reads weights and moments from the memory of a member, while the members compute the gradient
and so leave them alone, and takes part in the same step from there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from examples.fault_tolerance.checkpoint import Checkpoint
from examples.fault_tolerance.group import Group, Member
from examples.fault_tolerance.task import Task
from skipper.control import (
    Actor,
    ActorError,
    HostMesh,
    MeshFailure,
    ProcMesh,
    SupervisionError,
    concurrent_endpoint,
    context,
    endpoint,
)
from skipper.control.cluster.recovery import RecoveryPolicy

VOID_IN_A_ROW = 20
"""Attempts that may fail one after the other, with errors that are nobody's death."""


class QuorumLostError(RuntimeError):
    """Every group has died, and with them what was learned."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a coordinator is to lead.

    Attributes:
        task: what to learn.
        groups: how many replica groups.
        procs: processes of each.
        hosts: where the groups are, in turn.
        policy: what to do when a group fails.
        deadline_s: a member that takes longer for a part of a step counts as frozen.
        checkpoint_every: steps between two copies of the state that the coordinator's process keeps; 0: none.
    """

    task: Task
    groups: int
    procs: int
    hosts: HostMesh
    policy: RecoveryPolicy
    deadline_s: float
    checkpoint_every: int


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was made.

    Attributes:
        number: from 1 on.
        loss: mean over the batch.
        members: how many groups made it.
        entered: groups that took part for the first time, each with the number of its life.
        voided: attempts that were given up.
        at_s: when it was made, by `time.monotonic` of the coordinator's process.
    """

    number: int
    loss: float
    members: int
    entered: tuple[tuple[int, int], ...]
    voided: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Standing:
    """How a group is.

    Attributes:
        group: its number.
        life: its life's.
        procs: its processes, while it is up.
        is_member: whether it has taken part in a step.
    """

    group: int
    life: int
    procs: ProcMesh | None
    is_member: bool


class Coordinator(Actor):
    """Leads the groups of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._made = 0
        self._checkpoint = Checkpoint(plan.task) if plan.checkpoint_every else None
        self._changed = asyncio.Event()
        me = context().actor_instance
        self._groups = [
            Group(
                number,
                plan.task,
                procs=plan.procs,
                hosts=_place(plan.hosts, number),
                policy=plan.policy,
                deadline_s=plan.deadline_s,
                on_change=self._changed.set,
                on_end=me.abort,
            )
            for number in range(plan.groups)
        ]

    async def __supervise__(self, failure: MeshFailure) -> bool:
        """Replace a group that has failed, as the policy says."""
        group = next(group for group in self._groups if group.lives.owns(failure))
        life = group.lives.life
        goes_on = group.lives.supervise(failure)
        if group.member is not None and (group.lives.actors is None or group.lives.life != life):
            group.forget()
        return goes_on

    async def __cleanup__(self, error: Exception | None) -> None:
        """End all groups at once."""
        await asyncio.gather(*(group.lives.end() for group in self._groups))

    @endpoint
    async def up(self) -> None:
        """Answer when all groups are up."""
        while any(group.member is None for group in self._groups):
            await self._change()

    @endpoint
    async def step(self) -> Step:
        """Make the next step, with whoever is up.

        Raises:
            QuorumLostError: every group has died, and there is no checkpoint.
        """
        voided = complaints = 0
        while True:
            try:
                made = await self._attempt(*await self._quorum(), voided)
            except ActorError:  # often what it is like to read from one that has just died
                complaints += 1
                if complaints > VOID_IN_A_ROW:
                    raise
                made = None
            if made is not None:
                await self._keep(made)
                return made
            voided += 1

    @concurrent_endpoint
    async def standings(self) -> list[Standing]:
        """How every group is."""
        return [
            Standing(
                group.number,
                group.lives.life,
                group.lives.procs if group.member is not None else None,
                group.member is not None and group.member.is_current,
            )
            for group in self._groups
        ]

    @endpoint
    async def learned(self) -> list[tuple[int, Any]]:
        """From every process of every member: how many steps it has made, and its weights and moments."""
        members, _ = await self._quorum()
        return [each for member in members for each in await member.actors.learned.call()]

    # The quorum

    async def _quorum(self) -> tuple[list[Member], list[Member]]:
        """Those who have the state of the last step, and those who have come up since; one of the former at least."""
        while True:
            up = [group.member for group in self._groups if group.member is not None]
            members = [member for member in up if member.is_current]
            if members:
                return members, [member for member in up if not member.is_current]
            if up:
                await self._begin_with(up)
            else:
                await self._change()

    async def _begin_with(self, newcomers: Sequence[Member]) -> None:
        """Start from the checkpoint, or from nothing where nothing was learned yet: no member is left, or none was."""
        if self._checkpoint is not None and self._checkpoint.step:
            step, states = self._checkpoint.step, [self._checkpoint.handle]
            _none_complains(await self._all(newcomers, "adopt", lambda member: member.actors.adopt.call(step, states)))
            self._made = step
        elif self._made:
            raise QuorumLostError(
                f"all {len(self._groups)} groups have died after step {self._made}, and with them what was learned; "
                "with --checkpoint-every the script keeps a copy"
            )
        for member in newcomers:
            member.is_current = member.group.member is member

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    # A step

    async def _attempt(self, members: Sequence[Member], newcomers: Sequence[Member], voided: int) -> Step | None:
        """Try to make the next step; None where somebody has failed before all were ready to apply it."""
        number, shares = self._made + 1, self._shares(members)
        donor = members[number % len(members)]
        states = [handles.state for handles in donor.handles]
        gradients = [handles.gradient for member in members for handles in member.handles]
        everybody = [*members, *newcomers]

        def begin(member: Member) -> Awaitable[Any]:
            if member in shares:
                return member.actors.differentiate.call(number, shares[member])
            return member.actors.adopt.call(number - 1, states)

        for what, ask in (("begin", begin), ("reduce", lambda member: member.actors.reduce.call(number, gradients))):
            answers = await self._all(everybody, what, ask)
            _none_complains(answers)
            if len(answers) < len(everybody):
                return None
        # From here on the step is made: whoever does not apply it is lost, and whoever replaces that one reads it.
        losses = await self._all(everybody, "apply", lambda member: member.actors.apply.call(number))
        applied = [member for member, loss in losses.items() if not isinstance(loss, ActorError)]
        for member in losses.keys() - set(applied):
            member.group.lose(member, str(losses[member]))
        if not applied:
            return None
        self._made = number
        entered = tuple((each.group.number, each.life) for each in applied if not each.has_entered)
        for member in applied:
            member.is_current = member.has_entered = True
        return Step(number, losses[applied[0]][0], len(applied), entered, voided, time.monotonic())

    def _shares(self, members: Sequence[Member]) -> dict[Member, list[tuple[int, int]]]:
        """The batch cut for the processes of all members."""
        procs = self._plan.procs
        cut = self._plan.task.shares(len(members) * procs)
        return {member: cut[place * procs : (place + 1) * procs] for place, member in enumerate(members)}

    async def _all(
        self, members: Sequence[Member], what: str, ask: Callable[[Member], Awaitable[Any]]
    ) -> dict[Member, Any]:
        """Ask all, and wait for all; what they answer, be it an `ActorError`. Those who do not are lost."""
        answers = await asyncio.gather(*(self._ask(member, what, ask) for member in members))
        return {member: answer for member, answer in zip(members, answers, strict=True) if answer is not None}

    async def _ask(self, member: Member, what: str, ask: Callable[[Member], Awaitable[Any]]) -> Any:
        deadline_s = self._plan.deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                return await ask(member)
        except TimeoutError:
            member.group.lose(member, f"it did not {what} within {deadline_s:g} s")
        except SupervisionError as error:
            member.group.lose(member, error)
        except ActorError as error:
            return error
        return None

    async def _keep(self, made: Step) -> None:
        """Copy the state of a member where it is time to: if that dies meanwhile, after the next step."""
        checkpoint = self._checkpoint
        if checkpoint is None or made.number - checkpoint.step < self._plan.checkpoint_every:
            return
        states = [
            each.handles[0].state for each in (group.member for group in self._groups) if each and each.is_current
        ]
        if states:
            await checkpoint.take(made.number, states[0], timeout_s=self._plan.deadline_s)


def _place(hosts: HostMesh, number: int) -> HostMesh:
    """The host of a group."""
    place = number % hosts.size
    return hosts.slice(hosts=slice(place, place + 1)) if hosts.names else hosts


def _none_complains(answers: Mapping[Member, Any]) -> None:
    """Raise the error of one that could not do what it was asked for, and lives."""
    for answer in answers.values():
        if isinstance(answer, ActorError):
            raise answer
