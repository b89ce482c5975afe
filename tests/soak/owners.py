"""Owners as the soak knows them: how they are reached, and which faults each life of theirs has seen."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from tests.soak.memory import Memory

ROOT = Path(__file__).resolve().parents[2]
_REPLY_S = 60.0


class OwnerGoneError(Exception):
    """It was killed before it had answered."""


@dataclass(frozen=True)
class Lane:
    """A way between processes.

    Attributes:
        name: For the summary.
        shared: Whether the owner's memory comes from `dataplane.empty_array`.
        settings: For `dataplane.configure` in the owner.
        reads_wait: Whether reads wait while the owner is stopped.
        writes_wait: The same of writes; over CMA those of a connection that is being made.
        atomics_wait: The same of atomic operations.
    """

    name: str
    shared: bool
    settings: Mapping[str, Any] = field(default_factory=dict)
    reads_wait: bool = False
    writes_wait: bool = False
    atomics_wait: bool = False


LOCAL = Lane("local", shared=True)
LANES = (
    Lane("shm", shared=True),
    Lane("ucx-cma", shared=False, writes_wait=True, atomics_wait=True),
    Lane(
        "ucx-tcp",
        shared=False,
        settings={"backend": "ucx", "ucx": {"TLS": "tcp,self"}},
        reads_wait=True,
        writes_wait=True,
        atomics_wait=True,
    ),
)


@dataclass
class Life:
    """One process, from its start to its end, or this very one. Times are of the monotonic clock.

    Attributes:
        killed_at: When somebody began to kill it.
        gone_at: When it was gone.
        stops: When it was stopped and continued.
    """

    killed_at: float | None = None
    gone_at: float | None = None
    stops: list[tuple[float, float | None]] = field(default_factory=list)

    def stopped_within(self, begin: float, end: float) -> bool:
        return any(stop <= end and (go is None or begin <= go + _CATCH_UP_S) for stop, go in self.stops)

    @property
    def stopped(self) -> bool:
        return bool(self.stops) and self.stops[-1][1] is None


_CATCH_UP_S = 1.0  # what piles up while a process is stopped keeps it busy for some time


class Owner:
    """Somebody whose memory is read and written. Thread-safe."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.life = Life()
        self.lock = threading.RLock()

    def __call__(self, method: str, *args: Any) -> Any:
        """Let it do something, and return the answer.

        Raises:
            OwnerGoneError: It was killed first.
        """
        raise NotImplementedError

    def register(self, number: int, nbytes: int) -> tuple[bytes, Life]:
        """A new buffer: its handle, and the life that it belongs to."""
        with self.lock:
            life = self.life
            return self("make", number, nbytes), life

    def drop(self, number: int, life: Life) -> bool:
        """Drop a buffer of that life; whether it was there to do it."""
        with self.lock:
            if life is not self.life:
                return False
            try:
                self("drop", number)
            except OwnerGoneError:
                return False
            return True

    def close(self) -> None:
        """End it."""


class OwnOwner(Owner):
    """This process."""

    def __init__(self) -> None:
        super().__init__(LOCAL)
        self._memory = Memory(shared=True)

    def __call__(self, method: str, *args: Any) -> Any:
        """See `Owner`."""
        with self.lock:
            return getattr(self._memory, method)(*args)


class ProcessOwner(Owner):
    """A process of its own, which can be killed and born again.

    Attributes:
        mortal: Whether the soak kills it; the others live from the beginning to the end and must not grow.
    """

    def __init__(self, lane: Lane, *, mortal: bool) -> None:
        super().__init__(lane)
        self.mortal = mortal
        self._start()

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", "tests.soak.memory", str(theirs.fileno())]
        self.process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()])
        theirs.close()
        self._connection.send((dict(self.lane.settings), self.lane.shared))
        self.life = Life()

    def __call__(self, method: str, *args: Any) -> Any:
        """See `Owner`."""
        with self.lock:
            try:
                self._connection.send((method, args))
                if not self._connection.poll(_REPLY_S):
                    raise TimeoutError(f"an owner of {self.lane.name} does not answer")
                return self._connection.recv()
            except (OSError, EOFError):
                raise OwnerGoneError from None

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.life.killed_at = time.monotonic()
        self.process.kill()
        self.process.wait(_REPLY_S)
        self.life.gone_at = time.monotonic()

    def respawn(self) -> None:
        """Another life, with other memory."""
        with self.lock:
            self._connection.close()
            self._start()

    def stop(self) -> None:
        """SIGSTOP."""
        self.life.stops.append((time.monotonic(), None))
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self.process.pid, signal.SIGCONT)
        self.life.stops[-1] = (self.life.stops[-1][0], time.monotonic())

    def close(self) -> None:
        """See `Owner`."""
        if not self._connection.closed:
            self.process.kill()
            self.process.wait(_REPLY_S)
            self._connection.close()
