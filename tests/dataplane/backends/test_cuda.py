"""Memory of GPUs between processes: mapped by the driver, and over UCX."""

import os
import re
import subprocess
import sys
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
from tests.dataplane.backends.cuda_owner import CudaOwner
from tests.gpu.gates import needs_gpus, on_gpus
from tests.gpu.kernels import occupy

pytestmark = needs_gpus()

COUNT = 3_000_000  # of int64: large enough for several workers
LARGE = 1 << 26  # of int64: an allocation of its own
TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def owner() -> Iterator[CudaOwner]:
    """One for all tests that leave it alive: CUDA takes seconds to start."""
    owner = CudaOwner()
    yield owner
    owner.kill()


@pytest.fixture(params=["cuda_ipc", "ucx"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """What this process uses; an owner hands its memory out for both."""
    dataplane.configure(backend=request.param)
    yield request.param
    dataplane.configure(backend="auto")


@pytest.mark.parametrize("count", [1, 1000, COUNT])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_of_another_process_gpu_is_read_and_written(
    owner: CudaOwner, backend: str, device: str, count: int
) -> None:
    buffer = owner.buffer(count)
    assert buffer.backend == backend
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
@pytest.mark.usefixtures("backend")
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


@pytest.mark.usefixtures("backend")
def test_words_on_a_gpu_are_refused(owner: CudaOwner) -> None:
    buffer = owner.buffer(8)
    for operation in (buffer.fetch_add(1), buffer.compare_and_swap(0, 1)):
        with pytest.raises(BackendUnavailableError, match="host memory"):
            operation.get()


@pytest.mark.usefixtures("backend")
def test_a_dropped_buffer_gives_nothing_any_more(owner: CudaOwner) -> None:
    buffer = owner.buffer(1000)
    owner("drop")
    for device in ("cpu", "cuda"):
        memory = torch.zeros(1000, dtype=torch.int64, device=device)
        with pytest.raises(BufferDroppedError):
            buffer.read_into(memory, timeout=TIMEOUT_S).get()
        with pytest.raises(BufferDroppedError):
            buffer.write_from(memory, timeout=TIMEOUT_S).get()


@pytest.mark.usefixtures("backend")
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


@pytest.mark.usefixtures("backend")
def test_a_handle_leaves_when_the_content_is_there(owner: CudaOwner) -> None:
    buffer = RDMABuffer.deserialize(owner("make_late", COUNT, 5))
    into = torch.zeros(COUNT, dtype=torch.int64, device="cuda")
    buffer.read_into(into, timeout=TIMEOUT_S).get()
    assert (into == 5).all()


@pytest.mark.usefixtures("backend")
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


def test_a_copy_does_not_wait_for_streams_that_its_caller_does_not_use(owner: CudaOwner) -> None:
    buffer = owner.buffer(COUNT)
    into = torch.zeros(COUNT, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    occupy(seconds=2.0)
    with torch.cuda.stream(torch.cuda.Stream()):
        buffer.read_into(into, timeout=TIMEOUT_S).get()
    assert not torch.cuda.default_stream().query()
    assert torch.equal(into.cpu(), torch.arange(COUNT))


def test_memory_that_was_mapped_is_free_once_nothing_here_uses_it(owner: CudaOwner) -> None:
    buffer = owner.buffer(LARGE)
    first = torch.zeros(1, dtype=torch.int64, device="cuda")
    buffer.at(0, 8).read_into(first, timeout=TIMEOUT_S).get()
    last = buffer.at(8 * (LARGE - 1), 8)
    last.read_into(first, timeout=TIMEOUT_S).get()
    assert first.item() == LARGE - 1
    owner("give_back")
    held = torch.cuda.mem_get_info()[0]
    with pytest.raises(BufferDroppedError):
        last.read_into(first, timeout=TIMEOUT_S).get()
    del last, buffer
    assert torch.cuda.mem_get_info()[0] - held > 7 * LARGE


def test_new_memory_in_the_place_of_old_is_another(owner: CudaOwner) -> None:
    into = torch.zeros(LARGE, dtype=torch.int64, device="cuda")
    old: list[RDMABuffer] = []  # which keep theirs mapped
    for _ in range(3):
        buffer = owner.buffer(LARGE)
        buffer.read_into(into, timeout=TIMEOUT_S).get()
        assert torch.equal(into.cpu(), torch.arange(LARGE))
        owner("give_back")
        old.append(buffer)
        for each in old:
            with pytest.raises(BufferDroppedError):
                each.read_into(into, timeout=TIMEOUT_S).get()
        into.zero_()


_READ = """
import sys
import torch
from skipper.dataplane import BackendUnavailableError, RDMABuffer
buffer = RDMABuffer.deserialize(bytes.fromhex(sys.stdin.read()))
into = torch.zeros(1000, dtype=torch.int64)
for _ in range(2):
    try:
        buffer.read_into(into, timeout=30).get()
    except BackendUnavailableError as error:
        print("refused:", error)
    else:
        print(torch.equal(into, torch.arange(1000)), buffer.backend)
"""


@pytest.mark.parametrize(
    ("seen", "said"), [("0", ["True cuda_ipc"] * 2), ("", ["refused: no way to .* sees no GPU"] * 2)]
)
def test_who_sees_no_gpu_is_told_so(owner: CudaOwner, seen: str, said: list[str]) -> None:
    handle = owner("make", 1000)
    done = subprocess.run(
        [sys.executable, "-c", _READ],
        input=handle.hex(),
        env={**os.environ, "CUDA_VISIBLE_DEVICES": seen},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(said), done.stderr
    assert all(re.match(pattern, line) for pattern, line in zip(said, lines, strict=True)), done.stdout


def test_memory_that_cuda_does_not_share_goes_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    owner = CudaOwner()
    try:
        buffer = owner.buffer(COUNT)
        assert buffer.backend == "ucx"
        into = torch.zeros(COUNT, dtype=torch.int64, device="cuda")
        buffer.read_into(into, timeout=TIMEOUT_S).get()
        assert torch.equal(into.cpu(), torch.arange(COUNT))
    finally:
        owner.kill()


@on_gpus(2)
@pytest.mark.usefixtures("backend")
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
    statuses = {status.name: status for status in dataplane.backends()}
    assert "cuda" in statuses["ucx"].memory_kinds
    assert "CUDA modules" in statuses["ucx"].reason
    assert statuses["cuda_ipc"].usable
