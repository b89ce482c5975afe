"""Finds the TCP sockets that a library has opened in this process, among all of its descriptors."""

import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Self

_PLACE = struct.Struct("!16sH")
_STATE_AT = 0  # of tcp_info, linux/tcp.h
_SO_DOMAIN = 39  # asm-generic/socket.h
ESTABLISHED, CONNECTING = 1, 2  # net/tcp_states.h


class SocketPlace(NamedTuple):
    """One end of a connection; an address of IPv4 is mapped into IPv6."""

    address: ipaddress.IPv6Address
    port: int

    @classmethod
    def of(cls, name: "tuple[str, int] | tuple[str, int, int, int]") -> Self:
        """From what `getsockname` or `getpeername` returns."""
        return cls(as_ipv6(name[0]), name[1])

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """From `PLACE_BYTES` bytes."""
        address, port = _PLACE.unpack(raw)
        return cls(ipaddress.IPv6Address(address), port)

    def pack(self) -> bytes:
        """As `PLACE_BYTES` bytes."""
        return _PLACE.pack(self.address.packed, self.port)


PLACE_BYTES = _PLACE.size


def as_ipv6(text: str) -> ipaddress.IPv6Address:
    """An IP address, of IPv4 as mapped into IPv6."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return address if address.version == 6 else ipaddress.IPv6Address(b"\0" * 10 + b"\xff\xff" + address.packed)


def descriptors() -> dict[int, str]:
    """The open sockets of this process by descriptor, each with a name that no other socket has at the same time."""
    found = {}
    with os.scandir("/proc/self/fd") as entries:
        for entry in entries:
            try:
                name = os.readlink(entry.path)
            except OSError:
                continue  # closed since
            if name.startswith("socket:"):
                found[int(entry.name)] = name
    return found


def opened(known: Mapping[int, str]) -> Iterator[tuple[int, socket.socket]]:
    """The TCP sockets that are open now and not among the known ones, each as a copy that is closed afterwards."""
    for fd, name in descriptors().items():
        if known.get(fd) == name:
            continue
        copy = copy_of(fd)
        if copy is not None:
            with copy:
                yield fd, copy


def copy_of(fd: int) -> socket.socket | None:
    """The TCP socket of a descriptor, as a copy to be closed; None where it is none, or closed by now."""
    try:
        copy = _socket(socket.AF_INET, os.dup(fd))
    except OSError:
        return None
    try:
        family = copy.getsockopt(socket.SOL_SOCKET, _SO_DOMAIN)
        is_tcp = copy.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
    except OSError:  # no socket
        is_tcp = False
    if is_tcp and family == socket.AF_INET:
        return copy
    if is_tcp and family == socket.AF_INET6:
        return _socket(socket.AF_INET6, copy.detach())
    copy.close()
    return None


def _socket(family: int, fd: int) -> socket.socket:
    """A socket of Python's for a descriptor, which is closed where that fails.

    It is created as non-blocking. Otherwise Python would set the flags by `socket.setdefaulttimeout`, and flags belong
    to the open file, which the library uses.
    """
    try:
        return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, 0, fileno=fd)
    except OSError:
        os.close(fd)
        raise


def listening(known: Mapping[int, str]) -> dict[int, SocketPlace]:
    """Descriptors of TCP sockets that listen now and were not among the known ones, and where."""
    return {
        fd: SocketPlace.of(copy.getsockname())
        for fd, copy in opened(known)
        if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def state(connection: socket.socket) -> int:
    """The state of TCP of a connection."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[_STATE_AT]


def ends(connection: socket.socket) -> tuple[SocketPlace, SocketPlace] | None:
    """This end and the other one; None where it is not connected."""
    try:
        there = connection.getpeername()  # first: this end has no address until there is another one
        return SocketPlace.of(connection.getsockname()), SocketPlace.of(there)
    except OSError:
        return None


def hang_up(is_meant: Callable[[tuple[SocketPlace, SocketPlace]], bool]) -> None:
    """End the connections of this process of which this is true: it gets this end and the other one."""
    for _, copy in opened({}):
        both = ends(copy)
        if both is not None and is_meant(both):
            shut(copy)


def shut(connection: socket.socket) -> None:
    """End a connection, also where others hold its socket."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended
