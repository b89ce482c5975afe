"""`AuthListener`: takes incoming gRPC connections, which wait there until they have proven themselves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence

from skipper.control.wire.certificates import Certificates
from skipper.control.wire.grpc_listener import StreamListener
from skipper.control.wire.grpc_streams import OPTIONS, IncomingStream
from skipper.control.wire.handshake import Guest
from skipper.control.wire.identity import Role
from skipper.control.wire.process_ref import ProcessRef
from skipper.control.wire.strangers import HANDSHAKE_TIMEOUT_S, Strangers

_LIMITS = (("grpc.max_concurrent_streams", 4),)


class AuthListener:
    """A listener that accepts only peers that know a secret.

    Args:
        addresses: where to listen, as gRPC's targets, each with the certificates for TLS or None.
        name: the name that peers must have dialed: the id of this process, if it belongs to a job.
        secret: the secret that peers have to know.
        on_proven: takes the stream and the process at its other end, on the listener's thread.
        on_closed: called when nothing is left of the listener.
        roles: with TLS: the roles whose certificates are accepted.

    Raises:
        WireError: it cannot listen on an address.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, Certificates | None]],
        name: str,
        secret: bytes,
        *,
        on_proven: Callable[[Guest, ProcessRef], None],
        on_closed: Callable[[], None],
        roles: Collection[Role] = (),
    ) -> None:
        self._certificates = next((each for _, each in addresses if each is not None), None)
        """The certificates of all addresses with TLS: a process has one folder of certificates."""
        self._roles = roles
        self._name = name
        self._secret = secret
        self._on_proven = on_proven
        self._strangers = Strangers()
        self._listener = StreamListener(
            addresses,
            greeting_s=HANDSHAKE_TIMEOUT_S,
            options=(*OPTIONS, ("grpc.max_connection_idle_ms", int(1000 * HANDSHAKE_TIMEOUT_S)), *_LIMITS),
            on_stream=self._came,
            patience=self._strangers.lose_patience,
            on_closed=on_closed,
        )
        self.ports = self._listener.ports
        """The TCP port of each address."""

    def close(self) -> None:
        """Accept no more peers; returns at once."""
        self._listener.close()

    def cut(self) -> None:
        """End all incoming streams, whatever they are doing."""
        self._listener.cut()

    def _came(self, stream: IncomingStream) -> None:
        guest = Guest(
            stream,
            self._name,
            self._secret,
            on_proven=self._let_in,
            on_gone=self._forget,
            certificates=self._certificates,
            roles=self._roles,
        )
        if guest.receive():
            self._strangers.add(stream)

    def _let_in(self, guest: Guest, peer: ProcessRef) -> None:
        self._forget(guest)
        self._on_proven(guest, peer)

    def _forget(self, guest: Guest) -> None:
        self._strangers.forget(guest.stream)


class AuthListeners:
    """The listeners of one process of a job, opened one by one and closed together, on ``loop``.

    ``name`` is the id of the process; for the other arguments see `AuthListener`.
    """

    def __init__(
        self,
        name: str,
        secret: bytes,
        loop: asyncio.AbstractEventLoop,
        *,
        on_proven: Callable[[Guest, ProcessRef], None],
    ) -> None:
        self._name = name
        self._secret = secret
        self._loop = loop
        self._on_proven = on_proven
        self._all: list[AuthListener] = []
        self._closed = 0
        self._gone = asyncio.Event()
        """Set once all listeners have ended."""

    def open(
        self, addresses: Sequence[tuple[str, Certificates | None]], roles: Collection[Role] = ()
    ) -> tuple[int, ...]:
        """Open one more, with the arguments of `AuthListener`, from any thread; returns the TCP port of each address.

        Raises:
            WireError: it cannot listen on an address.
        """
        listener = AuthListener(
            addresses, self._name, self._secret, on_proven=self._on_proven, on_closed=self._one_closed, roles=roles
        )
        self._all.append(listener)
        return listener.ports

    async def close(self, patience_s: float) -> None:
        """Accept no more peers, and wait until all streams have ended. After ``patience_s`` they are cut."""
        if not self._all:
            return  # it could not listen on the only requested address
        for listener in self._all:
            listener.close()
        try:
            async with asyncio.timeout(patience_s):
                await self._gone.wait()
        except TimeoutError:  # there are unproven connections, or peers that do not respond
            for listener in self._all:
                listener.cut()
            await self._gone.wait()

    def _one_closed(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends
            self._loop.call_soon_threadsafe(self._count_closed)

    def _count_closed(self) -> None:
        self._closed += 1
        if self._closed == len(self._all):
            self._gone.set()
