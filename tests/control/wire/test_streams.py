"""Streams on gRPC's core at their ends. What gRPC does not take aborts the process: hence scripts."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.control.conftest import REPOSITORY, Script

LISTENS_NO_MORE = """
import os
import threading

from skipper.control.wire import grpc_poller

grpc_poller.choose()
from skipper.control.wire.listener import StreamListener
from skipper.control.wire.streams import OPTIONS, OutgoingStream


class Quiet:
    def opened(self, metadata):
        pass

    def received(self, message):
        return True

    def sent(self):
        pass

    def ended(self, status):
        pass


came, closed, streams = threading.Event(), threading.Event(), []


def on_stream(stream):
    stream.user = Quiet()
    stream.answer(())
    streams.append(stream)
    came.set()


address = f"unix-abstract:skipper-test-{os.getpid()}"
options = {"greeting_s": 5.0, "options": OPTIONS, "patience": lambda: None}
listener = StreamListener([(address, None)], on_stream=on_stream, on_closed=closed.set, **options)
dialed = OutgoingStream(address, (), Quiet())
threading.Thread(target=dialed.run, daemon=True).start()
assert came.wait(20)
listener.close()
listener.cut()
assert closed.wait(20)
[stream] = streams
LATE
print("alive")
"""


@pytest.mark.parametrize("late", ["stream.send(b'late')", "stream.receive()", "stream.end()"])
def test_what_is_done_with_a_stream_after_the_end_of_its_listener_is_void(
    script: Callable[[str], Script], late: str
) -> None:
    code, out, err = script(LISTENS_NO_MORE.replace("LATE", late)).finish()
    assert (code, out) == (0, "alive\n"), err


def test_no_order_in_which_streams_and_listeners_end_aborts_the_process() -> None:
    command = [sys.executable, "-m", "tests.control.endings", "--times", "150", "--processes", "4"]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, (ended.stdout, ended.stderr)


TWO_ADDRESSES = """
import os

from skipper.control.wire import grpc_poller

grpc_poller.choose()
from skipper.control.model.errors import WireError
from skipper.control.wire.listener import StreamListener
from skipper.control.wire.streams import OPTIONS


def listen(*addresses):
    pairs = [(address, None) for address in addresses]
    options = {"on_stream": None, "patience": lambda: None, "on_closed": lambda: None}
    return StreamListener(pairs, greeting_s=5.0, options=OPTIONS, **options)


address = f"unix-abstract:skipper-test-{os.getpid()}"
try:
    listen(address, "ipv4:203.0.113.9:70000")
except WireError:
    listen(address)
    print("listens")
"""


def test_a_listener_that_cannot_have_an_address_lets_go_of_the_others(
    script: Callable[[str], Script],
) -> None:
    code, out, err = script(TWO_ADDRESSES).finish()
    assert (code, out) == (0, "listens\n"), err
