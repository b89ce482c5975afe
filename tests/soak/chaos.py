"""What goes wrong during the soak, at random moments of its progress."""

import random
import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Sequence

from tests.soak.owners import ProcessOwner
from tests.soak.slots import Slot

_TICK_S = 0.002
_STOP_S = (0.02, 0.4)
_DEATH_S = (0.0, 0.1)

EVERY = {"drop": 60, "stop": 800, "kill": 2500}
"""Operations between two faults of a kind, on average."""


class Chaos(threading.Thread):
    """Drops, stops and kills while operations go on.

    Attributes:
        happened: Faults by kind.
        error: What this thread itself died of.
    """

    def __init__(
        self, seed: str, owners: Sequence[ProcessOwner], slots: Sequence[Slot], done: Callable[[], int]
    ) -> None:
        super().__init__(name="chaos", daemon=True)
        self.happened: Tally[str] = Tally()
        self.error: BaseException | None = None
        self._random = random.Random(seed)
        self._owners = owners
        self._mortals = [owner for owner in owners if owner.mortal]
        self._slots = slots
        self._done = done
        self._over = threading.Event()
        self._calm = threading.Event()
        self._quiet = threading.Event()
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._next = {kind: self._after(0, kind) for kind in EVERY}

    def calm_down(self) -> None:
        """No new faults; return when all owners are there and go on."""
        self._quiet.clear()
        self._calm.set()
        while not self._quiet.wait(_TICK_S):
            if self.error is not None:
                raise self.error

    def stir_up(self) -> None:
        """Go on with faults."""
        self._calm.clear()

    def end(self) -> None:
        """Calm down for good."""
        self.calm_down()
        self._over.set()
        self.join()

    def run(self) -> None:
        """See `threading.Thread`."""
        try:
            while not self._over.wait(_TICK_S):
                self._tick()
        except BaseException as error:  # noqa: BLE001 - raised by calm_down
            self.error = error

    def _tick(self) -> None:
        now = time.monotonic()
        for entry in [entry for entry in self._due if entry[0] <= now]:
            self._due.remove(entry)
            entry[1]()
        if self._calm.is_set():
            if not self._due:
                self._quiet.set()
            return
        done = self._done()
        for kind, at in self._next.items():
            if done >= at and getattr(self, f"_{kind}")():
                self.happened[kind] += 1
                self._next[kind] = self._after(done, kind)

    def _after(self, done: int, kind: str) -> int:
        return done + 1 + int(self._random.expovariate(1 / EVERY[kind]))

    def _drop(self) -> bool:
        slot = self._random.choice(self._slots)
        if slot.owner.life.stopped or slot.owner.life.killed_at is not None:
            return False
        slot.drop()
        return True

    def _stop(self) -> bool:
        owner = self._random.choice(self._owners)
        if owner.life.stopped or owner.life.killed_at is not None:
            return False
        owner.stop()
        life = owner.life

        def go_on() -> None:
            if life.killed_at is None:
                owner.go_on()

        self._due.append((time.monotonic() + self._random.uniform(*_STOP_S), go_on))
        return True

    def _kill(self) -> bool:
        owner = self._random.choice(self._mortals)
        if owner.life.killed_at is not None:
            return False
        owner.kill()
        self._due.append((time.monotonic() + self._random.uniform(*_DEATH_S), owner.respawn))
        return True
