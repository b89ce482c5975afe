"""gRPC itself, as it comes: ``grpc.aio``, unary calls, a server in each process."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import grpc
import numpy as np

from skipper.benchmarks.peers.memory import Bytes, Operation, fill, holds, memory_blocks
from skipper.benchmarks.peers.protocol import Block
from skipper.benchmarks.peers.work import FANOUT, MESSAGE_NBYTES, PIPELINED, REGION_NBYTES, ROWS, Family, Span

__all__ = ["CANNOT", "open_blocks"]

CANNOT = {row.name: "another peer is the floor of this row" for row in ROWS if row.yardstick != "grpc"}

_aio: Any = grpc.aio
_SERVICE = "skipper.benchmarks.Peer"
_MESSAGE = bytes(MESSAGE_NBYTES)
_PIECE_NBYTES = 1 << 20
_OPTIONS = [("grpc.max_receive_message_length", 4 << 20)]
_START_S = 30.0


def open_blocks(family: Family, stack: ExitStack) -> dict[str, Block]:
    """See `benchmarks.peers.child`."""
    runner = stack.enter_context(asyncio.Runner())
    if family == "memory":
        return memory_blocks(_Region(runner, stack))
    servers = _Servers(runner, 1 if family in ("store", "engine") else FANOUT)
    stack.callback(servers.close)
    one = servers.calls[0]

    def timed(action: Callable[[], Awaitable[object]]) -> Block:
        return lambda turn: runner.run(turn.times_async(action))

    call = timed(lambda: one(_MESSAGE))
    if family in ("store", "engine"):
        return dict.fromkeys(("put_64B", "get_64B", "issue", "fetch_4x4"), call)
    return {
        "call": call,
        "actor_to_actor": call,  # to gRPC, any caller is just a process
        "fanout": timed(lambda: _gather([each(_MESSAGE) for each in servers.calls])),
        "pipelined": timed(lambda: _gather([one(_MESSAGE) for _ in range(PIPELINED)])),
        "spawn": lambda turn: turn.times_spawn(lambda: _spawn(runner), _Servers.close),
    }


async def _gather(calls: Sequence[Awaitable[object]]) -> None:
    for call in calls:  # each began when it was created
        await call


def _spawn(runner: asyncio.Runner) -> _Servers:
    servers = _Servers(runner, FANOUT)
    runner.run(_gather([each(_MESSAGE) for each in servers.calls]))
    return servers


class _Servers:
    """Processes with a server each, and a channel to each."""

    def __init__(self, runner: asyncio.Runner, count: int) -> None:
        self._runner = runner
        started = [_start() for _ in range(count)]
        self._processes = [process for process, _ in started]
        self.channels = [runner.run(_dial(_port(connection))) for _, connection in started]
        self.calls = [channel.unary_unary(f"/{_SERVICE}/Echo") for channel in self.channels]

    def close(self) -> None:
        """End the processes."""
        for channel in self.channels:
            self._runner.run(channel.close())
        for process in self._processes:
            process.kill()
            process.join()


def _start() -> tuple[BaseProcess, Connection[Any, Any]]:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    there.close()
    return process, here


def _port(connection: Connection[Any, Any]) -> int:
    if not connection.poll(_START_S):
        raise TimeoutError("a server has not started")
    return int(connection.recv())


async def _dial(port: int) -> Any:
    return _aio.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS)


def _serve(connection: Connection[Any, Any]) -> None:
    asyncio.run(_serve_async(connection))


async def _serve_async(connection: Connection[Any, Any]) -> None:
    memory: Bytes = np.empty(REGION_NBYTES, np.uint8)

    async def echo(request: bytes, _context: object) -> bytes:
        return request

    async def read(request: bytes, _context: object) -> AsyncIterator[bytes]:
        for offset, nbytes in np.frombuffer(request, np.int64).reshape(-1, 2).tolist():
            for begin in range(offset, offset + nbytes, _PIECE_NBYTES):
                yield memory[begin : min(begin + _PIECE_NBYTES, offset + nbytes)].tobytes()

    async def write(requests: AsyncIterator[bytes], _context: object) -> bytes:
        begin = 0
        async for piece in requests:
            memory[begin : begin + len(piece)] = np.frombuffer(piece, np.uint8)
            begin += len(piece)
        return b""

    async def look(request: bytes, _context: object) -> bytes:
        what, value, *flat = np.frombuffer(request, np.int64).tolist()
        spans = list(zip(flat[::2], flat[1::2], strict=True))
        if what:
            fill(memory, spans, value)
        return b"" if what or holds(memory, spans, value) else b"wrong"

    handlers = {
        "Echo": grpc.unary_unary_rpc_method_handler(echo),
        "Read": grpc.unary_stream_rpc_method_handler(read),
        "Write": grpc.stream_unary_rpc_method_handler(write),
        "Look": grpc.unary_unary_rpc_method_handler(look),
    }
    server = _aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    connection.send(port)
    await server.wait_for_termination()


class _Region:
    """Bytes of another process, in messages; writes begin at the start of its memory."""

    def __init__(self, runner: asyncio.Runner, stack: ExitStack) -> None:
        self.local: Bytes = np.empty(REGION_NBYTES, np.uint8)
        self._runner = runner
        servers = _Servers(runner, 1)
        stack.callback(servers.close)
        channel = servers.channels[0]
        self._read = channel.unary_stream(f"/{_SERVICE}/Read")
        self._write = channel.stream_unary(f"/{_SERVICE}/Write")
        self._look = channel.unary_unary(f"/{_SERVICE}/Look")

    def operation(self, spans: Sequence[Span], *, write: bool) -> Operation:
        """One call for all spans."""
        request = np.array(spans, np.int64).tobytes()

        async def read() -> None:
            begin = 0  # the spans are contiguous
            async for piece in self._read(request):
                self.local[begin : begin + len(piece)] = np.frombuffer(piece, np.uint8)
                begin += len(piece)

        async def pieces() -> AsyncIterator[bytes]:
            for offset, nbytes in spans:
                for begin in range(offset, offset + nbytes, _PIECE_NBYTES):
                    yield self.local[begin : min(begin + _PIECE_NBYTES, offset + nbytes)].tobytes()

        async def send() -> None:
            await self._write(pieces())

        return lambda: self._runner.run(send() if write else read())

    def fill(self, spans: Sequence[Span], value: int) -> None:
        """See `Far`."""
        self._runner.run(self._ask(1, spans, value))

    def holds(self, spans: Sequence[Span], value: int) -> bool:
        """See `Far`."""
        return self._runner.run(self._ask(0, spans, value)) == b""

    async def _ask(self, what: int, spans: Sequence[Span], value: int) -> bytes:
        flat = [number for span in spans for number in span]
        answer: bytes = await self._look(np.array([what, value, *flat], np.int64).tobytes())
        return answer
