"""Operations under way, and what may become of them."""

import threading
import time
from collections.abc import Callable, Sequence

from skipper.dataplane import BufferDroppedError, Operation, OwnerDiedError, TransferError, TransferTimeoutError
from tests.soak.slots import Held

SLACK_S = 10.0
"""Beyond a deadline; what a machine with more threads than cores may take to run the one that notices."""

LATE_S = 60.0


class Pending:
    """One operation from its submission to its verdict.

    Attributes:
        kind: For the summary.
        operation: The thing itself.
        reads: Buffers that it reads.
        writes: Buffers that it writes.
        nbytes: How much.
        check: Called after success; what is wrong.
    """

    def __init__(
        self,
        kind: str,
        submit: Callable[[float], Operation],
        *,
        reads: Sequence[Held] = (),
        writes: Sequence[Held] = (),
        nbytes: int,
        timeout: float,
        check: Callable[[Operation], str | None],
    ) -> None:
        self.kind = kind
        self.reads = tuple(reads)
        self.writes = tuple(writes)
        self.nbytes = nbytes
        self.check = check
        self._timeout = timeout
        self.over = threading.Event()
        self._begun = time.monotonic()
        self.ended = 0.0
        self.operation = submit(timeout)
        self.operation.add_done_callback(self._note)

    @property
    def buffers(self) -> tuple[Held, ...]:
        return self.reads + self.writes

    @property
    def seconds(self) -> float:
        return self.ended - self._begun

    def verdict(self) -> tuple[str, str | None]:
        """What it has come to ("succeeds" or the error's class), and what is wrong with that."""
        try:
            self.operation.get()
        except Exception as error:  # noqa: BLE001 - to be judged
            for held in self.writes:
                held.doubtful = True
            return type(error).__name__, self._late() or self._objection(error)
        return "succeeds", self._late() or self._resurrection() or self.check(self.operation)

    def _note(self, _: Operation) -> None:
        self.ended = time.monotonic()
        self.over.set()

    def _late(self) -> str | None:
        if self.seconds > self._timeout + SLACK_S:
            return f"a {self.kind} took {self.seconds:.1f} s, its deadline was {self._timeout} s"
        return None

    def _resurrection(self) -> str | None:
        for held in self.buffers:
            if held.drop_done is not None and held.drop_done < self._begun:
                return f"a {self.kind} of buffer {held.number} succeeded after it was dropped"
            if held.life.gone_at is not None and held.life.gone_at < self._begun:
                return f"a {self.kind} of buffer {held.number} succeeded after its owner was gone"
        return None

    def _objection(self, error: Exception) -> str | None:
        """Nothing where a fault that happened explains the error."""
        if isinstance(error, BufferDroppedError):
            explained = any(held.drop_begun is not None and held.drop_begun < self.ended for held in self.buffers)
        elif isinstance(error, OwnerDiedError):
            explained = any(
                held.life.killed_at is not None and held.life.killed_at < self.ended for held in self.buffers
            )
        elif isinstance(error, TransferTimeoutError):
            explained = any(self._waits_for(held) for held in self.buffers)
        elif isinstance(error, TransferError) and self.kind == "atomic":
            # Its connection was cut for another's deadline, who may have waited for longer: it is not tried again.
            explained = any(self._waits_for(held, since=self._begun - self._timeout) for held in self.buffers)
        else:
            explained = False
        if explained:
            return None
        lanes = ", ".join(sorted({held.owner.lane.name for held in self.buffers}))
        return f"a {self.kind} over {lanes} failed for no reason: {error!r}"

    def _waits_for(self, held: Held, *, since: float | None = None) -> bool:
        """Whether it had to wait for an owner that was stopped meanwhile, or after ``since``."""
        lane = held.owner.lane
        if self.kind == "atomic":
            waits = lane.atomics_wait
        else:
            waits = lane.writes_wait if held in self.writes else lane.reads_wait
        return waits and held.life.stopped_within(self._begun if since is None else since, self.ended)
