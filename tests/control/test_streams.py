"""Streams on gRPC's core at their ends. What gRPC does not take aborts the process: hence scripts."""

from collections.abc import Callable

import pytest

from tests.control.conftest import Script

LISTENS_NO_MORE = """
import os
import threading

from control.wire import engine

engine.choose()
from control.wire.listener import Listener
from control.wire.streams import OutgoingStream


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
listener = Listener([(address, None)], idle_s=5.0, on_stream=on_stream, patience=lambda: None, on_closed=closed.set)
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
