"""CUDA memory over UCX, between processes."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from skipper import dataplane
from skipper.dataplane import BackendUnavailableError, RDMAAction, RDMABuffer

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

COUNT = 3_000_000  # of int64: large enough for several workers


def own(connection: "Connection[Any, Any]") -> None:
    """Another process, with memory on its GPU."""
    memory = torch.arange(COUNT, device="cuda")
    torch.cuda.synchronize()
    connection.send(RDMABuffer(memory).serialize())
    while connection.recv() == "sum":
        torch.cuda.synchronize()
        connection.send(int(memory.sum()))


@pytest.fixture
def owner() -> "Iterator[tuple[RDMABuffer, Connection[Any, Any]]]":
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=own, args=(there,), daemon=True)
    process.start()
    try:
        assert here.poll(60), "the owner does not start"
        yield RDMABuffer.deserialize(here.recv()), here
    finally:
        process.kill()
        process.join(10)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_of_another_process_gpu_is_read_and_written(
    owner: "tuple[RDMABuffer, Connection[Any, Any]]", device: str
) -> None:
    buffer, connection = owner
    assert buffer.backend == "ucx"
    into = torch.zeros(COUNT, dtype=torch.int64, device=device)
    buffer.read_into(into, timeout=30).get()
    assert torch.equal(into.cpu(), torch.arange(COUNT))
    buffer.write_from(torch.ones(COUNT, dtype=torch.int64, device=device), timeout=30).get()
    connection.send("sum")
    assert connection.recv() == COUNT


def test_a_batch_reads_parts_of_another_process_gpu(owner: "tuple[RDMABuffer, Connection[Any, Any]]") -> None:
    buffer, _ = owner
    first, last = torch.zeros(10, dtype=torch.int64), torch.zeros(10, dtype=torch.int64)
    tail = buffer.at((COUNT - 10) * 8, 80)
    RDMAAction().read_remote(first, buffer.at(0, 80)).read_remote(last, tail).submit(timeout=30).get()
    assert first.tolist() == list(range(10))
    assert last.tolist() == list(range(COUNT - 10, COUNT))


def test_words_on_a_gpu_are_refused(owner: "tuple[RDMABuffer, Connection[Any, Any]]") -> None:
    buffer, _ = owner
    with pytest.raises(BackendUnavailableError, match="host memory"):
        buffer.fetch_add(1).get()


def test_the_status_says_that_cuda_memory_can_be_moved() -> None:
    RDMABuffer(torch.zeros(10, device="cuda")).serialize()
    status = {status.name: status for status in dataplane.backends()}["ucx"]
    assert "cuda" in status.memory_kinds
    assert "CUDA modules" in status.reason
