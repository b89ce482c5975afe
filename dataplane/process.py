"""The whole state of the data plane of one process, as one object, which builds and connects all parts.

There is no other global state. A forked child starts with an empty object: it owns none of its parent's memory, and
reads it like any other process.
"""

import os
import threading
from collections.abc import Iterator

from skipper.dataplane.arena import Arena
from skipper.dataplane.backends.base import Backend, Peer, Remote
from skipper.dataplane.backends.cuda_ipc import CudaIpcBackend
from skipper.dataplane.backends.local import LocalBackend
from skipper.dataplane.backends.shared_memory import SharedMemoryBackend
from skipper.dataplane.backends.ucx.backend import UcxBackend
from skipper.dataplane.backends.verbs.backend import VerbsBackend
from skipper.dataplane.config import Config
from skipper.dataplane.copying import CopyPool
from skipper.dataplane.epochs import EpochTable
from skipper.dataplane.errors import BackendUnavailableError, BufferDroppedError
from skipper.dataplane.handle import Card, Handle
from skipper.dataplane.identity import OwnerId, new_owner
from skipper.dataplane.keys import Keys
from skipper.dataplane.metering import Meter
from skipper.dataplane.registration import Registration, RegistrationTable


class BackendSelector:
    """Chooses backends by the configuration that it was made with, and keeps the connections."""

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
        obstacles: list[str] = []
        for backend in self._ways(handle, obstacles):
            return backend
        raise _no_way(handle, obstacles)

    def route(self, handle: Handle) -> tuple[Peer, Remote]:
        """The connection to the handle's owner, made if necessary, and the registration there.

        Raises:
            BackendUnavailableError: No backend can reach it; says why for each.
            BufferDroppedError: The owner has released it.
            DescriptorError: The handle differs from the registration at its owner.
            OwnerDiedError: The owner is gone.
        """
        obstacles: list[str] = []
        for backend in self._ways(handle, obstacles):
            try:
                peer = self._peer(backend, handle.card)
                return peer, peer.resolve(handle)
            except BackendUnavailableError as error:
                obstacles.append(f"{backend.name}: {error}")
        raise _no_way(handle, obstacles)

    def _ways(self, handle: Handle, obstacles: list[str]) -> Iterator[Backend]:
        """The backends that may be used from here, best first; why others may not is added to `obstacles`."""
        if handle.card.owner == self._owner:
            yield self._local
            return
        for name in self._order if handle.card.owner.host == self._owner.host else self._far_order:
            backend = self._transports[name]
            obstacle = backend.obstacle(handle)
            if obstacle is None:
                yield backend
            else:
                obstacles.append(f"{name}: {obstacle}")

    def _peer(self, backend: Backend, card: Card) -> Peer:
        key = (backend.name, card.owner)
        with self._lock:
            peer = self._peers.get(key)
            if peer is not None and peer.usable():
                return peer
            self._sweep()
        # Without the lock: the first connection of a backend starts it, and other threads should not wait for that.
        fresh = backend.connect(card)
        with self._lock:
            peer = self._peers.setdefault(key, fresh)
        if peer is not fresh:
            fresh.close()
        return peer

    def _sweep(self) -> None:
        """Drop owners that have died since the last connection: each costs descriptors and mappings."""
        for key, peer in list(self._peers.items()):
            if not peer.usable():
                del self._peers[key]
                peer.close()


def _no_way(handle: Handle, obstacles: list[str]) -> BackendUnavailableError:
    return BackendUnavailableError(f"no backend can reach {handle}: {'; '.join(obstacles)}")


class DataPlane:
    """The data plane of this process.

    Attributes:
        owner: Its identity.
        config: The present configuration.
        keys: The keys that sign its handles, and verify those of others.
        arena: Its shareable memory.
        registrations: Its buffers.
        pool: Its copy threads.
        local: The backend for its own memory.
        transports: The backends for other processes, by name.
        selector: Finds the route to a handle.
        meter: Counts its transfers.
    """

    def __init__(self, config: Config, *, parent: "DataPlane | None" = None) -> None:
        self.owner = new_owner()
        self.config = config
        self.keys = Keys(config.secret)
        self.epochs = EpochTable(self.owner)
        self.arena = Arena(self.owner)
        self.registrations = RegistrationTable(self.epochs, self.arena)
        self.pool = CopyPool(config.threads)
        self.local = LocalBackend(self.registrations, self.pool)
        ucx_ran = parent is not None and parent.ucx.ran
        self.ucx: UcxBackend = UcxBackend(config, self.registrations, self._wire_up_keys, forbidden=ucx_ran)
        verbs_ran = parent is not None and parent.verbs.ran
        self.verbs: VerbsBackend = VerbsBackend(
            config, self.owner, self.registrations, self._wire_up_keys, forbidden=verbs_ran
        )
        self.transports: dict[str, Backend] = {
            "shm": SharedMemoryBackend(self.owner, self.pool),
            "cuda_ipc": CudaIpcBackend(self.owner, self.pool),
            "ucx": self.ucx,
            "verbs": self.verbs,
        }
        self.selector = BackendSelector(self.owner, self.local, self.transports, config)
        self.meter = Meter()
        self._cards: dict[tuple[int, tuple[bytes, ...]], Card] = {}

    def export(self, registration: Registration) -> Handle:
        """The data that peers need to reach a registration, by the present configuration.

        Raises:
            BufferDroppedError: It was dropped.
            BackendUnavailableError: No backend that is allowed and usable can export that memory.
            RegistrationError: A backend failed to register it.
        """
        card_sections: dict[int, bytes] = {}
        sections: dict[int, bytes] = {}
        obstacles = []
        if registration.region is None:
            raise BufferDroppedError(f"{registration} was dropped")
        for name in self.config.order:
            backend = self.transports[name]
            try:
                exported = backend.export(registration)
            except BackendUnavailableError as error:
                obstacles.append(f"{name}: {error}")
                continue
            if exported is None:
                obstacles.append(f"{name}: it does not export that memory")
                continue
            card_sections[backend.number], sections[backend.number] = exported
            if backend.reaches_all and not self.config.exports_all:
                break
        if not sections:
            raise BackendUnavailableError(f"{registration} cannot be exported: {'; '.join(obstacles)}")
        return self._handle(registration, card_sections, sections)

    def home_handle(self, registration: Registration) -> Handle:
        """A handle that is valid within this process only.

        Raises:
            BufferDroppedError: It was dropped.
        """
        return self._handle(registration, {}, {})

    def _wire_up_keys(self) -> tuple[bytes, ...]:
        """See `handshake.WireUpKeys`. They change when a job is entered or left, or a secret configured."""
        return self.keys.derived(b"wire-up")

    def _handle(
        self, registration: Registration, card_sections: dict[int, bytes], sections: dict[int, bytes]
    ) -> Handle:
        region = registration.region
        if region is None:
            raise BufferDroppedError(f"{registration} was dropped")
        epoch = registration.epoch
        key = (epoch.page.token, tuple(card_sections.values()))
        card = self._cards.get(key)
        if card is None:
            card = self._cards[key] = Card.make(self.owner, epoch.page.token, card_sections)
        return Handle(
            card=card,
            slot=epoch.slot,
            epoch=epoch.value,
            base=region.address,
            total=region.nbytes,
            writable=registration.writable,
            kind=region.kind,
            device=region.device,
            sections=sections,
        )

    def configure(self, config: Config) -> None:
        """Apply a new configuration, for every use that begins after it: all of it, or nothing.

        Raises:
            ConfigurationError: A backend cannot apply it.
        """
        for backend in self.transports.values():
            backend.check(config)
        for backend in self.transports.values():
            backend.configure(config)
        self.pool.threads = config.threads
        if config.secret != self.config.secret:
            self.keys = Keys(config.secret)
        self.config = config
        self.selector = BackendSelector(self.owner, self.local, self.transports, config)


_lock = threading.Lock()
_current: DataPlane | None = None


def current() -> DataPlane:
    """The data plane of this process, made on first use."""
    return _current or _first()


def meter() -> Meter | None:
    """The meter of the transfers of this process; None if it has not used its data plane yet."""
    return None if _current is None else _current.meter


def _first() -> DataPlane:
    global _current
    with _lock:
        if _current is None:
            os.register_at_fork(after_in_child=_start_afresh)
            _current = DataPlane(Config())
        return _current


def _start_afresh() -> None:
    global _current, _lock
    _lock = threading.Lock()  # another thread of the parent may have held it
    if _current is not None:
        parent, _current = _current, None
        _abandoned.append(parent)
        parent.arena.disown()
        parent.registrations.disown()
        _current = DataPlane(parent.config, parent=parent)


# A forked child keeps all that it inherits for ever: dropping it would release resources of the parent.
_abandoned: list[DataPlane] = []
