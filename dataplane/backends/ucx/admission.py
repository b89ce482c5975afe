"""How a process gets UCX's TCP port of another one to listen to it: a short, authenticated conversation before.

UCX itself asks nobody for anything: whoever connects to its port may read and write what its process can. So the
kernel keeps everybody from that port (`socket_filter`), and lets in only whom the owner's process has told it to. This
file has what is said, and the initiator's side of it; the owner's is `ucx_admission_server`.

    initiator  magic, nonce
    owner      magic, nonce
    initiator  the addresses that it will connect from, for each of its keys HMAC-SHA256(key, "sources" + all before)
    owner      the places where its UCX listens, HMAC-SHA256(key, "listeners" + all before)
    initiator  the ends of its connections to there, HMAC-SHA256(key, "connections" + all before)
    owner      how many of them it has found, HMAC-SHA256(key, "found" + all before)

A key is HMAC-SHA256(what a secret of the job or the user gives for this, token + address of the conversation), where
the token and the address are those of the handle; the owner uses the first key of its own that a proof is good under.
After the third message the kernel lets those addresses connect, but delivers no data. After the fifth, which the
initiator sends once it is connected and before it sends anything over that, data are delivered on exactly these
connections; what else has come in meanwhile is ended, and the port closed again. All messages have a fixed size.
"""

import contextlib
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from skipper.dataplane.backends import exchange, own_sockets
from skipper.dataplane.backends.exchange import DIGEST_BYTES, TOKEN_BYTES, proof_keys, prove, prove_by_each, proved_by
from skipper.dataplane.backends.own_sockets import PLACE_BYTES, Place
from skipper.dataplane.errors import DescriptorError, OwnerDiedError, TransferError, TransferTimeoutError

MAGIC = b"SKu2"
HELLO = struct.Struct("<4s16s")
MOST_PLACES = 8
PLACES = struct.Struct(f"<B{MOST_PLACES * PLACE_BYTES}s")
FOUND = struct.Struct("<B")

_LOOK_S = 0.0005
_STRAY_S = 0.1  # for a socket that is still connecting when another one is connected: it may be somebody else's


@dataclass(frozen=True, slots=True)
class Contact:
    """What a handle says of an owner whose UCX listens on TCP.

    Attributes:
        token: Whose owner is meant.
        address: Where the conversation takes place, as `exchange.bind` returns it.
        within_host: Whether it is reached over TCP even from its own host.
    """

    token: bytes
    address: str
    within_host: bool = False

    def pack(self) -> bytes:
        """As bytes."""
        return self.token + bytes([self.within_host]) + self.address.encode("ascii")

    @classmethod
    def parse(cls, raw: bytes) -> Self | None:
        """From bytes; None where there are none, so that nobody listens.

        Raises:
            DescriptorError: They are damaged.
        """
        if not raw:
            return None
        token, within_host, text = raw[:TOKEN_BYTES], raw[TOKEN_BYTES:][:1], raw[TOKEN_BYTES + 1 :]
        address = text.decode("ascii") if text.isascii() else ""
        if within_host not in (b"\0", b"\1") or not exchange.is_target(address):
            raise DescriptorError("this buffer handle has a damaged section for UCX")
        return cls(token, address, within_host == b"\1")


class Admission:
    """A conversation in which the owner has let this process connect; to be closed once it has."""

    def __init__(
        self, contact: Contact, wire_up_keys: Sequence[bytes], sources: Iterable[Place], deadline: float
    ) -> None:
        """Ask to be let in.

        Args:
            contact: Whom.
            wire_up_keys: One of which the owner has, too; see `exchange.WireUpKeys`.
            sources: The addresses from which this process will connect; their ports do not matter.
            deadline: On CLOCK_MONOTONIC.

        Raises:
            OwnerDiedError: Nobody listens there any more.
            TransferError: The owner hangs up: it knows none of the keys, has another token or too many visitors. Or it
                is of another version.
            TransferTimeoutError: The deadline passed.
        """
        self._contact = contact
        self._deadline = deadline
        self._transcript = b""
        self._keys = proof_keys(wire_up_keys, contact.token, contact.address)
        self._key: bytes | None = None  # under which the owner has answered
        self._known: Mapping[int, str] = {}
        self.listeners: frozenset[Place] = frozenset()
        try:
            self._socket = exchange.socket_for(contact.address)
        except OSError as error:  # no file descriptor is left
            message = f"no socket for a connection to {contact.address}: {error}"
            raise TransferError(message, status=error.errno) from error
        try:
            with _translated(contact.address):
                exchange.set_timeout(self._socket, deadline)
                self._socket.connect(exchange.target(contact.address))
                self._greet()
                own = Place.of(self._socket.getsockname()) if self._socket.family != socket.AF_UNIX else None
                self._say(b"sources", pack_places([*sources, *([own] if own else ())]))
                self.listeners = frozenset(parse_places(self._hear(b"listeners", PLACES)))
                self._known = own_sockets.descriptors()
        except BaseException:
            self._socket.close()
            raise

    def connected(self) -> None:
        """Tell the owner which connections are this process's, once they stand; then data are delivered on them.

        Raises:
            OwnerDiedError, TransferError, TransferTimeoutError: As above; or the owner has not seen one of them.
        """
        with _translated(self._contact.address):
            own = self._own_ends()
            self._say(b"connections", pack_places(own))
            (found,) = FOUND.unpack(self._hear(b"found", FOUND))
        if found < len(own):
            raise TransferError(
                f"the owner on {self._contact.address} has not seen this process connect: the addresses between them "
                "are translated, or another route is taken than that of the devices that UCX was told to use"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def _greet(self) -> None:
        mine = HELLO.pack(MAGIC, secrets.token_bytes(16))
        self._socket.sendall(mine)
        theirs = exchange.receive(self._socket, HELLO.size, self._deadline)
        if HELLO.unpack(theirs)[0] != MAGIC:
            raise TransferError(f"who listens on {self._contact.address} is no owner of this version of Skipper")
        self._transcript = mine + theirs

    def _say(self, role: bytes, message: bytes) -> None:
        self._transcript += message
        if self._key is None:
            message += prove_by_each(self._keys, role, self._transcript)
        else:
            message += prove(self._key, role, self._transcript)
        exchange.set_timeout(self._socket, self._deadline)
        self._socket.sendall(message)

    def _hear(self, role: bytes, layout: struct.Struct) -> bytes:
        answer = exchange.receive(self._socket, layout.size + DIGEST_BYTES, self._deadline)
        message, proof = answer[:-DIGEST_BYTES], answer[-DIGEST_BYTES:]
        self._transcript += message
        keys = self._keys if self._key is None else (self._key,)
        self._key = proved_by(proof, keys, role, self._transcript)
        if self._key is None:
            raise TransferError(f"who listens on {self._contact.address} is not the owner that the handle names")
        return message

    def _own_ends(self) -> list[Place]:
        """Those of the connections to the owner that were begun since it let this process in."""
        stray = self._deadline
        while True:
            found, connecting = [], False
            for _, copy in own_sockets.opened(self._known):
                both = own_sockets.ends(copy)
                if both is not None and both[1] in self.listeners:
                    found.append(both[0])
                connecting = connecting or own_sockets.state(copy) == own_sockets.CONNECTING
            now = time.monotonic()
            if found and connecting:
                stray = min(stray, now + _STRAY_S)
            if not connecting or now >= stray:
                if now >= self._deadline:
                    raise TimeoutError
                return found[:MOST_PLACES]
            time.sleep(_LOOK_S)


@contextlib.contextmanager
def _translated(address: str) -> Iterator[None]:
    """Turns what goes wrong in a conversation into errors of this package."""
    try:
        yield
    except TransferError:
        raise
    except TimeoutError:
        raise TransferTimeoutError(
            f"the deadline passed before the owner on {address} had let this process connect"
        ) from None
    except ConnectionRefusedError:
        raise OwnerDiedError(f"nobody listens on {address} any more: the owner is gone") from None
    except OSError as error:
        raise TransferError(f"no connection to the owner on {address}: {error}", status=error.errno) from error


def pack_places(places: Iterable[Place]) -> bytes:
    """A message with the first `MOST_PLACES` of them."""
    packed = [place.pack() for place in places][:MOST_PLACES]
    return PLACES.pack(len(packed), b"".join(packed))


def parse_places(message: bytes) -> list[Place]:
    """Those of a message."""
    count, packed = PLACES.unpack(message)
    used = min(count, MOST_PLACES)
    return [Place.parse(packed[at * PLACE_BYTES :][:PLACE_BYTES]) for at in range(used)]
