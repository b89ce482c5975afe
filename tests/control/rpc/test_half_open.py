"""Strangers who begin much and end nothing, against actor and metadata servers that others want to use meanwhile."""

import gzip
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from skipper.control.rpc import ActorServer, MetadataMapping, MetadataResolver, MetadataServer, Tls
from skipper.control.rpc.wire import listener, unproven
from tests.control.conftest import wait_until
from tests.control.rpc.conftest import client_of, self_signed
from tests.control.rpc.parties import PATIENCE_S, Calculator, Fragile, Host
from tests.http2 import DATA, PREFACE, SETTINGS, Stranger, dial, frame

INVOKE = "/skipper.control.v1.ActorService/Invoke"
OPEN = "/skipper.control.v1.ActorService/OpenSession"
WATCH = "/grpc.health.v1.Health/Watch"
LIMIT_S = 5.0
"""Of a call of whoever is no stranger, while strangers do their worst. It takes milliseconds."""


def use(server: ActorServer) -> None:
    """Use a server as those who may: by a connection of one's own."""
    if isinstance(server, MetadataServer):
        with MetadataMapping(server.address) as mapping:
            mapping.register("/calculator", "actor://127.0.0.1:1/calculator")
            assert MetadataResolver(server.address).resolve("/calculator") == ["actor://127.0.0.1:1/calculator"]
            mapping.unregister("/calculator", "actor://127.0.0.1:1/calculator")
    else:
        with client_of(server.address, Calculator, "calculator") as client:
            assert client.with_options(timeout=LIMIT_S).add.sync(1) == 3


@pytest.fixture(params=[ActorServer, MetadataServer])
def server(request: pytest.FixtureRequest) -> Iterator[ActorServer]:
    kind = request.param
    with kind("127.0.0.1", 0) as server:
        server.register("calculator", Calculator())
        yield server


@pytest.fixture
def strangers(server: ActorServer) -> Iterator[list[Stranger]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Stranger(server.address)) for _ in range(20)]


def open_requests(strangers: list[Stranger], path: str) -> int:
    """Begin a hundred requests on each connection; how many those are."""
    return sum(stranger.open(path) > 0 for stranger in strangers for _ in range(100))


def count_ended(strangers: list[Stranger]) -> int:
    for stranger in strangers:
        stranger.listen()
    return sum(len(stranger.ended) for stranger in strangers)


@pytest.mark.parametrize("path", [INVOKE, OPEN, WATCH])
def test_requests_without_a_body_keep_nobody_out(server: ActorServer, strangers: list[Stranger], path: str) -> None:
    with client_of(server.address, Calculator, "calculator") as client:
        assert client.add.sync(1) == 3
        open_requests(strangers, path)
        for number in range(5):
            assert client.with_options(timeout=LIMIT_S).add.sync(number) == number + 2
            use(server)


def test_requests_without_a_body_are_turned_away_after_a_while(
    server: ActorServer, strangers: list[Stranger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unproven, "PATIENCE_S", 0.5)
    begun = open_requests(strangers, INVOKE)
    wait_until(lambda: count_ended(strangers) == begun, "all to be turned away")
    use(server)


def test_a_body_that_comes_byte_by_byte_is_not_waited_for(server: ActorServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unproven, "PATIENCE_S", 0.5)
    with Stranger(server.address) as stranger:
        stream = stranger.open(INVOKE)
        stranger.send(frame(DATA, 0, stream, b"\0\0\0\0\x40"))
        deadline = time.monotonic() + PATIENCE_S
        while stream not in stranger.ended and time.monotonic() < deadline:
            stranger.send(frame(DATA, 0, stream, b"x"))
            stranger.listen(0.1)
        assert stream in stranger.ended


def test_who_watches_the_health_costs_others_nothing(server: ActorServer, strangers: list[Stranger]) -> None:
    for stranger in strangers:
        for _ in range(20):
            stranger.say(stranger.open(WATCH), b"")
    use(server)
    wait_until(lambda: count_ended(strangers) >= 400 - 64, "the first watchers to make room for the last")
    use(server)


def hangs_up(connection: socket.socket, drip: bytes = b"") -> bool:
    """Whether the other side ends a connection on which it is sent nothing, or a byte now and then."""
    connection.settimeout(0.05)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if drip:
                connection.sendall(drip[:1])
                drip = drip[1:]
            if not connection.recv(1 << 16):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


GREETINGS = {
    "nothing": b"",
    "a part of the greeting": PREFACE[:10],
    "a greeting without settings": PREFACE,
    "all of the greeting": PREFACE + frame(SETTINGS, 0, 0),
    "the beginning of TLS": bytes.fromhex("160301020001000101fc0303"),
    "HTTP/1.1": b"GET / HTTP/1.1\r\n\r\n",
    "garbage": b"\xff" * 100,
}


@pytest.mark.parametrize("kind", [ActorServer, MetadataServer])
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_who_connects_and_does_not_go_on_is_hung_up_on(
    kind: type[ActorServer], is_encrypted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "PATIENCE_S", 0.5)
    monkeypatch.setattr(listener, "_IDLE_MS", 500)
    tls = Tls(*self_signed()) if is_encrypted else None
    with kind("127.0.0.1", 0, tls=tls) as server:
        with ExitStack() as stack:
            connections = {}
            for name, greeting in GREETINGS.items():
                connections[name] = stack.enter_context(dial(server.address))
                connections[name].sendall(greeting)
            assert {name: hangs_up(connection) for name, connection in connections.items()} == dict.fromkeys(
                GREETINGS, True
            )
        for greeting in (PREFACE, GREETINGS["the beginning of TLS"] + bytes(200)):
            with dial(server.address) as connection:
                assert hangs_up(connection, greeting)
        server.register("calculator", Calculator())
        with client_of(
            server.address, Calculator, "calculator", tls=None if tls is None else replace(tls, server_name="localhost")
        ) as client:
            assert client.with_options(timeout=LIMIT_S).add.sync(1) == 3


def test_connections_do_not_take_the_descriptors_of_the_process(host: Callable[..., Host]) -> None:
    server = host(descriptors=200)
    with client_of(server.address, Fragile, "fragile") as client, ExitStack() as stack:
        assert client.times.sync() == 0
        connections = [stack.enter_context(dial(server.address)) for _ in range(400)]
        wait_until(lambda: sum(map(is_ended, connections)) > 200, "those beyond the limit to be closed")
        for _ in range(5):
            assert client.with_options(timeout=LIMIT_S).times.sync() == 0  # which opens a file


def is_ended(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


def peak_nbytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def test_nothing_is_inflated(host: Callable[..., Host]) -> None:
    bomb = gzip.compress(bytes(60 << 20))
    server = host()
    with client_of(server.address, Calculator, "calculator") as client, Stranger(server.address) as stranger:
        assert client.add.sync(1) == 3
        before = peak_nbytes(server.process.pid)
        streams = set()
        for path in (INVOKE, OPEN, "/grpc.health.v1.Health/Check") * 4:
            streams.add(stranger.open(path, [("grpc-encoding", "gzip")]))
            stranger.say(max(streams), bomb, is_compressed=True)
        wait_until(lambda: count_ended([stranger]) == len(streams), "all to be turned away")
        assert client.add.sync(1) == 3
        assert peak_nbytes(server.process.pid) - before < 30 << 20


def test_a_message_with_the_flag_of_compression_alone_is_refused(server: ActorServer) -> None:
    with Stranger(server.address) as stranger:
        stream = stranger.open(INVOKE)
        stranger.say(stream, gzip.compress(bytes(1 << 20)), is_compressed=True)
        wait_until(lambda: count_ended([stranger]) == 1, "it to be turned away")
    use(server)


def test_reflection_is_for_servers_that_serve_everybody_and_knows_their_services_alone(server: ActorServer) -> None:
    import google.protobuf.empty_pb2  # noqa: F401  (a message that this process knows, and nobody has to hear of)

    def ask(address: str, **question: str) -> Any:
        with grpc.insecure_channel(address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(**question)
            return next(iter(stub.ServerReflectionInfo(iter((request,)), timeout=PATIENCE_S)))

    with pytest.raises(grpc.RpcError) as raised:
        ask(server.address, list_services="")
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with ActorServer("127.0.0.1", 0, allow_json=True) as open_server:
        assert len(ask(open_server.address, list_services="").list_services_response.service) == 3
        assert ask(open_server.address, file_containing_symbol="google.protobuf.Empty").HasField("error_response")
        known = ask(open_server.address, file_containing_symbol="skipper.control.v1.ActorService")
        assert known.HasField("file_descriptor_response")


def test_health_says_nothing_of_what_is_served(server: ActorServer) -> None:
    from grpc_health.v1 import health_pb2

    with grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("calculator", "/calculator", "metadata", "/metadata"):
            with pytest.raises(grpc.RpcError) as raised:
                stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_S)
            assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.NOT_FOUND, "")
