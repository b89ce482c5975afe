"""Which owners the processes of the tests reach: over TCP where UCX's port can be guarded, by CMA where there is."""

import ctypes
import errno

import pytest

from skipper.trust import socket_filter

needs_filters = pytest.mark.skipif(
    socket_filter.obstacle() is not None,
    reason=f"UCX's TCP port cannot be guarded here: {socket_filter.obstacle()} (qemu, say, knows no SO_DETACH_FILTER)",
)

TCP_TOO = {"NET_DEVICES": "lo"} if socket_filter.obstacle() is None else {}
"""UCX's options for readers of owners of every kind, those that are told to be reached over TCP among them."""


def _has_cma() -> bool:
    """Whether there is that system call, whomever it lets copy: it is asked to copy nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.process_vm_readv(0, None, 0, None, 0, 0) != -1 or ctypes.get_errno() != errno.ENOSYS


needs_cma = pytest.mark.skipif(
    not _has_cma(), reason="there is no process_vm_readv here (as with qemu): UCX goes another way within a host"
)
