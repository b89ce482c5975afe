"""Owners that are stopped, and deadlines: what needs the owner ends at its deadline, everything else goes on."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest

from skipper.dataplane import RDMAAction, RDMABuffer, TransferTimeoutError
from tests.conformance.conftest import Case
from tests.conformance.owner import RemoteOwner
from tests.conformance.records import Fault, Provoke
from tests.conformance.test_transfers import handle_to, pattern
from tests.sameness import assert_same

Start = Callable[[], RemoteOwner]
SOON_S = 5.0
DEADLINE_S = 0.3
TOO_SHORT_S = 1e-4


@contextmanager
def frozen(owner: RemoteOwner) -> Iterator[None]:
    owner.freeze()
    try:
        yield
    finally:
        owner.thaw()


@contextmanager
def served(case: Case) -> Iterator[None]:
    """What a stopped owner's peers get, whether they want to read or to write."""
    if case.serves_frozen:
        yield
        return
    begin = time.monotonic()
    with pytest.raises(TransferTimeoutError, match="deadline"):
        yield
    assert DEADLINE_S * 0.8 < time.monotonic() - begin < SOON_S


def test_a_frozen_owner_costs_its_own_deadline_only(remote_case: Case, start: Start, provoke: Provoke) -> None:
    stopped, other = start(), start()
    content = pattern(2 << 20)
    name, buffer = handle_to(stopped, content)
    _, kept = handle_to(other, content)
    into = bytearray(len(content))
    buffer.read_into(into).get()
    buffer.write_from(content).get()
    kept.read_into(into).get()
    action = RDMAAction().read_remote(bytearray(len(content)), buffer)
    with frozen(stopped):
        with served(remote_case), provoke(Fault.FROZEN_BEFORE_READ, remote_case.id, deadline_s=DEADLINE_S):
            operation = buffer.read_into(bytearray(len(content)), timeout=DEADLINE_S)
            kept.read_into(into, timeout=10).get()
            assert_same(into, content)
            operation.get()
        with served(remote_case), provoke(Fault.FROZEN_BEFORE_READ, remote_case.id, deadline_s=DEADLINE_S):
            buffer.at(0, 8).read_into(bytearray(8), timeout=DEADLINE_S).get()
        with served(remote_case), provoke(Fault.FROZEN_BEFORE_WRITE, remote_case.id, deadline_s=DEADLINE_S):
            buffer.at(0, 8).write_from(content[:8], timeout=DEADLINE_S).get()
        with served(remote_case):
            action.submit(timeout=DEADLINE_S).get()
        kept.read_into(into, timeout=10).get()
    with provoke(Fault.THAWED, remote_case.id):
        buffer.read_into(into, timeout=20).get()
    assert_same(into, content)
    assert_same(stopped("content", name), content)


@pytest.mark.parametrize("fault", [Fault.FROZEN_AT_FIRST_READ, Fault.FROZEN_AT_FIRST_WRITE], ids=["read", "write"])
def test_an_owner_frozen_before_anybody_connected(
    remote_case: Case, start: Start, provoke: Provoke, fault: Fault
) -> None:
    stopped = start()
    content = pattern(100_000)
    name, buffer = handle_to(stopped, bytes(content))
    into = bytearray(len(content))
    reads = fault is Fault.FROZEN_AT_FIRST_READ
    waits = remote_case.first_read_waits if reads else remote_case.first_write_waits
    with (
        frozen(stopped),
        pytest.raises(TransferTimeoutError, match="deadline") if waits else nullcontext(),
        provoke(fault, remote_case.id, deadline_s=DEADLINE_S),
    ):
        (buffer.read_into(into, timeout=DEADLINE_S) if reads else buffer.write_from(content, timeout=DEADLINE_S)).get()
    buffer.read_into(into, timeout=20).get()
    assert_same(into, content)
    assert_same(stopped("content", name), content)


def test_the_deadline_of_one_operation_does_not_end_another_one(waiting_case: Case, start: Start) -> None:
    stopped = start()
    content = pattern(100_000)
    _, buffer = handle_to(stopped, content)
    buffer.read_into(bytearray(100_000)).get()
    patient_into = bytearray(100_000)
    with frozen(stopped):
        patient = buffer.read_into(patient_into, timeout=30)
        with pytest.raises(TransferTimeoutError):
            buffer.read_into(bytearray(100_000), timeout=0.2).get()
        assert not patient.done()
        with pytest.raises(TransferTimeoutError, match="goes on"):
            patient.get(timeout=0.05)
    patient.get()
    assert_same(patient_into, content)


def test_a_deadline_that_is_too_short_is_an_error_and_the_next_transfer_works(
    case: Case, large: RDMABuffer, provoke: Provoke
) -> None:
    memory = np.zeros(large.nbytes, np.uint8)
    large.read_into(memory, timeout=60).get()
    for move in (large.read_into, large.write_from):
        with too_late(case), provoke(Fault.DEADLINE, case.id, deadline_s=TOO_SHORT_S):
            move(memory, timeout=TOO_SHORT_S).get()
    memory[:] = 0
    large.at(0, 1 << 20).read_into(memory[: 1 << 20], timeout=60).get()
    assert (memory[: 1 << 20] == 7).all()


@contextmanager
def too_late(case: Case) -> Iterator[None]:
    """A deadline that passes; where nothing can end the copy it may be kept waiting, and all bytes are there."""
    begin = time.monotonic()
    try:
        yield
    except TransferTimeoutError as error:
        assert "deadline" in str(error)  # noqa: PT017 - the other outcome is right for some
    else:
        assert not case.interruptible
    assert time.monotonic() - begin < SOON_S


def test_owners_frozen_and_continued_again_and_again_lose_nothing(remote_case: Case, start: Start) -> None:
    """Transfers with patience go through every stop unharmed."""
    stopped = start()
    _, raw = stopped("make_filled", 1 << 20, 7)
    buffer = RDMABuffer.deserialize(raw)
    into = np.zeros(1 << 20, np.uint8)
    buffer.read_into(into).get()
    over = threading.Event()
    wrong = []

    def read() -> None:
        while not over.is_set():
            into[:] = 0
            buffer.read_into(into, timeout=30).get()
            if not (into == 7).all():
                wrong.append(into.copy())

    reading = threading.Thread(target=read)
    reading.start()
    try:
        for _ in range(5):
            with frozen(stopped):
                over.wait(0.02)
    finally:
        over.set()
        reading.join()
    assert wrong == []
