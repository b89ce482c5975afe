"""RDMA ports: which to use, and by what address. Opens nothing, needs no pyverbs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from skipper.dataplane.backends.verbs.sysfs import SYS, PortFolder, port_folder, port_folders
from skipper.dataplane.errors import BackendUnavailableError

MOST_PORTS = 8
"""A process uses at most so many at a time."""

_SYS = SYS  # another folder in tests


@dataclass(frozen=True, slots=True)
class VerbsPort:
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
        return port_folder(self.device, self.number, _SYS).state == "ACTIVE"


def find_ports(options: Mapping[str, Any]) -> tuple[VerbsPort, ...]:
    """The ports to use, in order: as configured, else that with the address to listen at, else the first active one.

    Raises:
        BackendUnavailableError: There is none, or one that is named is missing or not active, in words that say so.
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
    """Whether a port has the network's address of a host: packets to that host then go to its RDMA device."""
    return bool(host) and any(str(ip_address(gid.gid)) == host for gid in folder.gids())


def _best_gid(folder: PortFolder, routed: bool) -> int:
    """RoCE v2 with an IPv4 address before one with IPv6, that before link-local ones; entry 0 on InfiniBand."""
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
