"""RDMA ports and network interfaces as /sys shows them. Opens no device; the root can be another for tests."""

from dataclasses import dataclass
from pathlib import Path

from skipper.dataplane.backends.verbs.port import SYS, Gid, PortFolder, port_folders, text_of


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an RDMA device.

    Attributes:
        device: Name, such as ``mlx5_0``.
        number: Counted from 1.
        state: ``ACTIVE``, ``DOWN``, ...
        link: ``InfiniBand`` or ``Ethernet``.
        gbit_per_s: Rate of the link; None if it is not stated.
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


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface.

    Attributes:
        name: Such as ``eth0``.
        state: ``up``, ``down``, ``unknown`` (a loopback).
        gbit_per_s: Speed of the link; None if its driver states none, or there is no link.
        mtu: Bytes.
        software: It has no device: veth, bridge, loopback.
    """

    name: str
    state: str
    gbit_per_s: float | None
    mtu: int
    software: bool


def rdma_ports(root: Path = SYS) -> list[RdmaPort]:
    """All ports of all RDMA devices; an empty list without kernel support."""
    return [_port(folder) for folder in port_folders(root)]


def interfaces(root: Path = SYS) -> list[Interface]:
    """All network interfaces of this network namespace."""
    folder = root / "class" / "net"
    # Not everything there is one: bonding_masters is a file.
    found = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    return [
        Interface(
            name=path.name,
            state=text_of(path / "operstate") or "unknown",
            gbit_per_s=_megabits(text_of(path / "speed")),
            mtu=int(text_of(path / "mtu") or 0),
            software=not (path / "device").exists(),
        )
        for path in found
    ]


def mellanox_adapters(root: Path = SYS) -> int:
    """How many network adapters of NVIDIA/Mellanox are on the PCI bus, driver or not."""
    count = 0
    for device in (root / "bus" / "pci" / "devices").glob("*"):
        network = (text_of(device / "class") or "").startswith("0x02")
        count += network and text_of(device / "vendor") == "0x15b3"
    return count


def _port(folder: PortFolder) -> RdmaPort:
    return RdmaPort(
        device=folder.device,
        number=folder.number,
        state=folder.state,
        link=folder.link,
        gbit_per_s=folder.gbit_per_s,
        software=folder.software,
        gids=tuple(folder.gids()),
    )


def _megabits(speed: str | None) -> float | None:
    """Gb/s of a speed in Mb/s; -1 and 4294967295 stand for unknown."""
    value = int(speed) if speed is not None and speed.lstrip("-").isdecimal() else -1
    return value / 1000 if 0 < value < 0xFFFFFFFF else None
