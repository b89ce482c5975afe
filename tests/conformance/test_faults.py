"""Every fault has its own error, soon, on that owner only."""

import dataclasses
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

from dataplane import (
    BufferDroppedError,
    DataplaneError,
    OwnerDiedError,
    RDMAAction,
    RDMABuffer,
    TransferTimeoutError,
)
from dataplane import handle as handles
from tests.conformance.conftest import Case
from tests.conformance.owner import forged
from tests.conformance.test_transfers import handle_to, pattern

Owner = Any
SOON_S = 5.0


def read_until_it_fails(buffer: RDMABuffer, into: Any, value: int, reading: threading.Event | None = None) -> None:
    """Every read that succeeds must have brought `value` everywhere."""
    while True:
        into[:] = 0
        operation = buffer.read_into(into, timeout=10)
        if reading is not None:
            reading.set()
        operation.get()
        assert (into == value).all()


def test_a_dropped_buffer_is_an_error_both_ways(owner: Owner) -> None:
    name, buffer = handle_to(owner, pattern(100))
    part = buffer.at(10, 20)
    buffer.read_into(bytearray(100)).get()
    owner("drop", name)
    for used in (buffer, part):
        with pytest.raises(BufferDroppedError, match="dropped"):
            used.read_into(bytearray(used.nbytes)).get()
    before = owner("content", name)
    with pytest.raises(BufferDroppedError, match="dropped"):
        buffer.write_from(bytes(100)).get()
    assert owner("content", name) == before


def test_a_buffer_that_its_owner_forgot_is_dropped(owner: Owner) -> None:
    name, buffer = handle_to(owner, pattern(3 << 20))
    copy = RDMABuffer.deserialize(buffer.serialize())
    del buffer
    owner("forget", name)
    with pytest.raises(BufferDroppedError):
        copy.read_into(bytearray(3 << 20)).get()


def test_a_reused_word_does_not_revive_an_old_handle(owner: Owner) -> None:
    name, buffer = handle_to(owner, pattern(100))
    owner("drop", name)
    owner("churn", 3, 100)
    _, newer = handle_to(owner, pattern(100, 1))
    with pytest.raises(BufferDroppedError):
        buffer.read_into(bytearray(100)).get()
    newer.read_into(bytearray(100)).get()


def test_what_was_read_before_a_drop_is_never_what_came_after(owner: Owner) -> None:
    nbytes = 4 << 20
    for _ in range(3):
        name, raw = owner("make_filled", nbytes, 1)
        buffer = RDMABuffer.deserialize(raw)
        into = np.empty(nbytes, np.uint8)
        dropping = threading.Thread(target=owner, args=("drop_and_fill", name, 2))
        buffer.read_into(into).get()
        dropping.start()
        with pytest.raises(BufferDroppedError):
            read_until_it_fails(buffer, into, 1)
        dropping.join()


def test_only_the_owner_can_drop(owner: Owner) -> None:
    _, buffer = handle_to(owner, pattern(10))
    if buffer.backend == "local":
        buffer.drop()
    else:
        with pytest.raises(DataplaneError, match="only its owner"):
            buffer.drop()


def test_a_killed_owner_is_an_error_and_the_others_go_on(remote_case: Case, start: Any) -> None:
    victim, other = start(), start()
    content = pattern(2 << 20)
    _, lost = handle_to(victim, content)
    _, unused = handle_to(victim, content)
    _, kept = handle_to(other, content)
    small, into = lost.at(5, 100), bytearray(len(content))
    lost.read_into(into).get()
    action = RDMAAction().read_remote(bytearray(len(content)), lost)
    action.submit().get()
    victim.kill()
    begin = time.monotonic()
    for attempt in (
        lambda: small.read_into(bytearray(100)),
        lambda: lost.read_into(into),
        lambda: lost.write_from(content),
        lambda: unused.read_into(into),
        action.submit,
    ):
        with pytest.raises(OwnerDiedError, match="gone"):
            attempt().get()
        kept.read_into(into).get()
        assert into == content
    assert time.monotonic() - begin < SOON_S


def test_an_owner_killed_during_reads_is_an_error(remote_case: Case, start: Any) -> None:
    victim = start()
    nbytes = 16 << 20
    _, raw = victim("make_filled", nbytes, 7)
    buffer = RDMABuffer.deserialize(raw)
    into = np.empty(nbytes, np.uint8)
    reading = threading.Event()

    def kill() -> None:
        reading.wait(10)
        victim.signal(signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(OwnerDiedError):
        read_until_it_fails(buffer, into, 7, reading)
    killer.join()


def test_the_handle_of_a_dead_owner_does_not_fit_its_successor(remote_case: Case, start: Any) -> None:
    victim = start()
    _, stale = handle_to(victim, pattern(100))
    victim.kill()
    _, fresh = handle_to(start(), pattern(100, 1))
    into = bytearray(100)
    with pytest.raises(OwnerDiedError):
        stale.read_into(into).get()
    # As if the successor had put another buffer under the very word.
    old, new = (handles.parse(*handles.split(buffer.serialize()))[0] for buffer in (stale, fresh))
    body = dataclasses.replace(new, epoch=old.epoch).body(0, 100)
    with pytest.raises(BufferDroppedError):
        RDMABuffer.deserialize(handles.join(new.card.encoded, body)).read_into(bytearray(100)).get()
    # As if the successor had been given the very pid. Beyond the host only the words, random numbers, tell them apart.
    reborn = RDMABuffer.deserialize(forged(fresh.serialize(), started=stale.owner.started, token=stale.owner.token))
    if not remote_case.far:
        with pytest.raises(OwnerDiedError):
            reborn.read_into(into).get()
        assert into == bytes(100)
    fresh.read_into(into).get()
    assert into == pattern(100, 1)


def test_a_frozen_owner_costs_its_own_deadline_only(remote_case: Case, start: Any) -> None:
    frozen, other = start(), start()
    content = pattern(2 << 20)
    name, buffer = handle_to(frozen, content)
    _, kept = handle_to(other, content)
    into = bytearray(len(content))
    buffer.read_into(into).get()
    kept.read_into(into).get()
    frozen.freeze()
    try:
        begin = time.monotonic()
        operation = buffer.read_into(bytearray(len(content)), timeout=0.5)
        kept.read_into(into, timeout=10).get()
        assert into == content
        if remote_case.serves_frozen:
            operation.get()
        else:
            with pytest.raises(TransferTimeoutError, match="deadline"):
                operation.get()
            assert 0.4 < time.monotonic() - begin < SOON_S
            with pytest.raises(TransferTimeoutError):
                buffer.at(0, 8).read_into(bytearray(8), timeout=0.1).get()
            with pytest.raises(TransferTimeoutError):
                buffer.at(0, 8).write_from(bytes(8), timeout=0.1).get()
            with pytest.raises(TransferTimeoutError):
                RDMAAction().read_remote(into, buffer).submit(timeout=0.1).get()
        kept.read_into(into, timeout=10).get()
    finally:
        frozen.thaw()
    buffer.read_into(into, timeout=20).get()
    assert into == content
    assert frozen("content", name) == content


def test_the_deadline_of_one_operation_does_not_end_another_one(waiting_case: Case, start: Any) -> None:
    frozen = start()
    content = pattern(100_000)
    _, buffer = handle_to(frozen, content)
    buffer.read_into(bytearray(100_000)).get()
    frozen.freeze()
    patient_into = bytearray(100_000)
    patient = buffer.read_into(patient_into, timeout=30)
    with pytest.raises(TransferTimeoutError):
        buffer.read_into(bytearray(100_000), timeout=0.2).get()
    assert not patient.done()
    with pytest.raises(TransferTimeoutError, match="goes on"):
        patient.get(timeout=0.05)
    frozen.thaw()
    patient.get()
    assert patient_into == content
