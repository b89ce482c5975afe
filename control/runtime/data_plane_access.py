"""Opens the data plane of this process, and of the processes that it starts, to the other hosts of its job."""

from __future__ import annotations

import os

from skipper.control.wire import addresses

DATA_PLANE_HOST = "SKIPPER_DATA_PLANE_HOST"
DATA_PLANE_DEVICES = "UCX_NET_DEVICES"
"""The environment variables for the IP, and the devices, by which the data plane reaches other hosts."""


def open_data_plane(host: str) -> None:
    """Let the data plane of this process, and of the processes that it starts, use the network device that has an IP.

    A choice by the user stays. For the loopback there is nothing to do: only that is used by default.

    Args:
        host: the IP.
    """
    if addresses.is_loopback(host):
        return
    os.environ.setdefault(DATA_PLANE_HOST, host)
    if (device := addresses.device_of(host)) is not None:
        os.environ.setdefault(DATA_PLANE_DEVICES, f"{device},lo")
