"""What the kernel's own one-sided copy does: ``process_vm_readv`` or ``_writev`` of the server's buffers.

UCX moves bytes between processes of one host with that very system call (its CMA transport), so its rate,
taken in turns with ours, says how much of a gap is ours and how much is the kernel's.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from skipper.benchmarks.bandwidth.messages import Offer

__all__ = ["boot_id", "kernel_copier", "name", "started"]

_MOST_IOVECS = 1024  # IOV_MAX of Linux, limits.h
_MOST_BYTES = 1 << 30  # one call moves at most 2**31 - 4096 bytes, read(2)


class _IoVec(ctypes.Structure):
    """``struct iovec`` of readv(2)."""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def boot_id() -> str:
    """Identity of the running kernel: equal for two processes of one machine, containers included."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def started(pid: int) -> int | None:
    """When a process began, in clock ticks since boot (field 22 of proc_pid_stat(5)), if it lives."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name and may hold blanks and brackets: count from its end.
    return int(stat.rpartition(")")[2].split()[19])


def name(op: str) -> str:
    """The system call that does what ``op`` does."""
    return "process_vm_readv" if op == "read" else "process_vm_writev"


def kernel_copier(op: str, offer: Offer, size: int, *, local: int) -> Callable[[], object] | None:
    """Prepare a call that reads or writes ``size`` bytes of each of the server's buffers, one after another.

    Args:
        op: ``read`` or ``write``.
        offer: Says where the buffers are.
        size: Bytes of each.
        local: Address to read to or write from: the very memory that the transfers use, so that both move the same
            bytes between the same places.

    Returns:
        The call, after it worked once; ``None`` where the server is no process of this kernel that
        this one sees, or the kernel forbids it (ptrace(2), "Ptrace access mode checking").
    """
    if not offer.addresses or offer.boot_id != boot_id() or offer.started != started(offer.pid):
        return None
    calls = _calls(offer.addresses, size, local)
    try:
        copy = _bind(name(op), offer.pid, calls)
        copy()
    except OSError:
        return None
    return copy


def _calls(addresses: list[int], size: int, local: int) -> list[tuple[_IoVec, list[_IoVec]]]:
    """Split the transfer into calls that the kernel accepts: a stretch here, and the pieces over there."""
    pieces = [
        (address + begin, min(_MOST_BYTES, size - begin))
        for address in addresses
        for begin in range(0, size, _MOST_BYTES)
    ]
    calls: list[tuple[_IoVec, list[_IoVec]]] = []
    for address, nbytes in pieces:
        if not calls or len(calls[-1][1]) == _MOST_IOVECS or calls[-1][0].nbytes + nbytes > _MOST_BYTES:
            calls.append((_IoVec(local, 0), []))
        calls[-1][1].append(_IoVec(address, nbytes))
        calls[-1][0].nbytes += nbytes
        local += nbytes
    return calls


def _bind(call: str, pid: int, calls: list[tuple[_IoVec, list[_IoVec]]]) -> Callable[[], object]:
    function = getattr(ctypes.CDLL(None, use_errno=True), call)
    unsigned = ctypes.c_ulong
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, unsigned, ctypes.c_void_p, unsigned, unsigned]
    function.restype = ctypes.c_ssize_t
    prepared = [(local, (_IoVec * len(remotes))(*remotes), len(remotes), local.nbytes) for local, remotes in calls]

    def copy() -> None:
        for local, remotes, count, nbytes in prepared:
            if function(pid, ctypes.byref(local), 1, remotes, count, 0) != nbytes:
                error = ctypes.get_errno()
                raise OSError(error, f"{call}: {os.strerror(error)}")

    return copy
