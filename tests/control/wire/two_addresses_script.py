"""Listens at an address again after a listener that could not have its other one."""

import os
from typing import Any

from skipper.control.wire import grpc_poller

grpc_poller.choose()  # before anything imports gRPC

from skipper.control.model.errors import WireError  # noqa: E402
from skipper.control.wire.grpc_listener import StreamListener  # noqa: E402
from skipper.control.wire.grpc_streams import OPTIONS  # noqa: E402


def listen(*addresses: str) -> StreamListener:
    options: Any = {"on_stream": None, "patience": lambda: None, "on_closed": lambda: None}
    return StreamListener([(address, None) for address in addresses], greeting_s=5.0, options=OPTIONS, **options)


address = f"unix-abstract:skipper-test-{os.getpid()}"
try:
    listen(address, "ipv4:203.0.113.9:70000")
except WireError:
    listen(address)
    print("listens")
