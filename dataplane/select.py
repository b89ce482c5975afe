"""Finding the way to a handle: which backend, and the one `Peer` per owner and backend."""

import threading

from skipper.dataplane.backends.base import Backend, Peer
from skipper.dataplane.backends.local import LocalBackend
from skipper.dataplane.config import Config
from skipper.dataplane.errors import BackendUnavailableError
from skipper.dataplane.handle import Handle
from skipper.dataplane.identity import OwnerId


class BackendSelector:
    """Picks backends by the configuration that it was made with, and keeps the connections."""

    def __init__(self, owner: OwnerId, local: LocalBackend, transports: dict[str, Backend], config: Config) -> None:
        self._owner = owner
        self._local = local
        self._transports = transports
        self._order = config.order
        self._far_order = config.far_order
        self._lock = threading.Lock()
        self._peers: dict[tuple[str, OwnerId], Peer] = {}

    def backend_for(self, handle: Handle) -> Backend:
        """The backend that would be used from here. Connects nothing.

        Raises:
            BackendUnavailableError: None can; says why for each.
        """
        if handle.card.owner == self._owner:
            return self._local
        obstacles = []
        for name in self._order if handle.card.owner.host == self._owner.host else self._far_order:
            backend = self._transports[name]
            obstacle = backend.obstacle(handle)
            if obstacle is None:
                return backend
            obstacles.append(f"{name}: {obstacle}")
        raise BackendUnavailableError(f"no way to {handle}: {'; '.join(obstacles)}")

    def peer_for(self, handle: Handle) -> Peer:
        """The connection to the handle's owner, made if need be.

        Raises:
            BackendUnavailableError: No backend can reach it.
            OwnerDiedError: The owner is gone.
        """
        backend = self.backend_for(handle)
        key = (backend.name, handle.card.owner)
        with self._lock:
            peer = self._peers.get(key)
            if peer is not None and peer.usable():
                return peer
            self._sweep()
        # Without the lock: the first connection of a backend starts it, and nobody else should wait for that.
        fresh = backend.connect(handle.card)
        with self._lock:
            peer = self._peers.setdefault(key, fresh)
        if peer is not fresh:
            fresh.close()
        return peer

    def _sweep(self) -> None:
        """Let go of owners that have died since the last connection: each costs descriptors and mappings."""
        for key, peer in list(self._peers.items()):
            if not peer.usable():
                del self._peers[key]
                peer.close()
