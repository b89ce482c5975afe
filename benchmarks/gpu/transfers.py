"""Our reads and writes, each in turns with CUDA's own copy of as many bytes between the same kinds of memory.

The ceiling within a GPU is a copy on the device. Across PCIe it is a copy from or to pinned memory of the host, which
no copy of pageable memory reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from skipper.benchmarks.errors import IntegrityError
from skipper.benchmarks.gpu.owner import owned
from skipper.benchmarks.report import Reference, Result, Scalar
from skipper.benchmarks.statistics import timed
from skipper.dataplane import RDMABuffer

__all__ = ["Sweep", "measure"]

_TIMEOUT_S = 60.0
_WARM_UP = 3
_RATE_FROM = 64 << 10
"""For fewer bytes a row has the time of a transfer, for more their rate."""

PLACES = {"gpu": "cuda", "host": "cpu"}


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is measured.

    Attributes:
        sizes: In bytes.
        turns: How often each is measured.
    """

    sizes: tuple[int, ...]
    turns: int


def measure(sweep: Sweep) -> Iterator[Result]:
    """A row for each way and size, as soon as it is known.

    Raises:
        BenchmarkError: The other process cannot own such memory.
        IntegrityError: A transfer moved wrong bytes.
        DataplaneError: A transfer failed.
    """
    largest = max(sweep.sizes)
    with owned(largest, PLACES) as buffers:
        memory = {
            "gpu": torch.empty(largest, dtype=torch.uint8, device=PLACES["gpu"]),
            "host": torch.empty(largest, dtype=torch.uint8),
            "pinned host": torch.empty(largest, dtype=torch.uint8, pin_memory=True),
        }
        ceiling = _Ceiling(largest)
        for there, buffer in buffers.items():
            for here, local in memory.items():
                if "gpu" not in (here, there):
                    continue
                for size in sweep.sizes:
                    _check(buffer.at(0, size), local[:size])
                    for op in ("read", "write"):
                        yield _row(op, here, there, buffer.at(0, size), local[:size], ceiling, sweep.turns)


def _row(
    op: str, here: str, there: str, buffer: RDMABuffer, local: torch.Tensor, ceiling: _Ceiling, turns: int
) -> Result:
    def transfer() -> None:
        if op == "read":
            buffer.read_into(local, timeout=_TIMEOUT_S).get()
        else:
            buffer.write_from(local, timeout=_TIMEOUT_S).get()

    nbytes = buffer.nbytes
    source, target = (there, here) if op == "read" else (here, there)
    name, copy = ceiling.copier(source, target, nbytes)
    ours_ns, theirs_ns = [], []
    for turn in range(_WARM_UP + turns):
        pair = timed(transfer), timed(copy)
        if turn >= _WARM_UP:
            ours_ns.append(pair[0])
            theirs_ns.append(pair[1])
    unit = "us" if nbytes < _RATE_FROM else "GB/s"
    ours, theirs = ([ns / 1e3 if unit == "us" else nbytes / ns for ns in each] for each in (ours_ns, theirs_ns))
    reference = Reference(name, Result.from_samples(name, unit, theirs).value)
    parameters: dict[str, Scalar] = {
        "backend": buffer.backend,
        "op": op,
        "from": source,
        "to": target,
        "nbytes": nbytes,
    }
    return Result.from_samples(f"{op}_{there}", unit, ours, reference=reference, parameters=parameters)


class _Ceiling:
    """CUDA's own copies between memory of this process."""

    def __init__(self, nbytes: int) -> None:
        self._gpu = [torch.zeros(nbytes, dtype=torch.uint8, device=PLACES["gpu"]) for _ in range(2)]
        self._pinned = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)

    def copier(self, source: str, target: str, nbytes: int) -> tuple[str, Callable[[], object]]:
        """Its name, and a call that copies and waits until all has arrived."""
        near = {"gpu": self._gpu[0], "host": self._pinned, "pinned host": self._pinned}[source][:nbytes]
        far = {"gpu": self._gpu[1], "host": self._pinned, "pinned host": self._pinned}[target][:nbytes]

        def copy() -> None:
            far.copy_(near, non_blocking=True)
            torch.cuda.synchronize()

        if source == target:
            return "copy on the device", copy
        return "pinned copy to the GPU" if target == "gpu" else "pinned copy to the host", copy


def _check(buffer: RDMABuffer, local: torch.Tensor) -> None:
    """Write a pattern and read it back: the check must fail before the read, and pass after it."""
    local.fill_(0)
    if bool(local.any()):
        raise IntegrityError("memory that was set to zero is not")
    pattern = torch.arange(local.numel(), device=local.device).remainder_(251).to(torch.uint8)
    buffer.write_from(pattern, timeout=_TIMEOUT_S).get()
    if bool(torch.equal(local, pattern)) and local.numel() > 1:
        raise IntegrityError("the check missed that all bytes were wrong")
    buffer.read_into(local, timeout=_TIMEOUT_S).get()
    if not torch.equal(local, pattern):
        raise IntegrityError(f"{int((local != pattern).sum())} of {local.numel()} bytes came back wrong")
