"""What one put or get did, in figures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SyncRecord:
    """One finished `put*` or `get*` of this process.

    Attributes:
        op: "put" or "get".
        key: The (first) key.
        version: The version that was written or read.
        mode: "snapshot", "direct", or "inline" where the value travelled in the message.
        nbytes: Tensor bytes moved by this process (0 for a direct put: nothing moves).
        segments: Contiguous runs that were copied, after coalescing.
        seconds: All of it, the wait for the version included.
        control_s: Of these, waiting for the store's controller (and for the version).
        compile_s: Of these, building the plan; 0 when it was found.
        transfer_s: Of these, moving bytes.
        plan_hit: Whether a plan was replayed.
        control_calls: Control messages sent.
    """

    op: str
    key: str
    version: int
    mode: str
    nbytes: int
    segments: int
    seconds: float
    control_s: float
    compile_s: float
    transfer_s: float
    plan_hit: bool
    control_calls: int

    @property
    def gb_per_s(self) -> float:
        """Decimal gigabytes per second over the whole operation."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(slots=True)
class Cost:
    """Where the time of one operation goes; becomes its `SyncRecord`."""

    op: str
    begin: float
    control_s: float = 0.0
    compile_s: float = 0.0
    transfer_s: float = 0.0
    nbytes: int = 0
    segments: int = 0
    hit: bool = True
    mode: str = "inline"

    @contextmanager
    def spent_on(self, stage: str) -> Iterator[None]:
        """Count the time of the block as ``stage`` ("control", "compile" or "transfer")."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            name = f"{stage}_s"
            setattr(self, name, getattr(self, name) + time.perf_counter() - begin)

    def record(self, key: str, version: int, calls: int) -> SyncRecord:
        """The figures of the finished operation."""
        return SyncRecord(
            op=self.op,
            key=key,
            version=version,
            mode=self.mode,
            nbytes=self.nbytes,
            segments=self.segments,
            seconds=time.perf_counter() - self.begin,
            control_s=self.control_s,
            compile_s=self.compile_s,
            transfer_s=self.transfer_s,
            plan_hit=self.hit,
            control_calls=calls,
        )
