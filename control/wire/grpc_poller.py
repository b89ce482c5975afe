"""Which of gRPC's I/O engines this process uses: one that has no thread between the socket and its reader.

gRPC's *event engine* reads sockets on threads of its own and hands what came to the thread that waits for it. The
older engines let a waiting thread read by itself, which takes a hand-over out of every message; for long Python had no
other, and the library can still be told to use them. Of these, the one that is the default has one of the waiting
threads read for all. In a process with streams that it dialed and streams that came, that is nearly always the wrong
one, and there is the hand-over again. ``poll`` lets every thread wait for its own sockets: a call takes little more
than half as long. It looks at each of them at every turn, so a process with a thousand streams may want another: a
user's own `GRPC_POLL_STRATEGY` stands.

The fork handlers of gRPC are turned off with it. They cannot do anything while a thread waits in gRPC, as one always
does here, and say so on standard error at every fork. A forked copy of a process is no part of the job in any case.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

_CHOICE = {
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
    "GRPC_POLL_STRATEGY": "poll",
    "GRPC_ENABLE_FORK_SUPPORT": "0",
    "GRPC_VERBOSITY": "ERROR",
}
_KNOWN_UNTIL = (1, 85)
"""The last release that was seen to know these names; one that does not complains about them on standard error."""


def choose() -> None:
    """Import gRPC with the engine of our choice.

    gRPC reads its environment while it is imported, and the variables are removed right after. What the user has set
    stands, and nothing is changed if the user has imported gRPC before: that costs only speed.
    """
    if "grpc" in sys.modules or not _is_known():
        return
    ours = {name: value for name, value in _CHOICE.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        importlib.import_module("grpc")
    finally:
        for name in ours:
            del os.environ[name]


def _is_known() -> bool:
    major, minor = _version().split(".")[:2]
    return (int(major), int(minor)) <= _KNOWN_UNTIL


def _version() -> str:
    """That of gRPC, which is not imported yet."""
    spec = find_spec("grpc")
    if spec is not None and spec.origin is not None:
        file = Path(spec.origin).with_name("_grpcio_metadata.py")
        if file.exists() and (said := re.search(r"\d+\.\d+[.\w]*", file.read_text())) is not None:
            return said[0]
    from importlib.metadata import version  # which takes as long to import as a quarter of this package

    return version("grpcio")
