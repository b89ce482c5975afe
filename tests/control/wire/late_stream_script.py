"""Uses a stream whose listener has ended: ``late_stream_script.py send|receive|end``."""

import os
import sys
import threading
from typing import Any

from skipper.control.wire import grpc_poller

grpc_poller.choose()  # before anything imports gRPC

from skipper.control.wire.grpc_listener import StreamListener  # noqa: E402
from skipper.control.wire.grpc_streams import OPTIONS, OutgoingStream  # noqa: E402


class Quiet:
    def opened(self, metadata: Any) -> None:
        pass

    def received(self, message: Any) -> bool:
        return True

    def sent(self) -> None:
        pass

    def ended(self, status: Any) -> None:
        pass


came, closed = threading.Event(), threading.Event()
streams: list[Any] = []


def on_stream(stream: Any) -> None:
    stream.user = Quiet()
    stream.answer(())
    streams.append(stream)
    came.set()


address = f"unix-abstract:skipper-test-{os.getpid()}"
options: Any = {"greeting_s": 5.0, "options": OPTIONS, "patience": lambda: None}
listener = StreamListener([(address, None)], on_stream=on_stream, on_closed=closed.set, **options)
dialed = OutgoingStream(address, (), Quiet())
threading.Thread(target=dialed.run, daemon=True).start()
assert came.wait(20)
listener.close()
listener.cut()
assert closed.wait(20)
[stream] = streams
match sys.argv[1]:
    case "send":
        stream.send(b"late")
    case "receive":
        stream.receive()
    case "end":
        stream.end()
print("alive")
