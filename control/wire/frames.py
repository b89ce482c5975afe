"""Envelopes to messages of the stream and back; the only file that touches the generated protobuf classes.

What every envelope has stands in a header of fixed layout (see `link.proto`): a call is packed and unpacked four times
on its way there and back, so this is where microseconds are made or lost.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

from google.protobuf.message import DecodeError

from skipper.control.model.errors import ProtocolError
from skipper.control.model.shape import Extent
from skipper.control.wire._generated import link_pb2 as pb
from skipper.control.wire._poller import REPLIES
from skipper.control.wire.bulk import Incoming, Outgoing
from skipper.control.wire.envelope import NO_EXTENT, Envelope, Kind, Payload, ProcessRef, Whole

MAX_MESSAGE_NBYTES = 1 << 20
"""Largest message on the stream. Small enough that heartbeats pass between the pieces of a large payload and that a
stranger can make a process buffer no more than this."""

MAX_FRAME_NBYTES = 16 << 30
"""Largest frame that is put together again from pieces."""

_WHOLE, _PIECE, _LAST = b"\x00", b"\x01", b"\x02"
_REPLIES = bytes((REPLIES,))
"""A whole frame of answers to calls, nothing of which is lent: whoever is interrupted may deliver it again."""
_HEADER = struct.Struct("<BIQQHHI")
"""Kind, rank, target, reply_to, sizes of method and extent, number of segments."""
_SIZE = struct.Struct("<Q")
_HEADER_OF_ONE = struct.Struct("<BIQQHHIQ")
"""The header and the size of the only segment."""
_LENT = 1 << 63
"""Set in the size of a segment that is a descriptor of one that is lent."""
_WHOLE_BYTES = 1 << 62
"""Set in the size of a segment that is to arrive as `Whole`."""
_TRACED = 0x80
"""Set in the kind of an envelope that says of which trace it is."""
_NUMBERED = 0x40
"""Set in the kind of an envelope that has a number."""
_KINDS = {int(kind): kind for kind in Kind}


def encode(envelopes: Iterable[Envelope], max_nbytes: int = MAX_MESSAGE_NBYTES) -> Iterator[bytes]:
    """The messages that carry these envelopes, in order, as one frame, each of at most ``max_nbytes``."""
    parts: list[bytes | bytearray | memoryview] = [_REPLIES]
    for envelope in envelopes:
        method, extent, payload = _encode_text(envelope.method), b"", envelope.payload
        if envelope.extent is not NO_EXTENT:
            extent = _encode_extent(envelope.extent)
        fixed = (envelope.kind, envelope.rank, envelope.target, envelope.reply_to, len(method), len(extent))
        if envelope.trace:
            fixed = (fixed[0] | _TRACED, *fixed[1:])  # type: ignore[assignment]
            extent = b"".join((extent, bytes((len(envelope.trace),)), envelope.trace))
        if envelope.sequence:
            fixed = (fixed[0] | _NUMBERED, *fixed[1:])  # type: ignore[assignment]
            extent = b"".join((extent, _SIZE.pack(envelope.sequence)))
        if len(payload) == 1 and not isinstance(segment := payload[0], Outgoing | Incoming):
            parts += (_HEADER_OF_ONE.pack(*fixed, 1, len(segment)), method, extent, segment)
            if envelope.kind is not Kind.REPLY:
                parts[0] = _WHOLE
        else:
            sizes, segments = _encode_segments(payload)
            parts += (_HEADER.pack(*fixed, len(payload)), sizes, method, extent, *segments)
            parts[0] = _WHOLE
    message = b"".join(parts)
    if len(message) <= max_nbytes:
        yield message
        return
    view, step = memoryview(message)[1:], max_nbytes - 1
    for start in range(0, len(view), step):
        yield b"".join((_PIECE if start + step < len(view) else _LAST, view[start : start + step]))


def is_whole(message: bytes) -> bool:
    """Whether a message that `encode` made holds its whole frame: no other belongs to it."""
    return message.startswith((_WHOLE, _REPLIES))


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
    """Puts one stream's messages together again.

    Args:
        give_back: takes the numbers of segments that the other side has lent and that are not needed any more, and
            whether its memory was seen to be readable; from any thread.
    """

    def __init__(self, give_back: Callable[[int, bool], None] = lambda number, is_readable: None) -> None:
        self._give_back = give_back
        self._pieces: list[memoryview] = []
        self._nbytes = 0

    def feed(self, message: bytes) -> list[Envelope]:
        """The envelopes that this message completes; their payloads are views of it.

        Raises:
            ProtocolError: no peer of this version sends such a message.
        """
        tag, rest = message[:1], memoryview(message)[1:]
        if tag in (_WHOLE, _REPLIES):
            if self._pieces:
                raise ProtocolError("a whole frame came between the pieces of another")
            envelopes = self._decode_frame(rest)
            if tag == _REPLIES and any(envelope.kind is not Kind.REPLY for envelope in envelopes):
                raise ProtocolError("a frame of answers has something else in it")
            return envelopes
        if tag not in (_PIECE, _LAST):
            raise ProtocolError(f"unknown message tag {tag!r}")
        self._pieces.append(rest)
        self._nbytes += len(rest)
        if self._nbytes > MAX_FRAME_NBYTES:
            raise ProtocolError(f"a frame exceeds {MAX_FRAME_NBYTES} bytes")
        if tag == _PIECE:
            return []
        frame = memoryview(b"".join(self._pieces))
        self._pieces, self._nbytes = [], 0
        return self._decode_frame(frame)

    def _decode_frame(self, frame: memoryview) -> list[Envelope]:
        envelopes = []
        position, end = 0, len(frame)
        try:
            while position < end:
                envelope, position = _decode_envelope(frame, position, self._give_back)
                envelopes.append(envelope)
        except (struct.error, DecodeError, ValueError, TypeError, LookupError) as error:
            raise ProtocolError(f"a frame does not parse: {type(error).__name__}: {error}") from error
        if not envelopes:
            raise ProtocolError("a frame without envelopes")
        return envelopes


def _decode_envelope(frame: memoryview, position: int, give_back: Callable[[int, bool], None]) -> tuple[Envelope, int]:
    """The envelope at a position, and the position behind it."""
    kind, rank, target, reply_to, method_nbytes, extent_nbytes, count = _HEADER.unpack_from(frame, position)
    position += _HEADER.size
    sizes: tuple[int, ...]
    if count == 1:
        sizes = _SIZE.unpack_from(frame, position)
    elif count * _SIZE.size > len(frame) - position:
        raise ProtocolError(f"{count} segments exceed their frame")
    else:
        sizes = struct.unpack_from(f"<{count}Q", frame, position)
    position += count * _SIZE.size
    method, position = frame[position : position + method_nbytes], position + method_nbytes
    extent = NO_EXTENT
    if extent_nbytes:
        extent = _decode_extent(bytes(frame[position : position + extent_nbytes]))
        position += extent_nbytes
    trace = b""
    if kind & _TRACED:
        kind, begin = kind & ~_TRACED, position + 1
        position = begin + frame[position]
        trace = bytes(frame[begin:position])
    sequence = 0
    if kind & _NUMBERED:
        kind &= ~_NUMBERED
        (sequence,) = _SIZE.unpack_from(frame, position)
        position += _SIZE.size
    payload: list[memoryview | Whole | Incoming] = []
    for size in sizes:
        nbytes = size & ~(_LENT | _WHOLE_BYTES)
        segment = frame[position : position + nbytes]
        if size & _LENT:
            payload.append(Incoming(bytes(segment), give_back))
        else:
            payload.append(Whole(segment) if size & _WHOLE_BYTES else segment)
        position += nbytes
    if position > len(frame):
        raise ProtocolError(f"an envelope exceeds its frame by {position - len(frame)} bytes")
    content: Payload = tuple(payload)
    name = _decode_text(bytes(method))
    return Envelope(_KINDS[kind], target, content, name, reply_to, rank, extent, trace, sequence), position


# What follows says the same again and again: names of endpoints, shapes of meshes.


@lru_cache(maxsize=4096)
def _encode_text(text: str) -> bytes:
    return text.encode()


@lru_cache(maxsize=4096)
def _decode_text(encoded: bytes) -> str:
    return encoded.decode()


@lru_cache(maxsize=1024)
def _encode_extent(extent: Extent) -> bytes:
    return pb.Extent(axes=extent.axes, sizes=extent.sizes).SerializeToString(deterministic=True)


@lru_cache(maxsize=1024)
def _decode_extent(encoded: bytes) -> Extent:
    message = pb.Extent.FromString(encoded)
    return Extent(tuple(message.axes), tuple(message.sizes))


def encode_process(process: ProcessRef) -> bytes:
    """A process' reference as it stands in the metadata."""
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
