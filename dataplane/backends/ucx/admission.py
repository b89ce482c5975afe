"""How a process is let in to UCX's TCP port of another one: a handshake before it connects.

UCX itself asks for no proof: whoever connects to its port may read and write what its process can. So the kernel keeps
everybody from that port (`socket_filter`), and lets in only those that the owner's process has named. This file has
what is said, and the initiator's side of it; the owner's is `admission_server`.

    initiator  magic, nonce
    owner      magic, nonce
    initiator  the addresses that it will connect from, for each of its keys HMAC-SHA256(key, "sources" + all before)
    owner      the places where its UCX listens, HMAC-SHA256(key, "listeners" + all before)
    initiator  the ends of its connections to there, HMAC-SHA256(key, "connections" + all before)
    owner      how many of them it has found, HMAC-SHA256(key, "found" + all before)

A key is HMAC-SHA256(what a secret of the job or the user gives for this, token + address of the handshake), where
the token and the address are those of the handle; the owner uses the first key of its own that a proof is good under.
After the third message the kernel lets those addresses connect, but delivers no data. After the fifth, which the
initiator sends once it is connected and before it sends anything over that, data are delivered on exactly these
connections; what else has come in meanwhile is ended, and the port closed again. All messages have a fixed size.
"""

import secrets
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from skipper.dataplane.backends import own_sockets
from skipper.dataplane.backends.handshake import TOKEN_BYTES, Handshake, is_target
from skipper.dataplane.backends.own_sockets import PLACE_BYTES, SocketPlace
from skipper.dataplane.errors import DescriptorError, TransferError

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
        token: Tells which owner is meant.
        address: Where the handshake takes place, as `handshake.bind` returns it.
        within_host: Whether it is reached over TCP even from its own host.
    """

    token: bytes
    address: str
    within_host: bool = False

    def pack(self) -> bytes:
        """As bytes, for a card."""
        return self.token + bytes([self.within_host]) + self.address.encode("ascii")

    @classmethod
    def parse(cls, raw: bytes) -> Self | None:
        """From bytes; None where there are none, since nobody listens.

        Raises:
            DescriptorError: They are damaged.
        """
        if not raw:
            return None
        token, within_host, text = raw[:TOKEN_BYTES], raw[TOKEN_BYTES:][:1], raw[TOKEN_BYTES + 1 :]
        address = text.decode("ascii") if text.isascii() else ""
        if within_host not in (b"\0", b"\1") or not is_target(address):
            raise DescriptorError("this buffer handle has a damaged section for UCX")
        return cls(token, address, within_host == b"\1")


class Admission:
    """A handshake in which the owner has let this process connect; to be closed once this process has.

    Attributes:
        listeners: Where the owner's UCX listens.
    """

    def __init__(
        self, contact: Contact, wire_up_keys: Sequence[bytes], sources: Iterable[SocketPlace], deadline: float
    ) -> None:
        """Ask to be let in.

        Args:
            contact: Whom to ask.
            wire_up_keys: One of which the owner has, too; see `handshake.WireUpKeys`.
            sources: The addresses from which this process will connect; their ports do not matter.
            deadline: On CLOCK_MONOTONIC.

        Raises:
            OwnerDiedError: Nobody listens there any more.
            TransferError: The owner hangs up: it knows none of the keys, has another token or too many initiators. Or
                it is of another version.
            TransferTimeoutError: The deadline passed.
        """
        self._contact = contact
        self._deadline = deadline
        self._known: Mapping[int, str] = {}
        self.listeners: frozenset[SocketPlace] = frozenset()
        self._handshake = shake = Handshake(contact.address, contact.token, wire_up_keys, deadline)
        try:
            with shake.errors():
                shake.greet(HELLO.pack(MAGIC, secrets.token_bytes(16)), MAGIC)
                own = SocketPlace.of(shake.socket.getsockname()) if shake.socket.family != socket.AF_UNIX else None
                shake.say(b"sources", pack_places([*sources, *([own] if own else ())]))
                self.listeners = frozenset(parse_places(shake.hear(b"listeners", PLACES.size)))
                self._known = own_sockets.descriptors()
        except BaseException:
            shake.close()
            raise

    def connected(self) -> None:
        """Tell the owner which connections are this process's, once they stand; then data are delivered on them.

        Raises:
            OwnerDiedError, TransferError, TransferTimeoutError: As above; or the owner has not seen one of them.
        """
        with self._handshake.errors():
            own = self._own_ends()
            self._handshake.say(b"connections", pack_places(own))
            (found,) = FOUND.unpack(self._handshake.hear(b"found", FOUND.size))
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
        self._handshake.close()

    def _own_ends(self) -> list[SocketPlace]:
        """This end of each connection to the owner that was begun since it let this process in."""
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


def pack_places(places: Iterable[SocketPlace]) -> bytes:
    """A message with the first `MOST_PLACES` of them."""
    packed = [place.pack() for place in places][:MOST_PLACES]
    return PLACES.pack(len(packed), b"".join(packed))


def parse_places(message: bytes) -> list[SocketPlace]:
    """The places of a message."""
    count, packed = PLACES.unpack(message)
    used = min(count, MOST_PLACES)
    return [SocketPlace.parse(packed[at * PLACE_BYTES :][:PLACE_BYTES]) for at in range(used)]
