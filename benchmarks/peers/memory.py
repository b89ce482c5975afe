"""What all peers of the memory family share: a region at each end, its transfers, and the check of what arrived.

A peer implements how bytes move between the two regions (`Far`). What is moved, how often, and the check that it
arrived are the same for all.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from skipper.benchmarks.errors import IntegrityError, PeerLostError
from skipper.benchmarks.peers.protocol import Block, MeasuringTurn
from skipper.benchmarks.peers.work import Span, one_sided, rows_of

__all__ = ["Bytes", "Far", "Operation", "MemoryOwner", "fill", "holds", "keep", "memory_blocks"]

Bytes = NDArray[np.uint8]
Operation = Callable[[], object]

_CHUNK_NBYTES = 16 << 20
_ANSWER_S = 60.0


class Far(Protocol):
    """A region of another process, and a region of this process of the same size."""

    local: Bytes

    def operation(self, spans: Sequence[Span], *, write: bool) -> Operation:
        """Prepare what is not timed, and return a call that moves the spans and returns when they have arrived.

        Raises:
            CannotError: The peer has no such operation.
        """
        ...

    def fill(self, spans: Sequence[Span], value: int) -> None:
        """Write ``value`` into every byte of the far end's spans."""
        ...

    def holds(self, spans: Sequence[Span], value: int) -> bool:
        """Whether every byte of the far end's spans is ``value``."""
        ...


def memory_blocks(far: Far) -> dict[str, Block]:
    """How the rows of the family are done with ``far``."""
    return {row.name: functools.partial(_transfer, far, row.name) for row in rows_of("memory")}


def _transfer(far: Far, name: str, turn: MeasuringTurn) -> list[int]:
    write, spans = one_sided(name)
    move = far.operation(spans, write=write)
    for value in (5, 7):  # two values, so that an operation that moves nothing fails
        if write:
            fill(far.local, spans, value)
        else:
            far.fill(spans, value)
        move()
        arrived = far.holds(spans, value) if write else holds(far.local, spans, value)
        if not arrived:
            raise IntegrityError(f"{name}: the bytes that arrived are not those that were sent")
    return turn.times(move)


def fill(memory: Bytes, spans: Sequence[Span], value: int) -> None:
    """Write ``value`` into every byte of the spans."""
    for offset, nbytes in spans:
        memory[offset : offset + nbytes] = value


def holds(memory: Bytes, spans: Sequence[Span], value: int) -> bool:
    """Whether every byte of the spans is ``value``."""
    return all(
        bool((memory[begin : min(begin + _CHUNK_NBYTES, offset + nbytes)] == value).all())
        for offset, nbytes in spans
        for begin in range(offset, offset + nbytes, _CHUNK_NBYTES)
    )


class MemoryOwner:
    """A process that owns a region, where the peer does not start processes itself."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self.hello: Any = self._receive()

    @classmethod
    def start(cls, stack: ExitStack, target: Callable[..., None], *arguments: object) -> MemoryOwner:
        """Start ``target(connection, *arguments)``, which sends something and then calls `keep`; the stack ends it.

        Raises:
            PeerLostError: It ended before it had sent anything; or `TimeoutError`, it has not sent anything in time.
        """
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        process = spawn.Process(target=target, args=(there, *arguments), daemon=True)
        process.start()
        there.close()

        def end() -> None:
            here.close()
            process.join(5)
            process.kill()
            process.join()

        stack.callback(end)
        return cls(here)

    def fill(self, spans: Sequence[Span], value: int) -> None:
        """See `Far`."""
        self._ask("fill", spans, value)

    def holds(self, spans: Sequence[Span], value: int) -> bool:
        """See `Far`."""
        return bool(self._ask("holds", spans, value))

    def _ask(self, what: str, spans: Sequence[Span], value: int) -> object:
        self._connection.send((what, spans, value))
        return self._receive()

    def _receive(self) -> object:
        if not self._connection.poll(_ANSWER_S):
            raise TimeoutError(f"the owner of the memory has said nothing for {_ANSWER_S:.0f} s")
        try:
            return self._connection.recv()
        except EOFError as error:
            raise PeerLostError("the owner of the memory has ended") from error


def keep(connection: Connection[Any, Any], memory: Bytes) -> None:
    """Be the owner of ``memory`` until the other end closes."""
    actions: Mapping[str, Callable[[Bytes, Sequence[Span], int], object]] = {"fill": fill, "holds": holds}
    while True:
        try:
            what, spans, value = connection.recv()
        except EOFError:
            return
        connection.send(actions[what](memory, spans, value))
