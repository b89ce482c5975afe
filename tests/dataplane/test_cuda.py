"""Memory of a GPU within one process: copies, blocks of tensors, refusals, and the order of streams."""

import threading
from collections.abc import Iterator

import pytest
import torch

from skipper import dataplane
from skipper.dataplane import (
    BackendUnavailableError,
    BufferDroppedError,
    RDMAAction,
    RDMABuffer,
    RemoteLayout,
    TransferTimeoutError,
)
from tests.gpu.gates import needs_gpus, on_gpus
from tests.gpu.kernels import occupy

pytestmark = needs_gpus()

COUNT = 1 << 20
LARGE = 5 << 20  # of int64: more than one copy thread takes at once


@pytest.fixture(params=["default", "own"])
def stream(request: pytest.FixtureRequest) -> Iterator[torch.cuda.Stream]:
    """The current stream of the test: the default one, and one that is not ordered with it."""
    stream = torch.cuda.default_stream() if request.param == "default" else torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.synchronize()


@pytest.mark.parametrize("count", [1, 1000, LARGE])
@pytest.mark.parametrize("there", ["cpu", "cuda"])
@pytest.mark.parametrize("here", ["cpu", "cuda"])
def test_copies_in_both_directions(here: str, there: str, count: int) -> None:
    owned = torch.arange(count, device=there)
    buffer = RDMABuffer(owned)
    into = torch.zeros(count, dtype=torch.int64, device=here)
    buffer.read_into(into, timeout=30).get()
    assert torch.equal(into.cpu(), torch.arange(count))
    buffer.write_from(into + 1, timeout=30).get()
    assert torch.equal(owned.cpu(), torch.arange(1, count + 1))
    tail = torch.zeros(1, dtype=torch.int64, device=here)
    buffer.at((count - 1) * 8, 8).read_into(tail, timeout=30).get()
    assert tail.item() == count


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.int16, torch.uint8])
@pytest.mark.parametrize("there", ["cpu", "cuda"])
@pytest.mark.parametrize("here", ["cpu", "cuda"])
def test_blocks_of_tensors_with_strides(here: str, there: str, dtype: torch.dtype) -> None:
    content = (torch.arange(6 * 8 * 10) % 251).to(dtype).reshape(6, 8, 10)
    whole = content.to(there, copy=True)
    buffer = RDMABuffer(whole)
    size = dtype.itemsize
    strides = (80 * size, 10 * size, size)
    layout = RemoteLayout(offset=(1 * 80 + 2 * 10 + 3) * size, shape=(4, 5, 6), strides=strides, itemsize=size)
    room = torch.zeros(6, 5, 4, dtype=dtype, device=here)
    RDMAAction().read_remote(room.permute(2, 1, 0), buffer, layout=layout).submit(30).get()
    assert torch.equal(room.permute(2, 1, 0).cpu(), whole[1:5, 2:7, 3:9].cpu())
    RDMAAction().write_remote(buffer, -room.permute(2, 1, 0), layout=layout).submit(30).get()
    expected = content.clone()
    expected[1:5, 2:7, 3:9] *= -1
    assert torch.equal(whole.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_every_dtype_is_bytes(dtype: torch.dtype) -> None:
    source = torch.arange(64, device="cuda").to(torch.float32).to(dtype)
    into = torch.empty_like(source)
    RDMABuffer(source).read_into(into).get()
    assert torch.equal(into.view(torch.uint8), source.view(torch.uint8))


def test_words_on_a_gpu_are_refused() -> None:
    buffer = RDMABuffer(torch.zeros(4, dtype=torch.int64, device="cuda"))
    for operation in (buffer.fetch_add(1), buffer.compare_and_swap(0, 1)):
        with pytest.raises(BackendUnavailableError, match="host memory"):
            operation.get()


def test_a_dropped_buffer_gives_nothing_any_more() -> None:
    buffer = RDMABuffer(torch.zeros(COUNT, device="cuda"))
    part = buffer.at(0, 400)
    buffer.drop()
    for dropped in (buffer, part):
        with pytest.raises(BufferDroppedError):
            dropped.read_into(torch.empty(dropped.nbytes // 4, device="cuda")).get()


def test_memory_that_is_not_there_is_refused_before_anything_is_sent() -> None:
    freed = torch.zeros(COUNT, device="cuda")
    freed.untyped_storage().resize_(0)
    buffer = RDMABuffer(torch.zeros(COUNT, device="cuda"))
    with pytest.raises(ValueError, match="was freed"):
        RDMABuffer(freed)
    with pytest.raises(ValueError, match="was freed"):
        buffer.read_into(freed)
    with pytest.raises(ValueError, match="was freed"):
        RDMAAction().read_remote(freed, buffer)
    with pytest.raises(ValueError, match="contiguous"):
        RDMABuffer(torch.zeros(8, 8, device="cuda").t())
    with pytest.raises(ValueError, match="has 40 bytes"):
        buffer.read_into(torch.zeros(10, device="cuda"))
    with pytest.raises(TypeError, match="meta"):
        buffer.read_into(torch.zeros(COUNT, device="meta"))


@on_gpus(2)
def test_memory_of_two_gpus() -> None:
    first, second = (torch.full((COUNT,), value, device=f"cuda:{value}") for value in (0, 1))
    buffer = RDMABuffer(first)
    buffer.read_into(second, timeout=30).get()
    assert not second.any()
    buffer.write_from(torch.ones(COUNT, dtype=torch.int64, device="cuda:1"), timeout=30).get()
    assert first.sum().item() == COUNT


@pytest.mark.parametrize("count", [1000, LARGE])
def test_a_write_carries_what_kernels_that_were_queued_before_it_produce(stream: torch.cuda.Stream, count: int) -> None:
    owned, source = (torch.zeros(count, dtype=torch.int64, device="cuda") for _ in range(2))
    buffer = RDMABuffer(owned)
    torch.cuda.synchronize()
    occupy()
    source.fill_(7)
    buffer.write_from(source, timeout=30).get()
    assert (owned == 7).all()


@pytest.mark.parametrize("count", [1000, LARGE])
def test_a_read_leaves_alone_what_kernels_that_were_queued_before_it_still_use(
    stream: torch.cuda.Stream, count: int
) -> None:
    buffer = RDMABuffer(torch.full((count,), 2, device="cuda"))
    into = torch.ones(count, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    occupy()
    before = into.clone()
    buffer.read_into(into, timeout=30).get()
    after = into.clone()
    torch.cuda.synchronize()
    assert (before == 1).all()
    assert (after == 2).all()


def test_an_action_keeps_the_order_of_the_stream_too(stream: torch.cuda.Stream) -> None:
    owned = torch.zeros(64, 64, device="cuda")
    source = torch.zeros(64, 64, device="cuda")
    action = RDMAAction().write_remote(RDMABuffer(owned), source.t())
    action.submit(30).get()
    occupy()
    source.copy_(torch.arange(4096, device="cuda").reshape(64, 64))
    action.submit(30).get()
    assert torch.equal(owned.cpu(), torch.arange(4096.0).reshape(64, 64).t())


def test_the_interpreter_runs_while_a_transfer_waits_for_a_stream(stream: torch.cuda.Stream) -> None:
    buffer = RDMABuffer(torch.zeros(LARGE, dtype=torch.int64, device="cuda"))
    turns, over = [0], threading.Event()

    def count() -> None:
        while not over.is_set():
            turns[0] += 1

    other = threading.Thread(target=count)
    occupy()
    operation = buffer.read_into(torch.empty(LARGE, dtype=torch.int64, device="cuda"), timeout=30)
    other.start()
    begun = turns[0]
    operation.get()
    counted = turns[0] - begun
    over.set()
    other.join()
    assert counted > 100


def test_a_stream_that_is_busy_for_too_long_ends_the_transfer_and_not_more(stream: torch.cuda.Stream) -> None:
    buffer = RDMABuffer(torch.zeros(1000, device="cuda"))
    into = torch.ones(1000, device="cuda")
    torch.cuda.synchronize()
    occupy(seconds=2.0)
    with pytest.raises(TransferTimeoutError, match="earlier work of its stream"):
        buffer.read_into(into, timeout=0.2).get()
    torch.cuda.synchronize()
    assert into.all()
    buffer.read_into(into, timeout=30).get()
    assert not into.any()


def test_empty_gives_memory_of_a_gpu() -> None:
    assert dataplane.empty(3, device="cuda").is_cuda
