"""`Heartbeats`: signs of life on every link, and the end of links that show none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from control.wire.envelope import NO_SIGN_OF_LIFE, Envelope, Kind, ProcessRef
from control.wire.link import Link


class Heartbeats:
    """Those of one process.

    Args:
        links: its links, as they come and go, by the process at the other end.
        silence_s: how long a process may be silent; after that it counts as unreachable.
        lose: gives up the link to a process, with the reason.
    """

    def __init__(self, links: Mapping[str, Link], *, silence_s: float, lose: Callable[[ProcessRef, str], None]) -> None:
        self._links = links
        self._silence_s = silence_s
        self._lose = lose
        self._patient: set[str] = set()

    def be_patient_with(self, peer: ProcessRef) -> None:
        """Let silence alone never count as this peer's death. From any thread."""
        self._patient.add(peer.id)

    async def run(self) -> None:
        """Look after the links until cancelled; on the loop thread."""
        interval = self._silence_s / 4
        while True:
            before = time.monotonic()
            await asyncio.sleep(interval)
            now = time.monotonic()
            was_frozen = now - before > 2 * interval + 0.5
            for link in list(self._links.values()):
                if not link.connected:
                    continue
                if was_frozen:
                    link.heard()  # it was this process that stood still: the others deserve a fresh start
                if now - link.last_heard_s > self._silence_s and link.peer.id not in self._patient:
                    self._lose(link.peer, f"it showed {NO_SIGN_OF_LIFE} for {self._silence_s:g} s")
                else:
                    link.post(Envelope(Kind.PING))
