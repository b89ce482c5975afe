"""Ports of RDMA devices as /sys shows them, each thing read when it is asked for. Opens no device, needs no pyverbs."""

from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path

SYS = Path("/sys")
_DEVICES = Path("class") / "infiniband"


@dataclass(frozen=True, slots=True)
class Gid:
    """An address of a port: its entry in the table, the address, its kind (``RoCE v2``, ...), the interface."""

    index: int
    gid: str
    kind: str | None
    interface: str | None


@dataclass(frozen=True, slots=True)
class PortFolder:
    """A port's folder."""

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
        """``ACTIVE``, ``DOWN``, ...; ``unknown`` where the kernel does not say, as of a device that is gone."""
        return (text_of(self.path / "state") or "unknown").rpartition(":")[2].strip()

    @property
    def link(self) -> str:
        """``InfiniBand`` or ``Ethernet``."""
        return text_of(self.path / "link_layer") or "unknown"

    @property
    def gbit_per_s(self) -> float | None:
        """Rate of the link, as in ``100 Gb/sec (4X EDR)``; None where it is not stated."""
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
    """A GID as people write it: an IPv4 address where it holds one."""
    address = IPv6Address(gid)
    return str(address if address.ipv4_mapped is None else address.ipv4_mapped)
