"""The server's end as the client sees it: `side.Side`'s methods, done by request."""

from __future__ import annotations

from dataclasses import dataclass

from skipper.benchmarks.bandwidth.channel import MessageChannel
from skipper.benchmarks.bandwidth.messages import (
    Connect,
    Corrupt,
    Done,
    Elapsed,
    Fill,
    Goodbye,
    IntegrityVerdict,
    Mismatch,
    Offer,
    TransferOrder,
    Verify,
    Where,
    Which,
    Wire,
    Workload,
    ask,
    read_answer,
    tell,
)

__all__ = ["FarSide", "patience"]

SLOWEST_BYTES_PER_S = 100e6
"""Below any rate at which a machine fills or reads its own memory, fresh pages and a busy core included."""


def patience(workload: Workload) -> float:
    """Seconds after which an end that has not answered is given up: one transfer, and work on its memory."""
    return workload.timeout_s + 10.0 + 2 * workload.largest * workload.batch / SLOWEST_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class FarSide:
    """Drives the server's end over the channel. Every method raises `PeerError` when that fails."""

    channel: MessageChannel
    workload: Workload

    def open(self) -> tuple[Offer, list[bytes]]:
        """Let the server allocate and register; the handles of its buffers come back."""
        offer = ask(self.channel, self.workload, Offer, timeout=patience(self.workload))
        return offer, [self.channel.receive() for _ in range(self.workload.handles)]

    def connect(self, descriptors: list[bytes]) -> None:
        """Give the server this side's buffers, for the other direction."""
        tell(self.channel, Connect(handles=len(descriptors)))
        for descriptor in descriptors:
            self.channel.send(descriptor)
        read_answer(self.channel, Done, timeout=patience(self.workload))

    def fill(self, where: Where, size: int, *, seed: int) -> None:
        """Write the pattern of ``seed``."""
        ask(self.channel, Fill(where=where, size=size, seed=seed), Done, timeout=patience(self.workload))

    def verify(self, where: Where, size: int, *, seed: int) -> Mismatch | None:
        """The first byte that is not of the pattern."""
        request = Verify(where=where, size=size, seed=seed)
        return ask(self.channel, request, IntegrityVerdict, timeout=patience(self.workload)).mismatch

    def corrupt(self, where: Where, size: int, *, at: int) -> None:
        """Flip one byte of the stream."""
        ask(self.channel, Corrupt(where=where, size=size, at=at), Done)

    def start_transfer(self, size: int, *, runs: int) -> None:
        """Let the server transfer, and do not wait for it."""
        tell(self.channel, TransferOrder(size=size, runs=runs))

    def finish_transfer(self, *, runs: int) -> int:
        """Wait for the transfers that `start_transfer` began; returns their ns."""
        limit = self.workload.timeout_s * runs + 10.0
        return read_answer(self.channel, Elapsed, timeout=limit).elapsed_ns

    def transfer(self, size: int, *, runs: int) -> int:
        """Let the server transfer, and wait for it."""
        self.start_transfer(size, runs=runs)
        return self.finish_transfer(runs=runs)

    def link(self, backend: str) -> Wire:
        """The link of the server's end."""
        return ask(self.channel, Which(backend=backend), Wire)

    def goodbye(self) -> None:
        """End the session in order."""
        ask(self.channel, Goodbye(), Done, timeout=patience(self.workload))
