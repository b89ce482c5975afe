"""Sessions between a client and an `ActorServer`: proofs of both sides, and protection against replays.

`proto/actor_service.proto` says what the proofs cover. An unproven client costs the server no memory: everything about
an unused session is in the session's own bytes, protected by a key that only the server has.
"""

from __future__ import annotations

import hmac
import secrets
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from skipper.control.wire import auth

VERSION = 1
MIN_SECRET_NBYTES = 16
_TICKET = struct.Struct("<16sQ")
_NUMBER = struct.Struct("<Q")
_LENGTH = struct.Struct("<Q")
_DOMAIN = b"skipper actors"
SESSION_NBYTES = auth.NONCE_NBYTES + _TICKET.size + auth.PROOF_NBYTES
_REQUEST_PROOF_NBYTES = SESSION_NBYTES + _NUMBER.size + auth.PROOF_NBYTES
_FIELD = 0x7A
"""Key of the field ``proof`` on the wire: number 15, of bytes."""

_REQUEST_TAIL = bytes((_FIELD, _REQUEST_PROOF_NBYTES & 0x7F | 0x80, _REQUEST_PROOF_NBYTES >> 7))
_ANSWER_TAIL = bytes((_FIELD, auth.PROOF_NBYTES))

WINDOW = 4096
"""By how many numbers requests of one session may overtake each other."""

USE_WITHIN_S = 60.0
"""A new session must be used first within this time; afterwards it does not expire."""

MAX_SESSIONS = 16_384


class Refused(Exception):  # noqa: N818  (it is an answer)
    """A request that is refused without a further look; the message says why."""


class BadAnswerError(Exception):
    """An answer that is not from a server that knows the secret."""


def check_secret(secret: bytes) -> bytes:
    """The given secret, if it is valid.

    Raises:
        TypeError: it is not ``bytes``.
        ValueError: it is shorter than 16 bytes.
    """
    if not isinstance(secret, bytes):
        raise TypeError(f"a secret is bytes, not {type(secret).__name__}")
    if len(secret) < MIN_SECRET_NBYTES:
        raise ValueError(f"a secret has {MIN_SECRET_NBYTES} bytes or more, this one has {len(secret)}")
    return secret


class ClientSession:
    """The client's end: proves requests and verifies answers; for any number of threads.

    Args:
        secret: the secret that both sides know.
        nonce: the nonce that the client has sent.
        session: the session in the server's answer.
        proof: the server's proof.

    Raises:
        BadAnswerError: the server does not know the secret.
    """

    def __init__(self, secret: bytes, nonce: bytes, session: bytes, proof: bytes) -> None:
        if len(session) != SESSION_NBYTES or not auth.verify(_mac(secret, b"server", nonce, session), proof):
            raise BadAnswerError("the server does not know the secret of this client")
        self._session = session
        self._key = hmac.new(_mac(secret, b"key", nonce, session), digestmod="sha256")
        self._lock = threading.Lock()
        self._number = 0

    def prove(self, rpc: bytes, body: bytes) -> tuple[int, bytes]:
        """A request's number and its bytes with their proof."""
        with self._lock:
            self._number += 1
            number = self._number
        encoded = _NUMBER.pack(number)
        proof = _seal(self._key, b"request", rpc, encoded, body)
        return number, b"".join((body, _REQUEST_TAIL, self._session, encoded, proof))

    def open(self, rpc: bytes, number: int, answer: bytes) -> bytes:
        """An answer without its proof.

        Raises:
            BadAnswerError: it is not the server's answer to this request.
        """
        body, proof = _split(answer, _ANSWER_TAIL, auth.PROOF_NBYTES)
        if proof is None or not auth.verify(_seal(self._key, b"answer", rpc, _NUMBER.pack(number), body), proof):
            raise BadAnswerError("an answer came without the server's proof, and was not read")
        return body


class AnswerSealer:
    """The server's side of one proven request: it adds the proof to the answer."""

    __slots__ = ("_key", "_number", "_rpc")

    def __init__(self, key: hmac.HMAC, rpc: bytes, number: bytes) -> None:
        self._key, self._rpc, self._number = key, rpc, number

    def close(self, body: bytes) -> bytes:
        """An answer with its proof."""
        return b"".join((body, _ANSWER_TAIL, _seal(self._key, b"answer", self._rpc, self._number, body)))


class ServerSessions:
    """The server's end of all sessions; for any number of threads.

    Args:
        secret: the secret that both sides know.
        clock: returns monotonic seconds.
    """

    def __init__(self, secret: bytes, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._secret = secret
        self._clock = clock
        self._own_key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._used: OrderedDict[bytes, _Used] = OrderedDict()

    def offer(self, nonce: bytes) -> tuple[bytes, bytes]:
        """A session for the client that sent ``nonce``, and the server's proof.

        Raises:
            Refused: it is not a nonce.
        """
        if len(nonce) != auth.NONCE_NBYTES:
            raise Refused(f"a nonce has {auth.NONCE_NBYTES} bytes")
        ticket = nonce + _TICKET.pack(secrets.token_bytes(16), int(1000 * self._clock()))
        session = ticket + _mac(self._own_key, b"ticket", ticket)
        return session, _mac(self._secret, b"server", nonce, session)

    def accept(self, rpc: bytes, request: bytes) -> tuple[bytes, AnswerSealer | None]:
        """A request without its proof, and the object that seals the answer; None if it came without a proof.

        Raises:
            Refused: there is a proof, but it is wrong, or its session has ended, or it is a replay.
        """
        body, proof = _split(request, _REQUEST_TAIL, _REQUEST_PROOF_NBYTES)
        if proof is None:
            return body, None
        session, encoded = proof[:SESSION_NBYTES], proof[SESSION_NBYTES : SESSION_NBYTES + _NUMBER.size]
        used = self._used.get(session) or self._unused(session)
        if not auth.verify(_seal(used.key, b"request", rpc, encoded, body), proof[-auth.PROOF_NBYTES :]):
            raise Refused("wrong proof")
        (number,) = _NUMBER.unpack(encoded)
        with self._lock:
            if session not in self._used:
                self._admit(session, used)
            if not self._used[session].window.take(number):
                raise Refused("this request was already received, or is too old")
            self._used.move_to_end(session)
        return body, AnswerSealer(used.key, rpc, encoded)

    def _unused(self, session: bytes) -> _Used:
        ticket = session[: -auth.PROOF_NBYTES]
        if not auth.verify(_mac(self._own_key, b"ticket", ticket), session[-auth.PROOF_NBYTES :]):
            raise Refused("this server does not know this session")
        _, begun_ms = _TICKET.unpack(ticket[auth.NONCE_NBYTES :])
        begun = begun_ms / 1000
        if self._clock() - begun > USE_WITHIN_S:
            raise Refused("this session has ended")
        key = _mac(self._secret, b"key", session[: auth.NONCE_NBYTES], session)
        return _Used(hmac.new(key, digestmod="sha256"), begun)

    def _admit(self, session: bytes, used: _Used) -> None:
        """Remember a session. A forgotten one must be too old to pass as a new one: see `_unused`."""
        if len(self._used) >= MAX_SESSIONS:
            oldest, of_oldest = next(iter(self._used.items()))
            if self._clock() - of_oldest.begun <= USE_WITHIN_S:
                raise Refused("too many sessions have been opened here within a minute")
            del self._used[oldest]
        self._used[session] = used


class _Used:
    """A session that was used, and so by a client that knows the secret."""

    __slots__ = ("begun", "key", "window")

    def __init__(self, key: hmac.HMAC, begun: float) -> None:
        self.key = key
        self.begun = begun
        self.window = ReplayWindow()


class ReplayWindow:
    """The numbers that have come: the highest, and a bit for each of those before it."""

    __slots__ = ("_highest", "_seen")

    def __init__(self) -> None:
        self._highest = 0
        self._seen = 1  # number 0 is never used

    def take(self, number: int) -> bool:
        """Note a number; False if it has come before, or is too old to know."""
        ahead = number - self._highest
        if ahead > 0:
            self._seen = (self._seen << min(ahead, WINDOW) | 1) & ((1 << WINDOW) - 1)
            self._highest = number
            return True
        bit = 1 << -ahead
        if -ahead >= WINDOW or self._seen & bit:
            return False
        self._seen |= bit
        return True


def _split(message: bytes, tail: bytes, nbytes: int) -> tuple[bytes, bytes | None]:
    begin = len(message) - nbytes - len(tail)
    if begin < 0 or message[begin : begin + len(tail)] != tail:
        return message, None
    return message[:begin], message[begin + len(tail) :]


def _mac(secret: bytes, *parts: bytes) -> bytes:
    return _seal(hmac.new(secret, digestmod="sha256"), _DOMAIN, *parts)


def _seal(key: hmac.HMAC, *parts: bytes) -> bytes:
    mac = key.copy()
    *small, last = parts
    for part in small:
        mac.update(_LENGTH.pack(len(part)) + part)
    mac.update(_LENGTH.pack(len(last)))  # separate from the part itself, which may be large
    mac.update(last)
    return mac.digest()
