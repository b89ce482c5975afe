"""Which of gRPC's I/O engines this process uses: one without a thread between the socket and its reader.

gRPC's *event engine* reads sockets on threads of its own and passes the data to the thread that waits for it. The older
engines let a waiting thread read by itself, which saves one thread switch per message; for a long time Python had no
others, and the library can still be told to use them. The default one of these makes one of the waiting threads read
for all. In a process with dialed and incoming streams, that is nearly always the wrong thread, so the switch is back.
``poll`` lets every thread wait for its own sockets: a call takes little more than half as long. It checks every socket
each time, so a process with a thousand streams may need another engine: a `GRPC_POLL_STRATEGY` of the user is kept.

gRPC's fork handlers are turned off, too. They cannot do anything while a thread waits in gRPC, which is always so here,
and they say so on standard error at every fork. A forked copy of a process does not belong to the job in any case.
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
"""The last release that is known to support these names; a release without them complains on standard error."""


def choose() -> None:
    """Import gRPC with the chosen engine.

    gRPC reads its environment while it is imported, and the variables are removed right after. The user's own values
    are kept, and nothing is changed if the user has imported gRPC before: that costs only speed.
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
    """The version of gRPC, which is not imported yet."""
    spec = find_spec("grpc")
    if spec is not None and spec.origin is not None:
        file = Path(spec.origin).with_name("_grpcio_metadata.py")
        if file.exists() and (said := re.search(r"\d+\.\d+[.\w]*", file.read_text())) is not None:
            return said[0]
    from importlib.metadata import version  # its import takes a quarter of the time of this package's

    return version("grpcio")
