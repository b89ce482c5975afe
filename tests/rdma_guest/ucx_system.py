"""The system's own UCX, which has InfiniBand and RoCE in it: where it lies, and how to tell it to use Soft-RoCE.

The guest installs Debian's (1.13.1, with `ucx-utils`). The one of the wheel has no InfiniBand.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.rdma_guest.gates import needs_device

NAME = "libucp.so.0"


def library() -> Path | None:
    """The libucp that the loader finds, if the module for InfiniBand lies where it looks for modules."""
    known = subprocess.run(
        ["ldconfig", "-p"],
        env={**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"},
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    paths = [Path(line.split(" => ")[1]) for line in known.splitlines() if line.split(" ")[0].strip() == NAME]
    return next((path for path in paths if (path.resolve().parent / "ucx" / "libuct_ib.so.0").exists()), None)


def settings(device: str) -> dict[str, Any]:
    """For `dataplane.configure`, to use a Soft-RoCE device and nothing else, bytes between neighbours included."""
    return {
        "backend": "ucx",
        "ucx_library": NAME,
        "ucx": {
            "TLS": "rc,self",
            "NET_DEVICES": f"{device}:1",
            "IB_GID_INDEX": "1",  # its IPv4 address, RoCE v2
            "UD_ETH_DGID_CHECK": "n",  # UCX 1.13 does not find the address where rxe puts it, and drops the packet
            "RC_RETRY_COUNT": "6",  # 7, the default, means for ever on rxe
            "RC_TIMEOUT": "67ms",  # of one try, as the verbs backend has it: a dead peer is found out in half a second
            "UD_TIMEOUT": "5s",  # the same while it connects
            "IB_RX_QUEUE_LEN": "256",  # one-sided transfers need none; filling the default's 4096 takes a second here
        },
    }


def needs_roce(*devices: str) -> tuple[pytest.MarkDecorator, ...]:
    """For tests of UCX over Soft-RoCE."""
    missing = library() is None
    return (
        pytest.mark.verbs,
        needs_device(*devices),
        pytest.mark.skipif(missing, reason="needs a UCX with InfiniBand: the guest installs Debian's ucx-utils"),
    )
