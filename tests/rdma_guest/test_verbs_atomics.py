"""Inside the guest: atomic operations over a link that fails, and devices that have none. The rest is conformance."""

import dataclasses
import time

import numpy as np
import pytest

from skipper import dataplane
from skipper.dataplane import RDMABuffer, process
from skipper.dataplane.backends.verbs.card import verbs_card_of
from skipper.dataplane.backends.verbs.device import Atomics
from skipper.dataplane.errors import BackendUnavailableError, BufferDroppedError, TransferError, TransferTimeoutError
from skipper.dataplane.handle import VERBS, Card
from tests.conformance.owner import RemoteOwner
from tests.conformance.records import Fault
from tests.handles import parsed, proved
from tests.rdma_guest.gates import needs_device
from tests.rdma_guest.links import cut_link, shaped

pytestmark = [pytest.mark.verbs, needs_device("rxa", "rxb")]


@pytest.fixture(scope="module", autouse=True)
def _on_rxa():
    dataplane.configure(backend="verbs")
    yield
    dataplane.configure(backend="auto")


@pytest.fixture(scope="module")
def far():
    """An owner at the other end of the link."""
    owner = RemoteOwner({"backend": "verbs", "verbs": {"device": "rxb", "listen": "10.9.0.2:0"}}, shared=False)
    yield owner
    owner.close()


def counter_of(owner, value=0):
    name, handle = owner("make", np.array([value], np.uint64).tobytes())
    return name, RDMABuffer.deserialize(handle)


def held(owner, name):
    return int(np.frombuffer(owner("content", name), np.uint64)[0])


def all_credits_are_back():
    """Whether no queue counts requests that are not there any more."""
    rails = process.current().verbs.engine().rails.rails
    queues = [queue for rail in rails for queue in rail.queues.values()]
    return all(rail.room == rail.device.completions for rail in rails) and all(
        queue.room == queue.rail.device.depth for queue in queues
    )


@pytest.mark.parametrize("timeout", [0.1, 30.0])
def test_an_operation_whose_fate_is_unknown_is_not_repeated(far, timeout, provoke):
    name, counter = counter_of(far)
    assert counter.fetch_add(1).get() == 0
    error, deadline = (TransferTimeoutError, timeout) if timeout < 1 else (TransferError, None)
    with cut_link():
        begin = time.monotonic()
        with pytest.raises(error), provoke(Fault.ATOMIC_LINK_CUT, "verbs", deadline_s=deadline):
            counter.fetch_add(1, timeout=timeout).get()
        assert time.monotonic() - begin < 5
    assert held(far, name) in (1, 2)
    before = held(far, name)
    assert counter.fetch_add(1).get() == before
    assert held(far, name) == before + 1
    assert all_credits_are_back()


def test_one_whose_answer_is_lost_took_place_once(far):
    patient = {"device": "rxa", "timeout": 17}  # seven tries of 0.54 s, so that a slow link is not taken for a dead one
    name, handle = far("make", bytes(8))
    visitor = RemoteOwner({"backend": "verbs", "verbs": patient}, shared=False)
    try:
        assert visitor("add", handle, 0, 1, 1) == [0]
        with shaped("netem delay 2000ms", "eb"):  # long enough to cut the link, also on a busy machine
            visitor.tell("add", handle, 0, 1, 1)
            while held(far, name) == 1:
                time.sleep(0.001)
            with (
                cut_link("eb"),
                pytest.raises(TransferError, match="it is not known whether"),
            ):
                visitor.reply()
        assert held(far, name) == 2
        assert visitor("add", handle, 0, 1, 1) == [2]
    finally:
        visitor.close()


def test_one_that_was_not_sent_yet_is_begun_again_when_another_transfer_breaks_the_connection(far):
    name, counter = counter_of(far)
    assert counter.fetch_add(1).get() == 0
    into = bytearray(8)
    (rail,) = process.current().verbs.engine().rails.rails
    kept, rail.room = rail.room - 2, 2  # of a read with its epoch word
    try:
        with shaped("netem delay 100ms", "eb"):
            doomed = counter.read_into(into, timeout=0.05)
            operation = counter.fetch_add(1, timeout=20)
            with pytest.raises(TransferTimeoutError):
                doomed.get()
        assert operation.get() == 1
    finally:
        rail.room += kept
    assert held(far, name) == 2
    assert all_credits_are_back()


def test_a_buffer_dropped_by_its_owner_is_told_from_one_that_is_refused(far):
    name, counter = counter_of(far, 5)
    assert counter.fetch_add(0).get() == 5
    far("drop", name)
    with pytest.raises(BufferDroppedError):
        counter.fetch_add(1).get()
    assert held(far, name) == 5
    assert all_credits_are_back()


def test_an_owner_whose_device_has_none_is_an_error_before_anything_is_sent(far):
    _, handle = far("make", bytes(8))
    of, offset, nbytes = parsed(handle)
    contact = dataclasses.replace(verbs_card_of(of.card), atomics=Atomics.NONE)
    card = Card.make(of.card.owner, of.card.page_token, {VERBS: contact.pack()})
    dataplane.configure(backend="verbs")  # forgets the connection that was made by the true card
    counter = RDMABuffer.deserialize(proved(card.encoded, of.body(offset, nbytes)))
    with pytest.raises(BackendUnavailableError, match="that of its owner is an RDMA device without them"):
        counter.fetch_add(1).get()
    dataplane.configure(backend="verbs")


def test_a_handle_says_what_its_owners_atomic_operations_are_atomic_with(far):
    _, handle = far("make", bytes(8))
    of, _, _ = parsed(handle)
    assert verbs_card_of(of.card).atomics is Atomics.DEVICE  # Soft-RoCE: not with the CPU
