"""Processes that are killed: their own transfers end with an error, soon, and everybody else's go on."""

import dataclasses
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import numpy as np
import pytest

from skipper.dataplane import BufferDroppedError, OwnerDiedError, RDMAAction, RDMABuffer, TransferTimeoutError
from tests.conformance.conftest import Case
from tests.conformance.loops import meanwhile, read_until_it_fails, write_until_it_fails
from tests.conformance.owner import REPLY_S, RemoteOwner, forged
from tests.conformance.records import Clock, Fault, Provoke
from tests.conformance.test_transfers import handle_to, pattern
from tests.handles import parsed, proved
from tests.sameness import assert_same

Start = Callable[[], RemoteOwner]
SOON_S = 5.0


def test_a_killed_owner_is_an_error_and_the_others_go_on(remote_case: Case, start: Start, provoke: Provoke) -> None:
    victim, other = start(), start()
    content = pattern(2 << 20)
    _, lost = handle_to(victim, content)
    _, unused = handle_to(victim, content)
    _, kept = handle_to(other, content)
    small, into = lost.at(5, 100), bytearray(len(content))
    lost.read_into(into).get()
    action = RDMAAction().read_remote(bytearray(len(content)), lost)
    action.submit().get()
    short = RDMAAction().read_remote(bytearray(100), small)
    short.submit().get()
    victim.kill()
    begin = time.monotonic()
    for attempt in (
        lambda: small.read_into(bytearray(100)),
        lambda: lost.read_into(into),
        lambda: lost.write_from(content),
        lambda: unused.read_into(into),
        lambda: lost.at(0, 100).read_into(bytearray(100)),  # whose way there is the one that was found before
        action.submit,
        short.submit,
    ):
        with pytest.raises(OwnerDiedError, match="gone"), provoke(Fault.KILLED_BEFORE, remote_case.id):
            attempt().get()
        kept.read_into(into).get()
        assert_same(into, content)
    assert time.monotonic() - begin < SOON_S


def reading(buffer: RDMABuffer, moving: threading.Event) -> NoReturn:
    read_until_it_fails(buffer, np.empty(buffer.nbytes, np.uint8), 7, moving)


def writing(buffer: RDMABuffer, moving: threading.Event) -> NoReturn:
    write_until_it_fails(buffer, np.full(buffer.nbytes, 7, np.uint8), moving)


@pytest.mark.parametrize(
    ("move", "fault"),
    [(reading, Fault.KILLED_DURING_READ), (writing, Fault.KILLED_DURING_WRITE)],
    ids=["read", "write"],
)
def test_an_owner_killed_during_transfers_is_an_error(
    remote_case: Case,
    start: Start,
    provoke: Provoke,
    move: Callable[[RDMABuffer, threading.Event], NoReturn],
    fault: Fault,
) -> None:
    victim = start()
    _, raw = victim("make_filled", 16 << 20, 7)
    buffer = RDMABuffer.deserialize(raw)
    moving = threading.Event()
    clock = Clock()

    def kill() -> None:
        moving.wait(10)
        clock.start()
        victim.signal(signal.SIGKILL)

    with meanwhile(kill), pytest.raises(OwnerDiedError), provoke(fault, remote_case.id, clock=clock):
        move(buffer, moving)


def test_the_handle_of_a_dead_owner_does_not_fit_its_successor(
    remote_case: Case, start: Start, provoke: Provoke
) -> None:
    victim = start()
    _, stale = handle_to(victim, pattern(100))
    _, used = handle_to(victim, pattern(100))
    into = bytearray(100)
    used.read_into(into).get()
    never_met = RDMABuffer.deserialize(stale.serialize())
    victim.kill()
    _, fresh = handle_to(start(), pattern(100, 1))
    with pytest.raises(OwnerDiedError), provoke(Fault.RESTARTED, remote_case.id):
        used.read_into(into).get()
    with pytest.raises(OwnerDiedError), provoke(Fault.KILLED_AT_FIRST_USE, remote_case.id):
        never_met.read_into(into).get()
    into = bytearray(100)
    # As if the successor had put another buffer under the very word.
    old, new = (parsed(buffer.serialize())[0] for buffer in (stale, fresh))
    body = dataclasses.replace(new, epoch=old.epoch).body(0, 100)
    with pytest.raises(BufferDroppedError), provoke(Fault.RESTARTED_IN_PLACE, remote_case.id):
        RDMABuffer.deserialize(proved(new.card.encoded, body)).read_into(bytearray(100)).get()
    # As if the successor had been given the very pid. Beyond the host only the words, random numbers, tell them apart.
    reborn = RDMABuffer.deserialize(forged(fresh.serialize(), started=stale.owner.started, token=stale.owner.token))
    if not remote_case.far:
        with pytest.raises(OwnerDiedError), provoke(Fault.RESTARTED_IN_PLACE, remote_case.id):
            reborn.read_into(into).get()
        assert_same(into, bytes(100))
    fresh.read_into(into).get()
    assert_same(into, pattern(100, 1))


def test_a_writer_killed_in_its_write_harms_nobody_else(remote_case: Case, start: Start, provoke: Provoke) -> None:
    owner = start()
    nbytes, margin = 32 << 20, 8192
    name, raw = owner("make_filled", nbytes + 2 * margin, 1)
    whole = RDMABuffer.deserialize(raw)
    target = whole.at(margin, nbytes)
    content = pattern(100_000)
    _, kept = handle_to(owner, content)
    into = bytearray(len(content))
    kept.read_into(into).get()
    # With a write a connection is complete, with a read it may not be; short and large ones may take different ones.
    target.at(0, 8).write_from(bytes(8)).get()
    target.write_from(np.full(nbytes, 1, np.uint8)).get()
    footprint = owner("footprint")
    for value in (2, 3):
        writer = start()
        writer.tell("write_without_end", target.serialize(), nbytes, value)
        wait_for_byte(target.at(nbytes // 2, 1), value)  # it writes, again and again: it will die in the middle
        writer.kill()
        try:
            with provoke(Fault.WRITER_KILLED, remote_case.id):
                kept.read_into(into, timeout=10).get()
        except TransferTimeoutError:
            assert remote_case.id == "ucx-posix"  # it may have died with its hand in the owner's queue
            return
        assert_same(into, content)
    target.write_from(np.full(nbytes, 4, np.uint8), timeout=10).get()
    bytes_there = np.frombuffer(owner("content", name), np.uint8)
    assert (bytes_there[:margin] == 1).all()
    assert (bytes_there[-margin:] == 1).all()
    assert (bytes_there[margin:-margin] == 4).all()
    wait_for_footprint(owner, footprint)


def wait_for_byte(part: RDMABuffer, value: int) -> None:
    into = bytearray(1)
    end = time.monotonic() + REPLY_S
    while into[0] != value:
        assert time.monotonic() < end
        part.read_into(into, timeout=10).get()


def wait_for_footprint(owner: RemoteOwner, before: tuple[int, int, int]) -> None:
    """Until the owner has given back what those had that are gone: it hears of them from their sockets."""
    end = time.monotonic() + 10
    while True:
        descriptors, _, threads = owner("footprint")
        if descriptors <= before[0] and threads <= before[2]:
            return
        assert time.monotonic() < end, f"{(descriptors, threads)} file descriptors and threads, before {before}"
        time.sleep(0.01)
