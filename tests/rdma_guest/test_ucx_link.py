"""Inside the guest: UCX over a link that is cut, TCP between two network namespaces and RoCE between two devices."""

import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from skipper.dataplane import TransferTimeoutError
from tests.conformance.owner import RemoteOwner
from tests.conformance.records import Fault, Provoke
from tests.rdma_guest.gates import needs_device
from tests.rdma_guest.links import cut_link
from tests.rdma_guest.ucx_system import needs_roce, settings
from tests.sameness import assert_same

NBYTES = 1 << 20
DEADLINE_S = 1.0  # some hundred times what so many bytes take on an idle machine
PATIENCE_S = 20.0
NAMESPACE = "far"
HERE, THERE = "near0", "far0"
HERE_ADDRESS, THERE_ADDRESS = "10.8.0.1", "10.8.0.2"


@dataclass(frozen=True)
class Wire:
    """A link, and what UCX has to be told to use it.

    Attributes:
        column: Of the table of faults.
        interface: This end of the link.
        here: For the reader, which also reaches the owner beside it without the link.
        beside: For the owner beside the reader.
        there: For the owner at the other end.
        prefix: What starts that one there.
    """

    column: str
    interface: str
    here: Mapping[str, Any]
    beside: Mapping[str, Any]
    there: Mapping[str, Any]
    prefix: tuple[str, ...] = ()


def tcp(devices: str) -> dict[str, Any]:
    return {"backend": "ucx", "ucx": {"TLS": "tcp,self", "NET_DEVICES": devices}}


WIRES = (
    pytest.param(
        Wire("ucx-far", HERE, tcp(f"lo,{HERE}"), tcp("lo"), tcp(THERE), ("ip", "netns", "exec", NAMESPACE)),
        id="tcp",
        marks=(pytest.mark.verbs, needs_device("rxa", "rxb")),  # that is: the guest, whose network may be changed
    ),
    pytest.param(
        Wire("ucx-roce", "ea", settings("rxa"), settings("rxa"), settings("rxb")),
        id="roce",
        marks=needs_roce("rxa", "rxb"),
    ),
)


@pytest.fixture(scope="module", autouse=True)
def _two_namespaces() -> Iterator[None]:
    """A link from this network namespace to one of its own."""
    for command in (
        f"netns add {NAMESPACE}",
        f"link add {HERE} mtu 9000 type veth peer name {THERE} mtu 9000 netns {NAMESPACE}",
        f"address add {HERE_ADDRESS}/24 dev {HERE}",
        f"link set {HERE} up",
        f"-n {NAMESPACE} address add {THERE_ADDRESS}/24 dev {THERE}",
        f"-n {NAMESPACE} link set {THERE} up",
        f"-n {NAMESPACE} link set lo up",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    yield
    subprocess.run(["ip", "link", "del", HERE], check=True)
    subprocess.run(["ip", "netns", "del", NAMESPACE], check=True)


@pytest.fixture(scope="module", params=WIRES)
def wire(request: pytest.FixtureRequest) -> Wire:
    return request.param


class Ends:
    """Three processes: a reader, an owner at the other end of the link, and one at this end."""

    def __init__(self, wire: Wire, **options: str) -> None:
        self.wire = wire
        here = {**wire.here, "ucx": {**wire.here["ucx"], **options}}
        self._reader = RemoteOwner(here, shared=False, module="tests.rdma_guest.ucx_reader")
        self._far = RemoteOwner(wire.there, shared=False, far=True, prefix=wire.prefix)
        self._near = RemoteOwner(wire.beside, shared=False)
        self.name, self.lost = self._far("make_filled", NBYTES, 7)
        _, self.kept = self._near("make_filled", 4096, 5)

    def close(self) -> None:
        for process in (self._reader, self._far, self._near):
            process.close()

    def read(self) -> set[int]:
        """The bytes that lie at the other end."""
        return self._reader("read_value", self.lost, PATIENCE_S)

    def write(self, value: int) -> bytes:
        """What lies at the other end after it was written from here, as its owner sees it."""
        self._reader("write", self.lost, bytes([value]) * NBYTES, 1)
        return self._far("content", self.name)

    def begin(self, *, to_remote: bool, timeout: float) -> None:
        """Move bytes over the link until that fails, and read from the owner at this end all the time."""
        self._reader.tell("move_until_it_fails", self.lost, self.kept, to_remote, timeout)

    def end(self) -> None:
        """How that ended: raises the error."""
        error, self.before, self.beside = self._reader.reply()
        raise error


@pytest.fixture(scope="module")
def ends(wire: Wire) -> Iterator[Ends]:
    made = Ends(wire)
    yield made
    made.close()


def wait_for_bytes(interface: str, nbytes: int) -> None:
    """Until so many have come in or gone out there."""
    before, end = crossed(interface), time.monotonic() + 20
    while crossed(interface) - before < nbytes:
        assert time.monotonic() < end, "nothing moves"


def crossed(interface: str) -> int:
    folder = Path("/sys/class/net") / interface / "statistics"
    return sum(int((folder / name).read_text()) for name in ("rx_bytes", "tx_bytes"))


def unsent() -> int:
    """Bytes in TCP sockets of this namespace for the other one, those of sockets that are closed included: proc(5)."""
    there = socket.inet_aton(THERE_ADDRESS)[::-1].hex().upper()
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(fields[4].partition(":")[0], 16) for fields in lines if fields[2].startswith(there))


def test_bytes_cross_the_link_both_ways(ends: Ends) -> None:
    before = crossed(ends.wire.interface)
    assert ends.read() == {7}
    assert_same(ends.write(9), b"\x09" * NBYTES)
    assert crossed(ends.wire.interface) - before > 2 * NBYTES


@pytest.mark.parametrize(
    ("to_remote", "fault"), [(False, Fault.LINK_CUT_DURING), (True, Fault.LINK_CUT_DURING_WRITE)], ids=["read", "write"]
)
def test_a_link_cut_during_a_transfer_is_an_error_by_its_deadline_and_others_go_on(
    ends: Ends, provoke: Provoke, to_remote: bool, fault: Fault
) -> None:
    ends.begin(to_remote=to_remote, timeout=DEADLINE_S)
    wait_for_bytes(ends.wire.interface, 8 * NBYTES)
    with cut_link(ends.wire.interface):
        with pytest.raises(TransferTimeoutError), provoke(fault, ends.wire.column, deadline_s=DEADLINE_S):
            ends.end()
        assert ends.before > 0
        assert ends.beside > 0
    with provoke(Fault.LINK_HEALED, ends.wire.column):
        ends.read()
    assert_same(ends.write(3), b"\x03" * NBYTES)
    # What the kernel still held of the write that was given up arrives now, and must not land on top of that.
    end = time.monotonic() + 20
    while unsent():
        assert time.monotonic() < end
    assert ends.read() == {3}


def test_a_link_that_was_cut_before_is_an_error_by_the_deadline(ends: Ends, provoke: Provoke) -> None:
    ends.read()
    with cut_link(ends.wire.interface):
        ends.begin(to_remote=False, timeout=DEADLINE_S)
        with (
            pytest.raises(TransferTimeoutError),
            provoke(Fault.LINK_CUT_SHORT, ends.wire.column, deadline_s=DEADLINE_S),
        ):
            ends.end()
        assert ends.before == 0
        assert ends.beside > 0
    ends.read()


def test_a_link_that_is_cut_at_the_first_use_is_an_error_by_the_deadline(wire: Wire, provoke: Provoke) -> None:
    ends = Ends(wire)
    try:
        with cut_link(wire.interface):
            ends.begin(to_remote=False, timeout=DEADLINE_S)
            with (
                pytest.raises(TransferTimeoutError),
                provoke(Fault.LINK_CUT_AT_FIRST_USE, wire.column, deadline_s=DEADLINE_S),
            ):
                ends.end()
        assert ends.read() == {7}
    finally:
        ends.close()
