"""The handshakes before a connection over UCX's TCP or verbs, as targets call them: strangers on either side.

What comes from who knows the secrets is tried, too: a first byte of an input says whether its proofs are good.
"""

import contextlib
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache

from skipper.dataplane.backends.handshake import (
    DIGEST_BYTES,
    PROOFS_BYTES,
    bind,
    proof_keys,
    prove,
    prove_by_each,
    target,
)
from skipper.dataplane.backends.ucx import admission as ucx_admission
from skipper.dataplane.backends.ucx.admission import FOUND, PLACES, Admission, AdmissionServer, Contact, pack_places
from skipper.dataplane.backends.verbs import handshake
from skipper.dataplane.backends.verbs.device import ENDPOINT
from skipper.dataplane.backends.verbs.handshake import NOBODY, Endpoints, by_rail, dial
from skipper.dataplane.errors import TransferError, TransferTimeoutError
from skipper.trust import socket_filter
from skipper.trust.own_sockets import SocketPlace, as_ipv6
from tests.fuzz.mutation import join_parts, numbers_of, split_parts
from tests.fuzz.verdicts import Broken

TOKEN = b"0123456789abcdef"
KEYS = (b"of the job" + bytes(22), b"of the user" + bytes(21))
_SECONDS = 20.0
_RAILS = (0, 1)


def _deadline() -> float:
    return time.monotonic() + _SECONDS


def _heard(connection: socket.socket) -> int:
    """How many bytes come until the other end hangs up."""
    count = 0
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(4096):
            count += len(part)
    return count


# The handshake before queue pairs


class _Pairs:
    """Stands for queue pairs: they are a device's."""

    def __init__(self) -> None:
        self.endpoints = {rail: ENDPOINT.pack(6, 7, b"t" * 16, 8, 9, 10, 0) for rail in _RAILS}
        self.connected: list[Endpoints] = []

    def __call__(self, rails: tuple[int, ...], key: bytes) -> "_Pairs":
        return self

    def connect(self, theirs: Endpoints) -> None:
        self.connected.append(dict(theirs))

    def close(self) -> None:
        pass


@cache
def _verbs_owner() -> tuple[str, _Pairs]:
    pairs = _Pairs()
    listener, address = bind(None, f"skipper-fuzz-{os.getpid()}")
    handshake.QueuePairServer(listener, address, TOKEN, lambda: KEYS, _RAILS, pairs)
    return address, pairs


def meet_owner(data: bytes) -> None:
    """What a stranger says to an owner that has verbs; the next input is heard by the same thread."""
    address, pairs = _verbs_owner()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(_SECONDS)
        stranger.connect(target(address))
        with contextlib.suppress(ConnectionError):  # it hangs up, as it should
            for part in split_parts(data):
                stranger.sendall(part)
            stranger.shutdown(socket.SHUT_WR)
        _heard(stranger)
    if pairs.connected:
        raise Broken("a stranger got queue pairs")


def meet_owner_seeds() -> Iterator[bytes]:
    """An initiator's two messages; it has no proof."""
    hello = handshake.HELLO.pack(handshake.MAGIC, 3, bytes(16))
    yield join_parts(hello, bytes(2 * ENDPOINT.size + len(NOBODY) + PROOFS_BYTES))
    yield join_parts(handshake.HELLO.pack(handshake.MAGIC, 0, bytes(16)))


def meet_initiator(data: bytes) -> None:
    """What somebody answers who listens where an owner did."""
    knows, rest = data[:1] == b"\1", data[1:]
    hello, endpoints, *_ = *split_parts(rest), b"", b""
    name = f"skipper-fuzz-initiator-{os.getpid()}"

    def answer(connection: socket.socket) -> None:
        said = connection.recv(handshake.HELLO.size, socket.MSG_WAITALL) + hello
        connection.sendall(hello)
        if knows and len(hello) == handshake.HELLO.size:
            _, bits, _ = handshake.HELLO.unpack(hello)
            rails = sum(bits >> rail & 1 for rail in _RAILS)
            said += connection.recv(rails * ENDPOINT.size + len(NOBODY), socket.MSG_WAITALL)
            connection.recv(PROOFS_BYTES, socket.MSG_WAITALL)
        (key, *_) = proof_keys(KEYS if knows else (bytes(32),), TOKEN, f"unix:{name}")
        connection.sendall(endpoints + prove(key, b"owner", said, endpoints))

    with _answering(name, answer):
        mine = {rail: ENDPOINT.pack(1, 2, b"m" * 16, 3, 4, 5, 0) for rail in _RAILS}
        made = dial(f"unix:{name}", TOKEN, KEYS, mine, _deadline())
        made.socket.close()
        if not knows:
            raise Broken("an owner that does not know the secret was believed")
        if any(len(endpoint) != ENDPOINT.size for endpoint in made.endpoints.values()):
            raise Broken(f"endpoints of the wrong size: {made.endpoints}")


@contextlib.contextmanager
def _answering(name: str, answer: Callable[[socket.socket], None]) -> Iterator[None]:
    """While somebody listens at a unix socket, says what it has to say, and hangs up."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen(1)

        def meet() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):  # it is hung up on, as may be
                connection.settimeout(_SECONDS)
                answer(connection)
                connection.shutdown(socket.SHUT_WR)
                _heard(connection)

        thread = threading.Thread(target=meet)
        thread.start()
        try:
            yield
        except TransferTimeoutError as error:
            raise Broken("it waited for the deadline, though the other end had hung up") from error
        finally:
            thread.join()


def meet_initiator_seeds() -> Iterator[bytes]:
    """An owner's words, of one that knows the secret and of one that does not."""
    endpoints = ENDPOINT.pack(6, 7, b"t" * 16, 8, 9, 10, 0) * 2
    hello = handshake.HELLO
    for knows in (b"\0", b"\1"):
        yield knows + join_parts(hello.pack(handshake.MAGIC, 3, bytes(16)), endpoints)
        yield knows + join_parts(hello.pack(handshake.MAGIC, 1, bytes(16)), endpoints[: ENDPOINT.size])


def read_endpoints(data: bytes) -> None:
    """Endpoints of a peer, cut up by rail."""
    (count,), rest = numbers_of(data, 65)
    by_rail(rest, range(count))
    handshake.bits_of(range(count))


# The same with somebody in between

_CHANGE = struct.Struct("<BHB")  # whose words (odd: the owner's), where, by XOR with what
_BETWEEN = f"skipper-fuzz-between-{os.getpid()}"


@cache
def _verbs_owner_behind() -> tuple[str, _Pairs]:
    """Whose handles name the place of who sits in between."""
    pairs = _Pairs()
    listener, address = bind(None, f"skipper-fuzz-behind-{os.getpid()}")
    handshake.QueuePairServer(listener, f"unix:{_BETWEEN}", TOKEN, lambda: KEYS, _RAILS, pairs)
    return address, pairs


def change_handshake(data: bytes) -> None:
    """Both sides are real and belong together; somebody in between changes bytes of either."""
    address, pairs = _verbs_owner_behind()
    pairs.connected.clear()
    changes: dict[tuple[int, int], int] = {}
    for at in range(0, len(data) - _CHANGE.size + 1, _CHANGE.size):
        whose, place, by = _CHANGE.unpack_from(data, at)
        changes[whose % 2, place] = changes.get((whose % 2, place), 0) ^ by
    mine = {rail: ENDPOINT.pack(1, 2, b"m" * 16, 3, 4, 5, 0) for rail in _RAILS}

    hello, endpoints = handshake.HELLO.size, len(_RAILS) * ENDPOINT.size
    signed_nbytes = hello + endpoints + len(NOBODY), hello + endpoints + DIGEST_BYTES
    altered = {key for key, by in changes.items() if by and key[1] < signed_nbytes[key[0]]}
    open_to_owner = not any(whose == 0 or place < hello for whose, place in altered)

    def pass_on(connection: socket.socket) -> None:
        with socket.socket(socket.AF_UNIX) as onward:
            onward.settimeout(_SECONDS)
            onward.connect(target(address))
            _relay((connection, onward), changes)

    try:
        with _answering(_BETWEEN, pass_on):
            made = dial(f"unix:{_BETWEEN}", TOKEN, KEYS, mine, _deadline())
            made.socket.close()
    except TransferError:
        if not any(changes.values()):
            raise
    else:
        if altered:
            raise Broken(f"the initiator believed what was altered: {altered}")
    if pairs.connected and not open_to_owner:
        raise Broken(f"the owner believed what was altered: {altered}")


def _relay(sides: tuple[socket.socket, socket.socket], changes: dict[tuple[int, int], int]) -> None:
    """Pass on the four messages, changed, with as many bytes as their speaker says after what it has heard."""
    passed = [0, 0]
    rails = [0, 0]  # how many a side has in common with what it has heard

    def pass_message(speaker: int, nbytes: int) -> bytes:
        words = bytearray(sides[speaker].recv(nbytes, socket.MSG_WAITALL))
        for at in range(len(words)):
            words[at] ^= changes.get((speaker, passed[speaker] + at), 0)
        passed[speaker] += len(words)
        sides[1 - speaker].sendall(words)
        return bytes(words)

    for speaker in (0, 1):
        greeting = pass_message(speaker, handshake.HELLO.size)
        if len(greeting) < handshake.HELLO.size:
            return
        _, bits, _ = handshake.HELLO.unpack(greeting)
        rails[1 - speaker] = sum(bits >> rail & 1 for rail in _RAILS)
    meeting_nbytes = rails[0] * ENDPOINT.size + len(NOBODY) + PROOFS_BYTES
    if len(pass_message(0, meeting_nbytes)) < meeting_nbytes:
        return
    if rails[1] > rails[0]:
        sides[1].shutdown(socket.SHUT_WR)  # the owner is owed more than there will be
    pass_message(1, rails[1] * ENDPOINT.size + DIGEST_BYTES)


def change_handshake_seeds() -> Iterator[bytes]:
    """Nothing is changed, and each of the four messages is; and what one side has of rails."""
    yield b""
    for whose, place in ((0, 10), (1, 10), (0, 21), (1, 21), (0, 200), (1, 110), (0, 4), (1, 4)):
        yield _CHANGE.pack(whose, place, 1)
    yield _CHANGE.pack(0, 30, 7) + _CHANGE.pack(0, 30, 7)


# Asking to be let in to UCX's port


@cache
def _ucx_owner() -> AdmissionServer:
    """A port that stands for UCX's: nobody accepts there."""
    listener = socket.create_server(("127.0.0.1", 0))
    socket_filter.admit(listener, ())
    return AdmissionServer([listener], "127.0.0.1", lambda: KEYS, within_host=False)


_visits = itertools.count()


def ask_for_admission(data: bytes) -> None:
    """What comes to the port where an owner lets others in to its UCX."""
    server = _ucx_owner()
    contact = server.contact
    knows, parts = data[:1] == b"\1", split_parts(data[1:])
    visit = next(_visits)
    # Each from an address of its own: closed connections would use up the ports of one.
    source = f"127.{1 + visit // 62_500 % 100}.{1 + visit // 250 % 250}.{1 + visit % 250}"
    with socket.create_connection(target(contact.address), _SECONDS, source_address=(source, 0)) as visitor:
        heard = 0
        with contextlib.suppress(OSError):  # it hangs up, as it may
            if knows:
                heard = _ask_with_proofs(visitor, contact, parts)
            else:
                visitor.sendall(b"".join(parts))
            visitor.shutdown(socket.SHUT_WR)
        heard += _heard(visitor)
    if not knows and heard > ucx_admission.HELLO.size:
        raise Broken(f"a stranger was told {heard} bytes")
    if not server.alive:
        raise Broken("nobody answers any more who asks to be let in")


def _ask_with_proofs(visitor: socket.socket, contact: Contact, parts: list[bytes]) -> int:
    """Say these after the greetings, with good proofs; how much was heard."""
    hello = ucx_admission.HELLO.pack(ucx_admission.MAGIC, bytes(16))
    visitor.sendall(hello)
    said = hello + visitor.recv(ucx_admission.HELLO.size, socket.MSG_WAITALL)
    heard = ucx_admission.HELLO.size
    keys = proof_keys(KEYS, contact.token, contact.address)
    for role, part in zip((b"sources", b"connections"), parts, strict=False):
        said += part
        proofs = prove(keys[0], role, said) if role == b"connections" else prove_by_each(keys, role, said)
        visitor.sendall(part + proofs)
        if len(part) != PLACES.size or role == b"connections":
            break
        answer = visitor.recv(PLACES.size + DIGEST_BYTES, socket.MSG_WAITALL)
        heard += len(answer)
        said += answer[: PLACES.size]
    return heard


def admission_seeds() -> Iterator[bytes]:
    """What an initiator says, with and without proofs; and garbage."""
    sources = pack_places([SocketPlace(as_ipv6("127.0.0.1"), 0), SocketPlace(as_ipv6("10.0.0.7"), 4711)])
    connections = pack_places([SocketPlace(as_ipv6("127.0.0.1"), 4712)])
    hello = ucx_admission.HELLO.pack(ucx_admission.MAGIC, bytes(16))
    yield b"\0" + join_parts(hello, sources + bytes(PROOFS_BYTES), connections + bytes(DIGEST_BYTES))
    yield b"\0" + join_parts(ucx_admission.HELLO.pack(b"SKu1", bytes(16)))
    yield b"\1" + join_parts(sources, connections)
    yield b"\1" + join_parts(pack_places([]), pack_places([]))
    yield b"\1" + join_parts(b"\xff" * PLACES.size, b"\xff" * PLACES.size)


def answer_initiator(data: bytes) -> None:
    """What an owner answers to who asks to be let in."""
    knows, parts = data[:1] == b"\1", split_parts(data[1:])
    hello, *answers = parts or [b""]
    name = f"skipper-fuzz-admission-{os.getpid()}"
    contact = Contact(TOKEN, f"unix:{name}")
    (key, *_) = proof_keys(KEYS if knows else (bytes(32),), contact.token, contact.address)

    def answer(connection: socket.socket) -> None:
        said = connection.recv(ucx_admission.HELLO.size, socket.MSG_WAITALL) + hello
        connection.sendall(hello)
        roles = ((b"listeners", PLACES, PROOFS_BYTES), (b"found", FOUND, DIGEST_BYTES))
        last = len(hello) < ucx_admission.HELLO.size
        for (role, layout, proof_nbytes), words in zip(roles, answers, strict=False):
            if last:
                return  # who waits for the rest says nothing more
            said += connection.recv(PLACES.size, socket.MSG_WAITALL)
            connection.recv(proof_nbytes, socket.MSG_WAITALL)
            said += words
            connection.sendall(words + prove(key, role, said))
            last = len(words) < layout.size

    sources = [SocketPlace(as_ipv6("127.0.0.1"), 0)]
    with _answering(name, answer), Admission(contact, KEYS, sources, _deadline()) as admission:
        if not knows:
            raise Broken("an owner that does not know the secret was believed")
        admission.connected()


def answer_initiator_seeds() -> Iterator[bytes]:
    """An owner's words, of one that knows the secret and of one that does not."""
    hello = ucx_admission.HELLO.pack(ucx_admission.MAGIC, bytes(16))
    listeners = pack_places([SocketPlace(as_ipv6("127.0.0.1"), 4711), SocketPlace(as_ipv6("10.0.0.7"), 4711)])
    for knows in (b"\0", b"\1"):
        yield knows + join_parts(hello, listeners, FOUND.pack(0))
        yield knows + join_parts(hello, b"\xff" * PLACES.size, FOUND.pack(255))
        yield knows + join_parts(ucx_admission.HELLO.pack(b"SKu1", bytes(16)), listeners)
