"""The reference for calls: plain ``grpc.aio`` over TCP on this host, in a client and a server process of its own.

These processes run no actors: a process has one event loop for gRPC, and the options that `control` chooses for its own
channels must not change the reference.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter_ns
from typing import Any

from skipper.benchmarks.errors import PeerLostError

__all__ = ["RawGrpc", "read_line", "start_process"]

_SERVICE = "skipper.benchmarks.Echo"
_UNARY, _STREAM = f"/{_SERVICE}/Unary", f"/{_SERVICE}/Stream"
_MODULE, _ENDED = "skipper.benchmarks.actors.raw_grpc", "a raw gRPC process has ended"
_EXIT_S = 5.0


class RawGrpc:
    """The client process, which takes orders over its pipes, and the server process that it calls."""

    def __init__(self, client: subprocess.Popen[str]) -> None:
        self._client = client

    @classmethod
    @contextlib.contextmanager
    def start(cls) -> Iterator[RawGrpc]:
        """Start both processes; they end with the block.

        Raises:
            PeerLostError: One of them did not start.
        """
        # Skipper sets this variable for itself; the reference is gRPC as it comes.
        env = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
        with start_process(_MODULE, "server", env=env) as server:
            port = read_line(server, _ENDED)
            with start_process(_MODULE, "client", port, env=env) as client:
                yield cls(client)

    def unary(self, count: int, nbytes: int) -> list[int]:
        """Durations of ``count`` unary calls, one after another, in ns."""
        return self._ask("unary", count, nbytes)

    def stream(self, count: int, nbytes: int) -> list[int]:
        """Time in ns for ``count`` messages on one bidirectional stream, written as fast as it accepts them."""
        return self._ask("stream", count, nbytes)

    def _ask(self, what: str, count: int, nbytes: int) -> list[int]:
        assert self._client.stdin is not None  # see _process
        try:
            print(json.dumps([what, count, nbytes]), file=self._client.stdin, flush=True)
        except BrokenPipeError as error:
            raise PeerLostError("the raw gRPC client has ended") from error
        durations: list[int] = json.loads(read_line(self._client, _ENDED))
        return durations


@contextlib.contextmanager
def start_process(
    module: str, *arguments: str, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A process that runs ``module`` and ends when its standard input closes, which the end of the block does."""
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(_EXIT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def read_line(process: subprocess.Popen[str], ended: str) -> str:
    """The next line that the process prints.

    Raises:
        PeerLostError: The process printed no further line; ``ended`` is the message.
    """
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise PeerLostError(ended)
    return line


async def _serve() -> None:
    import grpc

    aio: Any = grpc.aio

    async def unary(request: bytes, _context: object) -> bytes:
        return request

    async def stream(_requests: object, context: Any) -> None:
        while (message := await context.read()) is not aio.EOF:
            await context.write(message)

    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "Stream": grpc.stream_stream_rpc_method_handler(stream),
    }
    server = aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


async def _call(port: str) -> None:
    import grpc

    aio: Any = grpc.aio
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        unary = channel.unary_unary(_UNARY)
        call = channel.stream_stream(_STREAM)()
        while line := await asyncio.to_thread(sys.stdin.readline):
            what, count, nbytes = json.loads(line)
            message = bytes(nbytes)
            if what == "unary":
                durations = []
                for _ in range(count):
                    begin = perf_counter_ns()
                    await unary(message)
                    durations.append(perf_counter_ns() - begin)
            else:
                begin = perf_counter_ns()
                reader = asyncio.create_task(_read(call, count))
                for _ in range(count):
                    await call.write(message)
                await reader
                durations = [perf_counter_ns() - begin]
            print(json.dumps(durations), flush=True)
        call.cancel()


async def _read(call: Any, count: int) -> None:
    for _ in range(count):
        await call.read()


def main(arguments: Sequence[str]) -> None:
    """Be the server or the client until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark alone answers Ctrl-C, and ends this process
    asyncio.run(_serve() if arguments[0] == "server" else _call(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
