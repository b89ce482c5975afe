"""Envelopes to messages of the stream and back; the only file that touches the generated protobuf classes."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from google.protobuf.message import DecodeError

from control.errors import ProtocolError
from control.shape import Extent
from control.wire._generated import link_pb2 as pb
from control.wire.envelope import NO_EXTENT, Envelope, Kind, ProcessRef

MAX_MESSAGE_NBYTES = 1 << 20
"""Largest message on the stream. Small enough that heartbeats pass between the pieces of a large payload and that a
stranger can make a process buffer no more than this."""

MAX_FRAME_NBYTES = 16 << 30
"""Largest frame that is put together again from pieces."""

_WHOLE, _PIECE, _LAST = b"\x00", b"\x01", b"\x02"
_LENGTH = struct.Struct("<I")
_PIECE_NBYTES = MAX_MESSAGE_NBYTES - 1


def encode(envelopes: Iterable[Envelope]) -> Iterator[bytes]:
    """The messages that carry these envelopes, in order, as one frame."""
    header = pb.FrameHeader()
    body: list[bytes | bytearray | memoryview] = []
    for envelope in envelopes:
        entry = header.envelopes.add(
            kind=int(envelope.kind),
            target=envelope.target,
            method=envelope.method,
            reply_to=envelope.reply_to,
            rank=envelope.rank,
            segments=[len(segment) for segment in envelope.payload],
        )
        if envelope.extent is not NO_EXTENT and envelope.extent.axes:
            entry.extent.axes.extend(envelope.extent.axes)
            entry.extent.sizes.extend(envelope.extent.sizes)
        body += envelope.payload
    head = header.SerializeToString()
    message = b"".join((_WHOLE, _LENGTH.pack(len(head)), head, *body))
    if len(message) <= MAX_MESSAGE_NBYTES:
        yield message
        return
    view = memoryview(message)[1:]
    for start in range(0, len(view), _PIECE_NBYTES):
        piece = view[start : start + _PIECE_NBYTES]
        yield b"".join((_PIECE if start + _PIECE_NBYTES < len(view) else _LAST, piece))


class Decoder:
    """Puts one stream's messages together again."""

    def __init__(self) -> None:
        self._pieces: list[memoryview] = []
        self._nbytes = 0

    def feed(self, message: bytes) -> list[Envelope]:
        """The envelopes that this message completes; their payloads are views of it.

        Raises:
            ProtocolError: no peer of this version sends such a message.
        """
        tag, rest = message[:1], memoryview(message)[1:]
        if tag == _WHOLE:
            if self._pieces:
                raise ProtocolError("a whole frame came between the pieces of another")
            return _decode_frame(rest)
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
        return _decode_frame(frame)


def _decode_frame(frame: memoryview) -> list[Envelope]:
    if len(frame) < _LENGTH.size:
        raise ProtocolError(f"a frame of {len(frame)} bytes has no header")
    (head_nbytes,) = _LENGTH.unpack_from(frame)
    position = _LENGTH.size + head_nbytes
    if position > len(frame):
        raise ProtocolError(f"a header of {head_nbytes} bytes exceeds its frame of {len(frame)}")
    try:
        header = pb.FrameHeader.FromString(bytes(frame[_LENGTH.size : position]))
        envelopes = []
        for entry in header.envelopes:
            payload = []
            for nbytes in entry.segments:
                if nbytes > len(frame) - position:
                    raise ProtocolError(f"a segment of {nbytes} bytes exceeds its frame")
                payload.append(frame[position : position + nbytes])
                position += nbytes
            extent = NO_EXTENT
            if entry.HasField("extent"):
                extent = Extent(tuple(entry.extent.axes), tuple(entry.extent.sizes))
            kind = Kind(entry.kind)
            envelopes.append(
                Envelope(kind, entry.target, tuple(payload), entry.method, entry.reply_to, entry.rank, extent)
            )
    except (DecodeError, ValueError) as error:
        raise ProtocolError(f"a frame does not parse: {error}") from error
    if position != len(frame):
        raise ProtocolError(f"{len(frame) - position} bytes of a frame belong to no envelope")
    return envelopes


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
