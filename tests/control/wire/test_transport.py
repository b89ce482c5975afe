"""The transport of a process, beside another one in this process."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from skipper.control.runtime import current_runtime as runtime
from skipper.control.wire import local_listener, transport
from skipper.control.wire._poller import Poller
from skipper.control.wire.local_stream import IncomingLocalStream
from skipper.control.wire.messages import Ping
from skipper.control.wire.strangers import Strangers
from tests.control.conftest import PATIENCE_S, wait_until
from tests.control.wire.transports import transport_of

Listen = Callable[[], transport.Transport]


@pytest.fixture
def listen() -> Iterator[Listen]:
    """Starts transports that share a poller with each other and not with this process."""
    runtime.current()
    loop = runtime._shared_loop()
    poller = Poller("test-transports")
    made: list[transport.Transport] = []

    def start() -> transport.Transport:
        one = transport_of(runtime.new_process_ref(f"process {len(made)}"), poller)
        made.append(one)
        loop.run(one.start(), timeout=PATIENCE_S)
        return one

    yield start
    for one in made:
        loop.run(one.close(), timeout=PATIENCE_S)
    poller.close()


def test_a_dial_that_was_pushed_out_goes_the_same_way_again(listen: Listen, monkeypatch: pytest.MonkeyPatch) -> None:
    turned_away: list[object] = []

    class Crowded(Strangers):
        """Turns the first stranger away, as where too many have come."""

        def add(self, stream: IncomingLocalStream) -> None:  # type: ignore[override]
            super().add(stream)
            if not turned_away:
                turned_away.append(stream)
                self._turn_away(stream)

    monkeypatch.setattr(local_listener, "Strangers", Crowded)
    dialing, dialed = listen(), listen()
    link = dialing.link(dialed.me)
    wait_until(lambda: link.connected, "the second dial succeeds")
    assert len(turned_away) == 1
    network: Any = dialed._network
    door = network._door
    assert door is not None
    assert door._thread is None  # nobody has come by gRPC


def test_what_is_cut_says_no_goodbye_and_leaves_no_descriptor(listen: Listen) -> None:
    dialing = listen()
    before = len(os.listdir("/proc/self/fd"))
    dialed = listen()
    link = dialing.link(dialed.me)
    wait_until(lambda: link.connected, "the link stands")
    runtime._shared_loop().run(dialed.cut(), timeout=PATIENCE_S)
    wait_until(lambda: link.lost is not None, "the end is seen")
    assert link.lost == "the connection was closed"
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, "all descriptors are closed")


def test_what_stands_still_is_connected_and_silent(listen: Listen) -> None:
    dialing, dialed = listen(), listen()
    link = dialing.link(dialed.me)
    wait_until(lambda: link.peer_namespace != 0, "the other end has shown a sign of life")
    assert link.peer_pid == 0  # it shares its place in the table of processes
    (back,) = [other for other in dialed._links.values() if other.connected]
    runtime._shared_loop().loop.call_soon_threadsafe(dialed.stand_still)
    wait_until(lambda: "post" in vars(back), "it stands still")
    heard, said = link.heard_messages, back.heard_messages
    back.post(Ping(1, 1))
    link.post(Ping(2, 2))
    third = listen()
    waiting = third.link(dialed.me)
    wait_until(lambda: waiting.dialing, "somebody else dials it")
    assert (link.heard_messages, back.heard_messages) == (heard, said)
    assert link.connected
    assert not waiting.connected
