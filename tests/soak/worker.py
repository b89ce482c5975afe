"""What one of the soak's initiators does: chosen at random, every byte of it checked."""

import math
import random
from collections import Counter as Tally
from collections.abc import Sequence
from typing import Any

import numpy as np

from skipper.dataplane import Operation, RDMABuffer
from tests.soak.pattern import content, described
from tests.soak.pending import LATE_S, Pending
from tests.soak.program import Program
from tests.soak.slots import Counter, Held, Slot

_SHORT_S = 0.2
_IN_PROGRAMS = 1 << 20
_PROGRAMS = 12
_PARTS = 5


class Worker:
    """Decides, submits and judges; who runs it waits in between.

    Attributes:
        tally: Operations by lane, kind and outcome.
        nbytes: Moved.
        slowest: Seconds of the slowest operation, by lane.
        wrong: What must not have happened.
    """

    def __init__(self, seed: str, slots: Sequence[Slot], counters: Sequence[Counter]) -> None:
        self.slots = tuple(slots)
        self.tally: Tally[tuple[str, str, str]] = Tally()
        self.nbytes = 0
        self.slowest: dict[str, float] = {}
        self.wrong: list[str] = []
        self._random = random.Random(seed)
        self._fit = tuple(slot for slot in slots if 16 <= slot.nbytes <= _IN_PROGRAMS)
        self._counters = tuple(counters)
        self._programs: list[Program] = []
        self._flying: list[Pending] = []

    def submit(self) -> Pending | None:
        """Begin something; None where what was chosen has to wait for what is under way."""
        dice = self._random.random()
        if dice < 0.02:
            pending = self._count()
        elif dice < 0.10:
            pending = self._program()
        else:
            held = self._present(self._random.choice(self.slots))
            if held is None:
                pending = None
            elif dice < 0.20 and held.words.size:
                pending = self._atomic(held)
            elif dice < 0.45:
                pending = self._write(held)
            else:
                pending = self._read(held)
        if pending is not None:
            self._flying.append(pending)
        return pending

    def conclude(self, pending: Pending) -> None:
        """Judge one that is over."""
        self._flying.remove(pending)
        outcome, wrong = pending.verdict()
        lanes = {held.owner.lane.name for held in pending.buffers}
        lane = "several" if len(lanes) > 1 else lanes.pop()
        self.tally[lane, pending.kind, outcome] += 1
        self.slowest[lane] = max(self.slowest.get(lane, 0.0), pending.seconds)
        if wrong is not None:
            self.wrong.append(wrong)
        if outcome == "succeeds":
            self.nbytes += pending.nbytes
        elif self._random.random() < 0.5:  # the other half of the time it is used again, to fail again
            for held in pending.buffers:
                if held.drop_begun is not None or held.life.killed_at is not None:
                    held.doubtful = True

    def sweep(self) -> int:
        """Read every buffer that is still there from its first byte to its last; how many."""
        swept = 0
        for slot in self.slots:
            held = slot.held
            if held.doubtful or held.drop_begun is not None or held.life.killed_at is not None:
                continue
            pending = self._whole(held)
            self._flying.append(pending)
            pending.over.wait()
            self.conclude(pending)
            swept += 1
        return swept

    def _present(self, slot: Slot) -> Held | None:
        """What the slot holds, put anew where its content is not known; None where that cannot be done now."""
        held = slot.held
        if held.doubtful:
            if any(held in pending.buffers for pending in self._flying) or not slot.renew(held):
                return None
            held = slot.held
        return held

    def _conflicts(self, held: Held, *, writes: bool) -> bool:
        return any(held in (pending.buffers if writes else pending.writes) for pending in self._flying)

    def _timeout(self, *buffers: Held) -> float:
        stopped = any(held.life.stopped for held in buffers)
        return _SHORT_S if stopped and self._random.random() < 0.5 else LATE_S

    def _range(self, held: Held) -> tuple[int, int]:
        """Mostly little of it, now and then all of it."""
        nbytes = min(held.nbytes, int(2 ** self._random.uniform(0, math.log2(held.nbytes) + 0.2)))
        begin = self._random.randint(0, held.nbytes - nbytes)
        return begin, begin + nbytes

    def _handle(self, held: Held, begin: int, end: int) -> RDMABuffer:
        dice = self._random.random()
        if dice < 0.02:
            return RDMABuffer.deserialize(held.handle.at(begin, end - begin).serialize())
        return held.handle if end - begin == held.nbytes else held.handle.at(begin, end - begin)

    def _read(self, held: Held) -> Pending | None:
        return None if self._conflicts(held, writes=False) else self._read_range(held, *self._range(held))

    def _whole(self, held: Held) -> Pending:
        return self._read_range(held, 0, held.nbytes)

    def _read_range(self, held: Held, begin: int, end: int) -> Pending:
        into = np.zeros(end - begin, np.uint8)

        def check(_: Operation) -> str | None:
            wanted = held.shadow[begin:end]
            if np.array_equal(wanted, into):
                return None
            return described(held.number, held.versions, begin, wanted, into)

        part = self._handle(held, begin, end)
        return Pending(
            "read",
            lambda timeout: part.read_into(into, timeout=timeout),
            reads=(held,),
            nbytes=end - begin,
            timeout=self._timeout(held),
            check=check,
        )

    def _write(self, held: Held) -> Pending | None:
        if self._conflicts(held, writes=True):
            return None
        begin, end = self._range(held)
        source = content(held.number, held.versions, begin, end)
        held.versions += 1

        def check(_: Operation) -> None:
            held.shadow[begin:end] = source

        part = self._handle(held, begin, end)
        return Pending(
            "write",
            lambda timeout: part.write_from(source, timeout=timeout),
            writes=(held,),
            nbytes=end - begin,
            timeout=self._timeout(held),
            check=check,
        )

    def _atomic(self, held: Held) -> Pending | None:
        if self._conflicts(held, writes=True):
            return None
        at = self._random.randrange(held.words.size)
        was, value = int(held.words[at]), self._random.getrandbits(64)
        swaps, fits = self._random.random() < 0.5, self._random.random() < 0.7
        expected = was if fits else was ^ 1
        becomes = (value if fits else was) if swaps else (was + value) % (1 << 64)

        def submit(timeout: float) -> Any:
            if swaps:
                return held.handle.compare_and_swap(expected, value, offset=8 * at, timeout=timeout)
            return held.handle.fetch_add(value, offset=8 * at, timeout=timeout)

        def check(operation: Any) -> str | None:
            previous: int = operation.get()
            held.words[at] = becomes
            return None if previous == was else f"word {at} of buffer {held.number} held {was:#x}, not {previous:#x}"

        return Pending("atomic", submit, writes=(held,), nbytes=8, timeout=self._timeout(held), check=check)

    def _count(self) -> Pending | None:
        """Add one to a word that all workers add to."""
        counter = self._random.choice(self._counters)
        held = counter.slot.held
        if held.doubtful and (any(held in p.buffers for p in self._flying) or not counter.slot.renew(held)):
            return None
        count, before = counter.begin()

        def check(operation: Any) -> str | None:
            return counter.confirm(count, before, operation.get())

        return Pending(
            "atomic",
            lambda timeout: count.held.handle.fetch_add(1, timeout=timeout),
            writes=(count.held,),
            nbytes=8,
            timeout=self._timeout(count.held),
            check=check,
        )

    def _program(self) -> Pending | None:
        """Submit a batch that was made before, or make one."""
        self._programs = [program for program in self._programs if program.valid]
        if len(self._programs) < _PROGRAMS or self._random.random() < 0.02:
            chosen = self._random.sample(self._fit, min(len(self._fit), self._random.randint(2, _PARTS)))
            present = [(slot, held) for slot in chosen if (held := self._present(slot)) is not None]
            if not present:
                return None
            self._programs.append(Program(self._random, present))
            del self._programs[:-_PROGRAMS]
        program = self._random.choice(self._programs)
        if any(self._conflicts(held, writes=True) for held in program.reads + program.writes):
            return None
        program.prepare()
        return Pending(
            "action",
            lambda timeout: program.action.submit(timeout=timeout),
            reads=program.reads,
            writes=program.writes,
            nbytes=program.action.nbytes,
            timeout=self._timeout(*program.reads, *program.writes),
            check=program.check,
        )
