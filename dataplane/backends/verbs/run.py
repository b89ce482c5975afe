"""One start of a program, and what happens to it when its connection fails.

The device's own status says why. A run that was flushed by another run's failure begins again on a new connection. A
run that was refused access fetches the words first, which distinguish a dropped buffer from a key that never was good.
A rail that does not answer is left out if there is another; the device itself has tried often enough. All this holds
for operations that can be repeated. An atomic operation is not repeated once it may have been sent.
"""

import asyncio
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from skipper.dataplane.backends.base import Done, Remote
from skipper.dataplane.backends.verbs.chain import Phase, RequestChain, VerbsProgram
from skipper.dataplane.backends.verbs.connection import EXPIRED, FLUSHED, NO_WAY, VerbsConnection
from skipper.dataplane.backends.verbs.connector import OwnerConnector
from skipper.dataplane.copying import dropped
from skipper.dataplane.errors import DataplaneError, OwnerDiedError, TransferError, TransferTimeoutError
from skipper.dataplane.operation import FetchOperation
from skipper.dataplane.regions import Region

_WORD = struct.Struct("=Q")
_TRIES = 8
_ACCESS = 10
_REFUSED = frozenset({9, _ACCESS})  # the peer's device has checked it and done nothing
_UNKNOWN = "it is not known whether the atomic operation took place, so it is not tried again"
_TEXTS = {
    1: "a local length error",
    2: "a local queue pair error, as when its own link is down",
    4: "a local protection error",
    FLUSHED: "its connection failed again and again under other transfers",
    9: "the peer's device refused the request",
    _ACCESS: "the peer's device refused access to that memory",
    11: "the peer's device failed",
    12: "no answer after all retries: the peer or the link to it is down",
}


class VerbsRun:
    """One start of a transfer; see `PostedRun`.

    Attributes:
        needs: Rails that its connection must have.
        error: The error that it ended with.
    """

    needs: tuple[int, ...] = ()

    def __init__(
        self,
        connector: OwnerConnector,
        make: Callable[[tuple[int, ...]], VerbsProgram],
        remotes: tuple[Remote, ...],
        epochs: bytes,
        pinned: tuple[Region, ...],
        timeout: float,
        done: Done,
    ) -> None:
        """Prepare the run.

        Args:
            connector: Connects to the owner.
            make: Makes the program for some rails.
            remotes: What it reads or writes.
            epochs: The expected values of their words.
            pinned: Local memory, kept alive during the run.
            timeout: Seconds.
            done: Called once with the outcome, unless it was over when `begin` returned.
        """
        self.timeout = timeout
        self.deadline: float | None = None
        # An event loop awaits it; other threads mostly call `get`, which leads by itself.
        self.attended = asyncio._get_running_loop() is None
        self.connection: VerbsConnection | None = None
        self.outstanding = 0
        self.over = False
        self.error: DataplaneError | None = None
        self._connector = connector
        self._make = make
        self._remotes = remotes
        self._epochs = epochs
        self._pinned = pinned
        self._done = done
        self._program: VerbsProgram
        self._rails: tuple[int, ...] = ()
        self._phases: list[Phase] = []  # the present one last
        self._left: dict[int, list[RequestChain]] = {}  # chains of the present phase, the next one last
        self._probed = False
        self._tries = 0

    def begin(self) -> bool:
        """Post it. Returns whether it is over already, with success or with `error`.

        Raises:
            DataplaneError: There is no connection, or no room for the words.
        """
        connection = self._connector.connected(self.needs, self.due)
        self._prepare(connection, probe=False)
        return self._connector.engine.start(self, connection)

    def resume(self, connection: VerbsConnection, program: VerbsProgram) -> None:
        """Take over a program that is completely posted there already."""
        self._rails, self._program, self._phases = connection.rails, program, [program.data]
        self._left = {rail: [] for rail in program.data}

    def due(self) -> float:
        """Its deadline, which does not change from now on."""
        if self.deadline is None:
            self.deadline = time.monotonic() + self.timeout
        return self.deadline

    def help(self) -> bool:
        """Let the waiting thread drive it; returns whether to call this again."""
        self._connector.engine.lead(self)
        return not self.over

    def rails(self) -> Iterable[int]:
        """See `PostedRun`."""
        return tuple(self._left)

    def next_chain(self, rail: int) -> RequestChain | None:
        """See `PostedRun`."""
        left = self._left[rail]
        return left[-1] if left else None

    def posted(self, rail: int) -> None:
        """See `PostedRun`."""
        self._left[rail].pop()

    def all_posted(self) -> bool:
        """See `PostedRun`."""
        return not any(self._left.values())

    def phase_over(self) -> bool:
        """See `PostedRun`. Every phase fetches the words, on each of its rails."""
        expected = self._epochs * len(self._left)
        if self._program.words.bytes[: len(expected)] != expected:
            self.error = self._dropped(np.frombuffer(expected, np.uint64))
            return False
        self._phases.pop()
        if not self._phases:
            return False
        self._load()
        return True

    def finish(self) -> None:
        """See `PostedRun`."""
        self._done(self.error)

    def failed(self, status: int) -> None:
        """See `PostedRun`."""
        connector = self._connector
        self._tries += 1
        again = self._tries < _TRIES
        if status == EXPIRED:
            self._report(TransferTimeoutError(f"the deadline passed before {connector.owner} had answered"))
        elif again and (status == FLUSHED or (status == _ACCESS and not self._probed)):
            self._again()
        elif connector.gone():
            self._report(OwnerDiedError(f"{connector.owner} is gone", status=status))
        elif again and status in NO_WAY and len(self._rails) > 1:
            self._again()
        else:
            self._report(self._verdict(status))

    def _prepare(self, connection: VerbsConnection, *, probe: bool) -> None:
        self._rails = connection.rails
        self._program = program = self._make(connection.rails)
        self._probed = probe
        self._phases = [program.data, program.probe] if probe else [program.data]
        self._load()

    def _load(self) -> None:
        self._left = {rail: [*reversed(chains)] for rail, chains in self._phases[-1].items()}

    def _again(self) -> None:
        """Begin again over a new connection: fetch the words first, and continue only if they are as expected."""
        try:
            connection = self._connector.connected(self.needs, self.due)
            self._prepare(connection, probe=True)
        except DataplaneError as error:
            self._report(error)
        else:
            if self._connector.engine.start(self, connection):
                self.finish()

    def _report(self, error: DataplaneError) -> None:
        self._done(error)
        self._connector.engine.over(self)

    def _verdict(self, status: int) -> TransferError:
        """The error for a status of the device after which nothing more can be tried."""
        text = _TEXTS.get(status, "an unexpected status")
        return TransferError(f"transfer with {self._connector.owner} failed: {text} (status {status})", status=status)

    def _dropped(self, expected: "np.ndarray[tuple[int], np.dtype[np.uint64]]") -> DataplaneError:
        changed = np.flatnonzero(self._program.words.found[: len(expected)] != expected)
        return dropped(self._remotes[changed[0] % len(self._remotes)].handle)


class VerbsAtomicRun(VerbsRun):
    """An atomic operation: posted only once.

    The word of the buffer is checked after it, and before it only if it begins again. The device itself refuses access
    to dropped buffers.
    """

    needs = (0,)

    def __init__(
        self,
        connector: OwnerConnector,
        make: Callable[[tuple[int, ...]], VerbsProgram],
        remote: Remote,
        timeout: float,
        operation: FetchOperation,
        spare: deque[VerbsProgram],
    ) -> None:
        """See `VerbsRun`; the program goes to `spare` when the operation has succeeded."""
        super().__init__(connector, make, (remote,), epochs_of((remote,)), (), timeout, operation.part_done)
        self._operation = operation
        self._spare = spare
        self._sent = False
        self._refusal: TransferError | None = None

    @property
    def previous(self) -> int:
        """The old value of the word."""
        return int(self._program.words.found[1])

    def posted(self, rail: int) -> None:
        """See `PostedRun`."""
        super().posted(rail)
        self._sent = self._sent or len(self._phases) == 1

    def finish(self) -> None:
        """See `PostedRun`."""
        self.error = self.error or self._refusal
        if self.error is None:
            self._operation.previous = self.previous
            self._spare.append(self._program)
        super().finish()

    def failed(self, status: int) -> None:
        """See `PostedRun`."""
        owner = self._connector.owner
        if not self._sent:
            super().failed(status)
        elif status in _REFUSED and self._refusal is None:
            self._refusal = self._verdict(status)
            self._again()  # only for the words, which show whether the buffer was dropped
        elif status == EXPIRED:
            self._report(TransferTimeoutError(f"the deadline passed before {owner} had answered; {_UNKNOWN}"))
        elif self._connector.gone():
            self._report(OwnerDiedError(f"{owner} is gone; {_UNKNOWN}", status=status))
        else:
            self._report(TransferError(f"{self._verdict(status)}; {_UNKNOWN}", status=status))

    def _prepare(self, connection: VerbsConnection, *, probe: bool) -> None:
        super()._prepare(connection, probe=probe)
        if self._refusal is not None:
            self._phases = [self._program.probe]
            self._load()


def epochs_of(remotes: Iterable[Remote]) -> bytes:
    """The expected values of the words of remotes, in their memory format."""
    return b"".join([_WORD.pack(remote.handle.epoch) for remote in remotes])
