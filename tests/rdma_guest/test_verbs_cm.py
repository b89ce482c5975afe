"""Inside the guest: queue pairs connected by the RDMA connection manager, where the owner asks for it."""

import gc
import os
import subprocess
import time

import numpy as np
import pytest

from skipper import dataplane
from skipper.dataplane import RDMABuffer, process
from skipper.dataplane.backends.verbs import rdma_cm
from skipper.dataplane.backends.verbs.card import verbs_card_of
from skipper.dataplane.backends.verbs.handshake import dial
from skipper.dataplane.errors import OwnerDiedError, TransferError, TransferTimeoutError
from tests.conformance.owner import RemoteOwner
from tests.handles import parsed
from tests.rdma_guest.gates import needs_device
from tests.rdma_guest.links import cut_link, received, resources
from tests.sameness import assert_same

pytestmark = [pytest.mark.verbs, needs_device("rxa", "rxb", "rxc", "rxd")]

MIB = 1 << 20
THEIRS = {"device": "rxb", "listen": "10.9.0.2:0", "rdma_cm": True}


@pytest.fixture(scope="module", autouse=True)
def _on_rxa():
    dataplane.configure(backend="verbs")
    yield
    dataplane.configure(backend="auto")


@pytest.fixture
def far():
    owner = RemoteOwner({"backend": "verbs", "verbs": THEIRS}, shared=False)
    yield owner
    owner.close()


def identities() -> int:
    """Connections that the kernel's connection manager knows."""
    shown = subprocess.run(["rdma", "resource", "show", "cm_id"], capture_output=True, text=True, check=True)
    return sum(" state CONNECT " in line for line in shown.stdout.splitlines())


def buffer_of(owner, content):
    name, handle = owner("make", content)
    return name, RDMABuffer.deserialize(handle)


def test_bytes_and_words_are_moved_as_ever(far):
    content = np.random.default_rng(2).bytes(3 * MIB)
    before = identities(), received("ea")[0]
    name, buffer = buffer_of(far, content)
    into = bytearray(3 * MIB)
    buffer.read_into(into).get()
    assert_same(into, content)
    assert (identities() - before[0]) == 2  # one connection, seen from both ends
    assert received("ea")[0] - before[1] > 3 * MIB
    buffer.write_from(bytes(3 * MIB)).get()
    assert buffer.fetch_add(3, offset=8).get() == 0
    assert buffer.fetch_add(0, offset=8).get() == 3
    assert far("content", name)[:8] == bytes(8)


def test_several_ports_are_connected_each():
    theirs = {"device": ["rxb", "rxd"], "listen": "10.9.0.2:0", "rdma_cm": True}
    owner = RemoteOwner({"backend": "verbs", "verbs": theirs}, shared=False)
    reader = RemoteOwner({"backend": "verbs", "verbs": {"device": ["rxa", "rxc"]}}, shared=False)
    try:
        _, handle = owner("make_filled", 8 * MIB, 7)
        before = identities(), received("ec")[0]
        assert_same(reader("read", handle, 8 * MIB, 1), b"\x07" * 8 * MIB)
        assert identities() - before[0] == 4
        assert received("ec")[0] - before[1] > 3 * MIB
    finally:
        reader.close()
        owner.close()


def test_nobody_is_connected_without_a_ticket_and_one_is_good_once(far):
    _, handle = far("make", bytes(8))
    of, _, _ = parsed(handle)
    contact = verbs_card_of(of.card)
    rails = process.current().verbs.engine().rails
    rail = rails.rails[0]
    deadline = time.monotonic() + 20

    def attempt(endpoint, proof):
        """What becomes of a queue pair that is to be connected to the owner's with that proof."""
        pair = rail.pair()
        try:
            rdma_cm.connect(pair, rail.device, endpoint, proof, deadline)
        except TransferError as error:
            return str(error)
        finally:
            pair.close()
        return "connected"

    mine = rail.pair()
    dialled = dial(
        contact.address, contact.token, process.current().keys.derived(b"wire-up"), {0: mine.endpoint}, deadline
    )
    theirs = dialled.endpoints
    try:
        good = rdma_cm.ticket(dialled.key, mine.endpoint, theirs[0])
        assert "REJECTED" in attempt(theirs[0], bytes(32))
        assert "REJECTED" in attempt(theirs[0], rdma_cm.ticket(contact.token, mine.endpoint, theirs[0]))
        rdma_cm.connect(mine, rail.device, theirs[0], good, deadline)
        assert "REJECTED" in attempt(theirs[0], good)
    finally:
        mine.close()
        dialled.socket.close()


def test_a_cut_link_is_an_error_in_time_and_it_works_again_when_it_heals(far):
    _, buffer = buffer_of(far, bytes(MIB))
    into = bytearray(MIB)
    buffer.read_into(into).get()
    with cut_link():
        with pytest.raises(TransferError):
            buffer.read_into(into).get()
        begin = time.monotonic()
        with pytest.raises(TransferTimeoutError):  # connecting anew needs the link as well
            buffer.read_into(into, timeout=0.3).get()
        assert time.monotonic() - begin < 3
    buffer.read_into(into, timeout=30).get()


def test_owners_that_die_leave_nothing_behind():
    dataplane.configure(backend="verbs")  # forgets the connections of other tests
    gc.collect()
    before = resources("qp"), identities(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        owner = RemoteOwner({"backend": "verbs", "verbs": THEIRS}, shared=False)
        _, buffer = buffer_of(owner, bytes(64))
        buffer.read_into(bytearray(64)).get()
        owner.kill()
        with pytest.raises(OwnerDiedError):
            buffer.read_into(bytearray(64)).get()
        owner.close()
        del buffer
    dataplane.configure(backend="verbs")
    gc.collect()
    end = time.monotonic() + 10
    while resources("qp") > before[0] or identities() > before[1]:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before[2]
