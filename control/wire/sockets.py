"""`Sockets`: the network of a process: packet sockets within its host, gRPC between hosts."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
from functools import partial
from typing import TYPE_CHECKING

from skipper.control.model.future import reader, set_reader
from skipper.control.wire import addresses, grpc_poller
from skipper.control.wire._poller import Poller, on_stream_thread
from skipper.control.wire.certificates import Certificates
from skipper.control.wire.grpc_door import GrpcDoor
from skipper.control.wire.identity import MEMBERS
from skipper.control.wire.local_listener import LocalListener
from skipper.control.wire.local_stream import OutgoingLocalStream
from skipper.control.wire.network import Connect, OnProven
from skipper.control.wire.process_ref import ProcessRef

if TYPE_CHECKING:
    from skipper.control.wire.auth_listener import AuthListeners


class Sockets:
    """A `Network` of the kernel's sockets.

    Args:
        me: the process that has it.
        secret: the job's secret.
        loop: the process' loop.
        poller: reads within the host, also for others, which then close it; None: it makes its own.
    """

    def __init__(
        self, me: ProcessRef, secret: bytes, loop: asyncio.AbstractEventLoop, poller: Poller | None = None
    ) -> None:
        self.pid = os.getpid() if poller is None else 0
        self._id = me.id
        self._secret = secret
        self._loop = loop
        self._shares_poller = poller is not None
        self._poller = poller or Poller("control-local")
        self._lock = threading.Lock()
        self._on_proven: OnProven | None = None
        self._auth_listeners: AuthListeners | None = None
        self._local_listener: LocalListener | None = None
        self._door: GrpcDoor | None = None

    def listen(self, me: ProcessRef, certificates: Certificates | None, on_proven: OnProven) -> ProcessRef:
        """See `Network.listen`."""
        self._on_proven = on_proven
        if not self._shares_poller:
            set_reader(self._poller)
        self._local_listener = LocalListener(me.id, self._secret, self._poller, self._loop, on_proven=on_proven)
        if host := addresses.host_of(me.address):
            within = (addresses.within_host(me.id), None)
            _, port = self._listeners().open([within, (addresses.at(host, 0), certificates)], MEMBERS)
            return dataclasses.replace(me, address=addresses.at(host, port))
        self._door = GrpcDoor(me.id, self._poller, lambda target: self._listeners().open([(target, None)]))
        return me

    def listen_beyond(self, me: ProcessRef, host: str, certificates: Certificates | None) -> ProcessRef:
        """See `Network.listen_beyond`."""
        (port,) = self._listeners().open([(addresses.at(host, 0), certificates)], MEMBERS)
        return dataclasses.replace(me, address=addresses.at(host, port))

    def within(self, process_id: str) -> Connect:
        """See `Network.within`."""
        return partial(OutgoingLocalStream, process_id, self._poller)

    def beyond(self, address: str | None) -> Connect | None:
        """None: gRPC dials."""
        grpc_poller.choose()
        return None

    def is_current(self) -> bool:
        """See `Network.is_current`."""
        return on_stream_thread()

    def fall_silent(self) -> None:
        """See `Network.fall_silent`."""
        self._poller.fall_silent()
        if self._local_listener is not None:
            self._local_listener.fall_silent()
        if self._door is not None:
            self._door.fall_silent()

    async def close(self, patience_s: float) -> None:
        """See `Network.close`."""
        if self._local_listener is not None:
            self._local_listener.close()
        if self._door is not None:
            await self._door.close()
        if self._auth_listeners is not None:
            await self._auth_listeners.close(patience_s)
        if self._shares_poller:
            return
        if reader() is self._poller:
            set_reader(None)
        self._poller.close()

    def _listeners(self) -> AuthListeners:
        """The gRPC listeners; the first one imports gRPC. From any thread."""
        grpc_poller.choose()
        from skipper.control.wire.auth_listener import AuthListeners

        with self._lock:
            if self._auth_listeners is None:
                assert self._on_proven is not None  # nothing listens before `listen`
                self._auth_listeners = AuthListeners(self._id, self._secret, self._loop, on_proven=self._on_proven)
            return self._auth_listeners
