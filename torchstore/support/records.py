"""The figures of one put or get."""

from __future__ import annotations

import time
from dataclasses import dataclass

STAGES = ("wait", "control", "describe", "compile", "transfer", "verify", "cast")
"""The stages of an operation; the rest of its time is spent in the script's own event loop."""


@dataclass(slots=True, unsafe_hash=True)  # never changed; a frozen one with so many fields takes 3 us more to create
class SyncRecord:
    """One finished `put*` or `get*` of this process.

    Attributes:
        op: "put" or "get".
        key: The (first) key.
        version: The version that was written or read.
        mode: "snapshot", "direct", or "inline" if the value is so small that the controller itself has it.
        nbytes: Tensor bytes moved by this process (0 for a direct put: nothing moves).
        segments: Contiguous runs that were copied, after coalescing.
        seconds: Time of the whole operation, including the wait for the version.
        control_s: Part of ``seconds``: waiting for the store's controller (and for the version).
        compile_s: Part of ``seconds``: building the plan; 0 if the plan already existed.
        transfer_s: Part of ``seconds``: moving bytes.
        plan_hit: Whether a plan was replayed.
        control_calls: Control messages sent.
        wait_s: Part of ``control_s``: how long the controller waited for the version (reads of state dicts).
        describe_s: Part of ``seconds``: looking up what is stored and comparing it with the given tensors.
        verify_s: Part of ``seconds``: verifying that the bytes are those of one version.
        cast_s: Part of ``seconds``: converting tensors.
        slowest_rank: If several ranks have put the version, the last one, as a tuple of one.
        spread_s: How long after the first rank it put its part.
        ended: When the operation ended, in seconds since the epoch.
        saved_nbytes: ``delta=True``: bytes that did not have to be moved, because they were there already; for a put,
            those that readers of the previous version need not read.
        lent_nbytes: ``serve=True``: the part of ``nbytes`` that came from another reader's copy.

    Example:
        ```python
        import torch

        from skipper import torchstore
        from skipper.torchstore import sync as ts

        ts.initialize()
        ts.put_state_dict({"w": torch.ones(256)}, "policy")
        ts.get_state_dict("policy", {"w": torch.empty(256)})
        record = torchstore.last_sync()
        assert record is not None
        print(record.op, record.key, record.version, record.nbytes)  # get policy 1 1024
        ts.shutdown()
        ```
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
    wait_s: float = 0.0
    describe_s: float = 0.0
    verify_s: float = 0.0
    cast_s: float = 0.0
    slowest_rank: tuple[int, ...] = ()
    spread_s: float = 0.0
    ended: float = 0.0
    saved_nbytes: int = 0
    lent_nbytes: int = 0

    @property
    def gb_per_s(self) -> float:
        """Decimal gigabytes per second over the whole operation."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    def attributes(self) -> dict[str, str | bool | int | float]:
        """The attributes of its span."""
        return {
            "torchstore.key": self.key,
            "torchstore.version": self.version,
            "torchstore.mode": self.mode,
            "torchstore.nbytes": self.nbytes,
            "torchstore.plan_hit": self.plan_hit,
        }

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by stage, none counted twice; the rest of ``seconds`` belongs to no stage."""
        figures = {stage: float(getattr(self, f"{stage}_s")) for stage in STAGES}
        figures["control"] = max(self.control_s - self.wait_s, 0.0)
        return figures


@dataclass(slots=True)
class Cost:
    """Measures the stages of one operation; becomes its `SyncRecord`."""

    op: str
    begin: float
    control_s: float = 0.0
    wait_s: float = 0.0
    describe_s: float = 0.0
    compile_s: float = 0.0
    transfer_s: float = 0.0
    verify_s: float = 0.0
    cast_s: float = 0.0
    nbytes: int = 0
    segments: int = 0
    hit: bool = True
    mode: str = "inline"
    slowest_rank: tuple[int, ...] = ()
    spread_s: float = 0.0
    saved_nbytes: int = 0
    lent_nbytes: int = 0

    def spent_on(self, stage: str) -> _Stage:
        """Count the time of the block as ``stage`` (one of `STAGES`, but "wait")."""
        return _Stage(self, f"{stage}_s")

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
            wait_s=self.wait_s,
            describe_s=self.describe_s,
            verify_s=self.verify_s,
            cast_s=self.cast_s,
            slowest_rank=self.slowest_rank,
            spread_s=self.spread_s,
            ended=time.time(),
            saved_nbytes=self.saved_nbytes,
            lent_nbytes=self.lent_nbytes,
        )


class _Stage:
    """A block whose time counts for one stage."""

    __slots__ = ("_begin", "_cost", "_name")

    def __init__(self, cost: Cost, name: str) -> None:
        self._cost = cost
        self._name = name

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        cost, name = self._cost, self._name
        setattr(cost, name, getattr(cost, name) + time.perf_counter() - self._begin)
