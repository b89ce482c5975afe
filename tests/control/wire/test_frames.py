import random

import pytest

from skipper.control.model.errors import ProtocolError
from skipper.control.model.shape import Extent
from skipper.control.wire.envelope import Envelope, Kind, ProcessRef
from skipper.control.wire.frames import MAX_MESSAGE_NBYTES, Decoder, decode_process, encode, encode_process

ENVELOPES = [
    Envelope(Kind.CALL, 2**63 - 1, (b"pickle", b"", bytes(70_000)), "step", 5, 3, Extent(("hosts", "gpus"), (2, 4))),
    Envelope(Kind.REPLY, 7, (b"value",), rank=2),
    Envelope(Kind.CAST, 9, (b"a", b"b"), "step", 5, 3, Extent(("gpus",), (4,)), b"00-trace"),
    Envelope(Kind.CALL, 9, (b"a",), trace=b"00-trace"),
    Envelope(Kind.PING),
]


def plain(envelope: Envelope) -> tuple[object, ...]:
    payload = tuple(bytes(segment) for segment in envelope.payload)
    return (
        envelope.kind,
        envelope.target,
        payload,
        envelope.method,
        envelope.reply_to,
        envelope.rank,
        envelope.extent,
        envelope.trace,
    )


def test_envelopes_survive_the_way() -> None:
    (message,) = encode(ENVELOPES)
    assert [plain(envelope) for envelope in Decoder().feed(message)] == [plain(envelope) for envelope in ENVELOPES]


def test_large_frames_travel_in_bounded_pieces() -> None:
    big = Envelope(Kind.CALL, 1, (b"p", random.Random(1).randbytes(3 * MAX_MESSAGE_NBYTES)))
    messages = list(encode([big, ENVELOPES[1]]))
    assert len(messages) == 4
    assert max(map(len, messages)) <= MAX_MESSAGE_NBYTES
    decoder = Decoder()
    arrived = [envelope for message in messages for envelope in decoder.feed(message)]
    assert [plain(envelope) for envelope in arrived] == [plain(big), plain(ENVELOPES[1])]
    assert [plain(envelope) for envelope in decoder.feed(next(encode(ENVELOPES)))] == [plain(e) for e in ENVELOPES]


def test_every_truncation_is_a_protocol_error() -> None:
    (message,) = encode([Envelope(Kind.CALL, 1, (b"payload",), "step", 5, 3, Extent(("gpus",), (4,)), b"00-trace")])
    for nbytes in range(len(message)):
        with pytest.raises(ProtocolError):
            Decoder().feed(message[:nbytes])
    with pytest.raises(ProtocolError):
        Decoder().feed(message + b"x")


def test_flipped_bytes_never_raise_anything_else() -> None:
    (message,) = encode(ENVELOPES[1:])
    rng = random.Random(7)
    for _ in range(2_000):
        mangled = bytearray(message)
        for _ in range(rng.randrange(1, 4)):
            mangled[rng.randrange(len(mangled))] = rng.randrange(256)
        try:
            Decoder().feed(bytes(mangled))
        except ProtocolError:
            continue


def test_a_whole_frame_between_pieces_is_refused() -> None:
    decoder = Decoder()
    first, *_ = encode([Envelope(Kind.CALL, 1, (bytes(2 * MAX_MESSAGE_NBYTES),))])
    assert decoder.feed(first) == []
    with pytest.raises(ProtocolError, match="between the pieces"):
        decoder.feed(next(encode(ENVELOPES)))


def test_process_references_survive_the_way() -> None:
    process = ProcessRef("id", "unix-abstract:x", "name")
    assert decode_process(encode_process(process)) == process
    for junk in (b"", b"\xff\xff\xff", encode_process(ProcessRef("", "a", "b"))):
        with pytest.raises(ProtocolError):
            decode_process(junk)
