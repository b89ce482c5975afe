"""The other process: it owns memory of a GPU and of the host, and does nothing while it is read and written."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from skipper import dataplane
from skipper.benchmarks.errors import BenchmarkError
from skipper.dataplane import RDMABuffer

__all__ = ["owned"]

_START_S = 90.0


@contextmanager
def owned(nbytes: int, devices: Mapping[str, str]) -> Iterator[dict[str, RDMABuffer]]:
    """Buffers of ``nbytes`` bytes, by the names of ``devices``: host memory is such that others can map it.

    Raises:
        BenchmarkError: The process does not start, or cannot register the memory; it says why.
    """
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_own, args=(there, nbytes, dict(devices)), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(_START_S):
            raise BenchmarkError(f"the owner of the memory did not start within {_START_S:g} s")
        answer = here.recv()
        if isinstance(answer, str):
            raise BenchmarkError(f"the owner of the memory: {answer}")
        yield {name: RDMABuffer.deserialize(handle) for name, handle in answer.items()}
    except EOFError:
        raise BenchmarkError("the owner of the memory ended before it had registered any") from None
    finally:
        process.kill()
        process.join(10)


def _own(connection: Connection[Any, Any], nbytes: int, devices: dict[str, str]) -> None:
    try:
        memory = {name: dataplane.empty((nbytes,), torch.uint8, device=device) for name, device in devices.items()}
        for tensor in memory.values():
            tensor.fill_(1)  # in place before anything is timed
        buffers = {name: RDMABuffer(tensor) for name, tensor in memory.items()}
        connection.send({name: buffer.serialize() for name, buffer in buffers.items()})
    except Exception as error:  # noqa: BLE001 - the other side gets it, and ends the run
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.poll(None)  # until the other side is gone
