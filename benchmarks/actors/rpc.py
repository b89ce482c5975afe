"""A plain object on an actor server, in a process of its own, and a client of it in this one."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
from collections.abc import Iterator
from time import perf_counter_ns

from skipper.benchmarks.errors import PeerLostError
from skipper.control.rpc import ActorServer, FixedResolver, RpcClient, RpcOptions

__all__ = ["RpcEcho"]

_NAME = "echo"
_EXIT_S = 5.0


class _Echo:
    def echo(self, value: bytes) -> bytes:
        """Give back what came."""
        return value


class RpcEcho:
    """The client, and the server process behind it."""

    def __init__(self, client: RpcClient[_Echo]) -> None:
        self._client = client

    @classmethod
    @contextlib.contextmanager
    def start(cls, *, timeout: float) -> Iterator[RpcEcho]:
        """Start the server; it ends with the block.

        Args:
            timeout: Of each call, in seconds.

        Raises:
            PeerLostError: It did not start.
        """
        secret = secrets.token_bytes(32)
        command = [sys.executable, "-m", "skipper.benchmarks.actors.rpc"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                print(secret.hex(), file=process.stdin, flush=True)  # not in its arguments, which others can read
                address = process.stdout.readline().strip()
                if not address:
                    raise PeerLostError("the actor server has not started")
                resolver = FixedResolver(f"actor://{address}/{_NAME}")
                with RpcClient(resolver, _Echo, RpcOptions(timeout=timeout), name=_NAME, secret=secret) as client:
                    yield cls(client)
            finally:
                process.stdin.close()  # which ends it
                try:
                    process.wait(_EXIT_S)
                except subprocess.TimeoutExpired:
                    process.kill()

    def call(self, count: int, value: bytes) -> list[int]:
        """Durations of ``count`` calls in this thread, one after another, in ns."""
        durations = []
        for _ in range(count):
            begin = perf_counter_ns()
            self._client.echo.sync(value)
            durations.append(perf_counter_ns() - begin)
        return durations

    def call_by_future(self, count: int, value: bytes) -> list[int]:
        """The same by way of a future."""
        durations = []
        for _ in range(count):
            begin = perf_counter_ns()
            self._client.echo(value).get()
            durations.append(perf_counter_ns() - begin)
        return durations


def _serve() -> None:
    secret = bytes.fromhex(sys.stdin.readline())
    with ActorServer("127.0.0.1", 0, secret=secret) as server:
        server.register(_NAME, _Echo())
        print(server.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _serve()
