"""The actors that take part. Every process of a run imports this module, so it imports nothing heavy."""

from __future__ import annotations

from time import perf_counter_ns

from skipper.control import Actor, ActorMesh, endpoint

__all__ = ["AsyncCaller", "AsyncEcho", "CallingActor", "Echo"]


class Echo(Actor):
    """Answers at once, so that a call measures only the round trip."""

    def __init__(self) -> None:
        self.count = 0

    @endpoint
    def echo(self, value: bytes) -> bytes:
        """Return the argument."""
        return value

    @endpoint
    def nbytes(self, value: bytes) -> int:
        """The number of bytes received."""
        return len(value)

    @endpoint
    def note(self, value: int) -> None:
        """Count a message that nobody waits for."""
        self.count += 1

    @endpoint
    def noted(self) -> int:
        """How many such messages have come since the last call of this endpoint."""
        count, self.count = self.count, 0
        return count


class AsyncEcho(Actor):
    """`Echo` with an async endpoint."""

    @endpoint
    async def echo(self, value: bytes) -> bytes:
        """Return the argument."""
        return value


class CallingActor(Actor):
    """Calls another actor and times the calls itself."""

    @endpoint
    def time_calls(self, other: ActorMesh[Echo], count: int, value: bytes, timeout: float) -> list[int]:
        """Durations of ``count`` calls, one after another, in ns."""
        durations = []
        for _ in range(count):
            begin = perf_counter_ns()
            other.echo.call_one(value).get(timeout)
            durations.append(perf_counter_ns() - begin)
        return durations


class AsyncCaller(Actor):
    """`CallingActor` with an async endpoint."""

    @endpoint
    async def time_calls(self, other: ActorMesh[AsyncEcho], count: int, value: bytes) -> list[int]:
        """Durations of ``count`` calls, one after another, in ns."""
        durations = []
        for _ in range(count):
            begin = perf_counter_ns()
            await other.echo.call_one(value)
            durations.append(perf_counter_ns() - begin)
        return durations
