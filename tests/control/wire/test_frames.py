import random
import struct

import pytest

from skipper.control.model.errors import ProtocolError
from skipper.control.model.shape import Extent
from skipper.control.wire.frames import MAX_MESSAGE_NBYTES, Decoder, decode_process, encode, encode_process
from skipper.control.wire.messages import MESSAGES, Bye, Call, Filler, Ping, Reply
from skipper.control.wire.process_ref import ProcessRef
from skipper.control.wire.protocol_page import EXAMPLES
from skipper.control.wire.version import VERSION
from tests.control.wire.plain import plain

MESSAGES_OF_ALL_KINDS = [
    *EXAMPLES,
    Call(2**63 - 1, 5, 3, "step", Extent(("hosts", "gpus"), (2, 4)), payload=(b"pickle", b"", bytes(70_000))),
    Call(9, payload=(b"a",), trace=b"00-trace"),
    Ping(),
]


def test_there_is_an_example_of_every_kind_and_numbers_differ() -> None:
    assert [type(example) for example in EXAMPLES] == list(MESSAGES)
    kinds = [int(cls.kind) for cls in MESSAGES]
    assert kinds == sorted(set(kinds))


def test_messages_survive_the_way() -> None:
    (frame,) = encode(MESSAGES_OF_ALL_KINDS)
    assert [plain(message) for message in Decoder().feed(frame)] == MESSAGES_OF_ALL_KINDS


def test_large_frames_travel_in_bounded_pieces() -> None:
    big = Call(1, payload=(b"p", random.Random(1).randbytes(3 * MAX_MESSAGE_NBYTES)))
    small = Reply(7, 2, payload=(b"value",))
    pieces = list(encode([big, small]))
    assert len(pieces) == 4
    assert max(map(len, pieces)) <= MAX_MESSAGE_NBYTES
    decoder = Decoder()
    assert [plain(message) for piece in pieces for message in decoder.feed(piece)] == [big, small]
    assert [plain(message) for message in decoder.feed(next(encode(EXAMPLES)))] == list(EXAMPLES)


def test_every_truncation_is_a_protocol_error() -> None:
    for example in EXAMPLES:
        (frame,) = encode([example])
        for nbytes in range(len(frame)):
            with pytest.raises(ProtocolError):
                Decoder().feed(frame[:nbytes])
        with pytest.raises(ProtocolError):
            Decoder().feed(frame + b"x")


def test_flipped_bytes_never_raise_anything_else() -> None:
    rng = random.Random(7)
    for example in EXAMPLES:
        (frame,) = encode([example, EXAMPLES[0]])
        for _ in range(200):
            mangled = bytearray(frame)
            for _ in range(rng.randrange(1, 4)):
                mangled[rng.randrange(len(mangled))] = rng.randrange(256)
            try:
                Decoder().feed(bytes(mangled))
            except ProtocolError:
                continue


def test_fields_that_are_too_short_or_exceed_their_message_are_refused() -> None:
    header = struct.Struct("<BBII")
    for fields in (b"", bytes(11), struct.pack("<QQIHH", 1, 0, 0, 5, 0) + b"four"):
        with pytest.raises(ProtocolError, match=r"exceeds its message|unpack_from requires"):
            Decoder().feed(b"\x00" + header.pack(Call.kind, 0, len(fields), 0) + fields)
    with pytest.raises(ProtocolError, match="too short"):  # what they lack stands in the next message
        Decoder().feed(b"\x00" + header.pack(Reply.kind, 0, 4, 0) + bytes(4) + next(encode([Ping(1, 2)]))[1:])
    following = next(encode([Ping(1, 2)]))[1:]
    with pytest.raises(ProtocolError, match="exceeds its message"):  # what they lack stands in the next message
        Decoder().feed(b"\x00" + header.pack(Call.kind, 0, 4, 0) + bytes(4) + following)


def test_what_may_be_skipped_is_skipped_and_keeps_its_place_in_the_order() -> None:
    before, behind = (next(encode([message]))[1:] for message in (Ping(1, 2), Reply(7, payload=(b"value",))))
    for options, rest, instead in ((0, b"", []), (2, struct.pack("<Q", 9), [Filler(sequence=9)])):
        fields, segments = b"unknown", (b"one", b"other")
        head = struct.pack("<BBIIQQ", 200, options, len(fields), len(segments), *map(len, segments))
        frame = b"".join((b"\x00", before, head, fields, rest, *segments, behind))
        came = [plain(message) for message in Decoder().feed(frame)]
        assert came == [Ping(1, 2), *instead, Reply(7, payload=(b"value",))]
    assert Decoder().feed(b"\x00" + struct.pack("<BBII", 200, 0, 0, 0)) == []


def test_what_may_not_be_skipped_ends_the_link_with_both_named() -> None:
    with pytest.raises(ProtocolError, match=rf"version {VERSION}, which has no messages of kind 100"):
        Decoder().feed(b"\x00" + struct.pack("<BBII", 100, 0, 0, 0))
    with pytest.raises(ProtocolError, match=rf"version {VERSION}, which has no options 0x4"):
        Decoder().feed(b"\x00" + struct.pack("<BBII", Bye.kind, 4, 0, 0))


def test_a_whole_frame_between_pieces_is_refused() -> None:
    decoder = Decoder()
    first, *_ = encode([Call(1, payload=(bytes(2 * MAX_MESSAGE_NBYTES),))])
    assert decoder.feed(first) == []
    with pytest.raises(ProtocolError, match="between the pieces"):
        decoder.feed(next(encode(EXAMPLES)))


def test_process_references_survive_the_way() -> None:
    process = ProcessRef("id", "unix-abstract:x", "name")
    assert decode_process(encode_process(process)) == process
    for junk in (b"", b"\xff\xff\xff", encode_process(ProcessRef("", "a", "b"))):
        with pytest.raises(ProtocolError):
            decode_process(junk)
