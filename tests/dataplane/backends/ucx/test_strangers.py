"""Strangers of the same host at the ports of an owner that UCX serves over TCP, while others read from it."""

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from skipper.dataplane import RDMABuffer
from skipper.dataplane.backends.ucx.peer import UcxPeer
from tests.conformance.owner import RemoteOwner
from tests.dataplane import stranger

ROOT = Path(__file__).parents[4]
NBYTES = 1 << 20
_LISTEN = "0A"  # TCP_LISTEN of net/tcp_states.h, as proc(5) has it

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def owner() -> Iterator[RemoteOwner]:
    started = RemoteOwner({"backend": "ucx", "ucx": {"TLS": "tcp,self"}}, shared=False)
    yield started
    started.close()


def listening(pid: int) -> list[int]:
    """The ports at which a process listens on TCP, as every user can find out."""
    own = {os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd") if entry.is_symlink()}
    with open(f"/proc/{pid}/net/tcp", encoding="ascii") as file:
        lines = [line.split() for line in list(file)[1:]]
    mine = [line for line in lines if f"socket:[{line[9]}]" in own and line[3] == _LISTEN]
    return [int(line[1].rpartition(":")[2], 16) for line in mine]


@contextlib.contextmanager
def attacked(buffer: RDMABuffer) -> Iterator[None]:
    """With a stranger trying; in the end it must have read nothing."""
    with subprocess.Popen(
        stranger.command(), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        stranger.begin(process, buffer)
        yield
        assert stranger.has_read(process) == 0


def reads_its_content(buffer: RDMABuffer) -> bool:
    into = np.zeros(NBYTES, np.uint8)
    buffer.read_into(into, timeout=stranger.PATIENCE_S).get()
    return bool((into == stranger.SECRET).all())


@needs_root
def test_a_stranger_reads_nothing_and_disturbs_nobody(owner: RemoteOwner) -> None:
    _, raw = owner("make_filled", NBYTES, stranger.SECRET)
    buffer = RDMABuffer.deserialize(raw)
    with attacked(buffer):
        for _ in range(20):
            assert reads_its_content(buffer)
    assert reads_its_content(buffer)


@needs_root
def test_a_stranger_reads_nothing_while_others_are_let_in(owner: RemoteOwner) -> None:
    """The port is open to the stranger's address meanwhile: it is that of the others."""
    _, raw = owner("make_filled", NBYTES, stranger.SECRET)
    buffer = RDMABuffer.deserialize(raw)
    peer, _, _ = buffer.route()
    assert isinstance(peer, UcxPeer)
    over, times_read = threading.Event(), 0
    with attacked(buffer):
        timer = threading.Timer(stranger.TRYING_S, over.set)
        timer.start()
        while not over.is_set():
            assert reads_its_content(buffer)
            times_read += 1
            peer.close()  # the next read connects anew
    assert times_read > 0
    assert reads_its_content(buffer)


def test_connections_that_are_refused_leave_nothing_open(owner: RemoteOwner) -> None:
    _, raw = owner("make_filled", NBYTES, stranger.SECRET)
    buffer = RDMABuffer.deserialize(raw)
    assert reads_its_content(buffer)
    before, _, _ = owner("footprint")
    ports = listening(owner.process.pid)
    assert len(ports) == 2
    for _ in range(250):
        for port in ports:
            with socket.socket() as connection:
                connection.setblocking(False)
                connection.connect_ex(("127.0.0.1", port))
                with contextlib.suppress(OSError):
                    connection.send(os.urandom(64))
    assert reads_its_content(buffer)
    after, _, _ = owner("footprint")
    assert after <= before + 2 * 16  # those of the conversation that have not been hung up on yet


def test_what_only_connects_does_not_listen(owner: RemoteOwner) -> None:
    """The reader's own server worker is the only one of its workers with a port, and that is closed."""
    before = set(listening(os.getpid()))  # other tests of this process may have left something
    _, raw = owner("make_filled", NBYTES, stranger.SECRET)
    assert reads_its_content(RDMABuffer.deserialize(raw))
    opened = set(listening(os.getpid())) - before
    for port in opened:
        with socket.socket() as connection:
            connection.settimeout(0.3)
            with contextlib.suppress(OSError):
                connection.connect(("127.0.0.1", port))
                connection.send(os.urandom(64))
                assert connection.recv(1) == b""  # whoever it is hangs up on what is no conversation
    assert len(opened) <= 2
