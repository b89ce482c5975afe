"""Peer reads: which readers offer a copy of a version, and which copy a reader is sent to. No I/O.

The readers of one *read group* need the same boxes of the same tensors. After its read, each of them has everything
that another one needs. The first of a group is sent to the publisher. Readers that come while it reads wait for it.
They are then sent to the present copies, a few to each, so that the number of copies grows like the number of nodes of
a tree with its depth. The publisher serves one reader of each group, whatever their number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from skipper.torchstore.protocol.messages import Share
from skipper.torchstore.support.process import ProcessId

_AT_ONE_TIME = 2  # readers of one copy: with one, a group of 8 takes four rounds; more would share its memory


@dataclass(slots=True)
class PeerCopy:
    """The copy of one reader.

    Attributes:
        share: Where it is: direct memory of that reader, with its own seal.
        leases: Of its present readers.
        closed: Its owner will change it, or a reader has failed to read it.
    """

    share: Share
    leases: dict[int, ProcessId] = field(default_factory=dict)
    closed: bool = False


@dataclass(slots=True)
class _ReadGroup:
    offers: list[PeerCopy] = field(default_factory=list)
    reading: set[int] = field(default_factory=set)  # leases of readers that may have an offer soon
    declined: bool = False  # a reader had nothing to offer, so the others will have nothing, either


@dataclass(slots=True)
class PeerReadScheduler:
    """The copies of one version that readers offer, by read group."""

    _groups: dict[str, _ReadGroup] = field(default_factory=dict)

    @property
    def were_made(self) -> bool:
        """Whether any reader has taken part."""
        return bool(self._groups)

    def must_wait(self, read_group: str, reader: ProcessId) -> bool:
        """Whether there is no copy to read now, but one will be made."""
        found = self._groups.get(read_group)
        if found is None or found.declined or self.choose(read_group, reader) is not None:
            return False
        return bool(found.reading)

    def choose(self, read_group: str, reader: ProcessId) -> PeerCopy | None:
        """The copy with the fewest readers; None: use the publisher."""
        found = self._groups.get(read_group)
        free = [
            offer
            for offer in (found.offers if found is not None else ())
            if not offer.closed and len(offer.leases) < _AT_ONE_TIME and offer.share.writer != reader
        ]
        return min(free, key=lambda offer: len(offer.leases), default=None)

    def begin(self, read_group: str, lease: int, reader: ProcessId, offer: PeerCopy | None) -> None:
        """Note that a reader was sent to a copy, or to the publisher."""
        self._groups.setdefault(read_group, _ReadGroup()).reading.add(lease)
        if offer is not None:
            offer.leases[lease] = reader

    def end(self, lease: int) -> None:
        """Note that a reader has left, with or without a copy."""
        for group in self._groups.values():
            group.reading.discard(lease)
            for offer in group.offers:
                offer.leases.pop(lease, None)
            group.offers = [offer for offer in group.offers if offer.leases or not offer.closed]

    def finish(self, lease: int, share: Share | None, *, failed: bool) -> None:
        """Note that a reader has got the version.

        Args:
            lease: Its lease, which must still be ended.
            share: Its copy, if it offers it.
            failed: It could not read the copy that it was sent to, so no other reader is sent there.
        """
        for group in self._groups.values():
            for offer in group.offers:
                offer.closed = offer.closed or (failed and lease in offer.leases)
            if lease in group.reading:
                group.declined = group.declined or share is None
                if share is not None:
                    group.offers.append(PeerCopy(share))

    def close(self, process: ProcessId) -> None:
        """Withdraw the copies of a process, or of a dead one."""
        self._close(lambda offer: offer.share.writer == process)

    def close_all(self) -> None:
        """Withdraw all copies."""
        self._close(lambda _offer: True)

    def _close(self, condition: Callable[[PeerCopy], bool]) -> None:
        for group in self._groups.values():
            for offer in group.offers:
                offer.closed = offer.closed or condition(offer)
            group.offers = [offer for offer in group.offers if offer.leases or not offer.closed]

    def readers(self, process: ProcessId) -> tuple[ProcessId, ...]:
        """The present readers of a process' copies."""
        return tuple(
            reader
            for group in self._groups.values()
            for offer in group.offers
            if offer.share.writer == process
            for reader in offer.leases.values()
        )


class Patience:
    """How long one reader waits for a copy: a stuck reader must not block the others of its group.

    The time starts when the reader first has to wait; ``wake`` is called in the event loop when it is over.
    """

    def __init__(self, seconds: float, wake: Callable[[], None]) -> None:
        self._seconds = seconds
        self._wake = wake
        self._state: Literal["unused", "waiting", "over"] = "unused"

    def is_over(self) -> bool:
        """Whether the reader has waited long enough; the first call begins the wait."""
        if self._state == "unused":
            self._state = "waiting"
            asyncio.get_running_loop().call_later(self._seconds, self._end)
        return self._state == "over"

    def _end(self) -> None:
        self._state = "over"
        self._wake()
