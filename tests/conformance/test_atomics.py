"""Atomic operations: nothing is lost or done twice, whoever else is at the word, and errors say what is not known."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from skipper.dataplane import BufferDroppedError, OwnerDiedError, RDMABuffer, TransferTimeoutError
from tests.conformance.conftest import Case
from tests.conformance.owner import Owner, RemoteOwner, replies
from tests.conformance.records import Fault, Provoke
from tests.conformance.test_transfers import handle_to

TOP = (1 << 64) - 1
ADDITIONS = 250
LOCKED = 40
DEADLINE_S = 0.3


def words(*values: int) -> bytes:
    return np.array(values, np.uint64).tobytes()


def held(owner: Owner, name: int) -> list[int]:
    return [int(word) for word in np.frombuffer(owner("content", name), np.uint64)]


def buffer_with(owner: Owner, *values: int, writable: bool = True) -> tuple[int, RDMABuffer]:
    name, buffer = handle_to(owner, words(*values), writable=writable)
    if writable:
        buffer.fetch_add(0).get()
    return name, buffer


def test_operations_tell_what_the_word_held_and_touch_nothing_else(owner: Owner) -> None:
    name, buffer = buffer_with(owner, 7, 40, 9)
    assert buffer.fetch_add(2, offset=8).get() == 40
    assert buffer.compare_and_swap(41, 5, offset=8).get() == 42
    assert buffer.compare_and_swap(42, 5, offset=8).get() == 42
    assert buffer.at(8, 16).fetch_add(1, offset=8).get() == 9
    assert held(owner, name) == [7, 5, 10]


def test_arithmetic_is_modulo_two_to_the_64(owner: Owner) -> None:
    name, buffer = buffer_with(owner, 3)
    assert buffer.fetch_add(-4).get() == 3
    assert buffer.fetch_add(1).get() == TOP
    assert buffer.fetch_add(TOP).get() == 0
    assert buffer.compare_and_swap(-1, 1 << 63).get() == TOP
    assert buffer.fetch_add(-(1 << 63)).get() == 1 << 63
    assert held(owner, name) == [0]


def test_sums_are_exact_whoever_adds(owner: Owner, crowd: Sequence[Owner]) -> None:
    name, buffer = buffer_with(owner, 1, TOP - 99, 1)
    for visitor in crowd:
        visitor.tell("add", buffer.serialize(), 8, 3, ADDITIONS)
    seen = [previous for previous_ones in replies(crowd) for previous in previous_ones]
    count = len(crowd) * ADDITIONS
    first = TOP - 99
    assert sorted((previous - first) % (1 << 64) for previous in seen) == list(range(0, 3 * count, 3))
    assert held(owner, name) == [1, (first + 3 * count) % (1 << 64), 1]


def test_compare_and_swap_makes_a_lock(owner: Owner, crowd: Sequence[Owner]) -> None:
    name, buffer = buffer_with(owner, 0, 0)
    for me, visitor in enumerate(crowd, start=1):
        visitor.tell("count_under_a_lock", buffer.serialize(), me, LOCKED)
    replies(crowd)
    assert held(owner, name) == [0, len(crowd) * LOCKED]


def test_what_cannot_be_done_is_refused_before_anything_is_sent(owner: Owner) -> None:
    name, buffer = buffer_with(owner, 1, 2)
    for offset in (-8, 1, 4, 9, 16, 1 << 62):
        with pytest.raises(ValueError, match=r"multiple of 8|not a word"):
            buffer.fetch_add(1, offset=offset)
        with pytest.raises(ValueError, match=r"multiple of 8|not a word"):
            buffer.compare_and_swap(1, 2, offset=offset)
    with pytest.raises(ValueError, match="multiple of 8"):
        buffer.at(4, 12).fetch_add(1)
    with pytest.raises(ValueError, match="timeout"):
        buffer.fetch_add(1, timeout=0)
    _, readonly = buffer_with(owner, 1, writable=False)
    with pytest.raises(ValueError, match="read-only"):
        readonly.fetch_add(1)
    with pytest.raises(ValueError, match="read-only"):
        readonly.compare_and_swap(1, 2)
    assert held(owner, name) == [1, 2]


def test_a_dropped_buffer_has_no_words(case: Case, owner: Owner, provoke: Provoke) -> None:
    name, buffer = buffer_with(owner, 5)
    part = buffer.at(0, 8)
    owner("drop", name)
    for attempt in (lambda: buffer.fetch_add(1), lambda: part.compare_and_swap(5, 6)):
        with pytest.raises(BufferDroppedError), provoke(Fault.ATOMIC_DROPPED, case.id):
            attempt().get()
    assert held(owner, name) == [5]


def test_an_owner_that_is_gone_is_an_error(
    remote_case: Case, start: Callable[[], RemoteOwner], provoke: Provoke
) -> None:
    victim = start()
    _, buffer = buffer_with(victim, 5)
    unused = RDMABuffer.deserialize(buffer.serialize())
    victim.kill()
    for attempt in (lambda: buffer.fetch_add(1), lambda: unused.compare_and_swap(5, 6)):
        with pytest.raises(OwnerDiedError), provoke(Fault.ATOMIC_KILLED, remote_case.id):
            attempt().get()


def test_a_frozen_owners_words_take_place_once_or_not_at_all(
    remote_case: Case, start: Callable[[], RemoteOwner], provoke: Provoke
) -> None:
    stopped = start()
    name, buffer = buffer_with(stopped, 5)
    stopped.freeze()
    try:
        if remote_case.atomics_need_owner:
            with (
                pytest.raises(TransferTimeoutError, match="deadline"),
                provoke(Fault.ATOMIC_FROZEN, remote_case.id, deadline_s=DEADLINE_S),
            ):
                buffer.fetch_add(1, timeout=DEADLINE_S).get()
        else:
            with provoke(Fault.ATOMIC_FROZEN, remote_case.id, deadline_s=DEADLINE_S):
                assert buffer.fetch_add(1, timeout=DEADLINE_S).get() == 5
    finally:
        stopped.thaw()
    now = buffer.fetch_add(10, timeout=20).get()
    assert now in ((5, 6) if remote_case.atomics_need_owner else (6,))
    assert held(stopped, name)[0] in (15, 16)
