"""Where processes are reached, as text: gRPC targets within a host, and ``IP:PORT`` between hosts; network devices.

Every process listens on a socket of its host whose name follows from its id. A process that other hosts may dial also
listens on TCP, and its reference says ``IP:PORT``. Port 0 means that only its launcher knows the port yet. Two
processes with the same IP are on the same host and use the socket within it.
"""

from __future__ import annotations

import fcntl
import socket
import struct

SCHEME = "tcp://"

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_IFREQ = struct.Struct("16s24x")  # netdevice(7)


def within_host(process_id: str) -> str:
    """The gRPC target of a process for processes on its host (and in its network namespace)."""
    return f"unix-abstract:skipper-{process_id}"


def at(host: str, port: int) -> str:
    """``IP:PORT``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """The IP of an address; empty for an address that is valid only within its host."""
    if address.startswith("unix"):
        return ""
    return address.rpartition(":")[0].strip("[]")


def port_of(address: str) -> int:
    """The port of an ``IP:PORT``; 0 if only the launcher knows it."""
    port = address.rpartition(":")[2]
    return int(port) if port.isdecimal() else 0


def target(address: str) -> str:
    """The gRPC target to dial an ``IP:PORT`` without looking up any name."""
    host = host_of(address)
    return address if not host else f"{'ipv6' if ':' in host else 'ipv4'}:{address}"


def dialed(target: str) -> str:
    """The IP of a gRPC target; empty for one within this host."""
    kind, _, address = target.partition(":")
    return host_of(address) if kind in ("ipv4", "ipv6") else host_of(target)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an IP."""
    import ipaddress

    return ipaddress.ip_address(host).is_loopback


def parse(text: str) -> tuple[str, int]:
    """The IP and the port of ``tcp://HOST:PORT``; a name is looked up, IPv4 first.

    Raises:
        ValueError: it is no such address, or the name is unknown.
    """
    import ipaddress  # most processes do not need it

    host, colon, port = text.removeprefix(SCHEME).rpartition(":")
    host = host.strip("[]")
    if not (colon and host and port.isdecimal() and int(port) < 1 << 16) or "/" in host:
        raise ValueError(f"an address is tcp://HOST:PORT, not {text!r}")
    try:
        return str(ipaddress.ip_address(host)), int(port)
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"{text}: the host {host!r} cannot be resolved: {error}") from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0]), int(port)


def own_address_towards(host: str) -> str:
    """The IP that this machine uses to reach another.

    Raises:
        OSError: there is no route to it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])


def device_of(host: str) -> str | None:
    """The network device with this IPv4 address, that of the loopback for all of its addresses; None: there is none."""
    if ":" in host:
        return None
    if is_loopback(host):
        host = "127.0.0.1"
    return next((name for _, name in socket.if_nameindex() if address_of_device(name) == host), None)


def address_of_device(device: str) -> str | None:
    """The IPv4 address of a network device; None if it has none, or does not exist."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, _IFREQ.pack(device.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
