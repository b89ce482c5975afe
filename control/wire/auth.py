"""Mutual proof that both ends of a stream know the job's secret.

Each end picks a nonce. The server proves itself in its initial metadata, the client in its first message, each with an
HMAC-SHA256 over its role, both versions and nonces, what the client says of itself, and which process it has dialed.
Nonces are fresh, so nothing can be replayed, and the roles differ, so nothing can be reflected.
"""

from __future__ import annotations

import hmac
import secrets

NOT_OUR_SECRET = "the other end does not know the job's secret"
"""Part of the reason for a lost link whose other end could not prove itself."""

NOT_ADMITTED = "the certificates do not match"
"""Start of the reason for a lost link, if one end does not accept the other end's certificate."""

NONCE_NBYTES = 32
PROOF_NBYTES = 32
SECRET_NBYTES = 32


def new_secret() -> bytes:
    """A job's secret."""
    return secrets.token_bytes(SECRET_NBYTES)


def new_nonce() -> bytes:
    """A nonce for one stream."""
    return secrets.token_bytes(NONCE_NBYTES)


def client_proof(secret: bytes, *transcript: bytes) -> bytes:
    """The client's proof over the transcript; 32 bytes.

    Args:
        secret: the job's secret.
        transcript: version and nonce of the client, version and nonce of the server, client, id of the server.
    """
    return _mac(secret, b"client", transcript)


def server_proof(secret: bytes, *transcript: bytes) -> bytes:
    """The server's proof over the same transcript; 32 bytes."""
    return _mac(secret, b"server", transcript)


def verify(expected: bytes, given: object) -> bool:
    """Whether ``given`` is the expected proof; the time does not depend on where they differ."""
    return isinstance(given, bytes) and len(given) == PROOF_NBYTES and hmac.compare_digest(expected, given)


def _mac(secret: bytes, role: bytes, transcript: tuple[bytes, ...]) -> bytes:
    mac = hmac.new(secret, digestmod="sha256")
    for part in (b"skipper link", role, *transcript):
        mac.update(len(part).to_bytes(8, "little"))  # the lengths separate neighbouring parts
        mac.update(part)
    return mac.digest()
