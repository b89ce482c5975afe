"""`Link`: everything that this process sends to one other process, and gets from it, in order.

A link exists before its stream: posted messages wait in the outbox until the stream is up. A link is lost only once and
for ever: for ordering and delivery, a process that comes back after a broken stream counts as another process.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic as _now
from typing import Any

from skipper.control.wire._frames import MOST_NBYTES, encode_short
from skipper.control.wire.frames import Decoder, encode, is_whole
from skipper.control.wire.identity import Identity
from skipper.control.wire.message_stream import CLOSED, MessageStream, Status
from skipper.control.wire.messages import NOTICE, Bye, Call, Cast, Kind, LoanReturned, Message, Ping, is_noticed
from skipper.control.wire.process_ref import STOPPED, ProcessRef

_SHARING = frozenset((Kind.CALL, Kind.REPLY, Kind.CREDIT, Kind.VALUE))
_BURST_S = 50e-6
"""Messages that are posted no later than this after the last one belong to a burst."""
_ONE_WAY_BURST_S = 1e-3
"""The same for calls that nobody waits for. A broadcast returns to each of its receivers more slowly, and it costs
receivers less to be woken once for many than for each."""
_MOST_TOGETHER = 32
"""How many messages of a burst leave together."""

Deliver = Callable[[ProcessRef, Message], None]
"""Takes a message that arrived; runs on the stream's thread and must not block."""


class Link:
    """One process' end of the link to ``peer``.

    `post` may be called from any thread, `lose` on the loop thread; the rest belongs to the stream's thread.

    Args:
        peer: the other process.
        deliver: takes what arrives.
        on_end: called once, on the stream's thread, when the stream is over, with the reason.
    """

    def __init__(self, peer: ProcessRef, deliver: Deliver, on_end: Callable[[Link, str], None]) -> None:
        self.peer = peer
        self.identity: Identity | None = None
        """What the peer's certificate says, if the stream uses TLS."""
        self.lost: str | None = None
        """Why nothing can be sent any more, once the link is lost."""
        self.unsent: list[Call | Cast] = []
        """Once the link is lost: the unsent messages that nobody waits for."""
        self.connected = False
        self.has_stood = False
        """Whether there ever was a stream. If there was none and the link is lost, nothing was sent."""
        self.dialing = False
        self.is_dialed = False
        """Whether this end has dialed, once the stream stands."""
        self.last_heard_s = _now()
        self.peer_pid = 0
        """The process id of the peer, as the peer says; 0 until then."""
        self.peer_namespace = 0
        """The pid namespace that this id belongs to."""
        self.heard_messages = 0
        """How many messages have arrived."""
        self.heard_signs = 0
        """How many of them were signs of life."""
        self.heard_nbytes = 0
        """How many bytes have arrived, in whole frames and in pieces."""
        self._deliver = deliver
        self._on_end = on_end
        self._ended = False
        self._stream: MessageStream | None = None
        self._not_ours: MessageStream | None = None
        """In a forked copy: the stream of the original, kept because dropping it would end a call of the original."""
        self._outbox: deque[Message] = deque()
        self._posted_s = 0.0
        self._takes_turns = False
        """Whether a message had come between the last two posted messages."""
        self._is_flushed_soon = False
        """Whether `_flush` will be called."""
        self._pieces: Iterator[bytes] | None = None
        """The rest of a frame that is too large for one piece."""
        self._writing = threading.Lock()
        """Held from the start of a piece until it is sent, whichever thread writes it."""
        self._decoder = Decoder(self._give_back)

    def post(self, message: Message) -> None:
        """Send a message; messages of one thread arrive in the order of posting. Dropped if the link is lost.

        If nothing is being sent, this thread writes it. Otherwise it leaves with the other queued messages when the
        current send is done: so bursts share frames, and single messages do not wait. If sending takes no time,
        messages in quick succession leave together after a moment, unless the two ends take turns: then no other
        message will follow before the other end has answered.
        """
        now = _now()
        is_quick = now - self._posted_s < (_ONE_WAY_BURST_S if is_noticed(message) else _BURST_S)
        is_turn = self.last_heard_s > self._posted_s
        is_of_a_burst = is_quick and not (is_turn and self._takes_turns)
        self._posted_s, self._takes_turns = now, is_turn
        if not is_of_a_burst and self._write_alone(message):
            return
        self._outbox.append(message)
        may_wait = is_of_a_burst and message.kind in _SHARING and len(self._outbox) < _MOST_TOGETHER
        if not (may_wait and self._is_flushed_in_a_moment()):
            self._write()

    def open(self, stream: MessageStream, *, greeting: bytes = b"") -> None:
        """Serve the link over an authenticated stream, on its thread; ``greeting`` is a message to send first."""
        self.last_heard_s = _now()
        self._writing.acquire()  # it is free: without a stream nothing is written
        stream.user, stream.flows = self, True
        self._stream = stream
        self.has_stood = True  # before `lost` is checked
        if self.lost is not None:
            stream.end()
        elif not greeting or stream.send(greeting):
            self.sent()

    def lose(self, reason: str) -> bool:
        """Give the link up; True the first time."""
        if self.lost is not None:
            return False
        self.lost = reason
        self.connected = False
        calls = (message for message in list(self._outbox) if isinstance(message, Call | Cast))
        self.unsent = [call for call in calls if call.reply_to >= NOTICE]
        self._outbox.clear()
        if self._stream is not None:
            self._stream.end()
        return True

    def excuse(self, late_s: float) -> None:
        """Do not count a time in which this process could not listen as the peer's silence."""
        self.last_heard_s = min(self.last_heard_s + late_s, _now())

    def fall_silent(self) -> None:
        """Queue posted messages for ever: the stream belongs to the process that this one was forked from."""
        self._not_ours, self._stream = self._stream, None

    def stand_still(self) -> None:
        """Drop posted and incoming messages, though the stream is open: this process behaves as if it were stopped."""
        setattr(self, "post", _drop)  # noqa: B010  (no message of other links is to pay for a look at a flag)
        if self._stream is not None:
            self._stream.user = _Deaf(self)
            self._stream.flows = True  # so that it checks its user before each message

    # Events of the stream

    def opened(self, metadata: dict[str, Any]) -> None:
        """Do nothing: that was before this link got the stream."""

    def received(self, piece: bytes) -> bool:
        """Deliver the messages in a piece of a frame."""
        if self._ended or self.lost is not None:
            return False
        self.last_heard_s = _now()
        try:
            messages = self._decoder.feed(piece)
            self.heard_messages += len(messages)
            self.heard_nbytes += len(piece)
            for message in messages:
                if isinstance(message, Bye):
                    self._end(STOPPED)
                    return False
                if isinstance(message, Ping):
                    self.heard_signs += 1
                    self.peer_pid, self.peer_namespace = message.pid, message.namespace
                else:
                    self._deliver(self.peer, message)
        except Exception as error:  # noqa: BLE001  (a peer whose message fails loses its link)
            self._end(_broken(error))
            return False
        return True

    def sent(self) -> None:
        """Send what has queued up since."""
        if self._send_all():
            return
        self._writing.release()
        if self._outbox:  # it came between the check and the release
            self._write()

    def ended(self, status: Status) -> None:
        """Note that the stream is over, and release it: lost links are kept for a long time."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.end()
        self._end("the connection was closed" if status.name == CLOSED.name else f"the connection broke ({status})")

    def _end(self, reason: str) -> None:
        if not self._ended:
            self._ended = True
            self._on_end(self, reason)

    def _give_back(self, number: int, is_readable: bool) -> None:
        """Tell the peer that one of its lent segments is not needed any more."""
        if self.lost is None:
            with contextlib.suppress(RuntimeError):  # the interpreter ends
                self.post(LoanReturned(number, is_readable))

    def _is_flushed_in_a_moment(self) -> bool:
        """Whether `_flush` will be called, which sends what is in the outbox now."""
        if self._is_flushed_soon:
            return True
        stream = self._stream
        self._is_flushed_soon = stream is not None  # first: it may be called before `flush_soon` returns
        if stream is None or stream.flush_soon(self._flush):
            return stream is not None
        self._is_flushed_soon = False  # and the caller writes, also for threads that have relied on the flush
        return False

    def _flush(self) -> None:
        self._is_flushed_soon = False  # before the outbox is checked
        self._write()

    def _write_alone(self, message: Message) -> bool:
        """Write a message of the usual form in the shortest way, if nothing is before it; returns whether it did."""
        stream = self._stream
        if stream is None or self._outbox or stream.max_nbytes < MOST_NBYTES:
            return False
        if not self._writing.acquire(blocking=False):
            return False
        piece = None
        if not self._outbox and self._pieces is None:
            try:  # (`contextlib.suppress` takes as long as all of this)
                piece = encode_short((message,))
            except Exception:  # noqa: BLE001  (the usual way meets it again, and ends the link)
                piece = None
        if piece is not None and not stream.send(piece):
            return True  # `sent` continues from here
        self._writing.release()
        if piece is not None and self._outbox:  # it came between the check and the release
            self._write()
        return piece is not None

    def _write(self) -> None:
        while self._outbox and self._stream is not None and self._writing.acquire(blocking=False):
            if self._send_all():
                return  # `sent` continues from here
            self._writing.release()

    def _send_all(self) -> bool:
        """Send until nothing is left, or a piece is being sent. The caller holds the lock.

        Returns:
            Whether the piece that is being sent keeps the lock.
        """
        while (self._outbox or self._pieces is not None) and (stream := self._stream) is not None:
            try:
                piece = self._next_piece(stream.max_nbytes)
            except Exception as error:  # noqa: BLE001  (nothing of the batch can be sent any more, nor behind it)
                self._end(_broken(error))
                return True
            if piece is not None and not stream.send(piece):
                return True
        return False

    def _next_piece(self, max_nbytes: int) -> bytes | None:
        """The next piece of the current frame, or else the first piece of the next one."""
        if self._pieces is not None and (piece := next(self._pieces, None)) is not None:
            return piece
        self._pieces = None
        batch = self._next_batch(max_nbytes // 2)
        if not batch:
            return None
        pieces = encode(batch, max_nbytes)
        piece = next(pieces)
        if not is_whole(piece):
            self._pieces = pieces
        return piece

    def _next_batch(self, enough_nbytes: int) -> list[Message]:
        """The messages for the next frame: everything that has queued up, to about this size."""
        batch: list[Message] = []
        nbytes = 0
        while nbytes < enough_nbytes:
            try:
                message = self._outbox.popleft()
            except IndexError:
                break
            nbytes += 64 + sum(map(len, message.payload))
            batch.append(message)
        return batch


def _drop(message: Message) -> None:
    """Drop a message."""


class _Deaf:
    """The user of the stream of a link that stands still."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def opened(self, metadata: dict[str, Any]) -> None:
        """Do nothing: the stream is already open."""

    def received(self, piece: bytes) -> bool:
        """Drop the message."""
        return True

    def sent(self) -> None:
        """Send nothing."""

    def ended(self, status: Status) -> None:
        """Do nothing: the other end has given up the link."""
        self._link.ended(status)


def _broken(error: BaseException) -> str:
    return f"the connection broke ({type(error).__name__}: {error})".partition("\n")[0]
