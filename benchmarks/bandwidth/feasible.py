"""Whether this machine can do what was asked for; found out before anything is allocated or started."""

from __future__ import annotations

from skipper import dataplane
from skipper.benchmarks.bandwidth.memory import available_nbytes
from skipper.benchmarks.bandwidth.messages import ATOMICS, Workload
from skipper.benchmarks.errors import UsageError

__all__ = ["require_feasible"]

_USABLE_SHARE = 0.9  # of the memory that is free: what is left keeps the rest of the machine alive


def require_feasible(workload: Workload, nbytes: int) -> None:
    """Check the backend, the memory kind and the amount.

    Args:
        workload: What is to be done here.
        nbytes: Payload memory that it will take on this host, both ends together if both are here.

    Raises:
        UsageError: One clear sentence about what is missing.
    """
    if workload.op not in ("read", "write", *ATOMICS) or workload.batch < 1 or workload.largest < 1:
        raise UsageError(f"{workload.batch} x {workload.largest} bytes cannot be moved by {workload.op!r}")
    if not 0 < workload.timeout_s < 1e6:
        raise UsageError(f"a deadline of {workload.timeout_s} s is none")
    if workload.backend != "auto":
        _require_backend(workload.backend)
    if workload.mem != "host":
        _require_cuda(workload.mem)
    elif nbytes > _USABLE_SHARE * available_nbytes():
        need, free = (f"{amount / 2**30:.1f} GiB" for amount in (nbytes, available_nbytes()))
        raise UsageError(f"this needs {need} of memory and {free} are free; lessen --size or --batch")


def _require_backend(name: str) -> None:
    for status in dataplane.backends():
        if status.name == name:
            if not status.usable:
                raise UsageError(f"the {name} backend cannot be used here: {status.reason}")
            return
    known = ", ".join(status.name for status in dataplane.backends())
    raise UsageError(f"there is no backend {name!r} here, only {known}")


def _require_cuda(mem: str) -> None:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(mem.partition(":")[2] or 0)
    if index >= count:
        have = f"{count} of them" if count else "none"
        raise UsageError(f"--mem {mem} needs a GPU that torch can use as number {index}; it sees {have}")
