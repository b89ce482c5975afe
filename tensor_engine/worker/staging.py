"""Blocks of shared memory through which workers of one host exchange large tensors."""

from __future__ import annotations

import torch

from skipper import dataplane
from skipper.dataplane import Operation, RDMABuffer
from skipper.tensor_engine.errors import CommunicationError

CARD_NBYTES = 512
"""Space for the handle of a block in a message. A handle with only shared memory has about 130 bytes."""
_CARD_MAX = CARD_NBYTES - 2


class StagingBlock:
    """A block that this worker writes, and others read one-sidedly. It grows as needed.

    Attributes:
        memory: the block.
        card: its handle, as `CARD_NBYTES` of uint8, to be sent to readers.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.card = torch.zeros(CARD_NBYTES, dtype=torch.uint8)
        self._buffer: RDMABuffer | None = None

    def room(self, nbytes: int) -> torch.Tensor:
        """The first ``nbytes`` of the block, as uint8. Nobody may be reading the block at this time."""
        if nbytes > self.memory.numel():
            self.memory = dataplane.empty((nbytes,), torch.uint8)
            self._buffer = RDMABuffer(self.memory, writable=False)
            handle = self._buffer.serialize()
            if len(handle) > _CARD_MAX:
                raise CommunicationError(
                    f"the handle of shared memory has {len(handle)} bytes where {_CARD_MAX} are expected; let "
                    "dataplane.configure export fewer backends"
                )
            raw = len(handle).to_bytes(2, "little") + handle
            self.card[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        return self.memory[:nbytes]


class Peers:
    """The blocks of other workers, opened by their cards."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[bytes, RDMABuffer]] = {}

    def read(
        self, peer: int, slot: int, card: torch.Tensor, offset: int, into: torch.Tensor, *, timeout_s: float
    ) -> Operation:
        """Begin to read from the block number ``slot`` of the member of rank ``peer``, whose handle is in ``card``.

        The read begins ``offset`` bytes into the block and fills ``into``, which is contiguous and not empty.
        """
        raw = card.numpy().tobytes()
        known = self._known.get((peer, slot))
        if known is None or known[0] != raw:
            length = int.from_bytes(raw[:2], "little")
            known = self._known[peer, slot] = (raw, RDMABuffer.deserialize(raw[2 : 2 + length]))
        return known[1].at(offset, into.nbytes).read_into(into, timeout=timeout_s)
