"""`Record`: what happened in a run, and how long recovery took."""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from examples.fault_tolerance.chaos import Fault
from examples.fault_tolerance.coordinator import Step

_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a death has cost.

    Attributes:
        fault: the death.
        recovered_s: from then until its group, replaced, has taken part in a step again.
        standstill_s: from then until the others have made a step, which without a fault takes one step.
    """

    fault: Fault
    recovered_s: float
    standstill_s: float


@dataclass(frozen=True, slots=True)
class Held:
    """What the script's process holds."""

    rss_nbytes: int
    descriptors: int

    @staticmethod
    def now() -> Held:
        """Count it."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return Held(pages * _PAGE_NBYTES, len(os.listdir("/proc/self/fd")))


@dataclass(slots=True)
class Record:
    """A run as the script has seen it.

    Attributes:
        groups: how many replica groups there are.
        losses: by step; a step that was made again, after a restart from the checkpoint, counts once.
        voided: attempts at steps that were given up.
        again: steps that were made again.
        quorums: steps by the number of groups that made them.
        faults: the deaths that were brought about.
        replaced: lives of groups that others have followed; with more than one for each death, some were slow enough to
            be taken for frozen.
        held: what the script's process held after the first deaths, and at the end.
    """

    groups: int
    losses: dict[int, float] = field(default_factory=dict)
    voided: int = 0
    again: int = 0
    quorums: dict[int, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    replaced: int = 0
    held: list[Held] = field(default_factory=list)
    _made_at: list[float] = field(default_factory=list)
    _entered: list[dict[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._entered = [{} for _ in range(self.groups)]

    def note(self, step: Step) -> None:
        """Take a step down."""
        self.again += step.number in self.losses
        self.losses[step.number] = step.loss
        self.voided += step.voided
        self.quorums[step.members] = self.quorums.get(step.members, 0) + 1
        self._made_at.append(step.at_s)
        for group, life in step.entered:
            self._entered[group][life] = step.at_s

    @property
    def seconds(self) -> float:
        """From the first step to the last."""
        return self._made_at[-1] - self._made_at[0]

    def pending(self, since_s: float) -> list[Fault]:
        """Deaths before a point in time whose groups have not taken part in a step since."""
        newest = [max(lives, default=-1) for lives in self._entered]
        return [fault for fault in self.faults if fault.at_s < since_s and newest[fault.group] <= fault.life]

    def recoveries(self) -> list[Recovery]:
        """What each death has cost, for those whose group is back."""
        costs = []
        for fault in self.faults:
            back_s = self._back_at(fault)
            next_step = bisect.bisect_right(self._made_at, fault.at_s)
            if back_s is not None and next_step < len(self._made_at):
                costs.append(Recovery(fault, back_s - fault.at_s, self._made_at[next_step] - fault.at_s))
        return costs

    def step_seconds(self) -> Sequence[float]:
        """From each step to the next."""
        return [after - before for before, after in zip(self._made_at, self._made_at[1:], strict=False)]

    def _back_at(self, fault: Fault) -> float | None:
        """When the group took part in a step after a death, in a later life."""
        return min((at_s for life, at_s in self._entered[fault.group].items() if life > fault.life), default=None)
