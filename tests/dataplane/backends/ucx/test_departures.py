"""Faults of UCX: readers that are killed while they connect, and datagrams of strangers without a byte."""

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from skipper.dataplane import RDMABuffer
from skipper.dataplane.backends.ucx import engine
from tests.conformance.owner import Memory, RemoteOwner, main

NBYTES = 4096
PATIENCE_S = 60.0
TIMES = 3
WAYS = {
    "cma": {"backend": "ucx"},
    "posix": {"backend": "ucx", "ucx": {"TLS": "posix,self", "POSIX_ERROR_HANDLING": "y"}},
}


class Reader(Memory):
    """Whose operations do not have to come to an end."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__(shared=shared)
        self._begun: list[object] = []

    def begin(self, handle: bytes) -> None:
        """Connect, and ask for what only the owner can do; returns when that has been sent."""
        buffer = RDMABuffer.deserialize(handle)
        self._begun.append((buffer, buffer.fetch_add(1, timeout=PATIENCE_S)))


@pytest.fixture(params=["cma", "posix"])
def owner(request: pytest.FixtureRequest) -> Iterator[RemoteOwner]:
    started = RemoteOwner(WAYS[request.param], shared=False)
    yield started
    started.close()


def test_an_owner_outlives_readers_that_are_killed_while_they_connect(owner: RemoteOwner) -> None:
    name, handle = owner("make_filled", NBYTES, 7)
    for _ in range(TIMES):
        reader = RemoteOwner({}, shared=False, module="tests.dataplane.backends.ucx.test_departures")
        owner.freeze()
        reader("begin", handle)
        reader.close()
        owner.thaw()
        assert owner("content", name) == bytes([7]) * NBYTES
    other = RemoteOwner({}, shared=False)
    assert other("read", handle, NBYTES, 1) == bytes([7]) * NBYTES
    assert other("add", handle, 0, 0, 1) == [int.from_bytes(bytes([7]) * 8, "little")]
    other.close()


def test_the_guard_is_in_place_where_the_library_needs_it() -> None:
    binding = engine.load(engine.find_library(None))
    needed = binding.library_version()[:2] == (1, 22)
    assert binding.guard() is (True if needed else None)
    assert binding.guard() is (True if needed else None)
    assert binding.guard_bells()
    assert binding.guard_bells()


@contextlib.contextmanager
def ringing() -> Iterator[None]:
    """Send datagrams without a byte to all sockets that have names as UCX's, as any user of the host can; no pause."""
    over = threading.Event()

    def ring() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as stranger:
            while not over.is_set():
                for name in re.findall(r" @([0-9a-f]{5})$", Path("/proc/net/unix").read_text(), re.MULTILINE):
                    with contextlib.suppress(OSError):
                        stranger.sendto(b"", f"\0{name}")

    thread = threading.Thread(target=ring)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("way", WAYS)
def test_strangers_who_ring_without_a_byte_end_nobody_and_delay_nobody_for_ever(way: str) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(ringing())
        for _ in range(TIMES):  # also while workers are being made
            owner, reader = (RemoteOwner(WAYS[way], shared=False) for _ in range(2))
            stack.callback(owner.close)
            stack.callback(reader.close)
            name, handle = owner("make_filled", NBYTES, 7)
            assert reader("read", handle, NBYTES, 20) == bytes([7]) * NBYTES
            assert owner("content", name) == bytes([7]) * NBYTES


if __name__ == "__main__":
    main(Reader)
