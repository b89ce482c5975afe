"""The actor classes that the files of this folder use."""

from __future__ import annotations

import asyncio
from typing import Any, Generic, TypeVar

from skipper.control import Actor, ActorMesh, Channel, Port, concurrent_endpoint, context, endpoint, idempotent

T = TypeVar("T")


class Point:
    """A result with an attribute."""

    def __init__(self, x: float) -> None:
        self.x = x


class Counter(Actor):
    """With plain endpoints, and attributes that are named as those of meshes."""

    def __init__(self, start: int, *, step: int = 1) -> None:
        self.value = start
        self.step = step
        self.name = b"of its own"
        self.size = [step]

    @endpoint
    def add(self, amount: int, times: int = 1) -> int:
        """Add to the value."""
        self.value += amount * times
        return self.twice(self.value)

    @endpoint
    def reset(self) -> None:
        """Begin anew."""
        self.value = self.add(0)  # within the actor a plain call

    @endpoint(propagate="cached")
    @idempotent
    def where(self, point: Point, /) -> Point:
        """Give it back."""
        return point

    @idempotent
    @endpoint
    def names(self, *parts: str, end: str = "") -> list[str]:
        """Give them back."""
        return [*parts, end]

    @endpoint(explicit_response_port=True)
    def later(self, port: Port[str], number: int) -> None:
        """Answer through the port."""
        port.send(str(number))

    @endpoint
    def subscribe(self, news: Port[float]) -> None:
        """Send something."""
        news.send(1.0)

    def twice(self, number: int) -> int:
        """No endpoint."""
        return 2 * number

    def delayed(self, port: Port[bytes], number: int) -> None:
        """No endpoint; takes a response port."""
        port.send(bytes(number))


class Waiter(Actor):
    """With ``async`` endpoints, and meshes of others."""

    def __init__(self, counters: ActorMesh[Counter]) -> None:
        self.counter = counters.slice(**context().actor_instance.rank)

    @endpoint
    async def wait(self, seconds: float) -> float:
        """Wait."""
        await asyncio.sleep(seconds)
        return await self.again(seconds)

    @concurrent_endpoint
    async def again(self, seconds: float) -> float:
        """Ask somebody else."""
        return seconds + await self.counter.add.call_one(1)

    @concurrent_endpoint(propagate=None)
    async def both(self, other: ActorMesh[Waiter], seconds: float) -> tuple[float, str]:
        """Ask one's like."""
        return await other.wait.call_one(seconds), "waited"

    @concurrent_endpoint(explicit_response_port=True)
    async def ask(self, port: Port[int], numbers: list[int]) -> None:
        """Answer through the port."""
        port.send(sum(numbers))

    @endpoint
    async def open(self) -> Port[int]:
        """A port to this actor."""
        port, self.receiver = Channel[int].open()
        return port


class Special(Counter):
    """Overrides an endpoint by one that takes more."""

    @endpoint
    def add(self, amount: int, times: int = 1, more: int = 0) -> int:
        """Add more."""
        return super().add(amount + more, times)


class Box(Actor, Generic[T]):
    """An actor class with a type variable."""

    def __init__(self, value: T) -> None:
        self.value = value

    @endpoint
    def swap(self, value: T) -> T:
        """Take a value, and give the one before."""
        before, self.value = self.value, value
        return before


class Untyped(Actor):
    """As people write them who do not annotate."""

    def __init__(self, start=0):  # type: ignore[no-untyped-def]
        self.value = start

    @endpoint
    def get(self, key, default=None):  # type: ignore[no-untyped-def]
        """Anything."""
        return self.value or key or default

    @endpoint
    def anything(self, *args: Any, **kwargs: Any) -> Any:
        """Anything."""
        return args, kwargs
