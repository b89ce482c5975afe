"""What the machine must have for a test, in one place: each gate is a mark that skips with the thing's name."""

import os
from pathlib import Path

import pytest

GUEST = Path(__file__).with_name("guest")


def devices() -> list[str]:
    """RDMA devices that this kernel knows."""
    try:
        return sorted(os.listdir("/sys/class/infiniband"))
    except FileNotFoundError:
        return []


def built() -> bool:
    """Whether the guest's kernel is in the cache, so that a run needs no build."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skipper" / "rdma_guest"
    return any(Path(os.environ.get("SKIPPER_GUEST_CACHE") or default).glob("linux-uml-*"))


def needs_device(*names: str) -> pytest.MarkDecorator:
    """For tests of an RDMA device; any one, or those named."""
    missing = not set(names) <= set(devices()) or not devices()
    wanted = " and ".join(names) or "an RDMA device"
    return pytest.mark.skipif(missing, reason=f"needs {wanted}: make test-verbs runs it in a guest that has it")


needs_guest = pytest.mark.skipif(
    not built() or Path("/run/guest/command").exists(),
    reason="needs the guest kernel (tests/rdma_guest/guest build makes it, in some minutes), and not to run in it",
)
