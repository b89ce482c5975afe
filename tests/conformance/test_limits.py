"""When the system has nothing left to give: an error that says so, nothing broken, and all is well with more of it."""

import resource
from collections.abc import Callable

import pytest

from skipper.dataplane import BackendUnavailableError, RDMABuffer, RegistrationError
from tests.conformance.conftest import CASES, Case
from tests.conformance.owner import RemoteOwner
from tests.conformance.records import Fault, Provoke
from tests.conformance.test_transfers import handle_to, pattern
from tests.sameness import assert_same

Start = Callable[[], RemoteOwner]
CONTENT = pattern(5000)
MIB = 1 << 20


def reads(visitor: RemoteOwner, buffer: RDMABuffer) -> bytes:
    content: bytes = visitor("read", buffer.serialize(), buffer.nbytes, 1)
    return content


def test_an_owner_without_descriptors_cannot_register(remote_case: Case, start: Start, provoke: Provoke) -> None:
    owner = start()
    owner("limit_descriptors", 0)
    with pytest.raises(RegistrationError, match="ulimit -n"), provoke(Fault.NO_DESCRIPTORS, remote_case.id):
        owner("make", CONTENT)
    owner("lift_limits")
    _, buffer = handle_to(owner, CONTENT)
    into = bytearray(len(CONTENT))
    buffer.read_into(into).get()
    assert_same(into, CONTENT)


def test_a_reader_without_descriptors_keeps_the_owners_that_it_has(
    remote_case: Case, start: Start, provoke: Provoke
) -> None:
    known, other, reader = start(), start(), start()
    _, first = handle_to(known, CONTENT)
    _, second = handle_to(other, CONTENT)
    assert_same(reads(reader, first), CONTENT)
    reader("limit_descriptors", 0)
    with (
        pytest.raises(BackendUnavailableError, match="ulimit -n"),
        provoke(Fault.READER_NO_DESCRIPTORS, remote_case.id),
    ):
        reads(reader, second)
    assert_same(reads(reader, first), CONTENT)
    reader("lift_limits")
    assert_same(reads(reader, second), CONTENT)


def _keeps_limits() -> bool:
    """Whether the kernel takes a limit of the address space. qemu, which needs much of it for itself, does not."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    large = 1 << 46 if before[1] == resource.RLIM_INFINITY else before[1] - 1
    try:
        resource.setrlimit(resource.RLIMIT_AS, (large, before[1]))
        return resource.getrlimit(resource.RLIMIT_AS)[0] == large
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.skipif(not _keeps_limits(), reason="RLIMIT_AS is not kept here, as under qemu")
def test_shared_memory_that_does_not_fit_is_an_error_on_both_sides(provoke: Provoke) -> None:
    case = next(case for case in CASES if case.shared and case.remote)
    owner, reader = case.start(), case.start()
    assert isinstance(owner, RemoteOwner)
    assert isinstance(reader, RemoteOwner)
    try:
        owner("limit_memory", 32 * MIB)
        with pytest.raises(RegistrationError, match="ulimit -v"), provoke(Fault.NO_MEMORY, case.id):
            owner("make_filled", 64 * MIB, 1)
        owner("lift_limits")
        _, raw = owner("make_filled", 64 * MIB, 1)
        buffer = RDMABuffer.deserialize(raw).at(0, 1000)
        reader("limit_memory", 16 * MIB)
        with pytest.raises(BackendUnavailableError, match="map"), provoke(Fault.READER_NO_MEMORY, case.id):
            reads(reader, buffer)
        reader("lift_limits")
        assert_same(reads(reader, buffer), bytes([1]) * 1000)
    finally:
        owner.close()
        reader.close()
