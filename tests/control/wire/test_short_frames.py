"""Frames that are made and read in C are those that the layouts of the messages make and read."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipper.control.model.errors import ProtocolError
from skipper.control.model.shape import Extent
from skipper.control.wire._frames import MOST_NBYTES, decode_short, encode_short
from skipper.control.wire.frames import Decoder, encode
from skipper.control.wire.messages import (
    NO_EXTENT,
    Bye,
    Call,
    Cast,
    CastAnswers,
    Credit,
    Failure,
    Kind,
    Message,
    Ping,
    Reply,
    RouteDone,
    Whole,
)
from tests.control.wire.plain import plain

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
COMMON = {
    "payload": st.tuples(st.binary(max_size=5000)),
    "trace": st.binary(max_size=60),
    "sequence": st.just(0) | U64,
}
EXTENTS = st.sampled_from([NO_EXTENT, Extent(("gpus",), (4,)), Extent(("hösts", "gpus"), (2, 8))])
METHODS = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
CALLS = st.builds(Call, U64, U64, U32, METHODS, EXTENTS, **COMMON)
CASTS = st.builds(Cast, U64, U64, U64, U64, U64, METHODS, EXTENTS, **COMMON)
ENTRIES = st.lists(st.tuples(U32, st.integers(0, 255), U32), max_size=5).map(tuple)
SEVERAL = st.lists(st.binary(max_size=3000), max_size=4).map(tuple)
ANSWERS = st.builds(CastAnswers, U64, U64, U64, st.booleans(), ENTRIES, **{**COMMON, "payload": SEVERAL})
PINGS = st.builds(Ping, U64, U64)
REPLIES = st.builds(Reply, U64, U32, **COMMON)


def at_length(messages: list[Message]) -> bytes:
    """Their frame by their layouts alone: one more message, which is not for `encode_short`, is cut off."""
    (frame,) = encode([*messages, Bye()])
    (last,) = encode([Bye()])
    tag = b"\x03" if all(isinstance(message, Reply) for message in messages) else b"\x00"
    return tag + frame[1 : 1 - len(last)]


@given(st.lists(CALLS | REPLIES | CASTS | ANSWERS | PINGS, min_size=1, max_size=4))
def test_frames_are_the_same_byte_for_byte(messages: list[Message]) -> None:
    frame = at_length(messages)
    short = encode_short(messages)
    assert short is None or short == frame
    assert short is not None or len(frame) > MOST_NBYTES - 100
    read = decode_short(frame)
    assert read is not None
    assert [plain(message) for message in read] == messages
    assert [plain(message) for message in Decoder().feed(frame)] == messages


@given(st.lists(CALLS | REPLIES | CASTS | ANSWERS | PINGS, min_size=1, max_size=2), st.data())
def test_what_is_cut_or_changed_is_read_as_the_layouts_say(messages: list[Message], data: st.DataObject) -> None:
    mangled = bytearray(at_length(messages))
    for _ in range(data.draw(st.integers(1, 3))):
        mangled[data.draw(st.integers(0, min(len(mangled), 120) - 1))] = data.draw(st.integers(0, 255))
    frame = bytes(mangled[: data.draw(st.integers(1, len(mangled)))])
    read = decode_short(frame) if frame[0] in (0, 3) else None
    if read is None:
        return
    follower = next(encode([Bye()]))[1:]
    if frame[0] == 3:
        assert all(isinstance(message, Reply) for message in read)
    *whole, last = Decoder().feed(b"\x00" + frame[1:] + follower)  # with which it is not for `decode_short`
    assert isinstance(last, Bye)
    assert [plain(message) for message in read] == [plain(message) for message in whole]


@pytest.mark.parametrize(
    "message",
    [
        Bye(),
        Credit(1, 2, 3),
        Failure(1, payload=(b"why",)),
        Reply(1),
        Reply(1, payload=(b"a", b"b")),
        Reply(1, payload=(bytearray(b"a"),)),
        Reply(1, payload=(Whole(b"a"),)),
        Reply(1, payload=(bytes(MOST_NBYTES),)),
        Call(1, method="m" * 70_000, payload=(b"a",)),
        Cast(1, 2, 3, 4, moves=((0, 1, 1),), payload=(b"a",)),
        Cast(1, 2, 3, 4, payload=(memoryview(b"a"),)),
        CastAnswers(1, 2, 3, True, ((0, Kind.REPLY, 2),), payload=(b"a", Whole(b"b"))),
        CastAnswers(1, 2, 3, True, ((0, Kind.REPLY, 1),) * 2000, payload=(b"a",) * 2000),
        RouteDone(1, 2),
        Ping(1, 2, payload=(b"a",)),
        Ping(1, 2, trace=b"t"),
        Ping(1, 2, sequence=3),
    ],
)
def test_all_else_is_left_to_the_layouts(message: Message) -> None:
    assert encode_short([message]) is None
    assert encode_short([Reply(1, payload=(b"a",)), message]) is None


def test_no_frame_without_messages() -> None:
    assert encode_short([]) is None
    assert decode_short(b"\x00") is None
    assert decode_short(b"") is None


def test_numbers_that_do_not_fit_are_refused() -> None:
    for message in (
        Reply(2**64, payload=(b"a",)),
        Reply(-1, payload=(b"a",)),
        Reply(1, 2**32, payload=(b"a",)),
        CastAnswers(1, 2, 3, False, ((0, 256, 1),), payload=(b"a",)),
        CastAnswers(1, 2, 3, False, ((2**32, 2, 1),), payload=(b"a",)),
        Cast(2**64, 2, 3, 4, payload=(b"a",)),
        Ping(2**64),
    ):
        with pytest.raises((OverflowError, struct.error)):
            next(encode([message]))


def test_a_frame_of_answers_has_nothing_else_in_it() -> None:
    frame = b"\x03" + at_length([Call(1, payload=(b"a",))])[1:]
    with pytest.raises(ProtocolError, match="a frame of answers has something else"):
        Decoder().feed(frame)


def test_small_payloads_keep_no_frame_in_memory_and_large_ones_are_not_copied() -> None:
    read = decode_short(at_length([Reply(1, payload=(b"a",)), Reply(2, payload=(bytes(4000),))]))
    assert read is not None
    assert [type(message.payload[0]) for message in read] == [bytes, memoryview]
