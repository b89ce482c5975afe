"""Whatever bytes come, the decoder says so and the listener lives on. Bounded in examples, so bounded in time."""

import contextlib
import queue
import socket
import struct
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skipper.control import ActorMesh, ProcMesh
from skipper.control.model.errors import ProtocolError
from skipper.control.model.shape import Extent
from skipper.control.runtime import current_runtime as runtime
from skipper.control.wire import auth
from skipper.control.wire.codec import LAYOUTS
from skipper.control.wire.frames import MAX_MESSAGE_NBYTES, Decoder, encode, encode_process
from skipper.control.wire.messages import MESSAGES, NO_EXTENT, Kind, Message, Reply
from skipper.control.wire.process_ref import ProcessRef
from skipper.control.wire.version import VERSION
from tests.control.actors import Echo
from tests.control.conftest import PATIENCE_S
from tests.control.wire.plain import plain

METHOD = "/skipper.control.v1.Link/Connect"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

extents = st.builds(
    lambda sizes: Extent(tuple(sizes), tuple(sizes.values())),
    st.dictionaries(st.text(min_size=1, max_size=8), st.integers(1, 2**31), max_size=4),
)
rows = {8: st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 255), st.integers(0, 2**32 - 1))}
rows[16] = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "32 bits": st.integers(0, 2**32 - 1),
    "64 bits": st.integers(0, 2**64 - 1),
    "8 bits, 0 or 1": st.booleans(),
    "UTF-8": st.text(max_size=20),
    "for each axis: its size (32 bits), the size of its name in bytes (16 bits), its name": st.one_of(
        st.just(NO_EXTENT), extents
    ),
    "rows of 32, 32 and 64 bits: first position, end position (exclusive), count": st.lists(rows[16], max_size=3).map(
        tuple
    ),
    "rows of 32, 8 and 32 bits: rank, kind, number of segments": st.lists(rows[8], max_size=3).map(tuple),
}
"""What a field may be, by what is said of its layout."""


def any_of(cls: type[Message]) -> st.SearchStrategy[Message]:
    """Messages of a class, of whatever its fields can hold."""
    return st.builds(
        cls,
        **{field.name: VALUES[field.form.words] for field in LAYOUTS[cls].fields},
        payload=st.lists(st.binary(max_size=300), max_size=5).map(tuple),
        trace=st.binary(max_size=255),
        sequence=st.integers(0, 2**64 - 1),
    )


messages_of_all_kinds = st.sampled_from(MESSAGES).flatmap(any_of)


@given(st.lists(messages_of_all_kinds, min_size=1, max_size=5))
def test_every_message_survives_the_way(sent: list[Message]) -> None:
    decoder = Decoder()
    assert [plain(message) for piece in encode(sent) for message in decoder.feed(piece)] == sent


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=200), max_size=5))
def test_any_bytes_are_messages_or_a_protocol_error(pieces: list[bytes]) -> None:
    decoder = Decoder()
    for piece in pieces:
        for tagged in (piece, b"\x00" + piece, b"\x01" + piece, b"\x02" + piece):
            with contextlib.suppress(ProtocolError):
                assert all(isinstance(message, Message) for message in decoder.feed(tagged))


@settings(max_examples=300)
@given(st.lists(messages_of_all_kinds, min_size=1, max_size=3), st.data())
def test_mangled_frames_are_messages_or_a_protocol_error(sent: list[Message], data: st.DataObject) -> None:
    mangled = bytearray(next(encode(sent)))
    for _ in range(data.draw(st.integers(1, 4))):
        where = data.draw(st.integers(0, len(mangled) - 1))
        how = data.draw(st.sampled_from(["flip", "cut", "insert"]))
        if how == "flip":
            mangled[where] = data.draw(st.integers(0, 255))
        elif how == "insert":
            mangled[where:where] = data.draw(st.binary(min_size=1, max_size=9))
        elif len(mangled) > 1:
            del mangled[where:]
            mangled = mangled or bytearray(b"\x00")
    with contextlib.suppress(ProtocolError):
        Decoder().feed(bytes(mangled))


def test_a_frame_that_promises_more_than_it_holds_allocates_nothing() -> None:
    header = struct.pack("<BBII", Kind.BYE, 0, 0, 0xFFFFFFFF)
    with pytest.raises(ProtocolError, match="4294967295 segments"):
        Decoder().feed(b"\x00" + header)
    with pytest.raises(ProtocolError, match="exceeds its frame"):
        Decoder().feed(b"\x00" + struct.pack("<BBIIQ", Kind.BYE, 0, 0, 1, 2**61))
    with pytest.raises(ProtocolError, match="fields of 4294967295 bytes"):
        Decoder().feed(b"\x00" + struct.pack("<BBII", Kind.BYE, 0, 0xFFFFFFFF, 0))


@pytest.fixture(scope="module")
def echo(procs: ProcMesh) -> ActorMesh[Echo]:
    echo = procs.slice(gpus=0).spawn("echo", Echo)
    echo.pid.call_one().get(PATIENCE_S)
    return echo


bounded = settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

http2_frames = st.builds(
    lambda kind, flags, stream, body: len(body).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + body,
    st.integers(0, 10),
    st.integers(0, 255),
    st.integers(0, 7),
    st.binary(max_size=64),
)


@bounded
@given(first=st.one_of(st.just(PREFACE), st.just(PREFACE[:9]), st.just(b"")), then=st.lists(http2_frames, max_size=8))
def test_any_bytes_on_the_socket_cost_only_their_connection(
    echo: ActorMesh[Echo], first: bytes, then: list[bytes]
) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(PATIENCE_S)
        stranger.connect("\0" + echo.root_members[0].address.removeprefix("unix-abstract:"))
        with contextlib.suppress(ConnectionError):
            stranger.sendall(first)
            for frame in then:
                stranger.sendall(frame)
    assert echo.echo.call_one(1).get(PATIENCE_S) == 1


values = st.one_of(st.binary(max_size=100), st.just(encode_process(ProcessRef("s", "unix-abstract:s", "s"))))
metadata = st.fixed_dictionaries(
    {},
    optional={
        "skipper-version": st.sampled_from([VERSION, "0", "9" * 100]),
        "skipper-process-bin": values,
        "skipper-nonce-bin": st.one_of(st.binary(min_size=auth.NONCE_NBYTES, max_size=auth.NONCE_NBYTES), values),
        "skipper-proof-bin": values,
    },
)


@bounded
@given(metadata=metadata, messages=st.lists(st.binary(max_size=100), max_size=3))
def test_any_stream_without_the_proof_is_turned_away(
    echo: ActorMesh[Echo], metadata: dict[str, Any], messages: list[bytes]
) -> None:
    with grpc.insecure_channel(echo.root_members[0].address) as channel:
        call = channel.stream_stream(METHOD)(iter(messages), metadata=tuple(metadata.items()), timeout=PATIENCE_S)
        received: list[bytes] = []
        with pytest.raises(grpc.RpcError):
            received.extend(call)
    assert received == []
    assert echo.echo.call_one(1).get(PATIENCE_S) == 1


def prove(me: ProcessRef, peer: ProcessRef, messages: list[bytes]) -> list[bytes]:
    """Dial with the secret, as a peer that misbehaves once it is welcome; what it received until its link was gone."""
    nonce = auth.new_nonce()
    ours = encode_process(me)
    hello = (("skipper-version", VERSION), ("skipper-process-bin", ours), ("skipper-nonce-bin", nonce))
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with grpc.insecure_channel(peer.address) as channel:
        call = channel.stream_stream(METHOD)(iter(requests.get, None), metadata=hello, timeout=PATIENCE_S)
        theirs = dict(call.initial_metadata())["skipper-nonce-bin"]
        transcript = (VERSION.encode(), nonce, VERSION.encode(), theirs, ours, peer.id.encode())
        requests.put(auth.client_proof(runtime.current().secret, *transcript))
        received = [next(call)]
        for message in messages:
            requests.put(message)
        with contextlib.suppress(grpc.RpcError):
            received.extend(call)
        requests.put(None)
    return received


@bounded
@given(message=st.binary(max_size=200))
def test_a_peer_that_talks_nonsense_loses_its_link_and_nothing_else_happens(
    echo: ActorMesh[Echo], message: bytes
) -> None:
    job = runtime.current().me.job
    confused = ProcessRef(f"{job}-confused-{message.hex()[:64]}", "unix-abstract:confused", "confused")
    received = prove(confused, echo.root_members[0], [b"\x00" + bytes(5) + message, b"\xff"])
    assert received[0] == b"\x01"  # welcome
    assert echo.echo.call_one(1).get(PATIENCE_S) == 1


def test_the_largest_message_is_that_of_the_stream() -> None:
    (message,) = encode([Reply(1, payload=(bytes(MAX_MESSAGE_NBYTES - 100),))])
    assert len(message) <= MAX_MESSAGE_NBYTES
