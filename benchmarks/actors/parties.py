"""The actors that take part. Nothing heavy is imported here, since every process of the run imports it."""

from __future__ import annotations

from time import perf_counter_ns

from skipper.control import Actor, ActorMesh, endpoint

__all__ = ["AsyncCaller", "AsyncEcho", "CallingActor", "Echo"]


class Echo(Actor):
    """Answers at once; what is measured is the way."""

    def __init__(self) -> None:
        self.count = 0

    @endpoint
    def echo(self, value: bytes) -> bytes:
        """Give back what came."""
        return value

    @endpoint
    def nbytes(self, value: bytes) -> int:
        """Say how much came."""
        return len(value)

    @endpoint
    def note(self, value: int) -> None:
        """Take a message that nobody waits for."""
        self.count += 1

    @endpoint
    def noted(self) -> int:
        """Say how many of them came since the last question."""
        count, self.count = self.count, 0
        return count


class AsyncEcho(Actor):
    """The async kind of `Echo`."""

    @endpoint
    async def echo(self, value: bytes) -> bytes:
        """Give back what came."""
        return value


class CallingActor(Actor):
    """Calls another actor and times that itself."""

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
    """The async kind of `CallingActor`."""

    @endpoint
    async def time_calls(self, other: ActorMesh[AsyncEcho], count: int, value: bytes) -> list[int]:
        """Durations of ``count`` calls, one after another, in ns."""
        durations = []
        for _ in range(count):
            begin = perf_counter_ns()
            await other.echo.call_one(value)
            durations.append(perf_counter_ns() - begin)
        return durations
