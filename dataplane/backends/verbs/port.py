"""RDMA ports in /sys: which to use, and with which address. Opens no device, needs no pyverbs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any

from skipper.dataplane.errors import BackendUnavailableError

SYS = Path("/sys")
_DEVICES = Path("class") / "infiniband"

MOST_PORTS = 8
"""How many ports a process uses at most at a time."""

_SYS = SYS  # another folder in tests


@dataclass(frozen=True, slots=True)
class Gid:
    """An address of a port: its index in the table, the address, its kind (``RoCE v2``, ...), the interface."""

    index: int
    gid: str
    kind: str | None
    interface: str | None


@dataclass(frozen=True, slots=True)
class PortFolder:
    """A port's folder in /sys; each property is read when it is used."""

    path: Path

    @property
    def device(self) -> str:
        """Name, as `ibv_devices` prints it."""
        return self.path.parents[1].name

    @property
    def number(self) -> int:
        """Counted from 1."""
        return int(self.path.name)

    @property
    def state(self) -> str:
        """``ACTIVE``, ``DOWN``, ...; ``unknown`` if the kernel does not say, for example if the device is gone."""
        return (text_of(self.path / "state") or "unknown").rpartition(":")[2].strip()

    @property
    def link(self) -> str:
        """``InfiniBand`` or ``Ethernet``."""
        return text_of(self.path / "link_layer") or "unknown"

    @property
    def gbit_per_s(self) -> float | None:
        """Rate of the link, as in ``100 Gb/sec (4X EDR)``; None if it is not stated."""
        number = (text_of(self.path / "rate") or "").split(" ")[0]
        try:
            return float(number) or None
        except ValueError:
            return None

    @property
    def software(self) -> bool:
        """Whether its device is made by the kernel (Soft-RoCE, siw)."""
        return not (self.path.parents[1] / "device").exists()

    def gids(self) -> Iterator[Gid]:
        """Its addresses in use, in the order of its table."""
        for index in sorted(int(entry.name) for entry in (self.path / "gids").glob("*")):
            text = text_of(self.path / "gids" / str(index))
            if text is not None and text.strip("0:"):
                attributes = self.path / "gid_attrs"
                kind, interface = (text_of(attributes / what / str(index)) for what in ("types", "ndevs"))
                yield Gid(index, _compact(text), kind, interface)


def port_folder(device: str, number: int, root: Path = SYS) -> PortFolder:
    """The folder of a port, which may be gone."""
    return PortFolder(root / _DEVICES / device / "ports" / str(number))


def port_folders(root: Path = SYS) -> Iterator[PortFolder]:
    """The folders of all ports of all devices, in the order of their names; none without kernel support."""
    folder = root / _DEVICES
    for device in sorted(folder.iterdir()) if folder.is_dir() else ():
        for number in sorted(int(port.name) for port in (device / "ports").iterdir()):
            yield port_folder(device.name, number, root)


def text_of(path: Path) -> str | None:
    """The text of a file; None if it cannot be read: unused entries and links that are down answer EINVAL."""
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _compact(gid: str) -> str:
    """A GID as people write it: an IPv4 address if it contains one."""
    address = IPv6Address(gid)
    return str(address if address.ipv4_mapped is None else address.ipv4_mapped)


@dataclass(frozen=True, slots=True)
class VerbsPort:
    """A port of a device.

    Attributes:
        device: Name, as `ibv_devices` prints it.
        number: Counted from 1.
        gid_index: The index of the address to use in its table.
        routed: Whether packets need that address (always on Ethernet).
    """

    device: str
    number: int
    gid_index: int
    routed: bool

    def __str__(self) -> str:
        return f"{self.device} port {self.number}"

    @property
    def active(self) -> bool:
        """Whether it can send now."""
        return port_folder(self.device, self.number, _SYS).state == "ACTIVE"


def find_ports(options: Mapping[str, Any]) -> tuple[VerbsPort, ...]:
    """The ports to use, in order: as configured, or the one with the listening address, or the first active one.

    Raises:
        BackendUnavailableError: There is none, or a named one is missing or not active; the message says which.
    """
    wanted, number = options.get("device"), options.get("port")
    if isinstance(wanted, str) and ":" in wanted:
        wanted = (wanted,)
    if isinstance(wanted, tuple):
        return tuple(_named(name, number, options) for name in wanted)
    active: list[VerbsPort] = []
    seen: list[str] = []
    listens_at = str(options.get("listen", "")).rpartition(":")[0].strip("[]")
    for folder in _ports(None if wanted == "all" else wanted, number):
        state = folder.state
        seen.append(f"{folder.device} port {folder.number} is {state}")
        if state == "ACTIVE":
            at = 0 if wanted is None and _has_address(folder, listens_at) else len(active)
            active.insert(at, _port(folder, options.get("gid_index")))
    if active:
        return tuple(active[:MOST_PORTS]) if wanted == "all" else (active[0],)
    if seen:
        raise BackendUnavailableError(f"no RDMA port is active: {', '.join(seen)}")
    if wanted not in (None, "all"):
        raise BackendUnavailableError(f"there is no RDMA device {wanted} with port {number or 1}")
    raise BackendUnavailableError("this kernel has no RDMA device (/sys/class/infiniband)")


def _named(name: str, number: int | None, options: Mapping[str, Any]) -> VerbsPort:
    """The active port of one entry of a list: "NAME" or "NAME:PORT"."""
    device, _, own = name.partition(":")
    one = find_ports({**options, "device": device, "port": int(own) if own else number})
    return one[0]


def _ports(wanted: str | None, number: int | None) -> Iterator[PortFolder]:
    for folder in port_folders(_SYS):
        if wanted in (None, folder.device) and number in (None, folder.number):
            yield folder


def _port(folder: PortFolder, gid_index: int | None) -> VerbsPort:
    routed = folder.link == "Ethernet"
    return VerbsPort(
        folder.device, folder.number, _best_gid(folder, routed) if gid_index is None else gid_index, routed
    )


def _has_address(folder: PortFolder, host: str) -> bool:
    """Whether a port has the IP of a host: packets to that host then go to its RDMA device."""
    return bool(host) and any(str(ip_address(gid.gid)) == host for gid in folder.gids())


def _best_gid(folder: PortFolder, routed: bool) -> int:
    """RoCE v2 with an IPv4 address first, then with IPv6, then link-local ones; index 0 on InfiniBand."""
    best, best_rank = 0, 0
    for gid in folder.gids() if routed else ():
        if gid.kind != "RoCE v2":
            continue
        address = ip_address(gid.gid)
        if address.version == 4:
            return gid.index
        rank = 1 if address.is_link_local else 2
        if rank > best_rank:
            best, best_rank = gid.index, rank
    return best
