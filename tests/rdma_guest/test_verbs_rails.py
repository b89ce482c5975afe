"""Inside the guest, over both links between the two hosts: large transfers use both, and one of them is enough."""

import sys
import time

import numpy as np
import pytest

from skipper.dataplane.errors import BackendUnavailableError, TransferError, TransferTimeoutError
from tests.conformance.owner import RemoteOwner
from tests.rdma_guest.gates import needs_device
from tests.rdma_guest.links import cut_link, received, shaped
from tests.sameness import assert_same

pytestmark = [pytest.mark.verbs, needs_device("rxa", "rxb", "rxc", "rxd")]

MIB = 1 << 20
LARGE = 8 * MIB
NO_ANSWER = 12
LISTEN = "10.9.0.2:0"
OURS = {"backend": "verbs", "verbs": {"device": ["rxa", "rxc"]}}
THEIRS = {"backend": "verbs", "verbs": {"device": ["rxb", "rxd"], "listen": LISTEN}}


@pytest.fixture(scope="module")
def far():
    """An owner at the other ends of both links."""
    owner = RemoteOwner(THEIRS, shared=False)
    yield owner
    owner.close()


@pytest.fixture
def reader():
    """A process of its own: the ports are for its whole life, and so is what it knows of them."""
    owner = RemoteOwner(OURS, shared=False)
    yield owner
    owner.close()


def crossed(before, after):
    """Bytes that came in at each interface between two looks."""
    return {name: after[name][0] - before[name][0] for name in before}


def look():
    return {name: received(name) for name in ("ea", "eb", "ec", "ed")}


def test_a_large_read_comes_half_over_each_link(far, reader):
    _, handle = far("make_filled", LARGE, 7)
    reader("read", handle, LARGE, 1)
    before = look()
    assert_same(reader("read", handle, LARGE, 1), b"\x07" * LARGE)
    moved = crossed(before, look())
    assert moved["ea"] > 0.45 * LARGE
    assert moved["ec"] > 0.45 * LARGE


def test_a_large_write_goes_half_over_each_link(far, reader):
    name, handle = far("make_filled", 8 * MIB + 3, 7)
    content = np.random.default_rng(1).bytes(8 * MIB + 3)
    before = look()
    reader("write", handle, content, 1)
    moved = crossed(before, look())
    assert_same(far("content", name), content)
    assert moved["eb"] > 3.5 * MIB
    assert moved["ed"] > 3.5 * MIB


def test_small_transfers_take_turns_on_the_links(far, reader):
    before = look()
    for value in range(8):
        _, handle = far("make_filled", 64 << 10, value)
        assert_same(reader("read", handle, 64 << 10, 1), bytes([value]) * (64 << 10))
    moved = crossed(before, look())
    assert moved["ea"] > 4 * (64 << 10)
    assert moved["ec"] > 4 * (64 << 10)


@pytest.mark.parametrize("devices", [["rxb"], "rxb"])
def test_a_side_with_one_port_is_reached_over_that(reader, devices):
    owner = RemoteOwner({"backend": "verbs", "verbs": {"device": devices, "listen": LISTEN}}, shared=False)
    try:
        name, handle = owner("make_filled", 4 * MIB, 7)
        before = look()
        reader("write", handle, b"\x09" * 4 * MIB, 1)
        assert_same(owner("content", name), b"\x09" * 4 * MIB)
        assert crossed(before, look())["ed"] < MIB
    finally:
        owner.close()


@pytest.mark.parametrize("interface", ["ea", "ec"])
def test_a_link_cut_during_a_transfer_leaves_the_other_one(far, reader, interface):
    name, handle = far("make_filled", LARGE, 7)
    reader("read", handle, LARGE, 1)
    reader.tell("write", handle, b"\x09" * LARGE, 10)
    start = received("eb")[0]
    while received("eb")[0] - start < 4 * MIB:
        time.sleep(0.001)
    with cut_link(interface):
        reader.reply()
        assert_same(far("content", name), b"\x09" * LARGE)
        before = look()
        assert_same(reader("read", handle, LARGE, 1), b"\x09" * LARGE)
        moved = crossed(before, look())
        assert moved["ec" if interface == "ea" else "ea"] > LARGE


def test_with_both_links_cut_there_is_an_error_and_it_works_again_when_they_heal(far, reader):
    _, handle = far("make_filled", 4 * MIB, 7)
    reader("read", handle, 4 * MIB, 1)
    with cut_link("ea", "ec"):
        begin = time.monotonic()
        with pytest.raises(TransferError) as failure:
            reader("read", handle, 4 * MIB, 1)
        assert failure.value.status == NO_ANSWER
        assert time.monotonic() - begin < 9
    assert_same(reader("read", handle, 4 * MIB, 1), b"\x07" * 4 * MIB)


def test_a_link_that_was_left_out_is_used_again_later(far):
    _, handle = far("make_filled", 4 * MIB, 7)
    reader = RemoteOwner(OURS, shared=False, module="tests.rdma_guest.hasty")
    try:
        with cut_link("ec"):
            assert_same(reader("read", handle, 4 * MIB, 1), b"\x07" * 4 * MIB)
        end = time.monotonic() + 30
        while True:
            before = look()
            reader("read", handle, 4 * MIB, 1)
            if crossed(before, look())["ec"] > MIB:
                break
            assert time.monotonic() < end
    finally:
        reader.close()


def test_a_write_that_was_given_up_never_lands_on_a_later_one(far, reader):
    nbytes = 64 << 10
    name, handle = far("make_filled", nbytes, 7)
    reader("write", handle, b"\x07" * nbytes, 2)
    with shaped("netem delay 500ms", "ea"):
        before = received("eb")[0]
        with pytest.raises(TransferTimeoutError):
            reader("write", handle, b"\x09" * nbytes, 2, 0.1)  # they take turns on the links, and one of them is slow
        reader("write", handle, b"\x03" * nbytes, 1)
        end = time.monotonic() + 20
        while received("eb")[0] - before < nbytes:
            assert time.monotonic() < end
        assert_same(far("content", name), b"\x03" * nbytes)


def test_atomic_operations_all_go_through_the_owners_first_port(far, reader):
    _, handle = far("make", bytes(64))
    before = look()
    assert reader("add", handle, 0, 1, 20) == list(range(20))
    moved = crossed(before, look())
    assert moved["eb"] > 20 * 64
    assert moved["ed"] < 20 * 64


def test_atomic_operations_wait_for_no_other_port_and_work_again_when_theirs_does(far, reader):
    name, handle = far("make", bytes(64))
    assert reader("add", handle, 0, 1, 1) == [0]
    with cut_link("ea"), pytest.raises(TransferError):
        reader("add", handle, 0, 1, 1)
    (held,) = reader("add", handle, 0, 1, 1)
    assert held == 1  # nothing left the interface, so it did not take place
    assert far("content", name)[:8] == (2).to_bytes(8, sys.byteorder)


def test_a_port_that_is_not_there_is_named(reader):
    owner = RemoteOwner({"backend": "verbs", "verbs": {"device": ["rxb", "rx9"]}}, shared=False)
    try:
        with pytest.raises(BackendUnavailableError, match="no RDMA device rx9"):
            owner("make", b"12345678")
    finally:
        owner.close()
