"""`Strangers`: streams whose other end has not proven itself yet."""

from __future__ import annotations

import time

from skipper.control.wire.message_stream import DialedStream

HANDSHAKE_TIMEOUT_S = 10.0
"""A peer that connects and sends no proof is turned away after this long."""

MAX_STRANGERS = 256
"""The most streams that have not proven themselves yet. With one more, the oldest is turned away."""


class Strangers:
    """The streams of a listener that are not authenticated. On the listener's thread."""

    def __init__(self) -> None:
        self._until: dict[DialedStream, float] = {}
        """The deadline for the proof of each stream, in the order of arrival."""

    def __len__(self) -> int:
        return len(self._until)

    def add(self, stream: DialedStream) -> None:
        """Add a stream with its deadline; if there are too many, the oldest is turned away."""
        if len(self._until) >= MAX_STRANGERS:
            self._turn_away(next(iter(self._until)))
        self._until[stream] = time.monotonic() + HANDSHAKE_TIMEOUT_S

    def forget(self, stream: DialedStream) -> None:
        """Do not wait for this stream any more."""
        self._until.pop(stream, None)

    def lose_patience(self) -> float | None:
        """Turn away streams that took too long. Returns the seconds until the next deadline."""
        while self._until:
            stream, until = next(iter(self._until.items()))
            remaining = until - time.monotonic()
            if remaining > 0:
                return remaining
            self._turn_away(stream)
        return None

    def turn_away_all(self) -> None:
        """Turn all of them away."""
        while self._until:
            self._turn_away(next(iter(self._until)))

    def _turn_away(self, stream: DialedStream) -> None:
        self.forget(stream)
        stream.turn_away("deadline_exceeded", "no proof came")
