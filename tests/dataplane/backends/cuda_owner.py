"""A process that owns memory of a GPU, and does what a test tells it."""

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import torch

from skipper import dataplane
from skipper.dataplane import RDMABuffer
from tests.gpu.kernels import occupy

START_S = 60.0
REPLY_S = 30.0


class CudaOwner:
    """The process, seen from the test."""

    def __init__(self, device: str = "cuda") -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, there = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(there, device), daemon=True)
        self.process.start()
        there.close()
        self._answer(START_S)

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Call a method of `_Memory` there."""
        self._connection.send((name, arguments))
        return self._answer(REPLY_S)

    def buffer(self, count: int) -> RDMABuffer:
        """A buffer of the int64 numbers from 0 on."""
        return RDMABuffer.deserialize(self("make", count))

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.join(REPLY_S)

    def _answer(self, timeout_s: float) -> Any:
        assert self._connection.poll(timeout_s), "the owner does not answer"
        kind, answer = self._connection.recv()
        assert kind == "answer", answer
        return answer


class _Memory:
    def __init__(self, device: str) -> None:
        self._device = device
        torch.zeros(1, device=device)  # so that CUDA has started before anybody counts seconds

    def make(self, count: int) -> bytes:
        self.tensor = torch.arange(count, device=self._device)
        self._buffer = RDMABuffer(self.tensor)
        return self._buffer.serialize()

    def make_shared(self, count: int) -> bytes:
        """The same in memory of the host that others can map."""
        self.tensor = torch.arange(count, out=dataplane.empty(count, torch.int64))
        self._buffer = RDMABuffer(self.tensor)
        return self._buffer.serialize()

    def make_late(self, count: int, value: int) -> bytes:
        """Memory whose content is still to be made when its handle is asked for, on a stream of its own."""
        self.tensor = torch.zeros(count, dtype=torch.int64, device=self._device)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            occupy()
            self.tensor.fill_(value)
            self._buffer = RDMABuffer(self.tensor)
        return self._buffer.serialize()

    def content(self) -> torch.Tensor:
        return self.tensor.cpu()

    def give_back(self) -> None:
        """Let go of the memory, and have torch give it back to CUDA."""
        del self.tensor, self._buffer
        torch.cuda.empty_cache()

    def drop(self) -> None:
        self._buffer.drop()


def _serve(connection: "Connection[Any, Any]", device: str) -> None:
    memory = _Memory(device)
    connection.send(("answer", None))
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("answer", getattr(memory, name)(*arguments)))
        except Exception as error:  # noqa: BLE001 - the test is told
            connection.send(("error", f"{type(error).__name__}: {error}"))
