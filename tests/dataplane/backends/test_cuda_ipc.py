"""What needs no GPU of the backend for mapped memory of GPUs: how a handle is refused that nobody can map."""

import dataclasses
import os
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from skipper import dataplane
from skipper.dataplane import BackendUnavailableError, DataplaneError, RDMABuffer
from skipper.dataplane import handle as handles
from skipper.dataplane.handle import CUDA_IPC
from skipper.dataplane.regions import MemoryKind
from tests.conformance.owner import RemoteOwner
from tests.handles import parsed, proved_handle

NBYTES = 4096
NOBODY_CAN = r"cuda_ipc: (torch was built without CUDA|there is no driver|CUDA's driver refuses|CUDA does not start)"


@pytest.fixture(scope="module")
def owner() -> Iterator[RemoteOwner]:
    owner = RemoteOwner({"backend": "shm"}, shared=True)
    yield owner
    owner.close()


def claiming(raw: bytes, card_section: bytes, section: bytes) -> RDMABuffer:
    """A handle with a good proof, by which that memory would be a GPU's."""
    handle, offset, nbytes = parsed(raw)
    card = handles.Card.make(handle.card.owner, handle.card.page_token, {CUDA_IPC: card_section})
    kind = MemoryKind.CUDA
    return RDMABuffer.deserialize(
        proved_handle(dataclasses.replace(handle, card=card, sections={CUDA_IPC: section}, kind=kind), offset, nbytes)
    )


def test_memory_that_nobody_has_shared_is_refused_in_words(owner: RemoteOwner) -> None:
    _, raw = owner("make", bytes(NBYTES))
    page_fd = struct.unpack_from("<I", parsed(raw)[0].card.sections[handles.SHM])[0]
    buffer = claiming(raw, struct.pack("<I", page_fd), os.urandom(64) + os.urandom(16) + struct.pack("<QQ", 1, 0))
    for operation in (buffer.read_into, buffer.write_from):
        with pytest.raises(BackendUnavailableError, match=NOBODY_CAN):
            operation(np.empty(NBYTES, np.uint8), timeout=20).get()


def test_sections_that_are_cut_short_end_in_an_error(owner: RemoteOwner) -> None:
    _, raw = owner("make", bytes(NBYTES))
    for end in range(0, 96, 5):
        buffer = claiming(raw, b"\x01\x00\x00\x00"[: end % 5], os.urandom(end))
        with pytest.raises(DataplaneError):
            buffer.read_into(np.empty(NBYTES, np.uint8), timeout=20).get()


def test_the_status_says_why() -> None:
    status = {status.name: status for status in dataplane.backends()}["cuda_ipc"]
    assert status.memory_kinds == (("cuda",) if status.usable else ())
    assert status.usable or "CUDA" in status.reason or "driver" in status.reason
