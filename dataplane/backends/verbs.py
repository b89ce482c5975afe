"""RDMA verbs: for network cards that the installed UCX cannot drive, and for full control.

One reliable connection (RC queue pair) per peer, which carries RDMA READs and WRITEs.

Every exported buffer has a memory region of its own, which goes when the buffer is dropped: from then on the device
refuses its key. So a write needs no look at the epoch word first, as other backends do.
"""

import threading

from dataplane.backends.base import Backend, BackendStatus, Peer
from dataplane.backends.verbs_device import Port, find_port, require_pyverbs
from dataplane.backends.verbs_engine import Engine
from dataplane.backends.verbs_peer import BODY, CARD, VerbsPeer, parse_card
from dataplane.config import Config
from dataplane.errors import BackendUnavailableError, ConfigurationError
from dataplane.handle import VERBS, Card, Handle, Sections
from dataplane.identity import OwnerId, host_id
from dataplane.memory import HOST, Region
from dataplane.registration import Registration, RegistrationTable


class VerbsBackend(Backend):
    """pyverbs and one RDMA port, opened when first needed."""

    name = "verbs"
    number = VERBS
    memory_kinds = frozenset({HOST})

    def __init__(self, config: Config, owner: OwnerId, registrations: RegistrationTable, *, forbidden: bool) -> None:
        self._config = config
        self._owner = owner
        self._registrations = registrations
        self._forbidden = forbidden
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._port: Port | None = None
        self._exports: dict[tuple[int, int], Sections] = {}  # by epoch page and slot

    @property
    def ran(self) -> bool:
        """Whether a device was opened in this process, or in one that this was forked from."""
        return self._forbidden or self._engine is not None

    def configure(self, config: Config) -> None:
        """Take over a new configuration.

        Raises:
            ConfigurationError: The device is open already, with other options.
        """
        if config.verbs != self._config.verbs and self._engine is not None:
            raise ConfigurationError("the RDMA device is open already; configure its options before its first use")
        if config.verbs != self._config.verbs:
            self._port = None
        self._config = config

    def status(self) -> BackendStatus:
        """See `Backend`."""
        try:
            port = self._usable_port()
        except BackendUnavailableError as error:
            return BackendStatus(self.name, False, str(error))
        state = "open" if self._engine is not None else "not opened yet"
        where = f"{port.device} port {port.number}, GID index {port.gid_index}, {state}"
        return BackendStatus(self.name, True, where, ("host",))

    def engine(self) -> Engine:
        """The device, opened now if it was not.

        Raises:
            BackendUnavailableError: There is none, or this process was forked from one that had it open.
        """
        if self._engine is not None:
            return self._engine
        with self._lock:
            if self._engine is None:
                self._engine = Engine(self._usable_port(), self._config.verbs, self._owner)
            return self._engine

    def obstacle(self, handle: Handle) -> str | None:
        """See `Backend`."""
        if VERBS not in handle.sections or VERBS not in handle.card.sections:
            return "its owner did not export it for verbs (dataplane.configure(export='all') makes it do so)"
        try:
            self._usable_port()
        except BackendUnavailableError as error:
            return str(error)
        if parse_card(handle.card).address.startswith("unix:") and handle.card.owner.host != host_id():
            return "its owner can be dialled on its own host only (dataplane.configure(verbs={'listen': ...}) there)"
        return None

    def connect(self, card: Card) -> Peer:
        """See `Backend`."""
        return VerbsPeer(self.engine(), card)

    def export(self, registration: Registration) -> Sections | None:
        """See `Backend`."""
        region = registration.region
        if region is None:
            return None
        if region.kind is not HOST:
            raise BackendUnavailableError("only host memory can be registered with an RDMA device here")
        known = self._exports.get(_key(registration))
        return self._exported(registration, region) if known is None else known

    def _exported(self, registration: Registration, region: Region) -> Sections:
        engine, page, key = self.engine(), registration.epoch.page, _key(registration)
        with self._lock:
            known = self._exports.get(key)
            if known is not None:
                return known
            memory = engine.memory.exported(region, writable=registration.writable)
            page_key = engine.memory.page(page.address, page.nbytes).rkey
            card = CARD.pack(engine.token, page.address, page_key) + engine.address.encode()
            known = self._exports[key] = (card, BODY.pack(memory.rkey))

        def end() -> None:
            del self._exports[key]
            memory.close()

        self._registrations.at_end(registration, end)
        return known

    def close(self) -> None:
        """Close the device. Idempotent."""
        if self._engine is not None:
            self._engine.close()

    def _usable_port(self) -> Port:
        if self._forbidden:
            raise BackendUnavailableError(
                "this process was forked from one that had the RDMA device open; start it by spawn instead"
            )
        if self._port is None:  # looked for once: a handle may ask a thousand times
            require_pyverbs()
            self._port = find_port(self._config.verbs)
        return self._port


def _key(registration: Registration) -> tuple[int, int]:
    return registration.epoch.page.token, registration.epoch.slot
