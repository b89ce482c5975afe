"""RDMA ports and network interfaces as /sys shows them. Opens no device; the root can be another for tests."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

SYS = Path("/sys")


@dataclass(frozen=True, slots=True)
class Gid:
    """An address of a port: its entry in the table, the address, its kind (``RoCE v2``, ...), the interface."""

    index: int
    gid: str
    kind: str | None
    interface: str | None


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an RDMA device.

    Attributes:
        device: Name, such as ``mlx5_0``.
        number: Counted from 1.
        state: ``ACTIVE``, ``DOWN``, ...
        link: ``InfiniBand`` or ``Ethernet``.
        gbit_per_s: Rate of the link; None where it is not stated.
        software: The device is made by the kernel (Soft-RoCE, siw): its rate is nominal.
        gids: Its addresses in use.
    """

    device: str
    number: int
    state: str
    link: str
    gbit_per_s: float | None
    software: bool
    gids: tuple[Gid, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "gids": [asdict(gid) for gid in self.gids]}


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface.

    Attributes:
        name: Such as ``eth0``.
        state: ``up``, ``down``, ``unknown`` (a loopback).
        gbit_per_s: Speed of the link; None where its driver states none, or there is no link.
        mtu: Bytes.
        software: No device is behind it: veth, bridge, loopback.
    """

    name: str
    state: str
    gbit_per_s: float | None
    mtu: int
    software: bool


def rdma_ports(root: Path = SYS) -> list[RdmaPort]:
    """All ports of all RDMA devices; an empty list without kernel support."""
    folder = root / "class" / "infiniband"
    if not folder.is_dir():
        return []
    return [
        _port(device, number)
        for device in sorted(folder.iterdir())
        for number in sorted(int(port.name) for port in (device / "ports").iterdir())
    ]


def interfaces(root: Path = SYS) -> list[Interface]:
    """All network interfaces of this network namespace."""
    folder = root / "class" / "net"
    # Not everything there is one: bonding_masters is a file.
    found = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    return [
        Interface(
            name=path.name,
            state=_text(path / "operstate") or "unknown",
            gbit_per_s=_megabits(_text(path / "speed")),
            mtu=int(_text(path / "mtu") or 0),
            software=not (path / "device").exists(),
        )
        for path in found
    ]


def mellanox_adapters(root: Path = SYS) -> int:
    """How many network adapters of NVIDIA/Mellanox are on the PCI bus, driver or not."""
    count = 0
    for device in (root / "bus" / "pci" / "devices").glob("*"):
        network = (_text(device / "class") or "").startswith("0x02")
        count += network and _text(device / "vendor") == "0x15b3"
    return count


def _port(device: Path, number: int) -> RdmaPort:
    path = device / "ports" / str(number)
    return RdmaPort(
        device=device.name,
        number=number,
        state=(_text(path / "state") or "unknown").rpartition(":")[2].strip(),
        link=_text(path / "link_layer") or "unknown",
        gbit_per_s=_gigabits(_text(path / "rate")),
        software=not (device / "device").exists(),
        gids=tuple(_gids(path)),
    )


def _gids(port: Path) -> Iterator[Gid]:
    for index in sorted(int(entry.name) for entry in (port / "gids").glob("*")):
        text = _text(port / "gids" / str(index))
        if text is not None and text.strip("0:"):
            attributes = port / "gid_attrs"
            kind, interface = (_text(attributes / what / str(index)) for what in ("types", "ndevs"))
            yield Gid(index, _compact(text), kind, interface)


def _compact(gid: str) -> str:
    """A GID as people write it: an IPv4 address where it holds one."""
    address = IPv6Address(gid)
    return str(address if address.ipv4_mapped is None else address.ipv4_mapped)


def _gigabits(rate: str | None) -> float | None:
    """Gb/s of ``100 Gb/sec (4X EDR)``."""
    number = (rate or "").split(" ")[0]
    try:
        return float(number) or None
    except ValueError:
        return None


def _megabits(speed: str | None) -> float | None:
    """Gb/s of a speed in Mb/s; -1 and 4294967295 stand for unknown."""
    value = int(speed) if speed is not None and speed.lstrip("-").isdecimal() else -1
    return value / 1000 if 0 < value < 0xFFFFFFFF else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # unused entries and links that are down answer EINVAL
        return None
