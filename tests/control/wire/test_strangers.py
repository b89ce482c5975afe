"""Whoever does not know the job's secret gets nothing, and costs nobody else anything."""

import asyncio
import contextlib
import dataclasses
import gzip
import pickle
import queue
import socket
import time
from base64 import b64encode
from pathlib import Path
from typing import Any

import grpc
import pytest

from skipper.control import ActorMesh, ProcMesh
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime.requests import PING
from skipper.control.wire import auth, auth_listener, local_stream, strangers
from skipper.control.wire.frames import encode, encode_process
from skipper.control.wire.messages import Call, ProcessRequest
from skipper.control.wire.payload import pack
from skipper.control.wire.process_ref import ProcessRef
from skipper.control.wire.version import VERSION
from tests.control.actors import Echo
from tests.control.conftest import PATIENCE_S, wait_until
from tests.control.wire.transports import transport_of
from tests.http2 import Stranger

METHOD = "/skipper.control.v1.Link/Connect"
STRANGER = ProcessRef("stranger", "unix-abstract:stranger", "stranger")
unpickled: list[str] = []
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
IMPOSTORS_METADATA = (("skipper-version", VERSION), ("skipper-nonce-bin", bytes(32)), ("skipper-proof-bin", bytes(32)))
SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""An empty SETTINGS frame, with which a client's side of HTTP/2 begins."""


class Trap:
    """Leaves a trace wherever it is unpickled."""

    def __reduce__(self) -> Any:
        return (unpickled.append, ("here",))


@pytest.fixture(scope="module")
def echo(procs: ProcMesh) -> ActorMesh[Echo]:
    echo = procs.slice(gpus=0).spawn("echo", Echo)
    echo.pid.call_one().get(PATIENCE_S)
    return echo


@pytest.fixture(autouse=True)
def nothing_was_unpickled_and_nobody_was_harmed(echo: ActorMesh[Echo]) -> Any:
    yield
    assert unpickled == []
    assert echo.echo.call_one(1).get(PATIENCE_S) == 1


def connect(address: str, metadata: tuple[tuple[str, Any], ...], messages: list[bytes]) -> tuple[Any, list[bytes]]:
    """What a client gets: the status, and the messages that came before it."""
    received: list[bytes] = []
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(METHOD)(iter(messages), metadata=metadata, timeout=PATIENCE_S)
        with contextlib.suppress(grpc.RpcError):
            received.extend(call)
        return call.code(), received


def hello(nonce: bytes = b"n" * auth.NONCE_NBYTES, version: str = VERSION) -> tuple[tuple[str, Any], ...]:
    process = encode_process(STRANGER)
    return (("skipper-version", version), ("skipper-process-bin", process), ("skipper-nonce-bin", nonce))


def targets(echo: ActorMesh[Echo]) -> list[str]:
    """The script itself and a worker."""
    return [runtime.current().me.address, echo.root_members[0].address]


def frames(echo: ActorMesh[Echo]) -> list[bytes]:
    trap = pack(Trap())
    return list(encode([Call(echo.uid, method="echo", payload=trap), ProcessRequest(0, method="spawn", payload=trap)]))


def test_a_wrong_proof_is_turned_away_before_anything_is_decoded(echo: ActorMesh[Echo]) -> None:
    for address in targets(echo):
        for proof in (bytes(32), b"", b"short", bytes(33), *frames(echo)):
            status, received = connect(address, hello(), [proof, *frames(echo)])
            assert (status, received) == (grpc.StatusCode.UNAUTHENTICATED, [])


def test_a_hello_without_nonce_or_of_another_version_is_turned_away(echo: ActorMesh[Echo]) -> None:
    for address in targets(echo):
        assert connect(address, hello(nonce=b"short"), frames(echo)) == (grpc.StatusCode.UNAUTHENTICATED, [])
        assert connect(address, hello(version="0"), frames(echo)) == (grpc.StatusCode.FAILED_PRECONDITION, [])
        assert connect(address, (), frames(echo)) == (grpc.StatusCode.FAILED_PRECONDITION, [])


def test_a_proof_cannot_be_replayed(echo: ActorMesh[Echo]) -> None:
    me = runtime.current()
    address = echo.root_members[0]
    nonce = b"n" * auth.NONCE_NBYTES
    with grpc.insecure_channel(address.address) as channel:
        call = channel.stream_stream(METHOD)(iter(()), metadata=hello(nonce), timeout=PATIENCE_S)
        theirs = dict(call.initial_metadata())["skipper-nonce-bin"]
    said = (VERSION.encode(), nonce, VERSION.encode(), theirs)
    transcript = (*said, encode_process(STRANGER), encode_process(address))
    once_valid = auth.client_proof(me.secret, *transcript)
    assert connect(address.address, hello(nonce), [once_valid, *frames(echo)])[0] is grpc.StatusCode.UNAUTHENTICATED


def test_a_message_above_the_limit_is_refused_unread(echo: ActorMesh[Echo]) -> None:
    for address in targets(echo):
        status, received = connect(address, hello(), [bytes(8 << 20)])
        assert status is not grpc.StatusCode.OK
        assert received == []


def peak_nbytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def test_nothing_of_a_strangers_is_inflated(echo: ActorMesh[Echo]) -> None:
    pid = echo.pid.call_one().get(PATIENCE_S)
    bomb = gzip.compress(bytes(60 << 20))
    assert len(bomb) < 64 << 10  # what HTTP/2 lets through before the other side has said a word
    before = peak_nbytes(pid)
    headers = [(name, b64encode(value) if isinstance(value, bytes) else value) for name, value in hello()]
    with Stranger(echo.root_members[0].address) as stranger:
        stream = stranger.open(METHOD, [("grpc-encoding", "gzip"), *headers])
        stranger.say(stream, bomb, is_compressed=True)
        wait_until(lambda: stranger.listen() or stream in stranger.ended, "it to be turned away")  # type: ignore[func-returns-value]
    assert echo.echo.call_one(1).get(PATIENCE_S) == 1
    assert peak_nbytes(pid) - before < 30 << 20


def test_streams_without_end_on_one_connection_keep_no_process_out(echo: ActorMesh[Echo], own_procs: Any) -> None:
    """Far more than HTTP/2 lets one connection have, none of which says anything."""
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(Stranger(runtime.current().me.address)) for _ in range(20)]
        for stranger in strangers:
            for _ in range(100):
                stranger.open(METHOD)
        newcomer = own_procs({"gpus": 1}).spawn("newcomer", Echo)
        assert newcomer.echo.call_one(1).get(PATIENCE_S) == 1


def test_garbage_on_the_socket_costs_only_its_connection(echo: ActorMesh[Echo]) -> None:
    for address in targets(echo):
        name = "\0" + address.removeprefix("unix-abstract:")
        for garbage in (b"\xff" * 4096, b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(500)):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.settimeout(PATIENCE_S)
                stranger.connect(name)
                try:
                    stranger.sendall(garbage)
                    while stranger.recv(4096):
                        pass
                except ConnectionError:
                    continue


def test_a_silent_stranger_is_turned_away_after_a_while(echo: ActorMesh[Echo], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "HANDSHAKE_TIMEOUT_S", 0.2)
    address = runtime.current().me.address

    async def stay_silent() -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.to_thread(wait_for_the_end)

    def wait_for_the_end() -> Any:
        import threading

        forever = threading.Event()
        with grpc.insecure_channel(address) as channel:
            call = channel.stream_stream(METHOD)(iter(forever.wait, True), metadata=hello(), timeout=PATIENCE_S)
            try:
                list(call)
            except grpc.RpcError:
                return call.code()
            finally:
                forever.set()

    assert asyncio.run(stay_silent()) is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_flood_of_silent_strangers_does_not_keep_a_new_process_out(
    echo: ActorMesh[Echo], monkeypatch: pytest.MonkeyPatch, own_procs: Any
) -> None:
    monkeypatch.setattr(strangers, "MAX_STRANGERS", 4)
    network: Any = runtime.current().transport._network
    with contextlib.ExitStack() as stack:
        ends: list[queue.SimpleQueue[None]] = []
        calls = []
        for _ in range(12):
            channel = stack.enter_context(grpc.insecure_channel(runtime.current().me.address, options=OWN_CONNECTION))
            ends.append(queue.SimpleQueue())
            calls.append(channel.stream_stream(METHOD)(iter(ends[-1].get, None), metadata=hello(), timeout=PATIENCE_S))
        wait_until(lambda: sum(call.done() for call in calls) == 8, "those behind to push out those in front")
        assert {call.code() for call in calls if call.done()} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        wait_until(lambda: len(network._auth_listeners._all[0]._strangers) == 4, "the last one to be let in")
        newcomer = own_procs({"gpus": 1}).spawn("newcomer", Echo)
        assert newcomer.echo.call_one(1).get(PATIENCE_S) == 1
        for end in ends:
            end.put(None)


def test_a_stranger_that_drips_its_bytes_or_idles_is_cut_off(
    echo: ActorMesh[Echo], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth_listener, "HANDSHAKE_TIMEOUT_S", 0.5)
    process = runtime.current()
    me = runtime.new_process_ref("listener", process.me)
    listener = transport_of(me)
    runtime._shared_loop().run(listener.start(), timeout=PATIENCE_S)
    try:
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS
        for at_once, dripping in ((b"", preface), (preface, b"")):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect("\0" + me.address.removeprefix("unix-abstract:"))
                stranger.sendall(at_once)
                stranger.settimeout(0.05)
                assert drip(stranger, dripping)
    finally:
        runtime._shared_loop().run(listener.close(), timeout=PATIENCE_S)


def drip(stranger: socket.socket, message: bytes) -> bool:
    """Send a byte now and then; whether the other side hangs up."""
    sent = 0
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            sent += stranger.send(message[sent : sent + 1])
            if not stranger.recv(4096):
                return True
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


def test_an_impostor_server_is_found_out(echo: ActorMesh[Echo]) -> None:
    """Somebody listens at the address of a process but does not know the secret."""

    def answer(requests: Any, context: Any) -> Any:
        context.send_initial_metadata(IMPOSTORS_METADATA)
        yield from frames(echo)

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        handlers = {"Connect": grpc.stream_stream_rpc_method_handler(answer)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("skipper.control.v1.Link", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        impostor = dataclasses.replace(
            runtime.new_process_ref("impostor", runtime.current().me), address=f"127.0.0.1:{port}", launcher=None
        )
        server.start()
        try:
            future = runtime.current().request(impostor, PING)
            with pytest.raises(Exception, match="does not know the job's secret"):
                future.get(PATIENCE_S)
        finally:
            server.stop(None).wait(PATIENCE_S)


def test_an_impostor_within_the_host_is_found_out(echo: ActorMesh[Echo]) -> None:
    impostor = dataclasses.replace(runtime.new_process_ref("impostor", runtime.current().me), launcher=None)
    with local_stream.new_socket() as listening:
        listening.setblocking(True)
        listening.bind(local_stream.socket_name(impostor.id))
        listening.listen()
        future = runtime.current().request(impostor, PING)
        listening.settimeout(PATIENCE_S)
        with listening.accept()[0] as dialed:
            dialed.settimeout(PATIENCE_S)
            said = local_stream.unpack_metadata(dialed.recv(1 << 16))
            assert said["skipper-version"] == VERSION
            dialed.send(local_stream.pack_metadata(IMPOSTORS_METADATA))
            for message in frames(echo):
                with contextlib.suppress(OSError):  # it has hung up
                    dialed.send(message)
            with pytest.raises(Exception, match="does not know the job's secret"):
                future.get(PATIENCE_S)
            assert dialed.recv(1 << 16) == b""  # not even a proof: it would show whether a guess is right


def test_the_secret_stands_in_no_argument_and_no_environment(echo: ActorMesh[Echo]) -> None:
    secret = runtime.current().secret
    pid = echo.pid.call_one().get(PATIENCE_S)
    for file in ("cmdline", "environ"):
        with open(f"/proc/{pid}/{file}", "rb") as content:
            text = content.read()
        assert secret not in text
        assert secret.hex().encode() not in text
    assert secret.hex() not in repr(runtime.current().__dict__)
    assert pickle.dumps(secret)  # it is a plain value; only its places are restricted
