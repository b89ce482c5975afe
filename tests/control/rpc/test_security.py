"""Who may call, and that nothing of a stranger's is ever unpickled."""

import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from skipper.control import AuthenticationError, UnsafeFileError
from skipper.control.model.errors import ConnectionLostError, ResolverError
from skipper.control.rpc import ActorServer, FixedResolver, RpcClient, RpcOptions, Tls
from skipper.control.rpc.user_secret import shared_secret
from skipper.control.rpc.wire import channel as actor_channel
from skipper.control.rpc.wire import messages
from skipper.control.rpc.wire.messages import MethodCall
from skipper.control.rpc.wire.session import ClientSession
from skipper.control.wire._generated import actor_service_pb2 as pb
from tests.control.rpc.conftest import client_of, self_signed
from tests.control.rpc.parties import PATIENCE_S, Calculator, Host

OTHER_SECRET = b"x" * 32
Raw = Callable[[str, bytes], bytes]


class Bomb:
    """Leaves a trace where it is unpickled, in whatever process that is."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def raw(server: ActorServer) -> Iterator[Raw]:
    """Sends bytes to an RPC of the server, and is nobody."""
    with grpc.insecure_channel(server.address) as channel:
        yield lambda name, request: channel.unary_unary(f"/{messages.SERVICE}/{name}")(request, timeout=PATIENCE_S)


def refusal(send: Callable[[], object]) -> str:
    with pytest.raises(grpc.RpcError) as raised:
        send()
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    return str(raised.value.details())


def request_with_a_bomb(path: Path) -> bytes:
    return pb.ActorRequest(
        actor="calculator", method="echo", args=pickle.dumps(((Bomb(path),), {}))
    ).SerializeToString()


def test_a_pickle_without_a_proof_is_never_opened(raw: Raw, client: RpcClient[Calculator], tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    request = request_with_a_bomb(trace)
    assert "needs a proof" in refusal(lambda: raw("Invoke", request))
    started = pb.StartOperationRequest(id="1", request=pb.ActorRequest.FromString(request)).SerializeToString()
    refusal(lambda: raw("StartOperation", started))
    for tail in (b"\x7a\x80\x01" + bytes(128), b"\x7a\x20" + bytes(32)):
        refusal(lambda tail=tail: raw("Invoke", request + tail))
    assert not trace.exists()
    client.echo.sync(Bomb(trace))  # the test would notice
    assert trace.exists()


def test_a_server_that_takes_json_from_anybody_takes_no_pickle(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with ActorServer("127.0.0.1", 0, allow_json=True) as server:
        server.register("calculator", Calculator())
        with grpc.insecure_channel(server.address) as channel:
            invoke = channel.unary_unary(f"/{messages.SERVICE}/Invoke")
            assert "pickle" in refusal(lambda: invoke(request_with_a_bomb(trace), timeout=PATIENCE_S))
            start = channel.unary_unary(f"/{messages.SERVICE}/StartOperation")
            nested = pb.StartOperationRequest(id="1", request=pb.ActorRequest.FromString(request_with_a_bomb(trace)))
            refusal(lambda: start(nested.SerializeToString(), timeout=PATIENCE_S))
            request = pb.ActorRequest(actor="calculator", method="add", args=b"[1]", encoding=pb.ENCODING_JSON)
            answer = pb.ActorResponse.FromString(invoke(request.SerializeToString(), timeout=PATIENCE_S))
            assert answer.result == b"3"
    assert not trace.exists()


def test_strangers_are_told_nothing_but_how_to_prove_themselves(raw: Raw) -> None:
    for name, request in (
        ("Invoke", pb.ActorRequest(actor="calculator", method="add", args=b"[1]", encoding=pb.ENCODING_JSON)),
        ("ListActors", pb.ListActorsRequest()),
        ("ListMethods", pb.ListMethodsRequest(actor="calculator")),
        ("PollOperation", pb.PollOperationRequest(id="1")),
        ("CancelOperation", pb.CancelOperationRequest(id="1")),
    ):
        assert "needs a proof" in refusal(lambda name=name, request=request: raw(name, request.SerializeToString()))


def test_a_request_that_is_replayed_is_refused(raw: Raw, server: ActorServer, client: RpcClient[Calculator]) -> None:
    nonce = os.urandom(32)
    opened = messages.decode_session(raw("OpenSession", messages.encode_nonce(nonce, 1)))
    session = ClientSession(shared_secret(), nonce, *opened)
    call = MethodCall("add", (pickle.dumps(((1,), {})),), actor="calculator")
    number, request = session.prove(b"Invoke", messages.encode_call(call))
    before = client.counted.sync()
    session.open(b"Invoke", number, raw("Invoke", request))
    for _ in range(2):
        assert "already received" in refusal(lambda: raw("Invoke", request))
    assert client.counted.sync() == before + 1


def test_a_client_with_another_secret_is_refused_and_does_not_trust_the_server(server: ActorServer) -> None:
    stranger = client_of(server.address, Calculator, "calculator", secret=OTHER_SECRET)
    for call in (lambda: stranger.add.sync(1), lambda: stranger.add(1).get(PATIENCE_S)):
        with pytest.raises(AuthenticationError, match="does not know the secret of this client"):
            call()
    with ActorServer("127.0.0.1", 0, secret=OTHER_SECRET) as other:
        other.register("calculator", Calculator())
        assert client_of(other.address, Calculator, "calculator", secret=OTHER_SECRET).add.sync(1) == 3
        both = RpcClient(
            FixedResolver(f"actor://{other.address}/calculator", f"actor://{server.address}/calculator"),
            Calculator,
            RpcOptions(PATIENCE_S),
        )
        assert {both.label.sync() for _ in range(5)} == {"calculator"}


@pytest.fixture
def liar(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a server that proves itself, and then gives answers that somebody else has written."""
    trace = tmp_path / "trace"
    with ActorServer("127.0.0.1", 0) as honest:
        honest.register("calculator", Calculator())
        with grpc.insecure_channel(honest.address) as behind:

            def pass_on(name: str) -> Any:
                def handle(request: bytes, context: Any) -> bytes:
                    answer: bytes = behind.unary_unary(f"/{messages.SERVICE}/{name}")(request, timeout=PATIENCE_S)
                    if name != "Invoke":
                        return answer
                    forged = pb.ActorResponse(result=pickle.dumps(Bomb(trace))).SerializeToString()
                    return forged + answer[-34:]  # with the proof of another

                return grpc.unary_unary_rpc_method_handler(handle)

            handlers = {name: pass_on(name) for name in ("OpenSession", "ListActors", "Invoke")}
            between = grpc.server(
                ThreadPoolExecutor(4),
                handlers=(grpc.method_handlers_generic_handler(messages.SERVICE, handlers),),
            )
            port = between.add_insecure_port("127.0.0.1:0")
            between.start()
            yield f"127.0.0.1:{port}", trace
            between.stop(None).wait(PATIENCE_S)


def test_an_answer_that_somebody_else_wrote_is_never_opened(liar: tuple[str, Path]) -> None:
    address, trace = liar
    client = client_of(address, Calculator, "calculator")
    for call in (lambda: client.add.sync(1), lambda: client.add(1).get(PATIENCE_S)):
        with pytest.raises(ConnectionLostError, match="was not read"):
            call()
    assert not trace.exists()


def test_a_secret_is_never_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tap between client and server sees the session, the call and the answer, and no secret."""
    seen = bytearray()
    with ActorServer("127.0.0.1", 0, secret=b"a very secret secret") as server:
        server.register("calculator", Calculator())
        with socket.create_server(("127.0.0.1", 0)) as tap:
            threads = [threading.Thread(target=_tap, args=(tap, server.address, seen))]
            threads[0].start()
            address = f"127.0.0.1:{tap.getsockname()[1]}"
            with client_of(address, Calculator, "calculator", secret=b"a very secret secret") as client:
                assert client.echo.sync("something to see") == "something to see"
            threads[0].join(PATIENCE_S)
    assert seen.count(b"something to see") == 2
    assert b"a very secret secret" not in seen


def _tap(listening: socket.socket, address: str, seen: bytearray) -> None:
    host, _, port = address.rpartition(":")
    client, _ = listening.accept()
    with client, socket.create_connection((host, int(port))) as server:

        def copy(source: socket.socket, destination: socket.socket) -> None:
            while chunk := source.recv(1 << 16):
                seen.extend(chunk)
                destination.sendall(chunk)
            destination.shutdown(socket.SHUT_WR)

        back = threading.Thread(target=copy, args=(server, client))
        back.start()
        copy(client, server)
        back.join(PATIENCE_S)


def test_without_a_secret_it_is_that_of_the_user_in_a_file_that_nobody_else_can_read(surroundings: Path) -> None:
    secret = shared_secret()
    path = surroundings / "skipper" / "actors.secret"
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (secret, 0o600)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert shared_secret() == secret
    path.chmod(0o640)
    with pytest.raises(UnsafeFileError, match="0640"):
        RpcClient(FixedResolver("actor://127.0.0.1:1/a"), Calculator)
    path.chmod(0o600)


def test_the_environment_may_name_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    monkeypatch.setenv("SKIPPER_SECRET_FILE", str(path))
    with pytest.raises(ResolverError, match="cannot be read"):
        shared_secret()
    path.write_bytes(b"short")
    path.chmod(0o600)
    with pytest.raises(ResolverError, match="holds 5 bytes"):
        shared_secret()
    path.write_bytes(OTHER_SECRET)
    assert shared_secret() == OTHER_SECRET
    path.chmod(0o644)
    with pytest.raises(UnsafeFileError):
        shared_secret()
    assert shared_secret(b"given secret 123") == b"given secret 123"


def test_processes_of_a_user_share_the_secret_by_themselves(host: Callable[..., Host]) -> None:
    assert client_of(host().address, Calculator, "calculator").add.sync(1) == 3


def test_a_server_listens_beyond_the_host_only_if_it_is_told_to_or_encrypts() -> None:
    for address in ("0.0.0.0", "::", "10.0.0.1", "somewhere.example"):
        with pytest.raises(ValueError, match="insecure=True"):
            ActorServer(address, 0)
    with pytest.raises(ValueError, match="advertise"):
        ActorServer("0.0.0.0", 0, Unused(), insecure=True)
    with ActorServer("0.0.0.0", 0, Unused(), insecure=True, advertise="127.0.0.1") as server:
        server.register("calculator", Calculator())
        assert client_of(server.address, Calculator, "calculator").add.sync(1) == 3


class Unused:
    def register(self, name: str, target_url: str) -> None:
        pass


@pytest.fixture(scope="module")
def certificate() -> tuple[bytes, bytes]:
    _, pem, key = self_signed()
    return pem, key


def test_with_tls_both_ends_know_each_other_by_certificate(certificate: tuple[bytes, bytes]) -> None:
    pem, key = certificate
    with ActorServer("127.0.0.1", 0, tls=Tls(pem, pem, key)) as server:
        server.register("calculator", Calculator())
        known = client_of(server.address, Calculator, "calculator", tls=Tls(pem, pem, key, "localhost"))
        assert known.add.sync(1) == known.add(1).get(PATIENCE_S) == 3
        for tls in (None, Tls(pem, server_name="localhost"), Tls(pem, pem, key, "elsewhere")):
            with pytest.raises(actor_channel.UnreachableError):
                client_of(server.address, Calculator, "calculator", tls=tls).add.sync(1)
    with pytest.raises(ValueError, match="needs its key"):
        Tls(pem, pem)
    assert "PRIVATE" not in repr(Tls(pem, pem, key))
