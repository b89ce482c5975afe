"""RDMA ports as /sys shows them: which there are, which to use, by what address. Opens nothing, needs no pyverbs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplane.errors import BackendUnavailableError

MOST_PORTS = 8
"""A process uses at most so many at a time."""

_SYSFS = Path("/sys/class/infiniband")
_MAPPED = bytes(10) + b"\xff\xff"  # how a GID holds an IPv4 address: RFC 4291, 2.5.5.2
_LINK_LOCAL = b"\xfe\x80"


@dataclass(frozen=True, slots=True)
class Port:
    """A port of a device.

    Attributes:
        device: Name, as `ibv_devices` prints it.
        number: Counted from 1.
        gid_index: The entry of its table of addresses to use.
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
        return _state(_SYSFS / self.device / "ports" / str(self.number)) == "ACTIVE"


def find_ports(options: Mapping[str, Any]) -> tuple[Port, ...]:
    """The ports to use, in order: as configured, else the first active one.

    Raises:
        BackendUnavailableError: There is none, or one that is named is missing or not active, in words that say so.
    """
    wanted, number = options.get("device"), options.get("port")
    if isinstance(wanted, str) and ":" in wanted:
        wanted = (wanted,)
    if isinstance(wanted, tuple):
        return tuple(_named(name, number, options) for name in wanted)
    active, seen = [], []
    for device, path in _ports(None if wanted == "all" else wanted, number):
        state = _state(path)
        seen.append(f"{device} port {path.name} is {state}")
        if state == "ACTIVE":
            active.append(_port(device, path, options.get("gid_index")))
    if active:
        return tuple(active[:MOST_PORTS]) if wanted == "all" else (active[0],)
    if seen:
        raise BackendUnavailableError(f"no RDMA port is active: {', '.join(seen)}")
    if wanted not in (None, "all"):
        raise BackendUnavailableError(f"there is no RDMA device {wanted} with port {number or 1}")
    raise BackendUnavailableError("this kernel has no RDMA device (/sys/class/infiniband)")


def _named(name: str, number: int | None, options: Mapping[str, Any]) -> Port:
    """The active port of one entry of a list: "NAME" or "NAME:PORT"."""
    device, _, own = name.partition(":")
    one = find_ports({**options, "device": device, "port": int(own) if own else number})
    return one[0]


def _ports(wanted: str | None, number: int | None) -> Iterator[tuple[str, Path]]:
    devices: Sequence[Path] = sorted(_SYSFS.iterdir()) if _SYSFS.is_dir() else ()
    for device in devices:
        for path in sorted((device / "ports").iterdir(), key=lambda path: int(path.name)):
            if wanted in (None, device.name) and number in (None, int(path.name)):
                yield device.name, path


def _state(path: Path) -> str:
    try:
        return (path / "state").read_text().split()[-1]
    except OSError:
        return "gone"


def _port(device: str, path: Path, gid_index: int | None) -> Port:
    routed = (path / "link_layer").read_text().strip() == "Ethernet"
    return Port(device, int(path.name), _best_gid(path, routed) if gid_index is None else gid_index, routed)


def _best_gid(path: Path, routed: bool) -> int:
    """RoCE v2 with an IPv4 address before one with IPv6, that before link-local ones; entry 0 on InfiniBand."""
    best, best_rank = 0, 0
    for index in sorted(int(entry.name) for entry in (path / "gids").iterdir()) if routed else ():
        try:
            kind = (path / "gid_attrs" / "types" / str(index)).read_text().strip()
            gid = bytes.fromhex((path / "gids" / str(index)).read_text().strip().replace(":", ""))
        except OSError:
            continue  # an unused entry has no type
        if gid.startswith(_MAPPED) and kind == "RoCE v2":
            return index
        rank = 0 if kind != "RoCE v2" or not any(gid) else 1 if gid.startswith(_LINK_LOCAL) else 2
        if rank > best_rank:
            best, best_rank = index, rank
    return best
