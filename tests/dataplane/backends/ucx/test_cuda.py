"""Memory of GPUs over UCX, between processes."""

import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from skipper import dataplane
from skipper.dataplane import (
    BackendUnavailableError,
    BufferDroppedError,
    OwnerDiedError,
    RDMAAction,
    RDMABuffer,
    RemoteLayout,
)
from tests.dataplane.backends.ucx.cuda_owner import CudaOwner
from tests.gpu.gates import needs_gpus, on_gpus
from tests.gpu.kernels import occupy

pytestmark = needs_gpus()

COUNT = 3_000_000  # of int64: large enough for several workers
TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def owner() -> Iterator[CudaOwner]:
    """One for all tests that leave it alive: CUDA takes seconds to start."""
    owner = CudaOwner()
    yield owner
    owner.kill()


@pytest.mark.parametrize("count", [1, 1000, COUNT])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_of_another_process_gpu_is_read_and_written(owner: CudaOwner, device: str, count: int) -> None:
    buffer = owner.buffer(count)
    assert buffer.backend == "ucx"
    into = torch.zeros(count, dtype=torch.int64, device=device)
    buffer.read_into(into, timeout=TIMEOUT_S).get()
    assert torch.equal(into.cpu(), torch.arange(count))
    buffer.write_from(-into, timeout=TIMEOUT_S).get()
    assert torch.equal(owner("content"), -torch.arange(count))


@pytest.mark.parametrize(("kind", "backend"), [("make", "ucx"), ("make_shared", "shm")])
def test_memory_of_a_host_is_read_into_a_gpu_and_written_from_it(kind: str, backend: str) -> None:
    owner = CudaOwner("cpu")
    try:
        buffer = RDMABuffer.deserialize(owner(kind, COUNT))
        assert buffer.backend == backend
        into = torch.zeros(COUNT, dtype=torch.int64, device="cuda")
        buffer.read_into(into, timeout=TIMEOUT_S).get()
        assert torch.equal(into.cpu(), torch.arange(COUNT))
        buffer.write_from(-into, timeout=TIMEOUT_S).get()
        assert torch.equal(owner("content"), -torch.arange(COUNT))
    finally:
        owner.kill()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_batch_moves_blocks_with_strides(owner: CudaOwner, device: str) -> None:
    buffer = owner.buffer(6 * 8 * 10)
    layout = RemoteLayout(offset=(1 * 80 + 2 * 10 + 3) * 8, shape=(4, 5, 6), strides=(640, 80, 8), itemsize=8)
    block, last = (torch.zeros(shape, dtype=torch.int64, device=device) for shape in ((6, 5, 4), (10,)))
    action = RDMAAction().read_remote(block.permute(2, 1, 0), buffer, layout=layout)
    action.read_remote(last, buffer.at(470 * 8, 80)).submit(TIMEOUT_S).get()
    expected = torch.arange(480).reshape(6, 8, 10)
    assert torch.equal(block.permute(2, 1, 0).cpu(), expected[1:5, 2:7, 3:9])
    assert last.tolist() == list(range(470, 480))
    RDMAAction().write_remote(buffer, -block.permute(2, 1, 0), layout=layout).submit(TIMEOUT_S).get()
    expected[1:5, 2:7, 3:9] *= -1
    assert torch.equal(owner("content").reshape(6, 8, 10), expected)


def test_words_on_a_gpu_are_refused(owner: CudaOwner) -> None:
    buffer = owner.buffer(8)
    for operation in (buffer.fetch_add(1), buffer.compare_and_swap(0, 1)):
        with pytest.raises(BackendUnavailableError, match="host memory"):
            operation.get()


def test_a_dropped_buffer_gives_nothing_any_more(owner: CudaOwner) -> None:
    buffer = owner.buffer(1000)
    owner("drop")
    for device in ("cpu", "cuda"):
        memory = torch.zeros(1000, dtype=torch.int64, device=device)
        with pytest.raises(BufferDroppedError):
            buffer.read_into(memory, timeout=TIMEOUT_S).get()
        with pytest.raises(BufferDroppedError):
            buffer.write_from(memory, timeout=TIMEOUT_S).get()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_owner_that_is_killed_under_transfers_is_a_typed_error_in_time(device: str) -> None:
    owner = CudaOwner()
    buffer = owner.buffer(16 * COUNT)
    into = torch.zeros(16 * COUNT, dtype=torch.int64, device=device)
    buffer.read_into(into, timeout=TIMEOUT_S).get()
    begin = time.monotonic()
    under_way = buffer.read_into(into, timeout=TIMEOUT_S)
    owner.kill()
    with suppress(OwnerDiedError):  # it may just have been over
        under_way.get()
    with pytest.raises(OwnerDiedError):
        buffer.read_into(into, timeout=TIMEOUT_S).get()
    assert time.monotonic() - begin < TIMEOUT_S
    with pytest.raises(OwnerDiedError):
        buffer.write_from(into, timeout=TIMEOUT_S).get()


def test_a_handle_leaves_when_the_content_is_there(owner: CudaOwner) -> None:
    buffer = RDMABuffer.deserialize(owner("make_late", COUNT, 5))
    into = torch.zeros(COUNT, dtype=torch.int64, device="cuda")
    buffer.read_into(into, timeout=TIMEOUT_S).get()
    assert (into == 5).all()


@pytest.mark.parametrize("stream", ["default", "own"])
@pytest.mark.parametrize("count", [1000, COUNT])
def test_transfers_keep_the_order_of_the_current_stream(owner: CudaOwner, count: int, stream: str) -> None:
    buffer = owner.buffer(count)
    memory = torch.ones(count, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.default_stream() if stream == "default" else torch.cuda.Stream()):
        occupy()
        before = memory.clone()
        buffer.read_into(memory, timeout=TIMEOUT_S).get()
        after = memory.clone()
        occupy()
        memory.fill_(9)
        buffer.write_from(memory, timeout=TIMEOUT_S).get()
    assert (before == 1).all()
    assert torch.equal(after.cpu(), torch.arange(count))
    assert (owner("content") == 9).all()


@on_gpus(2)
def test_memory_of_another_gpu_in_another_process() -> None:
    owner = CudaOwner("cuda:1")
    try:
        buffer = owner.buffer(COUNT)
        into = torch.zeros(COUNT, dtype=torch.int64, device="cuda:0")
        buffer.read_into(into, timeout=TIMEOUT_S).get()
        assert torch.equal(into.cpu(), torch.arange(COUNT))
    finally:
        owner.kill()


def test_the_status_says_that_cuda_memory_can_be_moved() -> None:
    RDMABuffer(torch.zeros(10, device="cuda")).serialize()
    status = {status.name: status for status in dataplane.backends()}["ucx"]
    assert "cuda" in status.memory_kinds
    assert "CUDA modules" in status.reason
