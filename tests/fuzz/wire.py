"""What comes over control's links and from its files, as targets call it."""

import dataclasses
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from skipper.control.cluster.hosts import protocol
from skipper.control.cluster.hosts.job_gate import GateAddress, introduced
from skipper.control.model.errors import HostError, ProtocolError
from skipper.control.model.settings import Settings
from skipper.control.model.shape import Extent
from skipper.control.rpc.wire import messages as actor_service
from skipper.control.rpc.wire.messages import (
    ActorInfo,
    CallFailure,
    CallResult,
    Code,
    MethodCall,
    OperationQuery,
    OperationState,
    Query,
    Start,
)
from skipper.control.rpc.wire.session import ClientSession, ServerSessions
from skipper.control.runtime import join_file
from skipper.control.runtime.cast import messages as tree_wire
from skipper.control.runtime.cast.tree import RankSpan
from skipper.control.runtime.join_file import Beyond, Connection
from skipper.control.wire import addresses, auth, frames
from skipper.control.wire._generated.actor_service_pb2 import ListMethodsRequest
from skipper.control.wire.bulk import Outgoing
from skipper.control.wire.handshake import Dial, Guest
from skipper.control.wire.local_stream import pack_metadata
from skipper.control.wire.messages import Bye, Call, Cast, CastAnswers, Kind, Ping, Reply, RouteOpened, Whole
from skipper.control.wire.payload import pack
from skipper.control.wire.process_ref import ProcessRef
from skipper.control.wire.protocol_page import EXAMPLES
from skipper.control.wire.version import VERSION
from tests.fuzz.mutation import join_parts, mutate_json, split_parts
from tests.fuzz.verdicts import Broken

SECRET = bytes(range(32))
SCRIPT = ProcessRef("job-1", "127.0.0.1:4711", "script")
GATE = GateAddress("127.0.0.1", 4711, SECRET, None, data_plane=True)
WORKER = ProcessRef("job-2", "unix-abstract:skipper-job-2", "worker", SCRIPT)
TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


# Frames


def feed_frames(data: bytes) -> None:
    """A stream's messages, one after the other; what they bring is looked at as a link does."""
    decoder = frames.Decoder()
    for message in split_parts(data):
        for brought in decoder.feed(message):
            repr(brought)
            sum(map(len, brought.payload))
            if isinstance(brought, Call):
                len(brought.for_rank(1).extent)
            elif isinstance(brought, Cast):
                len(brought.call_for(1).extent)


def frame_seeds() -> Iterator[bytes]:
    """One message, several, one of each kind, one of each form of a segment, and pieces of a large one."""
    call = Call(7, 9, 3, "step", Extent(("hosts", "gpus"), (2, 8)), payload=pack(([1, "a"], {})), trace=TRACE)
    reply = Reply(9, 2, payload=(b"x" * 40, Whole(b"y" * 10), memoryview(b"z")))
    lent = Outgoing(b"l" * 300)
    lent.descriptor = _descriptor()
    borrowed = Call(1, 4, method="take", payload=(b"head", lent))
    for batch in ([call], [reply], [borrowed], [call, reply, Ping(os.getpid())], [Bye()], EXAMPLES):
        yield join_parts(*frames.encode(batch))
    whole = next(frames.encode([call]))
    yield join_parts(b"\x01" + whole[1:20], b"\x01" + whole[20:50], b"\x02" + whole[50:])


def _descriptor() -> bytes:
    from skipper.control.wire import bulk, readv

    return bulk._HEADER.pack(1, 300, True, 1, 0, 0, bytes(readv.SEAL_NBYTES))


def process_seeds() -> Iterator[bytes]:
    """References of processes."""
    yield frames.encode_process(SCRIPT)
    yield frames.encode_process(WORKER)


# Trees


def unpack_answers(data: bytes) -> None:
    """A frame with answers to a cast."""
    for brought in frames.Decoder().feed(data):
        if isinstance(brought, CastAnswers):
            tree_wire.unpack_answers(brought)


def answers_seeds() -> Iterator[bytes]:
    """Answers to casts."""
    given = [tree_wire.GivenAnswer(rank, Kind.REPLY, (b"value", b"buffer")) for rank in range(3)]
    for some in (given, []):
        yield from frames.encode([tree_wire.pack_answers(3, 5, 9, some, is_home=True)])


def open_route(data: bytes) -> object:
    """What opens a route."""
    return tree_wire.Opening.of(RouteOpened(payload=(data,)))


def opening_seeds() -> Iterator[bytes]:
    """Openings of routes."""
    opening = tree_wire.Opening(3, SCRIPT, 8, RankSpan(0, 2), 1, [(0, SCRIPT), (1, WORKER)], [(0, True), (3, False)])
    yield b"".join(map(bytes, opening.message().payload))  # type: ignore[arg-type]


# The handshake


class _Stream:
    """Takes what an end of a handshake sends, and says nothing by itself."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.metadata = metadata
        self.user: Any = None
        self.sent: list[bytes] = []
        self.answered: Any = ()

    def answer(self, metadata: Any) -> None:
        self.answered = metadata

    def send(self, message: bytes) -> bool:
        self.sent.append(message)
        return True

    def turn_away(self, name: str, details: str) -> None:
        details.encode()

    def receive(self) -> None:
        pass

    def end(self) -> None:
        pass


_KEYS = ("skipper-version", "skipper-process-bin", "skipper-nonce-bin", "skipper-proof-bin")


def _metadata(parts: list[bytes]) -> dict[str, Any]:
    pairs: dict[str, Any] = dict(zip(_KEYS, parts, strict=False))
    if _KEYS[0] in pairs:
        pairs[_KEYS[0]] = pairs[_KEYS[0]].decode("latin-1")  # gRPC gives text where a name does not end in -bin
    return {key: value for key, value in pairs.items() if value}


def meet_guest(data: bytes) -> None:
    """A stranger's metadata and first message, at a process of a job."""
    parts = split_parts(data)
    proven: list[ProcessRef] = []
    stream: Any = _Stream(_metadata(parts[:4]))
    guest = Guest(stream, "job-1", SECRET, on_proven=lambda _, peer: proven.append(peer), on_gone=lambda _: None)
    if guest.receive():
        guest.received(parts[4] if len(parts) > 4 else b"")
    guest.ended(None)  # type: ignore[arg-type]  # it is not looked at
    if proven:
        raise Broken(f"{proven} got in without a proof")


def meet_guest_that_proves(data: bytes) -> None:
    """The same of one who knows the secret, and says odd things of itself."""
    (process,) = split_parts(data)[:1] or [b""]
    nonce = auth.new_nonce()
    stream: Any = _Stream(_metadata([VERSION.encode(), process, nonce]))
    guest = Guest(stream, "job-1", SECRET, on_proven=lambda _, peer: None, on_gone=lambda _: None)
    if guest.receive():
        said = (VERSION.encode(), nonce, VERSION.encode(), dict(stream.answered)[_KEYS[2]])
        encoded = stream.metadata.get(_KEYS[1], b"")
        guest.received(auth.client_proof(SECRET, *said, encoded, b"job-1"))


def metadata_seeds() -> Iterator[bytes]:
    """What each side says first within a host."""
    nonce, process = bytes(auth.NONCE_NBYTES), frames.encode_process(WORKER)
    yield pack_metadata(((_KEYS[0], VERSION), (_KEYS[1], process), (_KEYS[2], nonce)))
    yield pack_metadata(((_KEYS[2], nonce), (_KEYS[3], bytes(auth.PROOF_NBYTES))))


def guest_seeds() -> Iterator[bytes]:
    """What a process of the job says; its proof cannot be there."""
    said = (VERSION.encode(), frames.encode_process(WORKER), bytes(auth.NONCE_NBYTES))
    yield join_parts(*said)
    yield join_parts(*said, b"", bytes(auth.PROOF_NBYTES))


def proving_guest_seeds() -> Iterator[bytes]:
    """What a process of the job says of itself."""
    yield join_parts(frames.encode_process(WORKER))


def meet_host(data: bytes) -> None:
    """What somebody answers who was dialed, and is not of the job."""
    parts = split_parts(data)
    opened: list[object] = []
    dial = Dial.__new__(Dial)  # without its stream, which would be one of gRPC to an address
    stream: Any = _Stream({})
    dial._secret, dial._on_open, dial._on_failure = SECRET, opened.append, lambda reason, status: None  # type: ignore[assignment]
    dial._nonce, dial._me, dial._peer = auth.new_nonce(), frames.encode_process(SCRIPT), b"job-2"
    dial._missing, dial._reason, dial.stream = {"sent", "welcome"}, "", stream
    dial.opened(_metadata(parts[:4]))
    if stream.sent:
        raise Broken("the client has proved itself to a stranger")
    for message in parts[4:6]:
        dial.received(message)
    if opened:
        raise Broken("a stranger was taken for a process of the job")


def host_seeds() -> Iterator[bytes]:
    """What a process answers."""
    yield join_parts(b"", b"", bytes(auth.NONCE_NBYTES), bytes(auth.PROOF_NBYTES), b"\x01")


# Actor servers

_DECODERS = (
    *(actor_service.decode_nonce, actor_service.decode_session, actor_service.decode_call),
    *(actor_service.decode_answer, actor_service.decode_methods_query),
    *(actor_service.decode_actors_query, actor_service.decode_actors, actor_service.decode_start),
    *(actor_service.decode_poll, actor_service.decode_cancel, actor_service.decode_operation),
)


def decode_actor_message(data: bytes) -> object:
    """One of the messages of the actor service: the first byte says which."""
    return _DECODERS[data[0] % len(_DECODERS)](data[1:]) if data else None


def actor_message_seeds() -> Iterator[bytes]:
    """One of each."""
    call = MethodCall("step", (b"[1, 2]", b"buffer"), "handle", "trainer", is_json=True)
    failed = CallResult(failure=CallFailure(Code.RAISED, "ValueError: no", "Traceback", (b"cause", b"buffer")))
    messages = (
        actor_service.encode_nonce(bytes(32), 1),
        actor_service.encode_session(bytes(88), bytes(32)),
        actor_service.encode_call(call),
        actor_service.encode_answer(failed),
        ListMethodsRequest(actor_handle="handle", actor="trainer").SerializeToString(),
        actor_service.encode_actors_query(Query(actor="trainer", namespace="team")),
        actor_service.encode_actors([ActorInfo("trainer", "handle", "Trainer")]),
        actor_service.encode_start(Start("id", call)),
        actor_service.encode_poll(OperationQuery("id", 1.5)),
        actor_service.encode_cancel(OperationQuery("id")),
        actor_service.encode_operation(OperationState("id", CallResult((b"result",)))),
    )
    for number, message in enumerate(messages):
        yield bytes([number]) + message


@cache
def _sessions() -> tuple[ServerSessions, ClientSession]:
    server = ServerSessions(SECRET)
    nonce = auth.new_nonce()
    return server, ClientSession(SECRET, nonce, *server.offer(nonce))


def accept_request(data: bytes) -> None:
    """A request with a proof, or what looks like one, altered on its way."""
    server, client = _sessions()
    number, request = client.prove(b"Invoke", b"body")
    flipped = bytes(left ^ right for left, right in zip(request, data.ljust(len(request), b"\0"), strict=False))
    body, seal = server.accept(b"Invoke", flipped)
    if seal is not None and flipped != request:
        raise Broken(f"request {number} was altered and taken for proven: {body!r}")


def accept_bytes(data: bytes) -> None:
    """Any request, at a server, and any answer, at a client."""
    server, client = _sessions()
    _, seal = server.accept(b"Invoke", data)
    if seal is not None:
        raise Broken("a request was taken for proven that nobody has made")
    client.open(b"Invoke", 1, data)
    raise Broken("an answer was taken for the server's that it has not made")


def session_seeds() -> Iterator[bytes]:
    """Nothing altered, and one bit."""
    yield b""
    yield bytes(20) + b"\x01"


def request_seeds() -> Iterator[bytes]:
    """A request of another server, and one without a proof."""
    nonce = bytes(32)
    yield ClientSession(SECRET, nonce, *ServerSessions(SECRET).offer(nonce)).prove(b"Invoke", b"body")[1]
    yield b"body"


# Texts


def parse_address(data: bytes) -> None:
    """An address as text; nobody is asked for names."""
    text = data.decode("utf-8", "surrogateescape")
    addresses.target(text)
    addresses.port_of(text)
    _without_lookups()
    addresses.parse(text)


@cache
def _without_lookups() -> None:
    ask = socket.getaddrinfo

    def read(host: Any, port: Any, *args: Any, flags: int = 0, **kwargs: Any) -> Any:
        return ask(host, port, *args, flags=flags | socket.AI_NUMERICHOST, **kwargs)

    socket.getaddrinfo = read


def address_seeds() -> Iterator[bytes]:
    """Addresses of every kind."""
    yield from (b"tcp://127.0.0.1:4711", b"tcp://[::1]:4711", b"10.0.0.1:80", b"unix-abstract:skipper-job-1", b"host:1")


# Files, and answers of agents


@cache
def read_announcement(data: bytes) -> object:
    """The file in which an agent says where it listens."""
    _without_lookups()
    fd = os.memfd_create("announcement")
    try:
        os.write(fd, data)
        return protocol.announced(Path(f"/proc/self/fd/{fd}"))
    finally:
        os.close(fd)


def announcement_seeds() -> Iterator[bytes]:
    """One that an agent has written."""
    with tempfile.TemporaryDirectory() as folder:
        protocol.announce(Path(folder) / "agent", "tcp://127.0.0.1:4711")
        yield (Path(folder) / "agent").read_bytes()


def read_join_file(data: bytes) -> None:
    """The content of a connection file."""
    connection = join_file.decode(data.decode("utf-8", "replace"), "here")
    repr(connection)
    connection.encode()


def join_file_seeds() -> Iterator[bytes]:
    """One that a job has written."""
    connection = Connection("run", SCRIPT, SECRET, Settings(preload=("json",)), join_file.this_network(), "here")
    yield connection.encode().encode()
    beyond = Beyond("127.0.0.2", "/etc/skipper/certs", data_plane=False)
    yield dataclasses.replace(connection, beyond=beyond).encode().encode()


def read_gates_answer(data: bytes) -> None:
    """What a gate tells a process that joins."""
    repr(introduced(protocol.read_answer(Reply(1, payload=(data,))), GATE))


def gates_answer_seeds() -> Iterator[bytes]:
    """One, and a refusal."""
    there = {
        "root": {"id": "a-1", "address": "127.0.0.1:4711", "name": "script"},
        "nonce": SECRET.hex(),
        "masked_secret": protocol.mask(SECRET, SECRET, SECRET).hex(),
        "settings": dataclasses.asdict(Settings(preload=("json",))),
        "data_plane": True,
    }
    for message in (protocol.answer(1, there), protocol.refusal(1, HostError("no"))):
        yield bytes(message.payload[0])  # type: ignore[arg-type]


def read_agents_words(data: bytes) -> None:
    """A request to an agent, or its answer."""
    content = protocol.read_answer(Reply(1, payload=tuple(split_parts(data))))
    protocol.check_versions(content, "here")


def agents_words_seeds() -> Iterator[bytes]:
    """Requests and answers."""
    for message in (
        protocol.request("launch", {"name": "worker", "nonce": secrets.token_hex(4), **protocol.versions()}, 1),
        protocol.answer(1, {"id": "job-3", "port": 4711}),
        protocol.refusal(1, ProtocolError("no")),
    ):
        yield join_parts(*(bytes(segment) for segment in message.payload))  # type: ignore[arg-type]


def mutate_words(data: bytes, random: Random) -> bytes:
    """Alter one of the texts in JSON."""
    parts = split_parts(data) or [b"{}"]
    at = random.randrange(len(parts))
    parts[at] = mutate_json(parts[at], random)[:0xFFFF]
    return join_parts(*parts)
