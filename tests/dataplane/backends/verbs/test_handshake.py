"""The handshake that connects queue pairs: who may have one, and what strangers get. Needs no RDMA device."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from skipper.dataplane.backends import handshake
from skipper.dataplane.backends.handshake import TOKEN_BYTES, bind
from skipper.dataplane.backends.verbs import handshake as verbs_handshake
from skipper.dataplane.backends.verbs.device import ENDPOINT
from skipper.dataplane.backends.verbs.handshake import Endpoints, QueuePairServer, dial, hung_up
from skipper.dataplane.errors import BackendUnavailableError, OwnerDiedError, TransferError, TransferTimeoutError

TOKEN = b"0123456789abcdef"
KEYS = (b"of the job" + bytes(22), b"of the user" + bytes(21))
STRANGE = (b"of somebody else" + bytes(16),)
MINE = ENDPOINT.pack(1, 2, b"m" * 16, 3, 4, 5, 0)
THEIRS = ENDPOINT.pack(6, 7, b"t" * 16, 8, 9, 10, 0)


class Pairs:
    """Makes ends that note what is done to them, in place of a device's queue pairs."""

    def __init__(self) -> None:
        self.connected: list[Endpoints] = []
        self.keys: list[bytes] = []
        self.closed = threading.Semaphore(0)
        self.error: Exception | None = None
        self.endpoints: Endpoints = {0: THEIRS}

    def __call__(self, rails: tuple[int, ...], key: bytes) -> "Pairs":
        self.keys.append(key)
        if self.error is not None:
            raise self.error
        self.endpoints = {rail: THEIRS[:-1] + bytes([rail]) for rail in rails}
        return self

    def connect(self, theirs: Endpoints) -> None:
        self.connected.append(theirs)

    def close(self) -> None:
        self.closed.release()


@pytest.fixture
def pairs() -> Pairs:
    return Pairs()


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, pairs: Pairs) -> Iterator[str]:
    listen = None if request.param == "unix" else "127.0.0.1:0"
    listener, address = bind(listen, f"skipper-test-{os.getpid()}")
    server = QueuePairServer(listener, address, TOKEN, lambda: KEYS, (0,), pairs)
    yield address
    server.close()
    server.close()


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def connect_raw(address: str) -> socket.socket:
    kind, _, where = address.partition(":")
    if kind == "unix":
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(f"\0{where}")
    else:
        host, _, port = where.rpartition(":")
        connection = socket.create_connection((host, int(port)))
    connection.settimeout(10)
    return connection


def test_both_sides_learn_the_other_end(address: str, pairs: Pairs) -> None:
    connection, endpoints, *_ = dial(address, TOKEN, KEYS, {0: MINE}, soon())
    assert endpoints == {0: THEIRS}
    assert pairs.connected == [{0: MINE}]
    assert not hung_up(connection)
    connection.close()
    assert pairs.closed.acquire(timeout=10)


def test_a_connection_that_replaces_another_is_answered_when_that_is_destroyed(address: str, pairs: Pairs) -> None:
    first = dial(address, TOKEN, KEYS, {0: MINE}, soon())
    beside = dial(address, TOKEN, KEYS, {0: MINE}, soon())
    second = dial(address, TOKEN, KEYS, {0: MINE}, soon(), replaces=first.name)
    assert pairs.closed.acquire(blocking=False)
    assert not pairs.closed.acquire(blocking=False)
    assert [hung_up(each.socket) for each in (first, beside, second)] == [True, False, False]
    third = dial(address, TOKEN, KEYS, {0: MINE}, soon(), replaces=first.name)  # one that is gone already
    for each in (first, beside, second, third):
        each.socket.close()
    for _ in range(3):
        assert pairs.closed.acquire(timeout=10)


@pytest.mark.parametrize(
    ("ours", "theirs", "common"), [((0, 1, 2), (0, 1), (0, 1)), ((1,), (0, 1, 2), (1,)), ((0, 2), (0, 1, 2), (0, 2))]
)
def test_the_ports_that_both_sides_use_are_connected_by_number(
    ours: tuple[int, ...], theirs: tuple[int, ...], common: tuple[int, ...], pairs: Pairs
) -> None:
    listener, address = bind(None, f"skipper-test-rails-{os.getpid()}")
    server = QueuePairServer(listener, address, TOKEN, lambda: KEYS, theirs, pairs)
    mine = {rail: MINE[:-1] + bytes([rail]) for rail in ours}
    connection, endpoints, *_ = dial(address, TOKEN, KEYS, mine, soon())
    assert endpoints == {rail: THEIRS[:-1] + bytes([rail]) for rail in common}
    assert pairs.connected == [{rail: mine[rail] for rail in common}]
    connection.close()
    server.close()


def test_without_a_port_in_common_there_is_no_connection(address: str, pairs: Pairs) -> None:
    with pytest.raises(TransferError, match="other RDMA ports"):
        dial(address, TOKEN, KEYS, {1: MINE}, soon())
    assert pairs.connected == []


def test_a_wrong_token_gets_nothing(address: str, pairs: Pairs) -> None:
    with pytest.raises(TransferError, match="token"):
        dial(address, b"x" * TOKEN_BYTES, KEYS, {0: MINE}, soon())
    assert pairs.connected == []


@pytest.mark.parametrize("keys", [STRANGE, ()], ids=["another", "none"])
def test_a_handle_without_the_secret_gets_nothing(address: str, pairs: Pairs, keys: tuple[bytes, ...]) -> None:
    with pytest.raises(TransferError, match="does not know the secret"):
        dial(address, TOKEN, keys, {0: MINE}, soon())
    assert pairs.connected == []


@pytest.mark.parametrize("keys", [KEYS, KEYS[1:], (*STRANGE, KEYS[1]), KEYS[:1]], ids=["both", "user", "last", "job"])
def test_one_secret_in_common_is_enough_and_both_sides_know_which(
    address: str, pairs: Pairs, keys: tuple[bytes, ...]
) -> None:
    dialled = dial(address, TOKEN, keys, {0: MINE}, soon())
    assert pairs.keys == [dialled.key]
    (expected, *_) = (key for key in KEYS if key in keys)
    assert handshake.proof_keys([expected], TOKEN, address) == (dialled.key,)
    dialled.socket.close()


def test_a_proof_for_one_owner_is_none_for_another_place(address: str) -> None:
    """Somebody in between, who has what is said to him passed on, is not where the handle leads to."""
    elsewhere = handshake.proof_keys(KEYS, TOKEN, "tcp:127.0.0.1:1")
    assert not set(elsewhere).intersection(handshake.proof_keys(KEYS, TOKEN, address))


def test_an_older_version_is_told_apart(address: str, pairs: Pairs) -> None:
    with connect_raw(address) as older:
        older.sendall(b"SKv3\1" + b"n" * 16)
        assert older.recv(21, socket.MSG_WAITALL)[:4] == verbs_handshake.MAGIC
        assert older.recv(1) == b""
    assert pairs.connected == []


def test_an_owner_of_an_older_version_is_a_typed_error() -> None:
    listener, address = bind("127.0.0.1:0", "")
    listener.setblocking(True)

    def older() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(21)
            connection.sendall(b"SKv3\1" + b"i" * 16)

    thread = threading.Thread(target=older)
    thread.start()
    with pytest.raises(TransferError, match="version"):
        dial(address, TOKEN, KEYS, {0: MINE}, soon())
    thread.join(10)
    listener.close()


def test_a_proof_cannot_be_used_twice(address: str, pairs: Pairs) -> None:
    keys = handshake.proof_keys(KEYS, TOKEN, address)
    sent = []
    with connect_raw(address) as first:
        hello = verbs_handshake.MAGIC + b"\1" + b"n" * 16
        first.sendall(hello)
        greetings = hello + first.recv(21)
        own = MINE + verbs_handshake.NOBODY
        sent.append(own + handshake.prove_by_each(keys, b"initiator", greetings, own))
        first.sendall(sent[0])
        assert first.recv(ENDPOINT.size)[:4] == THEIRS[:4]
    with connect_raw(address) as second:
        second.sendall(hello)
        second.recv(21)
        second.sendall(sent[0])
        assert second.recv(1) == b""
    assert pairs.connected == [{0: MINE}]


@pytest.mark.parametrize(
    "message", [b"GET / HTTP/1.1\r\n\r\n...", b"\0" * 21, os.urandom(21)], ids=["http", "zeros", "noise"]
)
def test_strangers_are_hung_up_on(address: str, pairs: Pairs, message: bytes) -> None:
    with connect_raw(address) as stranger:
        stranger.sendall(message)
        with contextlib.suppress(ConnectionResetError):  # not all that it had sent was read
            assert stranger.recv(1) == b""
    assert pairs.connected == []


def test_a_silent_stranger_holds_nobody_up_and_is_hung_up_on(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs_handshake, "GREETING_S", 0.2)
    with connect_raw(address) as silent:
        connection, *_ = dial(address, TOKEN, KEYS, {0: MINE}, soon())
        connection.close()
        silent.sendall(b"SK")
        assert silent.recv(1) == b""


def test_an_owner_without_a_queue_pair_to_spare_hangs_up(address: str, pairs: Pairs) -> None:
    pairs.error = TransferError("none left")
    with pytest.raises(TransferError, match="closed the connection"):
        dial(address, TOKEN, KEYS, {0: MINE}, soon())
    pairs.error = None
    connection, *_ = dial(address, TOKEN, KEYS, {0: MINE}, soon())
    connection.close()


def test_the_end_of_the_owner_is_seen(pairs: Pairs) -> None:
    listener, address = bind(None, f"skipper-test-end-{os.getpid()}")
    server = QueuePairServer(listener, address, TOKEN, lambda: KEYS, (0,), pairs)
    connection, *_ = dial(address, TOKEN, KEYS, {0: MINE}, soon())
    server.close()
    assert hung_up(connection)
    connection.close()
    with pytest.raises(OwnerDiedError):
        dial(address, TOKEN, KEYS, {0: MINE}, soon())


def test_an_impostor_without_the_token_is_found_out() -> None:
    listener, address = bind("127.0.0.1:0", "")
    listener.setblocking(True)

    def impostor() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(21)
            connection.sendall(verbs_handshake.MAGIC + b"\1" + b"i" * 16)
            connection.recv(ENDPOINT.size + len(verbs_handshake.NOBODY) + handshake.PROOFS_BYTES)
            connection.sendall(THEIRS + b"\0" * 32)
            connection.recv(1)

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(TransferError, match="not the owner"):
        dial(address, TOKEN, KEYS, {0: MINE}, soon())
    thread.join(10)
    listener.close()


def test_a_deadline_is_kept_when_nobody_answers() -> None:
    listener, address = bind(None, f"skipper-test-mute-{os.getpid()}")
    begin = time.monotonic()
    with pytest.raises(TransferTimeoutError):
        dial(address, TOKEN, KEYS, {0: MINE}, soon(0.2))
    assert time.monotonic() - begin < 5
    listener.close()


def test_an_address_that_is_taken_is_named() -> None:
    listener, address = bind("127.0.0.1:0", "")
    with pytest.raises(BackendUnavailableError, match=address.removeprefix("tcp:")):
        bind(address.removeprefix("tcp:"), "")
    listener.close()
