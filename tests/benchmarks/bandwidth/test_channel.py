import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from skipper.benchmarks.bandwidth import channel as module
from skipper.benchmarks.bandwidth.channel import MAX_MESSAGE, MessageChannel, accept, connect
from skipper.benchmarks.errors import PeerError, PeerLostError, PeerTimeoutError, TokenRefusedError

SHORT_S = 0.2


@pytest.fixture
def pair() -> Iterator[tuple[MessageChannel, MessageChannel]]:
    left, right = socket.socketpair()
    with MessageChannel(left, peer="right", timeout=5) as near, MessageChannel(right, peer="left", timeout=5) as far:
        yield near, far


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


@pytest.fixture
def in_thread() -> Iterator[Callable[..., Future[MessageChannel]]]:
    with ThreadPoolExecutor() as pool:
        yield pool.submit


def test_messages_arrive_whole_and_in_order(pair: tuple[MessageChannel, MessageChannel]) -> None:
    near, far = pair
    messages = [b"", b"x", b"y" * 100_000]
    for message in messages:
        near.send(message)
        assert far.receive() == message


def test_a_closed_peer_is_lost(pair: tuple[MessageChannel, MessageChannel]) -> None:
    near, far = pair
    far.close()
    far.close()
    with pytest.raises(PeerLostError, match="the connection to right ended"):
        near.receive()
    with pytest.raises(PeerLostError):
        near.send(b"x")


def test_a_silent_peer_meets_the_deadline(pair: tuple[MessageChannel, MessageChannel]) -> None:
    with pytest.raises(PeerTimeoutError, match="right said nothing"):
        pair[0].receive(timeout=0.01)


def test_a_peer_that_stops_half_way_through_a_message_meets_the_deadline() -> None:
    left, right = socket.socketpair()
    with MessageChannel(left, peer="right", timeout=SHORT_S) as near, right:
        right.sendall(b"\x00\x00\x00\x08half")
        with pytest.raises(PeerTimeoutError):
            near.receive()


def test_a_peer_that_reads_nothing_meets_the_deadline() -> None:
    left, right = socket.socketpair()
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with (
        right,
        MessageChannel(left, peer="right", timeout=SHORT_S) as near,
        pytest.raises(PeerTimeoutError, match="does not read"),
    ):
        near.send(b"x" * MAX_MESSAGE)


def test_a_message_that_is_too_long_is_not_read() -> None:
    left, right = socket.socketpair()
    with MessageChannel(left, peer="right", timeout=5) as near, right:
        right.sendall((MAX_MESSAGE + 1).to_bytes(4, "big"))
        with pytest.raises(PeerLostError):
            near.receive()


def test_equal_tokens_open_a_channel(listener: socket.socket, in_thread: Callable[..., Future[MessageChannel]]) -> None:
    accepting = in_thread(accept, listener, b"token", timeout=5)
    with (
        connect("127.0.0.1", listener.getsockname()[1], b"token", timeout=5) as near,
        accepting.result() as far,
    ):
        near.send(b"hello")
        assert far.receive() == b"hello"


def test_a_wrong_token_is_refused_on_both_sides(
    listener: socket.socket, in_thread: Callable[..., Future[MessageChannel]]
) -> None:
    accepting = in_thread(accept, listener, b"token", timeout=5)
    with pytest.raises(TokenRefusedError, match="different tokens"):
        connect("127.0.0.1", listener.getsockname()[1], b"guess", timeout=5)
    with pytest.raises(TokenRefusedError):
        accepting.result()


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.0\r\n\r\n", b"\x00\x00\x00\x04ping", b"\x00" * 64])
def test_a_stranger_is_turned_away(
    listener: socket.socket, in_thread: Callable[..., Future[MessageChannel]], noise: bytes
) -> None:
    accepting = in_thread(accept, listener, b"token", timeout=5)
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(noise)
        with pytest.raises(PeerError):
            accepting.result()


def test_a_stranger_that_says_little_by_little_is_cut_off(
    listener: socket.socket, in_thread: Callable[..., Future[MessageChannel]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", SHORT_S)
    accepting = in_thread(accept, listener, b"token", timeout=60)
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(b"\x00\x00\x00\x20half")
        with pytest.raises(PeerLostError):
            accepting.result()


def test_a_server_that_never_answers_meets_the_deadline(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", SHORT_S)
    with pytest.raises(PeerLostError):
        connect("127.0.0.1", listener.getsockname()[1], b"token", timeout=60)


def test_a_server_of_another_protocol_is_named_as_such(listener: socket.socket) -> None:
    def babble() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(b"\x00\x00\x00\x05hello")
            sock.recv(1)

    thread = threading.Thread(target=babble)
    thread.start()
    with pytest.raises(PeerError, match="does not speak this protocol"):
        connect("127.0.0.1", listener.getsockname()[1], b"token", timeout=5)
    thread.join()


def test_a_port_where_nobody_listens_is_reported_in_words(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(PeerLostError, match="cannot be reached: Connection refused"):
        connect("127.0.0.1", port, b"token", timeout=5)
