"""Streams within a host: what the other end says arrives whole and in order, and its end is told at once."""

import asyncio
import contextlib
import gc
import os
import struct
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from skipper.control.model.errors import ProtocolError, WireError
from skipper.control.wire import auth, local_listener, local_stream, strangers
from skipper.control.wire._poller import Poller
from skipper.control.wire.handshake import WELCOME, Dial, Guest
from skipper.control.wire.link import Link
from skipper.control.wire.local_listener import LocalListener
from skipper.control.wire.local_stream import MAX_METADATA_NBYTES, OutgoingLocalStream, pack_metadata, unpack_metadata
from skipper.control.wire.message_stream import MessageStream, Status
from skipper.control.wire.messages import Bye, Call, Message, Reply
from skipper.control.wire.process_ref import ProcessRef
from skipper.control.wire.version import VERSION
from tests.control.conftest import PATIENCE_S, wait_until

SECRET = b"s" * 32


class Process:
    """A process as far as its links within the host go: it listens, dials, and notes what comes."""

    def __init__(self, name: str, secret: bytes = SECRET) -> None:
        self.me = ProcessRef(f"{name}-{os.getpid()}-{time.monotonic_ns()}", "", name)
        self.secret = secret
        self.poller = Poller(f"poller-{name}")
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.came: list[Message] = []
        self.links: list[Link] = []
        self.failures: list[tuple[str, Status]] = []
        self.ends: list[str] = []
        self.listener = LocalListener(self.me.id, secret, self.poller, self.loop, on_proven=self._let_in)

    def _let_in(self, guest: Guest, peer: ProcessRef) -> None:
        link = self._link(peer)
        link.open(guest.stream, greeting=WELCOME)

    def _link(self, peer: ProcessRef) -> Link:
        def end(link: Link, reason: str) -> None:
            self.ends.append(reason)
            link.lose(reason)

        link = Link(peer, lambda _, envelope: self.came.append(envelope), end)
        link.connected = True
        self.links.append(link)
        return link

    def dial(self, other: ProcessRef) -> Link:
        """Dial another process; the link queues until the stream stands."""
        link = self._link(other)

        def opened(stream: MessageStream) -> None:
            link.open(stream)

        dial = Dial(
            self.me,
            other,
            self.secret,
            on_open=opened,
            on_failure=lambda reason, status: self.failures.append((reason, status)),
            connect=partial(OutgoingLocalStream, other.id, self.poller),
        )
        dial.stream.start("")
        return link

    def close(self) -> None:
        """End everything."""
        for link in self.links:
            link.lose("the end")
        self.listener.close()
        self.poller.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()


@pytest.fixture
def two() -> Iterator[tuple[Process, Process]]:
    with contextlib.ExitStack() as stack:
        processes = Process("a"), Process("b")
        for process in processes:
            stack.callback(process.close)
        yield processes


def call(number: int, payload: bytes = b"") -> Call:
    """A message for an actor."""
    return Call(number, 1, method="method", payload=(payload,))


def test_messages_of_every_size_arrive_in_order_both_ways(two: tuple[Process, Process]) -> None:
    a, b = two
    there = a.dial(b.me)
    payloads = [b"x" * nbytes for nbytes in (0, 1, 100, 30_000, 65_535, 65_536, 65_537, 500_000, 3_000_000, 5)]
    for number, payload in enumerate(payloads):
        there.post(call(number, payload))
    wait_until(lambda: len(b.came) == len(payloads), "all to arrive")
    assert [bytes(message.payload[0]) for message in b.came] == payloads  # type: ignore[arg-type]
    (back,) = b.links
    for number, payload in enumerate(payloads):
        back.post(Reply(number, payload=(payload,)))
    wait_until(lambda: len(a.came) == len(payloads), "all to arrive")
    assert [message.port for message in a.came if isinstance(message, Reply)] == list(range(len(payloads)))


def test_threads_that_post_at_once_keep_each_its_order(two: tuple[Process, Process]) -> None:
    a, b = two
    there = a.dial(b.me)
    threads = [
        threading.Thread(target=lambda n=n: [there.post(call(1000 * n + i, bytes(i * 40))) for i in range(500)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(b.came) == 2000, "all to arrive")
    for n in range(4):
        assert [e.target for e in b.came if e.target // 1000 == n] == [1000 * n + i for i in range(500)]


def test_a_process_that_does_not_read_gets_all_once_it_does(two: tuple[Process, Process]) -> None:
    a, b = two
    there = a.dial(b.me)
    may_read = threading.Event()
    there.post(call(0))
    wait_until(lambda: len(b.came) == 1, "the link to stand")
    b.links[0]._deliver = lambda _, envelope: (may_read.wait(PATIENCE_S), b.came.append(envelope))  # type: ignore[assignment]
    for number in range(1, 300):
        there.post(call(number, bytes(20_000)))
    assert there._outbox, "the socket took more than it can hold"
    may_read.set()
    wait_until(lambda: len(b.came) == 300, "all to arrive")
    assert [envelope.target for envelope in b.came] == list(range(300))


def test_a_goodbye_and_an_end_without_one_are_told_apart(two: tuple[Process, Process]) -> None:
    a, b = two
    for farewell, reason in (([Bye()], "it has stopped"), ([], "the connection was closed")):
        b.ends.clear()
        there = a.dial(b.me)
        for envelope in [call(1), *farewell]:
            there.post(envelope)
        wait_until(lambda: len(b.came) > 0, "the link to stand")
        there.lose("the end")
        wait_until(lambda: bool(b.ends), "the end to be told")
        assert b.ends[0] == reason
        b.came.clear()


def test_nobody_gets_in_without_the_secret(two: tuple[Process, Process]) -> None:
    a, _ = two
    with contextlib.closing(Process("stranger", b"x" * 32)) as stranger:
        stranger.dial(a.me)
        wait_until(lambda: bool(stranger.failures), "it to be turned away")
        assert stranger.failures[0][0] == auth.NOT_OUR_SECRET
        a.dial(stranger.me)
        wait_until(lambda: bool(a.failures), "it to be found out")
        assert a.failures[0][0] == auth.NOT_OUR_SECRET
    wait_until(lambda: not len(a.listener._strangers), "the stranger to be forgotten")
    assert not a.came


def test_who_proves_nothing_is_told_why(two: tuple[Process, Process]) -> None:
    a, _ = two
    nonce = auth.new_nonce()
    hello = (("skipper-version", VERSION), ("skipper-process-bin", b"\x0a\x01x"), ("skipper-nonce-bin", nonce))
    for metadata, messages, word in (
        (hello, [bytes(32)], b"unauthenticated:wrong proof"),
        (hello[:2], [], b"unauthenticated:no nonce"),
        ((("skipper-version", "2"), *hello[1:]), [], b"failed_precondition:"),
    ):
        with local_stream.new_socket() as stranger:
            stranger.settimeout(PATIENCE_S)
            stranger.connect(local_stream.socket_name(a.me.id))
            stranger.send(pack_metadata(metadata))
            for message in messages:
                assert "skipper-proof-bin" in unpack_metadata(stranger.recv(1 << 16))
                stranger.send(message)
            assert stranger.recv(1 << 16).startswith(b"\xff" + word)
            assert stranger.recv(1 << 16) == b""
    wait_until(lambda: not len(a.listener._strangers), "the strangers to be forgotten")


@pytest.mark.parametrize(
    "garbage",
    [b"\0", b"\xff" * 100, os.urandom(5000), struct.pack("<HH", 60000, 60000), bytes(MAX_METADATA_NBYTES + 4)],
    ids=["short", "ones", "random", "sizes", "large"],
)
def test_garbage_is_hung_up_on(two: tuple[Process, Process], garbage: bytes) -> None:
    a, b = two
    with local_stream.new_socket() as stranger:
        stranger.settimeout(PATIENCE_S)
        stranger.connect(local_stream.socket_name(a.me.id))
        stranger.send(garbage)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1 << 16):
                pass
    with pytest.raises(ProtocolError):
        unpack_metadata(garbage)
    b.dial(a.me).post(call(1))
    wait_until(lambda: len(a.came) == 1, "the others to be served")


def test_a_silent_stranger_is_turned_away_and_a_flood_keeps_nobody_out(
    two: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = two
    monkeypatch.setattr(strangers, "MAX_STRANGERS", 4)
    monkeypatch.setattr(strangers, "HANDSHAKE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(local_listener, "HANDSHAKE_TIMEOUT_S", 0.3)
    with contextlib.ExitStack() as stack:
        silent: list[Any] = []
        for _ in range(40):
            stranger = stack.enter_context(local_stream.new_socket())
            stranger.settimeout(PATIENCE_S)
            stranger.connect(local_stream.socket_name(a.me.id))
            silent.append(stranger)
        b.dial(a.me).post(call(1))
        wait_until(lambda: len(a.came) == 1, "a process of the job to get in")
        for stranger in silent:
            assert stranger.recv(1 << 16).startswith(b"\xffdeadline_exceeded:")


def test_another_users_process_is_not_let_in(two: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is not of this user is hung up on before a byte of it is read; and is not dialed."""
    a, b = two
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with local_stream.new_socket() as stranger:
        stranger.settimeout(PATIENCE_S)
        stranger.connect(local_stream.socket_name(a.me.id))
        assert stranger.recv(1 << 16) == b""
    with pytest.raises(PermissionError):
        b.dial(a.me)


def test_nobody_listens_there(two: tuple[Process, Process]) -> None:
    with pytest.raises(ConnectionRefusedError):
        two[0].dial(ProcessRef("nobody", "", "nobody"))


def test_a_name_is_listened_at_once_only(two: tuple[Process, Process]) -> None:
    a, _ = two
    with pytest.raises(WireError):
        LocalListener(a.me.id, SECRET, a.poller, a.loop, on_proven=lambda guest, peer: None)


def test_no_descriptor_is_left_behind() -> None:
    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(5):
        a, b = Process("a"), Process("b")
        a.dial(b.me).post(call(1))
        wait_until(lambda b=b: len(b.came) == 1, "the link to stand")
        a.close()
        b.close()
        del a, b
    wait_until(lambda: count() <= before + 2, "the descriptors to be closed")


def test_metadata_come_back_as_they_were() -> None:
    metadata = (("a-bin", b"\0\xff"), ("b", "text ä"), ("c-bin", b""))
    assert unpack_metadata(pack_metadata(metadata)) == dict(metadata)
    with pytest.raises(ProtocolError):
        unpack_metadata(pack_metadata((("a", b"\xff"),)))


def test_sockets_are_not_inherited(two: tuple[Process, Process]) -> None:
    def local() -> list[int]:
        fds = [int(name) for name in os.listdir("/proc/self/fd")]
        return [fd for fd in fds if os.path.exists(path := f"/proc/self/fd/{fd}") and "socket" in os.readlink(path)]

    before = set(local())
    two[0].dial(two[1].me).post(call(1))
    wait_until(lambda: len(two[1].came) == 1, "the link to stand")
    opened = set(local()) - before
    assert opened
    assert not any(os.get_inheritable(fd) for fd in opened)
