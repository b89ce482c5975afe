"""The links between the guest's two hosts: cut, healed, and what crosses them."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def cut_link(*interfaces: str) -> Iterator[None]:
    """Nothing leaves the interfaces (by default `ea`) while this lasts; what waits there to leave is lost."""
    with shaped("blackhole", *(interfaces or ("ea",))):
        yield


@contextmanager
def shaped(kind: str, *interfaces: str) -> Iterator[None]:
    """The interfaces send by these rules of `tc qdisc` while this lasts, instead of by those that they had."""
    for name in interfaces:
        subprocess.run(["tc", "qdisc", "replace", "dev", name, "root", *kind.split()], check=True)
    try:
        yield
    finally:
        for name in interfaces:
            subprocess.run(["tc", "qdisc", "del", "dev", name, "root"], check=False, stderr=subprocess.DEVNULL)


def received(interface: str) -> tuple[int, int]:
    """(bytes, packets) that came in there so far."""
    folder = Path("/sys/class/net") / interface / "statistics"
    return int((folder / "rx_bytes").read_text()), int((folder / "rx_packets").read_text())


def resources(kind: str) -> int:
    """How many objects of a kind ("qp", "mr") all processes have on RDMA devices, as the kernel counts them.

    Of queue pairs only reliable connections, since each device has one of its own.
    """
    shown = subprocess.run(["rdma", "resource", "show", kind], capture_output=True, text=True, check=True)
    lines = shown.stdout.splitlines()
    return sum(" type RC " in line for line in lines) if kind == "qp" else len(lines)
