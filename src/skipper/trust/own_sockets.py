"""Finds the TCP sockets that a library has opened in this process, and the epoll instances that wait for them.

A descriptor can be closed and given to another socket at any time, by any thread. So each is kept with its inode,
which no other open file of this kind has at the same time.
"""

import errno
import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple, Self

_PLACE = struct.Struct("!16sH")
_STATE_AT = 0  # of tcp_info, linux/tcp.h
_SO_DOMAIN = 39  # asm-generic/socket.h
_IP_FAMILIES = (socket.AF_INET, socket.AF_INET6)
ESTABLISHED, CONNECTING = 1, 2  # net/tcp_states.h


class SocketPlace(NamedTuple):
    """One end of a connection; an address of IPv4 is mapped into IPv6."""

    address: ipaddress.IPv6Address
    port: int

    @classmethod
    def of(cls, name: "tuple[str, int] | tuple[str, int, int, int]") -> Self:
        """An end from the result of `getsockname` or `getpeername`."""
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
    """An IP address; IPv4 is mapped into IPv6."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return address if address.version == 6 else ipaddress.IPv6Address(b"\0" * 10 + b"\xff\xff" + address.packed)


def descriptors() -> dict[int, int]:
    """The open sockets of this process: the inode of each descriptor."""
    found = {}
    for fd, target in _open_files():
        if target.startswith("socket:["):
            found[fd] = int(target[len("socket:[") : -1])
    return found


def opened(known: Mapping[int, int]) -> Iterator[tuple[int, socket.socket]]:
    """The TCP sockets that are open now and not among the known ones, each as a copy that is closed afterwards."""
    for fd, inode in descriptors().items():
        if known.get(fd) == inode:
            continue
        copy = copy_of(fd, inode)
        if copy is not None:
            with copy:
                yield fd, copy


def copy_of(fd: int, inode: int) -> socket.socket | None:
    """A TCP socket, as a copy to be closed; None if it is of another kind, or the descriptor now is another file."""
    try:
        copy = os.dup(fd)
    except OSError:
        return None  # closed in the meantime
    found = os.fstat(copy)
    if found.st_ino != inode or not stat.S_ISSOCK(found.st_mode):
        os.close(copy)
        return None
    looked_at = _socket(socket.AF_INET, copy)
    family = looked_at.getsockopt(socket.SOL_SOCKET, _SO_DOMAIN)
    is_stream = looked_at.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
    if is_stream and family in _IP_FAMILIES:
        return _socket(family, looked_at.detach())
    looked_at.close()
    return None


def _socket(family: int, fd: int) -> socket.socket:
    """A Python socket for a descriptor, which is closed if that fails.

    It is created as non-blocking. Otherwise Python would set the flags by `socket.setdefaulttimeout`, and flags belong
    to the open file, which the library uses.
    """
    try:
        return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, 0, fileno=fd)
    except OSError:
        os.close(fd)
        raise


def listening(known: Mapping[int, int]) -> dict[int, SocketPlace]:
    """Descriptors of TCP sockets that listen now and were not among the known ones, with their addresses."""
    return {fd: SocketPlace.of(copy.getsockname()) for fd, copy in opened(known) if is_listening(copy)}


def is_listening(copy: socket.socket) -> bool:
    """Whether others can connect to a socket."""
    return bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def state(connection: socket.socket) -> int:
    """The state of TCP of a connection."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[_STATE_AT]


def ends(connection: socket.socket) -> tuple[SocketPlace, SocketPlace] | None:
    """This end and the other one; None if it is not connected."""
    try:
        there = connection.getpeername()  # first: this end has no address until it is connected
        return SocketPlace.of(connection.getsockname()), SocketPlace.of(there)
    except OSError:
        return None


def hang_up(is_meant: Callable[[tuple[SocketPlace, SocketPlace]], bool]) -> None:
    """End the connections of this process for which a function of this end and the other one returns True."""
    for _, copy in opened({}):
        both = ends(copy)
        if both is not None and is_meant(both):
            shut(copy)


def disown(places: Collection[SocketPlace]) -> None:
    """End the connections from others to these addresses of this process, and drop what they have received.

    To the library that has accepted them they have ended without a byte. Otherwise it could still read bytes that came
    before, even if the other end has reset the connection since.
    """
    for _, copy in opened({}):
        if not is_listening(copy) and SocketPlace.of(copy.getsockname()) in places:
            shut(copy)
            _drop_received(copy)


def _drop_received(connection: socket.socket) -> None:
    """Read all that a connection has received that was shut down: nothing more will come."""
    while True:
        try:
            if not connection.recv(1 << 16, socket.MSG_DONTWAIT):
                return
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ENOTCONN):
                return
            # Otherwise it was reset. That is reported once, after the bytes that came before.


def shut(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """End a connection, or one direction of it, even if others hold its socket."""
    try:
        connection.shutdown(how)
    except OSError:
        return  # it has ended


def event_loops() -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """The epoll instances of this process, each with the descriptors that it waits for and their inodes.

    They may include files that are still open in another way, under descriptors that now are other files.
    """
    for loop, target in _open_files():
        if target != "anon_inode:[eventpoll]":
            continue
        waits_for = []
        try:
            with open(f"/proc/self/fdinfo/{loop}", encoding="ascii") as lines:  # proc_pid_fdinfo(5)
                for line in lines:
                    words = line.replace(":", " ").split()
                    if words[:1] == ["tfd"]:
                        waits_for.append((int(words[1]), int(words[words.index("ino") + 1], 16)))
        except OSError:
            continue  # closed in the meantime
        yield loop, waits_for


def _open_files() -> Iterator[tuple[int, str]]:
    """The open descriptors of this process, and what each refers to: proc_pid_fd(5)."""
    for name in os.listdir("/proc/self/fd"):
        try:
            yield int(name), os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # closed in the meantime
