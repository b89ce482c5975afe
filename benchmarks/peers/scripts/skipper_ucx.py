"""Skipper's `RDMABuffer` of memory that it did not allocate: what a reader reaches through UCX."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from skipper.benchmarks.peers.memory import memory_blocks
from skipper.benchmarks.peers.protocol import Block
from skipper.benchmarks.peers.scripts.skipper import Region
from skipper.benchmarks.peers.work import REGION_NBYTES, Family

__all__ = ["CANNOT", "open_blocks"]

CANNOT: dict[str, str] = {}


def open_blocks(_family: Family, stack: ExitStack) -> dict[str, Block]:
    """See `benchmarks.peers.child`."""
    return memory_blocks(Region(stack, ordinary))


def ordinary(nbytes: int = REGION_NBYTES) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Memory from malloc."""
    return np.empty(nbytes, np.uint8)
