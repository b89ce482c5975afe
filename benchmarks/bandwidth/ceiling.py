"""Ceilings of a transfer: the kernel's own one-sided copy within a host, and the wire between hosts.

UCX moves bytes between processes of one host by ``process_vm_readv`` and ``_writev`` (its CMA transport). The rate of
the same system call, taken in turns with ours, shows how much of a gap is ours and how much is the kernel's.

Each end knows the rate of its own link from /sys; the slower of the two is the ceiling of the wire. Where no wire is
crossed, or no driver states its rate, there is a reason in place of the ceiling.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from skipper.benchmarks.bandwidth.messages import Offer, Wire
from skipper.dataplane.doctor.sysfs import interfaces, rdma_ports

__all__ = ["boot_id", "kernel_copier", "link", "name", "started", "wire_ceiling"]

_MOST_IOVECS = 1024  # IOV_MAX of Linux, limits.h
_MOST_BYTES = 1 << 30  # one call moves at most 2**31 - 4096 bytes, read(2)


class _IoVec(ctypes.Structure):
    """``struct iovec`` of readv(2)."""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def boot_id() -> str:
    """Identity of the running kernel: equal for two processes of one machine, containers included."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def started(pid: int) -> int | None:
    """When a process began, in clock ticks since boot (field 22 of proc_pid_stat(5)), if it runs."""
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
        local: Address to read to or write from: that of the transfers' own memory, so that both move the same bytes
            between the same places.

    Returns:
        The call, after it worked once; ``None`` if this process does not see the server among the
        processes of its kernel, or if the kernel forbids the call (ptrace(2), "Ptrace access mode checking").
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
    """Split the transfer into calls that the kernel accepts: a stretch of local memory, and pieces of the server's."""
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


def link(backend: str, net_devices: str | None) -> Wire:
    """The link by which transfers of ``backend`` leave this end.

    Args:
        backend: The one in use, not ``auto``.
        net_devices: As given to ``--net-devices``. Without it: for verbs, the first active RDMA port; for
            ucx, what its environment variables say, else the loopback.
    """
    if backend == "verbs":
        ports = [f"{port.device}:{port.number}" for port in rdma_ports() if port.state == "ACTIVE"]
        return _joined(net_devices.split(",") if net_devices else ports[:1])
    if backend == "ucx":
        return _joined((net_devices or os.environ.get("UCX_NET_DEVICES", "lo")).split(","))
    return Wire(None, "memory is copied within one host: no wire is crossed")


def wire_ceiling(backend: str, near: Wire, far: Wire, *, one_host: bool) -> Wire:
    """What bounds a transfer between two ends.

    Args:
        backend: The one in use.
        near: The link of this end.
        far: The link of the other.
        one_host: Both ends run on one kernel. Then only an RDMA device sends the bytes over a link.
    """
    if one_host and backend != "verbs":
        return Wire(None, "both ends are on one host: no wire is crossed")
    for wire in (near, far):
        if wire.gbit_per_s is None:
            return wire
    return min((near, far), key=lambda wire: wire.gbit_per_s or 0.0)


def _joined(names: Sequence[str]) -> Wire:
    """Several links used at once."""
    links = [_named(name) for name in names]
    unknown = next((one for one in links if one.gbit_per_s is None), None)
    if unknown is not None or not links:
        return unknown or Wire(None, "no RDMA port is active")
    told = " and ".join(one.told for one in links)
    return Wire(sum(one.gbit_per_s or 0.0 for one in links), told)


def _named(name: str) -> Wire:
    """One link: an RDMA port as ``DEVICE`` or ``DEVICE:PORT``, or a network interface."""
    device, _, number = name.partition(":")
    for port in rdma_ports():
        if port.device == device and number in ("", str(port.number)):
            if port.software:
                return Wire(None, f"{device} is made of software: its {port.gbit_per_s:g} Gb/s are nominal")
            return _stated(f"{device} port {port.number}", port.gbit_per_s)
    for interface in interfaces():
        if interface.name == name:
            if interface.software:
                return Wire(None, f"{name} has no wire behind it")
            return _stated(name, interface.gbit_per_s)
    return Wire(None, f"{name} names no single link here")


def _stated(name: str, gbit_per_s: float | None) -> Wire:
    if gbit_per_s is None:
        return Wire(None, f"the driver of {name} states no rate")
    return Wire(gbit_per_s, f"{name}, {gbit_per_s:g} Gb/s")
