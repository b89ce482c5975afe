"""Dropped means dropped: no handle of it works any more, and nothing that came after is taken for what was there."""

import gc
from typing import Any

import numpy as np
import pytest

from skipper.dataplane import BufferDroppedError, DataplaneError, RDMABuffer
from tests.conformance.conftest import Case
from tests.conformance.loops import meanwhile, read_until_it_fails, write_until_it_fails
from tests.conformance.records import Clock, Fault, Provoke
from tests.conformance.test_transfers import handle_to, pattern
from tests.sameness import assert_same

Owner = Any


def test_a_dropped_buffer_is_an_error_both_ways(case: Case, owner: Owner, provoke: Provoke) -> None:
    name, buffer = handle_to(owner, pattern(100))
    part = buffer.at(10, 20)
    buffer.read_into(bytearray(100)).get()
    owner("drop", name)
    for used in (buffer, part):
        with pytest.raises(BufferDroppedError, match="dropped"), provoke(Fault.DROPPED, case.id):
            used.read_into(bytearray(used.nbytes)).get()
    with pytest.raises(BufferDroppedError, match="dropped"), provoke(Fault.DROPPED, case.id):
        buffer.read_into(bytearray(100), stream=True).get()
    before = owner("content", name)
    with pytest.raises(BufferDroppedError, match="dropped"), provoke(Fault.DROPPED, case.id):
        buffer.write_from(bytes(100)).get()
    assert_same(owner("content", name), before)


def test_a_buffer_that_its_owner_forgot_is_dropped(case: Case, owner: Owner, provoke: Provoke) -> None:
    name, buffer = handle_to(owner, pattern(3 << 20))
    copy = RDMABuffer.deserialize(buffer.serialize())
    del buffer
    owner("forget", name)
    into = bytearray(3 << 20)
    with pytest.raises(BufferDroppedError), provoke(Fault.FREED, case.id):
        copy.read_into(into).get()
    with pytest.raises(BufferDroppedError), provoke(Fault.FREED, case.id):
        copy.write_from(into).get()


def test_a_reused_word_does_not_revive_an_old_handle(owner: Owner) -> None:
    name, buffer = handle_to(owner, pattern(100))
    owner("drop", name)
    owner("churn", 3, 100)
    _, newer = handle_to(owner, pattern(100, 1))
    with pytest.raises(BufferDroppedError):
        buffer.read_into(bytearray(100)).get()
    newer.read_into(bytearray(100)).get()


def test_what_was_read_before_a_drop_is_never_what_came_after(case: Case, owner: Owner, provoke: Provoke) -> None:
    nbytes = 4 << 20
    into = np.empty(nbytes, np.uint8)
    for _ in range(3):
        name, raw = owner("make_filled", nbytes, 1)
        buffer = RDMABuffer.deserialize(raw)
        buffer.read_into(into).get()
        clock = Clock()

        def drop(name: int = name, clock: Clock = clock) -> None:
            clock.start()
            owner("drop_and_fill", name, 2)

        with (
            meanwhile(drop),
            pytest.raises(BufferDroppedError),
            provoke(Fault.DROPPED_DURING_READ, case.id, clock=clock),
        ):
            read_until_it_fails(buffer, into, 1)


def test_a_drop_ends_writes_and_what_lies_beside_the_part_stays(case: Case, owner: Owner, provoke: Provoke) -> None:
    nbytes, margin = 4 << 20, 4096
    name, raw = owner("make_filled", nbytes + 2 * margin, 1)
    part = RDMABuffer.deserialize(raw).at(margin, nbytes)
    source = np.full(nbytes, 3, np.uint8)
    part.write_from(source).get()
    clock = Clock()

    def drop() -> None:
        clock.start()
        owner("drop", name)

    with meanwhile(drop), pytest.raises(BufferDroppedError), provoke(Fault.DROPPED_DURING_WRITE, case.id, clock=clock):
        write_until_it_fails(part, source)
    content = np.frombuffer(owner("content", name), np.uint8)
    assert (content[:margin] == 1).all()
    assert (content[-margin:] == 1).all()
    assert (content[margin:-margin] == 3).all()


def test_a_part_taken_before_or_after_a_drop_is_refused(case: Case, owner: Owner) -> None:
    name, raw = owner("make_filled", 4096, 1)
    buffer = RDMABuffer.deserialize(raw)
    into = bytearray(16)
    buffer.at(0, 16).read_into(into).get()  # finds the way by itself
    buffer.read_into(bytearray(4096)).get()
    part = buffer.at(16, 16)  # has that of the whole
    part.read_into(into).get()
    owner("drop", name)
    for refused in (part, buffer.at(32, 16), buffer):
        with pytest.raises(BufferDroppedError):
            refused.read_into(bytearray(refused.nbytes)).get()


def test_memory_freed_while_it_is_read_is_an_error_and_the_owner_lives(case: Case, owner: Owner) -> None:
    nbytes = 16 << 20
    name, raw = owner("make_filled", nbytes, 1)
    buffer = RDMABuffer.deserialize(raw)
    into = np.empty(nbytes, np.uint8)
    buffer.read_into(into).get()
    if not case.remote:  # where owner and reader are one process, a handle in use keeps the memory
        owner("forget", name)
        buffer.read_into(into).get()
        assert (into == 1).all()
    else:
        with meanwhile(lambda: owner("forget", name)), pytest.raises(BufferDroppedError):
            read_until_it_fails(buffer, into, 1)
    del buffer
    gc.collect()
    _, newer = handle_to(owner, pattern(100))
    small = bytearray(100)
    newer.read_into(small).get()
    assert_same(small, pattern(100))


def test_only_the_owner_can_drop(owner: Owner) -> None:
    _, buffer = handle_to(owner, pattern(10))
    if buffer.backend == "local":
        buffer.drop()
    else:
        with pytest.raises(DataplaneError, match="only its owner"):
            buffer.drop()
