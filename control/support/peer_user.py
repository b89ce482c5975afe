"""`user_of_peer`: which user of this host is at the other end of a TCP connection over the loopback."""

from __future__ import annotations

import socket
import struct

_TABLES = {4: "/proc/net/tcp", 16: "/proc/net/tcp6"}
"""The kernel's connections, by the length of their addresses (proc_pid_net(5))."""


def user_of_peer(peer: tuple[str, int], own: tuple[str, int]) -> int | None:
    """The id of the user who made a connection; None if the kernel's table does not have it.

    Both ends of a connection over the loopback are in the table of this network namespace, each with its user.

    Args:
        peer: address and port of the other end.
        own: those of this end.

    Raises:
        OSError: there is no such table.
        ValueError: that is not an address.
    """
    theirs, ours = _entry(*peer), _entry(*own)
    with open(_TABLES[len(_packed(peer[0]))], encoding="ascii") as table:
        next(table)  # the names of the columns
        for line in table:
            _, local, remote, _, _, _, _, user, *_ = line.split()
            if (local, remote) == (theirs, ours):
                return int(user)
    return None


def _packed(address: str) -> bytes:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.inet_pton(family, address)
    except OSError:
        raise ValueError(f"{address!r} is not an address") from None


def _entry(address: str, port: int) -> str:
    """An end as the kernel writes it: words of 32 bits in native byte order, and the port."""
    packed = _packed(address)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
