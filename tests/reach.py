"""Which owners the processes of the tests reach: those over TCP only where UCX's port can be guarded."""

import pytest

from skipper.dataplane.backends import socket_filter

needs_filters = pytest.mark.skipif(
    socket_filter.obstacle() is not None,
    reason=f"UCX's TCP port cannot be guarded here: {socket_filter.obstacle()} (qemu, say, knows no SO_DETACH_FILTER)",
)

TCP_TOO = {"NET_DEVICES": "lo"} if socket_filter.obstacle() is None else {}
"""UCX's options for readers of owners of every kind, those that are told to be reached over TCP among them."""
