"""Reading the memory of another process of this host through the kernel, without mapping it.

That takes one copy instead of two, but a slower one, page by page. The system permits it if it would permit tracing
that process: for the same user, if neither a container nor a security module forbids it. Only an attempt shows that.

The kernel reads whatever is at an address now. So each lent segment has a `MemorySeal`, which is destroyed before the
memory may hold anything else: a reader that finds the seal intact after reading has read the right bytes. A process
that has got the pid of a dead one, or has that pid in another container, has no such seal.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

SEAL_NBYTES = 16


class MemorySeal:
    """Random bytes of this process at an address that can be sent to others."""

    __slots__ = ("_memory", "address", "content")

    def __init__(self) -> None:
        self.content = os.urandom(SEAL_NBYTES)
        self._memory = ctypes.create_string_buffer(self.content, SEAL_NBYTES)
        self.address = ctypes.addressof(self._memory)

    def destroy(self) -> None:
        """Overwrite it, so that no reader finds it intact any more."""
        ctypes.memset(self._memory, 0, SEAL_NBYTES)


def address_of(memory: memoryview) -> int:
    """The address of a view's bytes in this process."""
    import numpy as np

    address: int = np.frombuffer(memory, "u1").__array_interface__["data"][0]
    return address


def is_whole(pid: int, address: int, content: bytes) -> bool:
    """Whether a process that is readable from here has a seal with this content at this address."""
    found = bytearray(SEAL_NBYTES)
    try:
        _read(pid, address, address_of(memoryview(found)), SEAL_NBYTES)
    except OSError:
        return False
    return found == content


def read(pid: int, address: int, memory: memoryview) -> None:
    """Fill writable memory from an address of a process, which does nothing for it.

    The kernel copies without waiting, so there is no deadline: a stopped process is read, too.

    Raises:
        OSError: that process, or that memory, cannot be read (any more); ``memory`` may be partly filled.
    """
    _read(pid, address, address_of(memory), len(memory))


class _IoVector(ctypes.Structure):
    """The ``struct iovec`` of readv(2)."""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def _read(pid: int, there: int, here: int, nbytes: int) -> None:
    function = _process_vm_readv()
    done = 0
    while done < nbytes:
        to, source = _IoVector(here + done, nbytes - done), _IoVector(there + done, nbytes - done)
        count = function(pid, ctypes.byref(to), 1, ctypes.byref(source), 1, 0)  # without the interpreter lock
        if count <= 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        done += count


@cache
def _process_vm_readv() -> Any:
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    function.restype = ctypes.c_ssize_t
    function.argtypes = (
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong),  # the process; what is filled here
        *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),  # what is read there; flags: none
    )
    return function
