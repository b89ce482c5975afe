"""Messages to frames, in the pieces that a stream carries, and back."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator

from google.protobuf.message import DecodeError

from skipper.control.model.errors import ProtocolError
from skipper.control.wire._frames import MOST_NBYTES, decode_short, encode_short
from skipper.control.wire._generated import link_pb2 as pb
from skipper.control.wire._poller import REPLIES
from skipper.control.wire.bulk import Incoming, Outgoing
from skipper.control.wire.codec import BY_KIND, HEADER, LAYOUTS, NUMBERED, OPTIONS, SIZE, TRACED
from skipper.control.wire.messages import FIRST_OPTIONAL, Filler, Kind, Message, Payload, Whole
from skipper.control.wire.process_ref import ProcessRef
from skipper.control.wire.version import VERSION

MAX_MESSAGE_NBYTES = 1 << 20
"""Largest message on the stream. Small enough that heartbeats pass between the pieces of a large payload and that a
stranger can make a process buffer no more than this."""

MAX_FRAME_NBYTES = 16 << 30
"""Largest frame that is assembled from pieces."""

_WHOLE, _PIECE, _LAST = b"\x00", b"\x01", b"\x02"
_REPLIES = bytes((REPLIES,))
"""A whole frame of answers to calls with no lent segments: a reader that was interrupted may deliver it again."""
_LENT = 1 << 63
"""Flag in the size of a segment that is the descriptor of a lent one."""
_WHOLE_BYTES = 1 << 62
"""Flag in the size of a segment that must arrive as `Whole`."""


def encode(messages: Collection[Message], max_nbytes: int = MAX_MESSAGE_NBYTES) -> Iterator[bytes]:
    """The pieces that carry these messages, in order, as one frame, each of at most ``max_nbytes``."""
    if max_nbytes >= MOST_NBYTES and (short := encode_short(messages)) is not None:
        yield short
        return
    parts: list[bytes | bytearray | memoryview] = [_REPLIES]
    for message in messages:
        layout, payload = LAYOUTS[type(message)], message.payload
        options, rest = 0, b""
        if message.trace:
            options, rest = TRACED, b"".join((bytes((len(message.trace),)), message.trace))
        if message.sequence:
            options, rest = options | NUMBERED, rest + SIZE.pack(message.sequence)
        if len(payload) == 1 and not isinstance(segment := payload[0], Outgoing | Incoming):
            parts += (*layout.encode(message, options, len(segment)), rest, segment)
            if layout.kind is not Kind.REPLY:
                parts[0] = _WHOLE
        else:
            fields = layout.encode_fields(message)
            sizes, segments = _encode_segments(payload) if payload else (b"", [])
            parts += (HEADER.pack(layout.kind, options, len(fields), len(payload)), sizes, fields, rest, *segments)
            parts[0] = _WHOLE
    frame = b"".join(parts)
    if len(frame) <= max_nbytes:
        yield frame
        return
    view, step = memoryview(frame)[1:], max_nbytes - 1
    for start in range(0, len(view), step):
        yield b"".join((_PIECE if start + step < len(view) else _LAST, view[start : start + step]))


def is_whole(piece: bytes) -> bool:
    """Whether a piece from `encode` is a whole frame: no other piece belongs to it."""
    return piece.startswith((_WHOLE, _REPLIES))


def _encode_segments(payload: Payload) -> tuple[bytes, list[bytes | bytearray | memoryview]]:
    sizes: list[int] = []
    segments: list[bytes | bytearray | memoryview] = []
    for segment in payload:
        if isinstance(segment, Incoming):
            raise TypeError("a segment that was lent to this process cannot be passed on unread")
        lent = isinstance(segment, Outgoing)
        segments.append(segment.descriptor if isinstance(segment, Outgoing) else segment)
        sizes.append(len(segments[-1]) | (_LENT if lent else _WHOLE_BYTES if type(segment) is Whole else 0))
    return struct.pack(f"<{len(sizes)}Q", *sizes), segments


class Decoder:
    """Assembles the frames of one stream.

    Args:
        give_back: takes the numbers of lent segments of the other side that are not needed any more, and whether its
            memory was found readable; from any thread.
    """

    def __init__(self, give_back: Callable[[int, bool], None] = lambda number, is_readable: None) -> None:
        self._give_back = give_back
        self._pieces: list[memoryview] = []
        self._nbytes = 0

    def feed(self, piece: bytes) -> list[Message]:
        """The messages that this piece completes; their payloads are views of it.

        Raises:
            ProtocolError: no peer of this version sends such a piece.
        """
        if not self._pieces and (short := decode_short(piece)) is not None:
            return short
        tag = piece[:1]
        if tag in (_WHOLE, _REPLIES):
            if self._pieces:
                raise ProtocolError("a whole frame came between the pieces of another")
            messages = self._decode_frame(piece, 1)
            if tag == _REPLIES and any(message.kind is not Kind.REPLY for message in messages):
                raise ProtocolError("a frame of answers has something else in it")
            return messages
        if tag not in (_PIECE, _LAST):
            raise ProtocolError(f"unknown tag {tag!r} of a piece")
        rest = memoryview(piece)[1:]
        self._pieces.append(rest)
        self._nbytes += len(rest)
        if self._nbytes > MAX_FRAME_NBYTES:
            raise ProtocolError(f"a frame exceeds {MAX_FRAME_NBYTES} bytes")
        if tag == _PIECE:
            return []
        frame = b"".join(self._pieces)
        self._pieces, self._nbytes = [], 0
        return self._decode_frame(frame, 0)

    def _decode_frame(self, frame: bytes, position: int) -> list[Message]:
        messages: list[Message] = []
        view, end = memoryview(frame), len(frame)
        if position == end:
            raise ProtocolError("a frame without messages")
        try:
            while position < end:
                message, position = _decode_message(frame, view, position, self._give_back)
                if message is not None:
                    messages.append(message)
        except (struct.error, ValueError, TypeError, LookupError) as error:
            raise ProtocolError(f"a frame does not parse: {type(error).__name__}: {error}") from error
        return messages


def _decode_message(
    frame: bytes, view: memoryview, position: int, give_back: Callable[[int, bool], None]
) -> tuple[Message | None, int]:
    """The message at a position, and the position after it; None for a message that is skipped.

    It takes a frame both as bytes, whose parts are cheap to take, and as a view, for payloads that are not copied.
    """
    kind, options, nbytes, count = HEADER.unpack_from(frame, position)
    position += HEADER.size
    sizes: tuple[int, ...]
    if count == 1:
        sizes = SIZE.unpack_from(frame, position)
    elif count == 0:
        sizes = ()
    elif count * SIZE.size > len(frame) - position:
        raise ProtocolError(f"{count} segments exceed their frame")
    else:
        sizes = struct.unpack_from(f"<{count}Q", frame, position)
    fields = position + count * SIZE.size
    position = fields + nbytes
    if position > len(frame):
        raise ProtocolError(f"fields of {nbytes} bytes exceed their frame")
    message: Message | None = None
    if (layout := BY_KIND.get(kind)) is not None:
        message = layout.decode(frame, fields, position)
    elif kind < FIRST_OPTIONAL:
        raise ProtocolError(f"this process speaks version {VERSION}, which has no messages of kind {kind}")
    if options:
        trace, sequence, position = _decode_options(options, frame, position)
        if message is not None:
            message.trace, message.sequence = trace, sequence
        elif sequence:
            message = Filler(sequence=sequence)  # a skipped message counts, too
    if count == 1 and sizes[0] < _WHOLE_BYTES:  # nearly all are of this form
        begin, position = position, position + sizes[0]
        payload: Payload = (view[begin:position],)
    elif count == 0:
        payload = ()
    else:
        payload, position = _decode_segments(sizes, view, position, give_back)
    if position > len(frame):
        raise ProtocolError(f"a message exceeds its frame by {position - len(frame)} bytes")
    if message is not None and layout is not None:
        message.payload = payload
    return message, position


def _decode_segments(
    sizes: Iterable[int], view: memoryview, position: int, give_back: Callable[[int, bool], None]
) -> tuple[Payload, int]:
    """The segments of these sizes, and the position after them."""
    payload: list[memoryview | Whole | Incoming] = []
    for size in sizes:
        nbytes = size & ~(_LENT | _WHOLE_BYTES)
        segment = view[position : position + nbytes]
        if size & _LENT:
            payload.append(Incoming(bytes(segment), give_back))
        else:
            payload.append(Whole(segment) if size & _WHOLE_BYTES else segment)
        position += nbytes
    return tuple(payload), position


def _decode_options(options: int, frame: bytes, position: int) -> tuple[bytes, int, int]:
    """The trace and the number, if the options say so, and the position after them."""
    if options & ~OPTIONS:
        raise ProtocolError(f"this process speaks version {VERSION}, which has no options {options:#x}")
    trace, sequence = b"", 0
    if options & TRACED:
        begin = position + 1
        position = begin + frame[position]
        trace = frame[begin:position]
    if options & NUMBERED:
        (sequence,) = SIZE.unpack_from(frame, position)
        position += SIZE.size
    return trace, sequence, position


def encode_process(process: ProcessRef) -> bytes:
    """A process reference in the form for the metadata."""
    return pb.Process(id=process.id, address=process.address, name=process.name).SerializeToString(deterministic=True)


def decode_process(encoded: bytes) -> ProcessRef:
    """The inverse of `encode_process`.

    Raises:
        ProtocolError: these bytes are no process reference.
    """
    try:
        message = pb.Process.FromString(encoded)
    except DecodeError as error:
        raise ProtocolError("not a process reference") from error
    if not message.id:
        raise ProtocolError("a process reference without an id")
    return ProcessRef(message.id, message.address, message.name)
