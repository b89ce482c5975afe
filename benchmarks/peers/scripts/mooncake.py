"""Mooncake's transfer engine over TCP, which finds its peer without a metadata server."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from skipper.benchmarks.errors import PeerError
from skipper.benchmarks.peers.memory import Bytes, MemoryOwner, Operation, keep, memory_blocks
from skipper.benchmarks.peers.protocol import Block
from skipper.benchmarks.peers.work import REGION_NBYTES, Family, Span

__all__ = ["CANNOT", "open_blocks"]

CANNOT: dict[str, str] = {}


def open_blocks(_family: Family, stack: ExitStack) -> dict[str, Block]:
    """See `benchmarks.peers.child`."""
    return memory_blocks(_Region(stack))


class _Region:
    def __init__(self, stack: ExitStack) -> None:
        self.local: Bytes = np.zeros(REGION_NBYTES, np.uint8)
        self._owner = MemoryOwner.start(stack, _own)
        self._engine = _engine(self.local)
        self._name, self._address = self._owner.hello
        self.fill, self.holds = self._owner.fill, self._owner.holds

    def operation(self, spans: Sequence[Span], *, write: bool) -> Operation:
        """One request for all spans."""
        engine = self._engine
        mine, theirs = ([base + offset for offset, _ in spans] for base in (self.local.ctypes.data, self._address))
        sizes = [nbytes for _, nbytes in spans]
        one = engine.transfer_sync_write if write else engine.transfer_sync_read
        many = engine.batch_transfer_sync_write if write else engine.batch_transfer_sync_read

        def move() -> None:
            if len(sizes) == 1:
                code = one(self._name, mine[0], theirs[0], sizes[0])
            else:
                code = many(self._name, mine, theirs, sizes)
            if code != 0:
                raise PeerError(f"the transfer has failed with {code}")

        return move


def _engine(memory: Bytes) -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise PeerError("the transfer engine has not started")
    if engine.register_memory(memory.ctypes.data, memory.nbytes) != 0:
        raise PeerError("the memory could not be registered")
    return engine


def _own(connection: Connection[Any, Any]) -> None:
    memory: Bytes = np.zeros(REGION_NBYTES, np.uint8)
    engine = _engine(memory)
    connection.send((f"127.0.0.1:{engine.get_rpc_port()}", memory.ctypes.data))
    keep(connection, memory)
