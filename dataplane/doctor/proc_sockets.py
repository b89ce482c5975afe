"""The kernel's tables of sockets: those of a process that take what comes, from whomever."""

import ipaddress
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")

_LISTENS = "0A"  # TCP_LISTEN of include/net/tcp_states.h
_UNCONNECTED = "07"  # a socket of UDP that was bound and takes from everybody
_ACCEPTS = 1 << 16  # __SO_ACCEPTCON of include/uapi/linux/net.h
_DATAGRAM = 2
_AUTOBOUND = re.compile(r"@[0-9a-f]{5}")  # unix(7): a name that the kernel chose


@dataclass(frozen=True, slots=True)
class Socket:
    """A socket that listens, or that is bound and takes datagrams.

    Attributes:
        kind: tcp, udp, unix or abstract.
        name: ``IP:PORT``, a path, or a name of an abstract socket with its "@".
        pid: Of the process.
        uid: Of its owner.
        is_loopback: Whether it is at an address that this host alone reaches; False for unix sockets.
        is_datagram: Whether it is a unix socket without connections.
    """

    kind: str
    name: str
    pid: int
    uid: int
    is_loopback: bool = False
    is_datagram: bool = False


def of_process(pid: int, inodes: Collection[int]) -> Iterator[Socket]:
    """Those among the sockets of a process, by their inodes, in its network namespace."""
    owner = (PROC / str(pid)).stat().st_uid
    for table, kind, wanted in (("tcp", "tcp", _LISTENS), ("udp", "udp", _UNCONNECTED), ("raw", "raw", _UNCONNECTED)):
        for version in ("", "6"):
            yield from _internet(pid, f"{table}{version}", kind, wanted, inodes)
    for fields in _rows(pid, "unix"):
        if len(fields) == 8 and int(fields[6]) in inodes:
            is_datagram = int(fields[4], 16) == _DATAGRAM
            if is_datagram or int(fields[3], 16) & _ACCEPTS:
                kind = "abstract" if fields[7].startswith("@") else "unix"
                yield Socket(kind, fields[7], pid, owner, is_datagram=is_datagram)


def is_autobound(name: str) -> bool:
    """Whether the kernel chose the name of an abstract socket."""
    return bool(_AUTOBOUND.fullmatch(name))


def _internet(pid: int, table: str, kind: str, wanted: str, inodes: Collection[int]) -> Iterator[Socket]:
    for fields in _rows(pid, table):
        if fields[3] == wanted and int(fields[9]) in inodes:
            host, _, port = fields[1].partition(":")
            ip = _ip(host)
            text = f"[{ip}]" if ip.version == 6 else str(ip)
            yield Socket(kind, f"{text}:{int(port, 16)}", pid, int(fields[7]), is_loopback=ip.is_loopback)


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address as the kernel prints it: words of 32 bits in hexadecimal, each in this host's order of bytes."""
    words = (int(text[at : at + 8], 16) for at in range(0, len(text), 8))
    ip = ipaddress.ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words))
    return ip.ipv4_mapped or ip if isinstance(ip, ipaddress.IPv6Address) else ip


def _rows(pid: int, table: str) -> Iterator[list[str]]:
    path = PROC / str(pid) / "net" / table
    if path.exists():  # not every kernel has IPv6
        for line in path.read_text(errors="replace").splitlines()[1:]:
            yield line.split(maxsplit=7 if table == "unix" else -1)
