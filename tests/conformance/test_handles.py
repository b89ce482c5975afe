"""Handles that are no good here: damaged, of another kind, or taken along through a fork."""

from collections.abc import Callable
from typing import Any

import pytest

from skipper import dataplane
from skipper.dataplane import BackendUnavailableError, DescriptorError, RDMABuffer
from tests.conformance.conftest import Case
from tests.conformance.owner import Owner, RemoteOwner
from tests.conformance.records import Fault, Provoke
from tests.conformance.test_transfers import handle_to, pattern
from tests.sameness import assert_same

CONTENT = pattern(3000)


@pytest.fixture
def elsewhere(remote_case: Case) -> Any:
    """This process is told to use a backend that the handle says nothing of."""
    dataplane.configure(backend="ucx" if remote_case.shared else "shm")
    yield
    dataplane.configure(backend=remote_case.reader.get("backend", "auto"))


def test_a_damaged_handle_is_refused(case: Case, owner: Owner, provoke: Provoke) -> None:
    _, raw = owner("make", CONTENT)
    for at in range(0, len(raw), 7):
        damaged = bytearray(raw)
        damaged[at] ^= 0x40
        with pytest.raises(DescriptorError), provoke(Fault.DAMAGED, case.id):
            RDMABuffer.deserialize(damaged)
    for foreign in (b"", raw[:-1], raw + b"\x00", b"\x80\x05N.", bytes(len(raw))):
        with pytest.raises(DescriptorError), provoke(Fault.DAMAGED, case.id):
            RDMABuffer.deserialize(foreign)


@pytest.mark.usefixtures("elsewhere")
def test_a_handle_without_a_way_from_here_says_so(
    remote_case: Case, start: Callable[[], RemoteOwner], provoke: Provoke
) -> None:
    _, buffer = handle_to(start(), CONTENT)
    with pytest.raises(BackendUnavailableError), provoke(Fault.NO_WAY, remote_case.id):
        buffer.read_into(bytearray(len(CONTENT))).get()
    with pytest.raises(BackendUnavailableError):
        buffer.backend  # noqa: B018 - it is computed


@pytest.mark.parametrize("way", ["read_in_a_fork", "submit_in_a_fork"])
def test_a_fork_has_shared_memory_and_no_library(
    remote_case: Case, start: Callable[[], RemoteOwner], provoke: Provoke, way: str
) -> None:
    _, buffer = handle_to(start(), CONTENT)
    reader = start()
    if remote_case.shared:
        with provoke(Fault.FORKED, remote_case.id):
            assert_same(reader(way, buffer.serialize(), len(CONTENT)), CONTENT)
    else:
        with pytest.raises(BackendUnavailableError, match="fork"), provoke(Fault.FORKED, remote_case.id):
            reader(way, buffer.serialize(), len(CONTENT))
    assert_same(reader("read", buffer.serialize(), len(CONTENT), 1), CONTENT)
