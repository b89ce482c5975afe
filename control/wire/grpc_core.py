"""gRPC's C core in Python: the only file that imports gRPC.

gRPC's public Python interfaces have threads between the socket and the receiver of a message: `grpc` one that consumes
requests and one that notifies, `grpc.aio` a poller and an event loop. Each costs a switch between threads, and these
switches are most of the time of a call. All of them are built on the module that is used here. It has a leading
underscore and promises nothing; so the names used of it are checked once, and only `streams` builds on it.
"""

from __future__ import annotations

from typing import Any

import grpc
from grpc._cython import cygrpc as core

from skipper.control.model.errors import WireError

__all__ = ["NO_COMPRESSION", "core", "missing_in", "server_certificates"]

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
