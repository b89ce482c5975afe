"""`Link`: everything that this process says to one other process, and hears from it, in order.

A link exists before its stream does: what is posted waits in the outbox until the stream is up. It is lost once and
for ever: whoever comes back after a broken stream is, as far as ordering and delivery are concerned, another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from control.errors import ProtocolError
from control.wire.envelope import NOTICE, STOPPED, Envelope, Kind, ProcessRef
from control.wire.frames import MAX_MESSAGE_NBYTES, Decoder, encode


class Stream(Protocol):
    """The part of a gRPC stream that a link needs."""

    async def read(self) -> bytes | None:
        """The next message, or None at the end."""

    async def write(self, message: bytes) -> None:
        """Send a message, waiting while the transport's window is full."""


Deliver = Callable[[ProcessRef, Envelope], None]
"""Takes an envelope that arrived; runs on the loop thread and must not block."""


class Link:
    """One process' end of the link to ``peer``.

    `post` may be called from any thread; everything else belongs to the loop thread.
    """

    def __init__(self, peer: ProcessRef, loop: asyncio.AbstractEventLoop, deliver: Deliver) -> None:
        self.peer = peer
        self.lost: str | None = None
        self.unsent: list[Envelope] = []
        """Once the link is lost: what nobody waits for and was still to be sent."""
        """Why nothing can be sent any more, once that is so."""
        self.connected = False
        self.dialing = False
        self.last_heard_s = time.monotonic()
        self.up: asyncio.Future[None] = loop.create_future()
        """Resolves when the stream stands, or when the link is lost before."""
        self._loop = loop
        self._deliver = deliver
        self._outbox: deque[Envelope] = deque()
        self._writer_sleeps = False
        self._wakeup: asyncio.Future[None] | None = None
        self._farewell = False
        self._given_up: asyncio.Future[str] = loop.create_future()

    def post(self, envelope: Envelope) -> None:
        """Queue an envelope; of one thread they arrive in the order of posting. Dropped if the link is lost.

        Raises:
            RuntimeError: the loop has been closed.
        """
        self._outbox.append(envelope)
        # The writer raises the flag and then looks into the outbox again; so either it sees this envelope, or this
        # thread sees the flag. Many envelopes posted in a burst cost one wake-up.
        if self._writer_sleeps:
            self._writer_sleeps = False
            self._loop.call_soon_threadsafe(self._wake_writer)

    async def run(self, stream: Stream) -> str:
        """Serve the link over ``stream`` until that ends.

        Returns:
            Why it ended.
        """
        self.connected = True
        self.last_heard_s = time.monotonic()
        if not self.up.done():
            self.up.set_result(None)
        writer = self._loop.create_task(self._write(stream))
        reader = self._loop.create_task(self._read(stream))
        try:
            await asyncio.wait((writer, reader, self._given_up), return_when=asyncio.FIRST_COMPLETED)
            if writer.done() and not writer.exception():  # our goodbye is out: the other side ends the stream
                await asyncio.wait((reader, self._given_up), return_when=asyncio.FIRST_COMPLETED)
            if self._given_up.done():
                return self._given_up.result()
            if self._farewell:
                return STOPPED
            for task in (reader, writer):
                if task.done() and not task.cancelled() and (error := task.exception()):
                    return f"the connection broke ({_one_line(error)})"
            return "the connection was closed"
        finally:
            writer.cancel()
            reader.cancel()
            await asyncio.gather(writer, reader, return_exceptions=True)

    def lose(self, reason: str) -> bool:
        """Give the link up.

        Returns:
            True the first time.
        """
        if self.lost is not None:
            return False
        self.lost = reason
        self.connected = False
        self.unsent = [envelope for envelope in self._outbox if envelope.reply_to >= NOTICE]
        self._outbox.clear()
        self._given_up.set_result(reason)
        if not self.up.done():
            self.up.set_result(None)
        return True

    def heard(self) -> None:
        """Note a sign of life."""
        self.last_heard_s = time.monotonic()

    async def _read(self, stream: Stream) -> None:
        decoder = Decoder(self._give_back)
        while (message := await stream.read()) is not None:
            self.last_heard_s = time.monotonic()
            for envelope in decoder.feed(message):
                if envelope.kind is Kind.BYE:
                    self._farewell = True
                    return
                if envelope.kind is not Kind.PING:
                    self._deliver(self.peer, envelope)

    def _give_back(self, number: int) -> None:
        """Tell the peer that a segment that it has lent is not needed any more."""
        if self.lost is None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends
                self.post(Envelope(Kind.GIVE_BACK, number))

    async def _write(self, stream: Stream) -> None:
        while True:
            if not self._outbox:
                self._wakeup = self._loop.create_future()
                self._writer_sleeps = True
                if not self._outbox:
                    await self._wakeup
                self._writer_sleeps = False
            batch = self._next_batch()
            for message in encode(batch):
                await stream.write(message)
            if batch and batch[-1].kind is Kind.BYE:
                return

    def _next_batch(self) -> list[Envelope]:
        """What goes into the next frame: everything that queued up, to about one message's size."""
        batch: list[Envelope] = []
        nbytes = 0
        while self._outbox and nbytes < MAX_MESSAGE_NBYTES // 2:
            envelope = self._outbox.popleft()
            nbytes += 64 + sum(map(len, envelope.payload))
            batch.append(envelope)
        return batch

    def _wake_writer(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)


def _one_line(error: BaseException) -> str:
    if isinstance(error, ProtocolError):
        return str(error)
    details = getattr(error, "details", None)
    text = details() if callable(details) else str(error)
    return f"{type(error).__name__}: {text}".splitlines()[0]
