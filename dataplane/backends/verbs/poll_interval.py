"""How often the daemon thread of the verbs backend looks after the runs that nobody waits for.

To wake the thread for each run would cost that run more than the device does. So the thread looks by itself. It looks
less often the longer it finds that other threads do all the work, and it rests when nothing happens at all.
"""

import math
import threading
from typing import Any

from skipper.dataplane.backends.verbs.connection import PostedRun, deadline_of

_GRACE_S = 0.01  # a run that is this old and that nobody waits for is led by the daemon thread
_SLOWEST_S = 0.08


class PollInterval:
    """For one thread that looks and others that call it. All methods are for holders of the lock.

    Attributes:
        seconds: To sleep between two looks; infinity until the thread is called.
    """

    def __init__(self, lock: Any) -> None:
        """Begin quickly; the lock is one that conditions can have."""
        self._called = threading.Condition(lock)
        self.seconds = _GRACE_S
        self._busy = False  # whether a run has begun since the last look

    def begun(self, run: PostedRun) -> None:
        """A run is under way."""
        self._busy = True
        if self.seconds > _SLOWEST_S or not run.attended or run.timeout < self.seconds:
            self.call()

    def left_alone(self) -> None:
        """The thread that has led for others leads no more."""
        if self.seconds > _GRACE_S:
            self.call()

    def call(self) -> None:
        """Have the thread look soon, and often."""
        self.seconds = _GRACE_S
        self._called.notify()

    def quicken(self) -> None:
        """Look often again: the thread has had something to do."""
        self.seconds = _GRACE_S

    def rest(self, most: float, *, idle: bool) -> None:
        """Sleep until the next look, or a call, for `most` seconds; `idle` when no run is under way."""
        if idle and not self._busy and self.seconds == _SLOWEST_S:
            self.seconds = math.inf
        self._busy = False
        seconds = min(self.seconds, most)
        if not self._called.wait(None if seconds == math.inf else max(0.0, seconds)):
            self.seconds = min(2 * self.seconds, _SLOWEST_S)


def lead_from(run: PostedRun) -> float:
    """When the daemon thread leads a run that no thread waits for."""
    return deadline_of(run) - run.timeout + (_GRACE_S if run.attended else 0.0)
