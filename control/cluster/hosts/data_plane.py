"""What the data plane needs to know so that it reaches other hosts: through which device of this machine."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from skipper.control.wire.addresses import is_loopback

VARIABLE = "SKIPPER_DATA_PLANE_HOST"
DEVICES = "UCX_NET_DEVICES"
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_IFREQ = struct.Struct("16s24x")  # netdevice(7)


def open_data_plane(host: str) -> None:
    """Let the data plane of this process, and of those that it starts, use the network device that has an IP.

    The user's own choice stands. For the loopback there is nothing to do: nothing else is used by default.

    Args:
        host: the IP.
    """
    if is_loopback(host):
        return
    os.environ.setdefault(VARIABLE, host)
    device = device_of(host)
    if device is not None:
        os.environ.setdefault(DEVICES, f"{device},lo")


def device_of(host: str) -> str | None:
    """The network device with this IPv4 address, that of the loopback for all of its addresses; None: there is none."""
    if ":" in host:
        return None
    if is_loopback(host):
        host = "127.0.0.1"
    return next((name for _, name in socket.if_nameindex() if address_of(name) == host), None)


def address_of(device: str) -> str | None:
    """The IPv4 address of a network device; None where it has none, or there is no such device."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, _IFREQ.pack(device.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
