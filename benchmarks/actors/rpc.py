"""An actor server with one plain object, in a process of its own, and its client in this process."""

from __future__ import annotations

import contextlib
import secrets
import signal
import sys
from collections.abc import Iterator

from skipper.benchmarks.actors.raw_grpc import read_line, start_process
from skipper.benchmarks.statistics import time_runs
from skipper.control.rpc import ActorServer, FixedResolver, RpcClient, RpcOptions

__all__ = ["RpcEcho"]

_NAME = "echo"


class _Echo:
    def echo(self, value: bytes) -> bytes:
        """Give back what came."""
        return value


class RpcEcho:
    """The client, and the server process that it calls."""

    def __init__(self, client: RpcClient[_Echo]) -> None:
        self._client = client

    @classmethod
    @contextlib.contextmanager
    def start(cls, *, timeout: float) -> Iterator[RpcEcho]:
        """Start the server; it ends with the block.

        Args:
            timeout: Limit of each call, in seconds.

        Raises:
            PeerLostError: It did not start.
        """
        secret = secrets.token_bytes(32)
        with start_process("skipper.benchmarks.actors.rpc") as process:
            print(secret.hex(), file=process.stdin, flush=True)  # not an argument, which other users could read
            address = read_line(process, "the actor server has not started")
            resolver = FixedResolver(f"actor://{address}/{_NAME}")
            with RpcClient(resolver, _Echo, RpcOptions(timeout=timeout), name=_NAME, secret=secret) as client:
                yield cls(client)

    def call(self, count: int, value: bytes) -> list[int]:
        """Durations of ``count`` calls in this thread, one after another, in ns."""
        return time_runs(lambda: self._client.echo.sync(value), count)

    def call_by_future(self, count: int, value: bytes) -> list[int]:
        """The same, each call through a future."""
        return time_runs(lambda: self._client.echo(value).get(), count)


def _serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark alone answers Ctrl-C, and ends this process
    secret = bytes.fromhex(sys.stdin.readline())
    with ActorServer("127.0.0.1", 0, secret=secret) as server:
        server.register(_NAME, _Echo())
        print(server.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _serve()
