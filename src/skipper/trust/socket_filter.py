"""Makes the kernel decide which packets a listening TCP socket of this process takes; this needs no privilege.

A classic BPF program (Linux: Documentation/networking/filter.rst) drops all segments but those without data from some
addresses. So these addresses can connect, and all others do not even see a listener. Data from the admitted ones is
not delivered at first, since a connection inherits the program of its listening socket. The program is detached from a
connection once its peer is known. The kernel at the other end then sends the dropped data again.
"""

import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable
from functools import cache

_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER, which reads as SO_GET_FILTER, and SO_DETACH_FILTER: asm-generic/socket.h
_INSTRUCTION = struct.Struct("=HBBI")  # sock_filter of linux/filter.h
_PROGRAM = struct.Struct("@HP")  # sock_fprog
_LOAD_BYTE, _LOAD_WORD, _LOAD_LENGTH = 0x30, 0x20, 0x80  # into A, at a fixed offset; the length of the packet
_AND, _SHIFT_RIGHT, _SUBTRACT_X, _A_TO_X = 0x54, 0x74, 0x1C, 0x07
_IF_EQUAL, _RETURN = 0x15, 0x06
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF: offsets from there on are those of the IP header; else of the TCP header
_DATA_OFFSET = 12  # of TCP: the length of its header in words, in the upper half of this byte
_SOURCES = {int(socket.AF_INET): (12,), int(socket.AF_INET6): (8, 12, 16, 20)}  # of the words of an IP header
_WHOLE = 0xFFFFFFFF

_libc = ctypes.CDLL(None, use_errno=True)


@cache
def obstacle() -> str | None:
    """Why sockets cannot be guarded here; None if they can.

    Not every kernel does what it reports: sandboxes in place of a kernel may accept a program and not run it, and
    emulators may not be able to detach one.
    """
    try:
        with socket.socket() as trial:
            admit(trial, ())
            if not restricted(trial):
                return "the system takes a socket's filter, and does not have one then"
            lift(trial)
            return "the system does not take a socket's filter off" if restricted(trial) else None
    except OSError as error:
        return f"the system has no socket filters that can be taken off again: {error.strerror}"


def admit(listener: socket.socket, sources: Iterable[ipaddress.IPv6Address]) -> None:
    """Make a listening socket take connections from these addresses only, and no data on them.

    Args:
        listener: A listening socket of IPv4 or IPv6.
        sources: The addresses; IPv4 is mapped into IPv6. Empty: nobody can connect.

    Raises:
        OSError: The kernel refuses, for example because there are too many for its limit (net.core.optmem_max).
    """
    code = b"".join(_INSTRUCTION.pack(*instruction) for instruction in _program(listener.family, sources))
    kept = ctypes.create_string_buffer(code, len(code))
    program = _PROGRAM.pack(len(code) // _INSTRUCTION.size, ctypes.addressof(kept))
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH, program)


def lift(connection: socket.socket) -> None:
    """Let a connection take data. Idempotent."""
    if restricted(connection):
        connection.setsockopt(socket.SOL_SOCKET, _DETACH, 0)


def restricted(connection: socket.socket) -> bool:
    """Whether a socket has a program."""
    length = ctypes.c_uint32(0)  # too short for any program: then the kernel only returns the number of instructions
    if _libc.getsockopt(connection.fileno(), socket.SOL_SOCKET, _ATTACH, None, ctypes.byref(length)):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return length.value > 0


def _program(family: int, sources: Iterable[ipaddress.IPv6Address]) -> Iterable[tuple[int, int, int, int]]:
    yield _LOAD_BYTE, 0, 0, _DATA_OFFSET
    yield _AND, 0, 0, 0xF0
    yield _SHIFT_RIGHT, 0, 0, 2
    yield _A_TO_X, 0, 0, 0
    yield _LOAD_LENGTH, 0, 0, 0
    yield _SUBTRACT_X, 0, 0, 0
    yield _IF_EQUAL, 1, 0, 0
    yield _RETURN, 0, 0, 0
    offsets = _SOURCES[family]
    for source in sorted(set(sources)):
        if (source.ipv4_mapped is not None) != (family == socket.AF_INET):
            continue
        words = struct.unpack("!4I", source.packed)[-len(offsets) :]
        for left, (offset, word) in zip(range(len(words) - 1, -1, -1), zip(offsets, words, strict=True), strict=True):
            yield _LOAD_WORD, 0, 0, _NETWORK_HEADER + offset
            yield _IF_EQUAL, 0, 2 * left + 1, word
        yield _RETURN, 0, 0, _WHOLE
    yield _RETURN, 0, 0, 0
