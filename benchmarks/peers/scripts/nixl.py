"""NIXL: agents with its UCX backend, memory registered once, a prepared request for each transfer."""

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
        self._agent = _agent("reader", self.local)
        metadata, self._address = self._owner.hello
        self._far = self._agent.add_remote_agent(metadata)
        self.fill, self.holds = self._owner.fill, self._owner.holds

    def operation(self, spans: Sequence[Span], *, write: bool) -> Operation:
        """One request for all spans."""
        agent = self._agent
        mine, theirs = (
            agent.get_xfer_descs([(base + offset, nbytes, 0) for offset, nbytes in spans], "DRAM")
            for base in (self.local.ctypes.data, self._address)
        )
        request = agent.initialize_xfer("WRITE" if write else "READ", mine, theirs, self._far)

        def move() -> None:
            state = agent.transfer(request)
            while state != "DONE":
                if state == "ERR":
                    raise PeerError("the transfer has failed")
                state = agent.check_xfer_state(request)

        return move


def _agent(name: str, memory: Bytes) -> Any:
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    descriptors = agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    agent.register_memory(descriptors)
    return agent


def _own(connection: Connection[Any, Any]) -> None:
    memory: Bytes = np.zeros(REGION_NBYTES, np.uint8)
    agent = _agent("owner", memory)
    connection.send((agent.get_agent_metadata(), memory.ctypes.data))
    keep(connection, memory)
