"""With a GPU and a network card: GPU memory at both ends of a transfer, registered or staged, never silently."""

import pytest

from skipper import dataplane
from skipper.dataplane import RDMABuffer, process
from skipper.dataplane.regions import MemoryKind
from tests.conformance.owner import RemoteOwner
from tests.gpu.gates import needs_gpus
from tests.handles import parsed
from tests.rdma_guest.gates import needs_device
from tests.sameness import assert_same

pytestmark = [pytest.mark.verbs, needs_device(), *needs_gpus()]

NBYTES = (4 << 20) + 12


@pytest.fixture(scope="module", autouse=True)
def _verbs_only():
    dataplane.configure(backend="verbs")
    yield
    dataplane.configure(backend="auto")


@pytest.fixture(scope="module")
def owner():
    owner = RemoteOwner({"backend": "verbs"}, shared=False)
    yield owner
    owner.close()


def test_gpu_memory_of_this_side_is_read_into_and_written_from(owner, caplog):
    import torch

    name, handle = owner("make_filled", NBYTES, 7)
    buffer = RDMABuffer.deserialize(handle)
    tensor = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    buffer.read_into(tensor).get()
    assert bool((tensor == 7).all())
    tensor.fill_(9)
    torch.cuda.synchronize()
    buffer.write_from(tensor).get()
    assert_same(owner("content", name), b"\x09" * NBYTES)
    staged = process.current().verbs.engine().rails.staging
    assert ("through host memory" in caplog.text) == (staged is not None)
    assert ("through host memory" in dataplane.backends()[-1].reason) == (staged is not None)


def test_gpu_memory_is_exported_or_the_reason_is_given(owner):
    import torch

    tensor = torch.full((NBYTES,), 5, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    buffer = RDMABuffer(tensor)
    refusal = refused(buffer)
    if refusal is not None:
        assert "as a dma-buf" in refusal
        return
    handle = buffer.serialize()
    of, _, _ = parsed(handle)
    assert of.kind is MemoryKind.CUDA
    assert_same(owner("read", handle, NBYTES, 1), b"\x05" * NBYTES)


def refused(buffer):
    """Why it cannot be exported; None where it can."""
    try:
        buffer.serialize()
    except dataplane.BackendUnavailableError as error:
        return str(error)
    return None
