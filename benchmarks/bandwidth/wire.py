"""How fast the wire is that a transfer crosses: the ceiling of a run between two hosts, or through an RDMA device.

Each end knows its own link, from /sys; the slower of the two is the ceiling. Where no wire is crossed, or nobody
states its rate, there is no ceiling, and a reason in its place.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from skipper.benchmarks.bandwidth.messages import Wire
from skipper.dataplane.doctor.sysfs import interfaces, rdma_ports

__all__ = ["ceiling", "link"]


def link(backend: str, net_devices: str | None) -> Wire:
    """The link of this end that transfers by ``backend`` leave it by.

    Args:
        backend: The one in use, not ``auto``.
        net_devices: As given to ``--net-devices``. Without: the first active RDMA port for verbs, and what UCX
            is told by its environment, else the loopback, for ucx.
    """
    if backend == "verbs":
        ports = [f"{port.device}:{port.number}" for port in rdma_ports() if port.state == "ACTIVE"]
        return _together(net_devices.split(",") if net_devices else ports[:1])
    if backend == "ucx":
        return _together((net_devices or os.environ.get("UCX_NET_DEVICES", "lo")).split(","))
    return Wire(None, "memory is copied within one host: no wire is crossed")


def ceiling(backend: str, near: Wire, far: Wire, *, one_host: bool) -> Wire:
    """What bounds a transfer between two ends.

    Args:
        backend: The one in use.
        near: The link of this end.
        far: The link of the other.
        one_host: Both ends run on one kernel. Only an RDMA device moves the bytes itself then.
    """
    if one_host and backend != "verbs":
        return Wire(None, "both ends are on one host: no wire is crossed")
    for wire in (near, far):
        if wire.gbit_per_s is None:
            return wire
    return min((near, far), key=lambda wire: wire.gbit_per_s or 0.0)


def _together(names: Sequence[str]) -> Wire:
    """All of these links at once."""
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
