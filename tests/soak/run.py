"""The soak: initiators, owners and faults together, and the books at the end."""

import asyncio
import contextlib
import faulthandler
import gc
import itertools
import os
import random
import sys
import threading
import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.soak.chaos import Chaos
from tests.soak.memory import footprint
from tests.soak.owners import LANES, Owner, OwnOwner, ProcessOwner
from tests.soak.pending import Pending
from tests.soak.slots import Counter, Slot
from tests.soak.worker import Worker

THREADS = 3
COROUTINES = 3
SIZES = (8, 64, 500, 4096, 30_000, 250_000)
LARGE = (2 << 20, 16 << 20)
"""One worker per owner has these too."""

_DEPTH = 4
_FLIPS = 20
_STUCK_S = 120.0
_REPORT_S = 30
_AWAY_S = 0.002
_GROWTH = {"descriptors": 12, "threads": 4, "mappings": 200, "anonymous_kib": 48 << 10, "shared_kib": 128 << 10}
"""What may be more at the end than at half time: sockets of the last dead, and pages of the owners' chunks of shared
memory that were touched for the first time."""
_EARLY_GROWTH = {"descriptors": 40, "threads": 8, "mappings": 400}
"""The same for a run so short that libraries and allocators still fill what they keep for later: at half time some
connections to the owners are not open yet (58 descriptors of the initiator have become 75, where a long run stays)."""
_SETTLED = 50_000
"""Operations in a half from which on growth is a leak."""


@dataclass
class Summary:
    """What came of it; `ok` is the verdict."""

    ok: bool
    seed: int
    operations: int
    seconds: float
    operations_per_s: float
    gigabytes: float
    faults: dict[str, int]
    outcomes: dict[str, dict[str, int]]
    slowest_s: dict[str, float]
    swept: int
    footprints: dict[str, Any]
    wrong: list[str] = field(default_factory=list)
    wrongs: int = 0


class Soak:
    """One run."""

    def __init__(self, *, operations: int, seed: int, seconds_limit: float, corrupt: bool) -> None:
        self._seed = seed
        self._operations = operations
        self._until = time.monotonic() + seconds_limit
        self._numbers = itertools.count(1)
        self._done = 0
        self._corrupt = corrupt
        self._before = _outside()
        self._own = OwnOwner()
        self._processes = [ProcessOwner(lane, mortal=mortal) for lane in LANES for mortal in (True, False)]
        owners: list[Owner] = [self._own, *self._processes]
        counters = [Counter(owner) for owner in owners]
        self._workers = [Worker(f"{seed}/{i}", self._slots(i, owners), counters) for i in range(THREADS + COROUTINES)]
        self._counters = counters
        self._all = [slot for worker in self._workers for slot in worker.slots] + [counter.slot for counter in counters]
        self._chaos = Chaos(f"{seed}/chaos", self._processes, self._all, lambda: self._done)

    def run(self) -> Summary:
        """All of it.

        Returns:
            What happened; the owners are closed by then.
        """
        begin = time.monotonic()
        self._chaos.start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        try:
            self._work(self._operations // 2)
            swept = self._sweep()
            halfway = self._footprints()
            if self._corrupt:
                self._flip()
            self._chaos.stir_up()
            self._work(self._operations)
            swept += self._sweep()
            end = self._footprints()
            self._chaos.end()
        finally:
            for owner in (self._own, *self._processes):
                owner.close()
        self._done = -1
        allowed = _GROWTH if self._operations >= 2 * _SETTLED else _EARLY_GROWTH
        wrong = [line for worker in self._workers for line in worker.wrong]
        wrong += _growth(halfway, end, allowed) + self._left()
        return self._summary(time.monotonic() - begin, swept, {"halfway": halfway, "end": end}, wrong)

    def _summary(self, seconds: float, swept: int, footprints: dict[str, Any], wrong: list[str]) -> Summary:
        tally: Tally[tuple[str, str, str]] = sum((worker.tally for worker in self._workers), Tally())
        outcomes: dict[str, dict[str, int]] = {}
        for (lane, kind, outcome), count in sorted(tally.items()):
            outcomes.setdefault(f"{lane} {kind}", {})[outcome] = count
        slowest: dict[str, float] = {}
        for worker in self._workers:
            for lane, taken in worker.slowest.items():
                slowest[lane] = round(max(taken, slowest.get(lane, 0.0)), 3)
        done = sum(tally.values()) - swept
        return Summary(
            ok=not wrong,
            seed=self._seed,
            operations=done,
            seconds=round(seconds, 1),
            operations_per_s=round(done / seconds, 1),
            gigabytes=round(sum(worker.nbytes for worker in self._workers) / 1e9, 2),
            faults=dict(self._chaos.happened),
            outcomes=outcomes,
            slowest_s=slowest,
            swept=swept,
            footprints=footprints,
            wrong=wrong[:20],
            wrongs=len(wrong),
        )

    def _slots(self, index: int, owners: Sequence[Owner]) -> list[Slot]:
        slots = [Slot(owner, nbytes) for owner in owners for nbytes in SIZES]
        mine = [owner for i, owner in enumerate(owners) if i % (THREADS + COROUTINES) == index]
        return slots + [Slot(owner, nbytes) for owner in mine for nbytes in LARGE]

    def _more(self, until: int) -> bool:
        return self._done < until and time.monotonic() < self._until

    def _sweep(self) -> int:
        """Read everything: also what opens all connections that there can be, so that footprints can be compared."""
        lost = [line for counter in self._counters if (line := counter.audit()) is not None]
        self._workers[0].wrong += lost
        return sum(worker.sweep() for worker in self._workers)

    def _work(self, until: int) -> None:
        """All workers, until so many operations are done; then all faults are over."""
        threads = [
            threading.Thread(target=self._guarded, args=(self._in_thread, worker, until))
            for worker in self._workers[:THREADS]
        ]
        threads.append(threading.Thread(target=self._guarded, args=(self._in_loop, self._workers[THREADS:], until)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._chaos.calm_down()

    def _guarded(self, work: Any, workers: Any, until: int) -> None:
        try:
            work(workers, until)
        except Exception as error:  # noqa: BLE001 - a worker that dies is a finding
            some = workers if isinstance(workers, Worker) else workers[0]
            some.wrong.append(f"a worker died: {error!r}")
            sys.excepthook(type(error), error, error.__traceback__)

    def _in_thread(self, worker: Worker, until: int) -> None:
        chosen = random.Random(f"{self._seed}/{until}/waits")
        flying: deque[Pending] = deque()
        while self._more(until):
            pending = worker.submit()
            if pending is not None:
                self._done = next(self._numbers)
                flying.append(pending)
            elif not flying:
                time.sleep(_AWAY_S)
            while len(flying) > (chosen.randrange(_DEPTH) if pending is not None else 0):
                _wait(flying[0], chosen)
                worker.conclude(flying.popleft())
        for pending in flying:
            _wait(pending, chosen)
            worker.conclude(pending)

    def _in_loop(self, workers: Sequence[Worker], until: int) -> None:
        async def one(worker: Worker) -> None:
            while self._more(until):
                pending = worker.submit()
                if pending is None:
                    await asyncio.sleep(_AWAY_S)
                    continue
                self._done = next(self._numbers)
                with contextlib.suppress(Exception):  # the verdict looks at it
                    await pending.operation
                worker.conclude(pending)

        async def all_of_them() -> None:
            await asyncio.gather(*(one(worker) for worker in workers))

        asyncio.run(all_of_them())

    def _flip(self) -> None:
        """The negative control: bits that change behind everybody's back in owners that live on."""
        chosen = random.Random(self._seed)
        steady = [
            slot
            for slot in self._all
            if isinstance(slot.owner, ProcessOwner) and not slot.owner.mortal and not slot.owner.lane.reads_wait
        ]
        for slot in chosen.sample(steady, _FLIPS):
            if not slot.held.doubtful and slot.held.drop_begun is None:
                slot.owner("flip", slot.held.number, chosen.randrange(slot.nbytes))

    def _footprints(self) -> dict[str, dict[str, int]]:
        gc.collect()
        immortals = {owner.lane.name: owner for owner in self._processes if not owner.mortal}
        return {"initiator": footprint(), **{name: owner("footprint") for name, owner in immortals.items()}}

    def _left(self) -> list[str]:
        """What is still there although all owners are closed."""
        gc.collect()
        after = _outside()
        return [
            f"left behind: {sorted(after[what] - self._before[what])}"
            for what in after
            if after[what] - self._before[what]
        ]

    def _watch(self) -> None:
        """Say how far it is; end a run that hangs, with the stack of every thread."""
        last, moved = 0, time.monotonic()
        for seconds in itertools.count(1):
            time.sleep(1)
            if self._done < 0:
                return
            if self._done != last:
                last, moved = self._done, time.monotonic()
            elif time.monotonic() - moved > _STUCK_S:
                print(f"nothing has moved for {_STUCK_S} s", file=sys.stderr)
                faulthandler.dump_traceback(all_threads=True)
                for owner in self._processes:
                    owner.process.kill()
                os._exit(3)
            if seconds % _REPORT_S == 0:
                print(f"{seconds} s: {last} operations", file=sys.stderr, flush=True)


def _wait(pending: Pending, chosen: random.Random) -> None:
    """Until it is over: as a thread that helps, as one that only waits, or as one that looks now and then."""
    dice = chosen.random()
    if dice < 0.6:
        with contextlib.suppress(Exception):  # the verdict looks at it
            pending.operation.get()
    elif dice < 0.9:
        pending.over.wait()
    else:
        while not pending.operation.done():
            time.sleep(0.0005)
    pending.over.wait()


def _outside() -> dict[str, set[str]]:
    """What this process has in places that outlive it: children, and names in /dev/shm."""
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        children = set(file.read().split())
    return {"children": children, "shm": set(os.listdir("/dev/shm"))}


def _growth(halfway: dict[str, dict[str, int]], end: dict[str, dict[str, int]], allowed: dict[str, int]) -> list[str]:
    return [
        f"{who}: {what} grew from {halfway[who][what]} to {counts[what]} in the second half"
        for who, counts in end.items()
        for what, more in allowed.items()
        if counts[what] > halfway[who][what] + more
    ]
