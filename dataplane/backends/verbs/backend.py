"""RDMA verbs: for network cards that the installed UCX does not support, and for full control.

One reliable connection (RC queue pair) per peer and port in use, which carries RDMA READs, WRITEs and atomics.

Every exported buffer has a memory region of its own, which ends when the buffer is dropped: from then on the device
refuses its key. So a write need not check the epoch word first, as it must on other backends.
"""

import threading

from skipper.dataplane.backends.base import Backend, BackendStatus, Peer
from skipper.dataplane.backends.handshake import WireUpKeys
from skipper.dataplane.backends.verbs.card import VerbsCard, pack_body, verbs_card_of
from skipper.dataplane.backends.verbs.device import require_pyverbs
from skipper.dataplane.backends.verbs.engine import VerbsEngine
from skipper.dataplane.backends.verbs.peer import VerbsPeer
from skipper.dataplane.backends.verbs.port import VerbsPort, find_ports
from skipper.dataplane.config import Config
from skipper.dataplane.errors import BackendUnavailableError, ConfigurationError, RegistrationError
from skipper.dataplane.handle import VERBS, Card, Handle, Sections
from skipper.dataplane.identity import OwnerId
from skipper.dataplane.regions import HOST, Region
from skipper.dataplane.registration import Registration, RegistrationTable


class VerbsBackend(Backend):
    """pyverbs and the RDMA ports to use, opened when first needed."""

    name = "verbs"
    number = VERBS

    def __init__(
        self,
        config: Config,
        owner: OwnerId,
        registrations: RegistrationTable,
        wire_up_keys: WireUpKeys,
        *,
        forbidden: bool,
    ) -> None:
        self._config = config
        self._wire_up_keys = wire_up_keys
        self._owner = owner
        self._registrations = registrations
        self._forbidden = forbidden
        self._lock = threading.Lock()
        self._engine: VerbsEngine | None = None
        self._ports: tuple[VerbsPort, ...] = ()
        self._exports: dict[tuple[int, int], Sections] = {}  # by epoch page and slot

    @property
    def ran(self) -> bool:
        """Whether a device was opened in this process, or in one that this was forked from."""
        return self._forbidden or self._engine is not None

    def check(self, config: Config) -> None:
        """See `Backend`.

        Raises:
            ConfigurationError: The device is open already, with other options.
        """
        if config.verbs != self._config.verbs and self._engine is not None:
            raise ConfigurationError("the RDMA device is open already; configure its options before its first use")

    def configure(self, config: Config) -> None:
        """See `Backend`."""
        if config.verbs != self._config.verbs:
            self._ports = ()
        self._config = config

    def status(self) -> BackendStatus:
        """See `Backend`."""
        try:
            ports = self._usable_ports()
        except BackendUnavailableError as error:
            return BackendStatus(self.name, False, str(error))
        state = "open" if self._engine is not None else "not opened yet"
        where = ", ".join(f"{port}, GID index {port.gid_index}" for port in ports)
        staging = None if self._engine is None else self._engine.rails.staging
        if staging is not None:
            state += f"; CUDA memory is moved through host memory: {staging}"
        return BackendStatus(self.name, True, f"{where}, {state}", ("host", "cuda"))

    def engine(self) -> VerbsEngine:
        """The device, opened now if it was not.

        Raises:
            BackendUnavailableError: There is no device, or this process was forked from one that had it open.
        """
        if self._engine is not None:
            return self._engine
        with self._lock:
            if self._engine is None:
                try:
                    ports = self._usable_ports()
                    self._engine = VerbsEngine(ports, self._config.verbs_options, self._owner, self._wire_up_keys)
                except OSError as error:  # no file descriptor is left
                    raise BackendUnavailableError(f"RDMA cannot be started: {error}") from error
            return self._engine

    def obstacle(self, handle: Handle) -> str | None:
        """See `Backend`."""
        if VERBS not in handle.sections or VERBS not in handle.card.sections:
            return "its owner did not export it for verbs (dataplane.configure(export='all') makes it do so)"
        try:
            self._usable_ports()
        except BackendUnavailableError as error:
            return str(error)
        if verbs_card_of(handle.card).address.startswith("unix:") and handle.card.owner.host != self._owner.host:
            return "only its own host can connect to its owner (dataplane.configure(verbs={'listen': ...}) there)"
        return None

    def connect(self, card: Card) -> Peer:
        """See `Backend`."""
        return VerbsPeer(self.engine(), card)

    def export(self, registration: Registration) -> Sections | None:
        """See `Backend`."""
        region = registration.region
        if region is None:
            return None
        known = self._exports.get(_key(registration))
        if known is not None:
            return known
        try:
            return self._exported(registration, region)
        except RegistrationError as error:
            if region.kind is HOST:
                raise
            # Another backend may support it; this one cannot stage memory that peers read by themselves.
            raise BackendUnavailableError(str(error)) from error

    def _exported(self, registration: Registration, region: Region) -> Sections:
        engine, page, key = self.engine(), registration.epoch.page, _key(registration)
        with self._lock:
            known = self._exports.get(key)
            if known is not None:
                return known
            rails = engine.rails
            memory = rails.memory.exported(region, writable=registration.writable)
            keys = rails.memory.page(page.address, page.nbytes).rkeys
            contact = VerbsCard(rails.token, page.address, keys, rails.devices[0].atomics, rails.address)
            known = self._exports[key] = (contact.pack(), pack_body(memory.begin, memory.rkeys))

        def end() -> None:
            del self._exports[key]
            memory.close()

        self._registrations.at_end(registration, end)
        return known

    def _usable_ports(self) -> tuple[VerbsPort, ...]:
        if self._forbidden:
            raise BackendUnavailableError(
                "this process was forked from one that had the RDMA device open; start it by spawn instead"
            )
        if not self._ports:  # searched only once: a thousand handles may ask
            require_pyverbs()
            self._ports = find_ports(self._config.verbs_options)
        return self._ports


def _key(registration: Registration) -> tuple[int, int]:
    return registration.epoch.page.token, registration.epoch.slot
