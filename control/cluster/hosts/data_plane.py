"""Which network device of this machine the data plane uses to reach other hosts."""

from __future__ import annotations

import os

from skipper.control.wire.addresses import device_of, is_loopback

VARIABLE = "SKIPPER_DATA_PLANE_HOST"
DEVICES = "UCX_NET_DEVICES"


def open_data_plane(host: str) -> None:
    """Let the data plane of this process, and of those that it starts, use the network device that has an IP.

    The user's own choice stands. For the loopback there is nothing to do: nothing else is used by default.

    Args:
        host: the IP.
    """
    if is_loopback(host):
        return
    os.environ.setdefault(VARIABLE, host)
    device = device_of(host)
    if device is not None:
        os.environ.setdefault(DEVICES, f"{device},lo")
