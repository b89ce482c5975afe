"""Which shares make one step: publishing groups and the numbers of their puts. No I/O, no clock, no actor.

The n-th put of each rank under one key belongs to step n of its group. A step is complete when all ranks have put their
shares, or, if a share contains the whole value, at the first one; the others are replicas. A step that can never be
complete is given up: ranks with late shares get an error, and these shares join no other step.

A rank uses one *session* at a time: a process that counts its puts. If a rank has a new session, its process was
restarted: the group's unfinished steps are given up and all ranks start to count again. Earlier sessions are then
refused, unless they state the version themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass, field

from skipper.torchstore.errors import LateShareError, OutOfStepError, ShareMismatchError
from skipper.torchstore.protocol.origin import Origin, Turn
from skipper.torchstore.support.process import ProcessId

MAX_AHEAD = 64
"""How many steps ranks may be apart: each unfinished one keeps the memory of its shares."""

_REMEMBERED_STEPS = 1024
_REMEMBERED_GROUPS = 8
_SHOWN = 8


@dataclass(slots=True, eq=False)
class Step:
    """One step of a group.

    Attributes:
        index: The number of the puts that belong to it.
        version: The number of the version that it makes.
        size: How many ranks the group has.
        alone: Its shares are replicas of each other; None: unknown yet, since all shares so far are empty.
        puts: The session and the number of the put of each rank that has put.
        refused: How many puts of each of these ranks were refused before, if that matters.
        is_whole: It has become a version.
        given_up: Why it never will; "" while it still can.
    """

    index: int
    version: int
    size: int = 1
    alone: bool | None = None
    puts: dict[int, tuple[str, int]] = field(default_factory=dict)
    refused: dict[int, int] = field(default_factory=dict)
    is_whole: bool = False
    given_up: str = ""

    @property
    def is_open(self) -> bool:
        """Whether it waits for shares."""
        return not self.is_whole and not self.given_up

    def take(self, key: str, turn: Turn) -> ShareMismatchError | OutOfStepError | None:
        """Learn from a share whether shares are parts or replicas; returns why it does not fit the others, if so."""
        for other, refused in self.refused.items() if turn.refused is not None else ():
            if refused != turn.refused and other != turn.origin.rank:
                return OutOfStepError(
                    key,
                    f"{turn.refused} earlier puts of {name_ranks((turn.origin.rank,), self.size)} were refused, but "
                    f"{refused} of rank {other}: the store cannot know whether the two are at the same step; pass "
                    "version=...",
                )
        if turn.alone is None or turn.alone == self.alone:
            return None
        if self.alone is None:
            self.alone = turn.alone
            return None
        kind = (
            "no DTensors, and those of other ranks have"
            if turn.alone
            else "DTensors, and those of other ranks have none"
        )
        rank = name_ranks((turn.origin.rank,), self.size)
        return ShareMismatchError(
            key,
            f"the share of {rank} in step {self.index} has {kind}: the store cannot know "
            "whether they are parts or replicas of one another; ranks that put parts pass publisher=(rank, ranks)",
        )

    def add(self, turn: Turn) -> None:
        """Note that a rank has put its share."""
        self.puts[turn.origin.rank] = (turn.session, turn.number)
        if turn.refused is not None:
            self.refused[turn.origin.rank] = turn.refused

    @property
    def is_complete(self) -> bool:
        """Whether it waits for no rank."""
        return len(self.puts) == self.size or bool(self.alone and self.puts)

    def absent(self) -> tuple[int, ...]:
        """The ranks that it waits for."""
        if self.is_complete:
            return ()
        return tuple(rank for rank in range(self.size) if rank not in self.puts)


@dataclass(slots=True)
class _Member:
    session: str
    writer: ProcessId
    died: str = ""


@dataclass(slots=True)
class _Group:
    """One group, since its last restart of counting."""

    members: dict[int, _Member] = field(default_factory=dict)
    former: dict[str, str] = field(default_factory=dict)  # why each earlier session is refused
    steps: OrderedDict[int, Step] = field(default_factory=OrderedDict)


class Steps:
    """The steps of all groups that publish one key."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._groups: OrderedDict[tuple[str, int], _Group] = OrderedDict()

    @property
    def were_taken(self) -> bool:
        """Whether a group has published the key."""
        return bool(self._groups)

    def place(self, turn: Turn, writer: ProcessId, version: int | None, newest: int) -> Step:
        """The step that a share belongs to; a new one if it is the first of its step.

        Raises:
            LateShareError: The step was given up, or the rank no longer belongs to the group.
            OutOfStepError: The rank is too far ahead of others.
        """
        origin = turn.origin
        name = (origin.group, origin.size)
        group = self._groups.setdefault(name, _Group())
        self._groups.move_to_end(name)
        while len(self._groups) > _REMEMBERED_GROUPS:
            _, oldest = self._groups.popitem(last=False)
            _give_up(oldest, "other groups have put the key in the meantime")
        group = self._enter(group, turn, writer, is_explicit=version is not None)
        step = _find(group, turn, version)
        if step is None:
            step = self._open(group, turn, version, newest)
        if step.given_up:
            raise LateShareError(self._key, origin.rank, origin.size, step.index, step.given_up)
        return step

    def find(self, turn: Turn, version: int) -> Step | None:
        """The step of a group that makes this version."""
        group = self._groups.get((turn.origin.group, turn.origin.size))
        return _find(group, turn, version) if group is not None else None

    def process_died(self, process: ProcessId, reason: str) -> None:
        """Give up the steps for which a dead process has not put its share; its other shares stay."""
        for (_, size), group in self._groups.items():
            for rank, member in group.members.items():
                if member.writer == process and not member.died:
                    member.died = f"rank {rank} of {size} is gone: {reason}"
                    _give_up(group, member.died, {rank})

    def given_up(self) -> str:
        """Why the latest abandoned step was given up, if no later one is complete or in progress."""
        for group in reversed(self._groups.values()):
            last = next(reversed(group.steps.values()), None)
            if last is not None:
                return last.given_up
        return ""

    def clear(self) -> None:
        """Forget everything: the key is deleted."""
        for group in self._groups.values():
            _give_up(group, "the key was deleted")
        self._groups.clear()

    def _enter(self, group: _Group, turn: Turn, writer: ProcessId, *, is_explicit: bool) -> _Group:
        """The group; from now on this session is the one of its rank.

        Raises:
            LateShareError: The rank has another session.
        """
        origin, rank = turn.origin, turn.origin.rank
        member = group.members.get(rank)
        if member is not None and member.session == turn.session:
            return group
        if turn.session in group.former and (member is not None or not is_explicit):
            raise LateShareError(self._key, rank, origin.size, turn.number, group.former[turn.session])
        if member is not None:
            why = f"rank {rank} of {origin.size} was started again"
            if is_explicit:  # the number identifies the version: the others continue
                group.former[member.session] = why
            else:
                _give_up(group, why)
                former = group.former | {known.session: why for known in group.members.values()}
                group = _Group(former=dict(list(former.items())[-16 * origin.size :]))
                self._groups[origin.group, origin.size] = group
        group.former.pop(turn.session, None)
        group.members[rank] = _Member(turn.session, writer)
        return group

    def _open(self, group: _Group, turn: Turn, version: int | None, newest: int) -> Step:
        """Begin a step.

        Raises:
            LateShareError: It is older than all remembered steps, or a rank that it needs is gone.
            OutOfStepError: There are too many unfinished ones.
        """
        origin, index = turn.origin, turn.number
        if group.steps and version is None and index < next(iter(group.steps)) and len(group.steps) > MAX_AHEAD:
            raise LateShareError(self._key, origin.rank, origin.size, index, "the group is already many steps ahead")
        if version is not None and index in group.steps:
            index = max(group.steps) + 1
        if not turn.alone:
            self._check_others(group, origin, index, is_explicit=version is not None)
        step = Step(index, newest + 1 if version is None else version, origin.size)
        group.steps[index] = step
        while len(group.steps) > _REMEMBERED_STEPS:
            group.steps.popitem(last=False)
        return step

    def _check_others(self, group: _Group, origin: Origin, index: int, *, is_explicit: bool) -> None:
        """Check that the ranks that a new step needs can put their shares."""
        died = [member.died for rank, member in group.members.items() if member.died and rank != origin.rank]
        if died and not is_explicit:
            raise LateShareError(self._key, origin.rank, origin.size, index, died[0])
        waiting = [step for step in group.steps.values() if step.is_open]
        if len(waiting) >= MAX_AHEAD:
            slow = waiting[0]
            others = name_ranks(slow.absent(), origin.size)
            raise OutOfStepError(
                self._key,
                f"rank {origin.rank} of {origin.size} is at step {index}, but {others} has not put step {slow.index}: "
                "every rank puts every step, those that have nothing to give an empty state dict",
            )


def name_ranks(ranks: tuple[int, ...], size: int) -> str:
    """Some ranks of a group, as text."""
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank {shown}{more} of {size}"


def _find(group: _Group, turn: Turn, version: int | None) -> Step | None:
    if version is None:
        return group.steps.get(turn.number)
    return next((step for step in reversed(group.steps.values()) if step.version == version), None)


def _give_up(group: _Group, why: str, waiting_for: Set[int] | None = None) -> None:
    """Give up the unfinished steps, or those that wait for one of these ranks."""
    for step in group.steps.values():
        if step.is_open and (waiting_for is None or not waiting_for.isdisjoint(step.absent())):
            step.given_up = why
