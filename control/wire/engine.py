"""Which of gRPC's two I/O engines this process uses: the one that has no thread between the socket and its reader.

gRPC's *event engine* reads sockets on threads of its own and hands what came to the thread that waits for it. The
older engine lets that thread read the socket itself, which takes a hand-over out of every message: a quarter of a
call's time on a small machine. For long Python had no other, and the library can still be told to use it.

Its fork handlers are turned off with it. They cannot do anything while a thread waits in gRPC, as one always does
here, and say so on standard error at every fork. A forked copy of a process is no part of the job in any case.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import version

_CHOICE = {
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}
_KNOWN_UNTIL = (1, 85)
"""The last release that was seen to know these names; one that does not complains about them on standard error."""


def choose() -> None:
    """Import gRPC with the engine of our choice.

    gRPC reads its environment while it is imported, and the variables are removed right after. If the user has set
    one of them, or has imported gRPC before, nothing is changed: that costs only speed.
    """
    if "grpc" in sys.modules or not _CHOICE.keys().isdisjoint(os.environ) or not _is_known():
        return
    os.environ.update(_CHOICE)
    try:
        importlib.import_module("grpc")
    finally:
        for name in _CHOICE:
            del os.environ[name]


def _is_known() -> bool:
    major, minor = version("grpcio").split(".")[:2]
    return (int(major), int(minor)) <= _KNOWN_UNTIL
