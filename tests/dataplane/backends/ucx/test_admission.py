"""Who gets to UCX's TCP port: the conversation before, and the filter in the kernel. Hardly needs UCX."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from skipper.dataplane.backends import handshake
from skipper.dataplane.backends.ucx.admission import HELLO, MAGIC, Admission, AdmissionServer, Contact
from skipper.dataplane.backends.ucx.engine import UcxEngine
from skipper.dataplane.config import Config
from skipper.dataplane.errors import (
    BackendUnavailableError,
    DescriptorError,
    OwnerDiedError,
    TransferError,
    TransferTimeoutError,
)
from skipper.trust import own_sockets, socket_filter
from skipper.trust.own_sockets import SocketPlace, as_ipv6

KEYS = (b"of the job" + bytes(22), b"of the user" + bytes(21))
STRANGE = (b"of somebody else" + bytes(16),)
MUTE_S = 0.3  # the kernel sends again after a fifth of a second what nobody has acknowledged
PATIENCE_S = 20.0


class Library:
    """Stands for UCX: accepts whoever gets through, in a thread of its own, and keeps them."""

    def __init__(self, host: str) -> None:
        self.listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.listener.bind((host, 0))
        self.listener.listen(64)
        self.place = SocketPlace.of(self.listener.getsockname())
        self.accepted: list[socket.socket] = []
        self.arrived = threading.Semaphore(0)
        self.listener.settimeout(0.05)
        self._closing = False
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        while not self._closing:
            with contextlib.suppress(TimeoutError):
                self.accepted.append(self.listener.accept()[0])
                self.arrived.release()

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        for one in (self.listener, *self.accepted):
            one.close()


@pytest.fixture(params=["127.0.0.1", "::1"])
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    library = Library(request.param)
    yield library
    library.close()


@pytest.fixture
def server(library: Library) -> Iterator[AdmissionServer]:
    copy = library.listener.dup()
    socket_filter.admit(copy, ())
    server = AdmissionServer([copy], library.listener.getsockname()[0], lambda: KEYS, within_host=False)
    yield server
    server.close()
    server.close()


def soon(seconds: float = PATIENCE_S) -> float:
    return time.monotonic() + seconds


def connecting_to(library: Library, source: str | None = None) -> socket.socket:
    """A socket that has begun to connect, as UCX's do."""
    connection = socket.socket(library.listener.family)
    if source is not None:
        connection.bind((source, 0))
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        connection.connect(library.listener.getsockname()[:2])
    return connection


def own_address(library: Library) -> SocketPlace:
    return SocketPlace(library.place.address, 0)


def got(connection: socket.socket, seconds: float) -> bytes | None:
    """What arrives within so long; None: nothing."""
    connection.settimeout(seconds)
    try:
        return connection.recv(64)
    except TimeoutError:
        return None
    except ConnectionResetError:
        return b""


def is_connected(connection: socket.socket, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while own_sockets.state(connection) != own_sockets.ESTABLISHED:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_nobody_can_connect_unasked(library: Library, server: AdmissionServer) -> None:
    with connecting_to(library) as stranger:
        assert not is_connected(stranger, MUTE_S)
    assert library.accepted == []


def test_what_was_let_in_is_heard(library: Library, server: AdmissionServer) -> None:
    with Admission(server.contact, KEYS, [own_address(library)], soon()) as admission:
        assert admission.listeners == {library.place}
        peer = connecting_to(library)
        admission.connected()
    with peer:
        peer.setblocking(True)
        peer.sendall(b"hello")
        assert library.arrived.acquire(timeout=PATIENCE_S)
        (accepted,) = library.accepted
        assert got(accepted, PATIENCE_S) == b"hello"
        accepted.sendall(b"welcome")
        assert got(peer, PATIENCE_S) == b"welcome"
        with connecting_to(library) as later:
            assert not is_connected(later, MUTE_S)  # the port is closed again


def test_a_stranger_of_the_same_address_is_not_heard_and_then_cut_off(
    library: Library, server: AdmissionServer
) -> None:
    with Admission(server.contact, KEYS, [own_address(library)], soon()) as admission, contextlib.ExitStack() as stack:
        known = own_sockets.descriptors()
        # As another process of that host would: not among the sockets that this process has opened since.
        strangers = [stack.enter_context(connecting_to(library)) for _ in range(3)]
        for stranger in strangers:
            assert is_connected(stranger, PATIENCE_S)
            stranger.sendall(b"let me in")
            assert library.arrived.acquire(timeout=PATIENCE_S)
        heard = [got(accepted, MUTE_S) for accepted in library.accepted]
        assert heard == [None] * 3
        admission._known = {**own_sockets.descriptors(), **known}
        peer = stack.enter_context(connecting_to(library))
        admission.connected()
        peer.setblocking(True)
        peer.sendall(b"hello")
        assert library.arrived.acquire(timeout=PATIENCE_S)
        assert got(library.accepted[-1], PATIENCE_S) == b"hello"
        for accepted in library.accepted[:-1]:
            assert got(accepted, PATIENCE_S) == b""


@pytest.mark.parametrize("library", ["127.0.0.1"], indirect=True)  # of IPv6 the loopback has one address
def test_other_addresses_than_those_that_were_told_stay_out(library: Library, server: AdmissionServer) -> None:
    with (
        Admission(server.contact, KEYS, [own_address(library)], soon()),
        connecting_to(library, "127.0.0.9") as stranger,
    ):
        assert not is_connected(stranger, MUTE_S)


def test_a_visitor_that_leaves_closes_the_port_behind_it(library: Library, server: AdmissionServer) -> None:
    with Admission(server.contact, KEYS, [own_address(library)], soon()), connecting_to(library) as peer:
        assert is_connected(peer, PATIENCE_S)
    assert library.arrived.acquire(timeout=PATIENCE_S)
    assert got(library.accepted[0], PATIENCE_S) == b""  # it had not said that this was its own


def test_another_token_lets_nobody_in(library: Library, server: AdmissionServer) -> None:
    forged = Contact(os.urandom(handshake.TOKEN_BYTES), server.contact.address)
    with pytest.raises(TransferError, match="closed the connection"):
        Admission(forged, KEYS, [own_address(library)], soon())
    with connecting_to(library) as stranger:
        assert not is_connected(stranger, MUTE_S)


@pytest.mark.parametrize("keys", [STRANGE, ()], ids=["another", "none"])
def test_a_handle_without_the_secret_lets_nobody_in(
    library: Library, server: AdmissionServer, keys: tuple[bytes, ...]
) -> None:
    with pytest.raises(TransferError, match="does not know the secret"):
        Admission(server.contact, keys, [own_address(library)], soon())
    with connecting_to(library) as stranger:
        assert not is_connected(stranger, MUTE_S)


@pytest.mark.parametrize("keys", [KEYS, KEYS[1:], (*STRANGE, KEYS[1])], ids=["both", "user", "last"])
def test_one_secret_in_common_lets_in(library: Library, server: AdmissionServer, keys: tuple[bytes, ...]) -> None:
    with Admission(server.contact, keys, [own_address(library)], soon()) as admission, connecting_to(library):
        admission.connected()


def test_an_older_version_is_told_apart(library: Library, server: AdmissionServer) -> None:
    with socket.create_connection(handshake.target(server.contact.address)) as older:
        older.sendall(HELLO.pack(b"SKu1", bytes(16)))
        older.settimeout(PATIENCE_S)
        assert older.recv(HELLO.size, socket.MSG_WAITALL)[:4] == MAGIC
        assert older.recv(1) == b""


def test_an_owner_of_an_older_version_is_a_typed_error() -> None:
    listener, address = handshake.bind("127.0.0.1:0", "")
    listener.setblocking(True)

    def older() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(HELLO.size)
            connection.sendall(HELLO.pack(b"SKu1", bytes(16)))

    thread = threading.Thread(target=older)
    thread.start()
    with pytest.raises(TransferError, match="version"):
        Admission(Contact(bytes(16), address), KEYS, [], soon())
    thread.join()
    listener.close()


def test_an_owner_that_does_not_know_the_token_is_not_believed() -> None:
    listener, address = handshake.bind("127.0.0.1:0", "")
    listener.setblocking(True)

    def pretend() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(HELLO.pack(MAGIC, bytes(16)))
            connection.recv(4096)
            connection.sendall(bytes(1 << 12))
            with contextlib.suppress(ConnectionResetError):
                connection.recv(1)

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(TransferError, match="not the owner"):
        Admission(Contact(bytes(16), address), KEYS, [], soon())
    thread.join()
    listener.close()


@pytest.mark.parametrize(
    "message", [b"GET / HTTP/1.0\r\n\r\n" * 9, os.urandom(4096), HELLO.pack(MAGIC, bytes(16)) + os.urandom(4096)]
)
def test_garbage_is_hung_up_on(library: Library, server: AdmissionServer, message: bytes) -> None:
    with socket.create_connection(handshake.target(server.contact.address)) as stranger:
        stranger.sendall(message)
        stranger.settimeout(PATIENCE_S)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
    with Admission(server.contact, KEYS, [own_address(library)], soon()):
        pass


@pytest.mark.parametrize("library", ["127.0.0.1"], indirect=True)  # of IPv6 the loopback has one address
def test_strangers_that_say_nothing_leave_room_for_others(library: Library, server: AdmissionServer) -> None:
    where = handshake.target(server.contact.address)
    with contextlib.ExitStack() as stack:
        for _ in range(3 * handshake.MOST_ALIKE):
            stack.enter_context(socket.create_connection(where, source_address=("127.0.0.9", 0)))
        with Admission(server.contact, KEYS, [own_address(library)], soon()):
            pass


def test_strangers_that_say_nothing_are_hung_up_on_in_the_end(library: Library, server: AdmissionServer) -> None:
    with socket.create_connection(handshake.target(server.contact.address)) as stranger:
        assert got(stranger, PATIENCE_S) == b""


def test_what_is_replayed_is_not_believed(library: Library, server: AdmissionServer) -> None:
    """Somebody who has listened to one conversation says the same again."""
    said: list[bytes] = []
    real = socket.socket.sendall
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "sendall", lambda self, data: (said.append(bytes(data)), real(self, data))[1])
        with Admission(server.contact, KEYS, [own_address(library)], soon()):
            pass
    first, *_ = (text for text in said if text[:4] == MAGIC)
    proof = next(text for text in said if len(text) > HELLO.size)
    with socket.create_connection(handshake.target(server.contact.address)) as stranger:
        stranger.sendall(first)
        stranger.settimeout(PATIENCE_S)
        assert len(stranger.recv(HELLO.size)) == HELLO.size
        stranger.sendall(proof)
        assert got(stranger, PATIENCE_S) == b""


def test_an_owner_that_is_gone_is_told_from_one_that_is_silent(library: Library) -> None:
    listener, address = handshake.bind("127.0.0.1:0", "")
    with pytest.raises(TransferTimeoutError):
        Admission(Contact(bytes(16), address), KEYS, [], soon(0.1))
    listener.close()
    with pytest.raises(OwnerDiedError):
        Admission(Contact(bytes(16), address), KEYS, [], soon())


@pytest.mark.parametrize("text", [b"", b"tcp:", b"tcp:1.2.3.4:", b"tcp:1.2.3.4:99999", b"udp:1.2.3.4:5", b"tcp:\xff:5"])
def test_a_damaged_contact_is_a_typed_error(text: bytes) -> None:
    with pytest.raises(DescriptorError):
        Contact.parse(bytes(17) + text)
    assert Contact.parse(b"") is None


def test_a_contact_survives_as_bytes() -> None:
    for within_host in (False, True):
        contact = Contact(os.urandom(16), "tcp:10.0.0.7:4711", within_host)
        assert Contact.parse(contact.pack()) == contact


class NoFilters(socket.socket):
    """A socket of a system that takes a filter and forgets it."""

    def setsockopt(self, *arguments: object) -> None:
        """Do nothing."""


def test_a_system_that_forgets_filters_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert socket_filter.obstacle.__wrapped__() is None
    monkeypatch.setattr(socket, "socket", NoFilters)
    assert "does not have one" in str(socket_filter.obstacle.__wrapped__())


def test_ucx_does_not_listen_where_strangers_cannot_be_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_filter, "obstacle", lambda: "no filters")
    with pytest.raises(BackendUnavailableError, match="open to all users: no filters"):
        UcxEngine(Config(ucx={"TLS": "tcp,self"}), lambda: KEYS)


def test_many_addresses_fit_into_a_filter() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        socket_filter.admit(listener, [as_ipv6(f"10.0.{at >> 8}.{at & 255}") for at in range(500)])
        assert socket_filter.restricted(listener)
        socket_filter.lift(listener)
        assert not socket_filter.restricted(listener)
        socket_filter.lift(listener)
