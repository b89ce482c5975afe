"""gRPC's C core in Python: the only file that imports gRPC.

gRPC's public Python interfaces have threads between the socket and the receiver of a message: `grpc` one that consumes
requests and one that notifies, `grpc.aio` a poller and an event loop. Each costs a switch between threads, and these
switches are most of the time of a call. All of them are built on the module that is used here. It has a leading
underscore and promises nothing; so the names used of it are checked once, and only `streams` builds on it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from grpc._cython import cygrpc as core

from skipper.control.model.errors import WireError

__all__ = ["NO_COMPRESSION", "WakePeriod", "core", "missing_in", "server_certificates", "wake_period"]

NO_COMPRESSION = (("grpc.per_message_decompression", 0), ("grpc.per_message_compression", 0))
"""For every channel and server: incoming messages are not decompressed.

gRPC limits the size of a message before decompression, and not after: two megabytes from an unknown peer became one
gigabyte here. A message that is compressed anyway then fails its proof, or does not parse.
"""

_TESTED = "from 1.66 to 1.85"
_NEEDED = {
    "Channel": ("segregated_call", "close"),
    "SegregatedCall": ("operate", "next_event", "cancel"),
    "Server": (
        "add_http2_port",
        "register_completion_queue",
        "start",
        "request_call",
        "shutdown",
        "cancel_all_calls",
        "destroy",
    ),
    "CompletionQueue": ("poll", "shutdown"),
    "Call": ("start_server_batch", "cancel", "peer"),
    "CompletionType": ("queue_shutdown", "queue_timeout"),
    "InitialMetadataFlags": ("wait_for_ready", "wait_for_ready_explicitly_set"),
    "SSLChannelCredentials": (),
    "server_credentials_ssl": (),
    "server_credentials_ssl_dynamic_cert_config": (),
    "auth_context": (),
    "PropagationConstants": ("GRPC_PROPAGATE_DEFAULTS",),
    "StatusCode": (
        "ok",
        "cancelled",
        "unauthenticated",
        "permission_denied",
        "invalid_argument",
        "failed_precondition",
        "already_exists",
        "internal",
        "not_found",
        "resource_exhausted",
        "unavailable",
        "unimplemented",
        "deadline_exceeded",
    ),
    "SendInitialMetadataOperation": (),
    "SendMessageOperation": (),
    "SendStatusFromServerOperation": (),
    "ReceiveInitialMetadataOperation": (),
    "ReceiveMessageOperation": ("message",),
    "ReceiveStatusOnClientOperation": ("code", "details"),
    "ReceiveCloseOnServerOperation": (),
}


def server_certificates(authority: bytes, certificate: bytes, key: bytes) -> Any:
    """The certificates that a server shows and accepts from now on."""
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)


class WakePeriod:
    """How often threads that wait in gRPC wake up to look for signals of the operating system.

    gRPC wakes each of them five times a second: a script with a thousand hosts had a tenth of a core to do with that.
    Only the main thread can take signals, and streams have other threads. So the more streams wait, the more seldom
    they wake. gRPC keeps the period in a variable of its C interface, and changes it itself for gevent.

    Args:
        module: gRPC's core. Nothing is changed if it has no such variable.
    """

    def __init__(self, module: Any) -> None:
        self._lock = threading.Lock()
        self._streams = 0
        capsule = getattr(module, "__pyx_capi__", {}).get("g_interrupt_check_period_ms")
        self._period_ms: ctypes.c_int | None = None
        if capsule is not None:
            pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
            pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
            self._period_ms = ctypes.c_int.from_address(pointer_of(capsule, b"int"))

    @property
    def period_ms(self) -> int | None:
        """The present period; None if it is not known."""
        return None if self._period_ms is None else self._period_ms.value

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A thread waits for the events of a stream until the end of the block."""
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    def _add(self, streams: int) -> None:
        with self._lock:
            self._streams += streams
            if self._period_ms is not None:
                wanted_ms = _PERIOD_MS * self._streams // _FEW
                self._period_ms.value = min(max(wanted_ms, _PERIOD_MS), _LONGEST_PERIOD_MS)


_PERIOD_MS = 200
_FEW = 16
_LONGEST_PERIOD_MS = 5000
"""A script that calls gRPC itself, from its main thread, takes Ctrl-C after at most this time."""

wake_period = WakePeriod(core)
"""That of this process."""


def missing_in(module: Any) -> list[str]:
    """The names of gRPC's core that are used here and that a module lacks."""
    missing: list[str] = []
    for name, attributes in _NEEDED.items():
        thing = getattr(module, name, None)
        if thing is None:
            missing.append(name)
        else:
            missing += [f"{name}.{attribute}" for attribute in attributes if not hasattr(thing, attribute)]
    return missing


def _check() -> None:
    if missing := missing_in(core):
        raise WireError(
            f"grpcio {grpc.__version__} lacks {', '.join(missing)}, which control needs: install a release {_TESTED}"
        )


_check()
