"""`Chaos`: an actor that lets processes die while others train. The training does not know of it."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from examples.fault_tolerance.coordinator import Coordinator, Standing
from examples.fault_tolerance.saboteur import Saboteur
from skipper.control import Actor, ActorMesh, ControlError, MeshFailure, concurrent_endpoint

LOOK_S = 0.02
"""How often it looks for processes that can be let die."""

READY_S = 1.0
"""How long a saboteur may take to come up. One that does not is in a process that is failing already, or is busy."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A death that was brought about.

    Attributes:
        kind: how (see `DEATHS`).
        group: in which group.
        life: of that group.
        at_s: when, by `time.monotonic` of the coordinator's process.
        is_newcomer: whether that life had not taken part in a step yet: it died while it recovered.
    """

    kind: str
    group: int
    life: int
    at_s: float
    is_newcomer: bool


class Chaos(Actor):
    """Lets processes of the coordinator's groups die.

    Args:
        coordinator: whose.
        groups: how many those are.
        kinds: in which ways, by turns.
        at_once: so many groups in the same moment; all of them only if they are as many as there are, and else it
            waits for the moment in which a member is left that nothing was done to.
        every_s: seconds from one such moment to the next.
        seed: of what is random in it.
    """

    def __init__(
        self,
        coordinator: ActorMesh[Coordinator],
        *,
        groups: int,
        kinds: Sequence[str],
        at_once: int,
        every_s: float,
        seed: int,
    ) -> None:
        self._coordinator = coordinator
        self._groups, self._at_once, self._every_s = groups, at_once, every_s
        self._random = random.Random(seed)
        self._kinds = self._shuffled(kinds)
        self._faults: list[Fault] = []
        self._hit: set[tuple[int, int]] = set()
        self._saboteurs: dict[tuple[int, int], ActorMesh[Saboteur]] = {}

    def __supervise__(self, failure: MeshFailure) -> bool:
        """Take note that a saboteur died with its process: that is what it was for."""
        return True

    @concurrent_endpoint
    async def run(self, deaths: int) -> None:
        """Bring about so many deaths."""
        due_s = time.monotonic()
        while len(self._faults) < deaths:
            due_s = max(due_s + self._every_s, time.monotonic())
            await asyncio.sleep(due_s - time.monotonic())
            victims = await self._victims(min(self._at_once, deaths - len(self._faults)))
            await asyncio.gather(*(self._hit_one(victim) for victim in victims))

    @concurrent_endpoint
    async def faults(self, since: int) -> list[Fault]:
        """The deaths after the first so many."""
        return self._faults[since:]

    async def _victims(self, count: int) -> list[Standing]:
        """So many groups to be hit, once that leaves enough of them."""
        while True:
            if victims := self._choose(await self._standings(), count):
                return victims
            await asyncio.sleep(LOOK_S)

    def _choose(self, standings: Sequence[Standing], count: int) -> list[Standing]:
        """Groups to be hit now; none where too few would be left."""
        whole = [each for each in standings if each.procs is not None and (each.group, each.life) not in self._hit]
        victims = self._random.sample(whole, count) if len(whole) >= count else []
        if count == self._groups:
            return victims if all(each.is_member for each in victims) else []
        is_enough_left = any(each.is_member and each not in victims for each in whole)
        return victims if is_enough_left else []

    async def _hit_one(self, victim: Standing) -> None:
        assert victim.procs is not None  # it was chosen
        place = victim.group, victim.life
        rank = self._random.randrange(victim.procs.extent.nelements)
        saboteur: Any = victim.procs.slice(ranks=rank).spawn(f"saboteur-{victim.group}.{victim.life}", Saboteur)
        self._hit.add(place)
        self._saboteurs[place] = saboteur
        try:
            async with asyncio.timeout(READY_S):
                await saboteur.initialized
        except (ControlError, TimeoutError):
            self._leave(place)
            return
        kind = next(self._kinds)
        self._faults.append(Fault(kind, *place, time.monotonic(), not victim.is_member))
        saboteur.fall.call_one(kind)

    def _leave(self, place: tuple[int, int]) -> None:
        self._hit.discard(place)
        self._saboteurs.pop(place).stop()

    async def _standings(self) -> list[Standing]:
        """How the groups are; what concerns lives that are over is forgotten."""
        standings: list[Standing] = await self._coordinator.standings.call_one()
        lives = {each.group: each.life for each in standings}
        for place in [place for place in self._hit if lives[place[0]] != place[1]]:
            self._leave(place)
        return standings

    def _shuffled(self, kinds: Sequence[str]) -> Iterator[str]:
        """All kinds, again and again, each time in another order."""
        for _ in itertools.count():
            yield from self._random.sample(kinds, len(kinds))
