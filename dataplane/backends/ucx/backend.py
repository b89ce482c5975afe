"""Any memory, any process that UCX reaches: CMA within a host, TCP or RDMA beyond it, CUDA if UCX supports it.

UCX itself protects nothing: it reads and writes wherever a request points. So bounds are checked before a request is
made, and the epoch words before and after every transfer: in the owner's page if it can be mapped (within the host),
otherwise by requests of their own. If the owner's process itself would have to touch its memory, as over TCP, copies
are our own messages instead, and the owner looks up their memory among its exports.
"""

import functools
import threading
import weakref

from skipper.dataplane.backends.base import Backend, BackendStatus, Peer
from skipper.dataplane.backends.handshake import WireUpKeys
from skipper.dataplane.backends.ucx.card import UcxCard, pack_parts
from skipper.dataplane.backends.ucx.engine import UcxEngine, check_options, find_library, has_cuda_modules, load
from skipper.dataplane.backends.ucx.peer import UcxPeer
from skipper.dataplane.config import Config
from skipper.dataplane.errors import BackendUnavailableError, ConfigurationError
from skipper.dataplane.handle import UCX, Card, Handle, Sections
from skipper.dataplane.regions import HOST, MemoryKind
from skipper.dataplane.registration import Registration, RegistrationTable


class UcxBackend(Backend):
    """libucp, loaded and started when it is first needed.

    Attributes:
        config: The latest configuration.
    """

    name = "ucx"
    number = UCX

    def __init__(
        self, config: Config, registrations: RegistrationTable, wire_up_keys: WireUpKeys, *, forbidden: bool
    ) -> None:
        self.config = config
        self._wire_up_keys = wire_up_keys
        self._registrations = registrations
        self._forbidden = forbidden
        self._lock = threading.Lock()
        self._engine: UcxEngine | None = None
        self._exports: weakref.WeakKeyDictionary[Registration, tuple[Sections, object]] = weakref.WeakKeyDictionary()

    @property
    def ran(self) -> bool:
        """Whether UCX was started in this process, or in one that this was forked from."""
        return self._forbidden or self._engine is not None

    def check(self, config: Config) -> None:
        """See `Backend`.

        Raises:
            ConfigurationError: UCX runs already with other options, or does not know one of them.
        """
        changed = (config.ucx, config.ucx_library) != (self.config.ucx, self.config.ucx_library)
        if changed and self._engine is not None:
            raise ConfigurationError("UCX runs already in this process; configure its options before its first use")
        if changed and config.ucx:
            check_options(config)

    def configure(self, config: Config) -> None:
        """See `Backend`."""
        if self._engine is not None:
            self._engine.width = config.threads
        self.config = config

    def status(self) -> BackendStatus:
        """Loads the library if needed, starts nothing. Which memory UCX can move is known once it runs."""
        if self._forbidden:
            return BackendStatus(self.name, False, _FORKED)
        library = find_library(self.config.ucx_library)
        try:
            version = load(library).library_version()
        except BackendUnavailableError as error:
            return BackendStatus(self.name, False, str(error))
        where = f"UCX {'.'.join(map(str, version))} from {library}"
        if has_cuda_modules(library):
            where += " with CUDA modules"
        if self._engine is None:
            return BackendStatus(self.name, True, f"{where}, not started", ("host",))
        kinds = tuple(kind.name.lower() for kind in MemoryKind if self._engine.memory_types >> kind & 1)
        return BackendStatus(self.name, True, f"{where}, running", kinds)

    def engine(self) -> UcxEngine:
        """UCX, started now if it was not.

        Raises:
            BackendUnavailableError: It does not start, or this process was forked from one where it ran.
        """
        if self._engine is not None:
            return self._engine
        if self._forbidden:
            raise BackendUnavailableError(_FORKED)
        with self._lock:
            if self._engine is None:
                self._engine = UcxEngine(self.config, self._wire_up_keys)
            return self._engine

    def obstacle(self, handle: Handle) -> str | None:
        """See `Backend`."""
        if UCX not in handle.sections or UCX not in handle.card.sections:
            return "its owner did not export it for UCX (dataplane.configure(export='all') makes it do so)"
        if self._forbidden:
            return _FORKED
        return None

    def connect(self, card: Card) -> Peer:
        """See `Backend`."""
        return UcxPeer(self.engine(), card)

    def export(self, registration: Registration) -> Sections | None:
        """See `Backend`."""
        if registration.region is None or registration.storage is None:
            return None
        known = self._exports.get(registration)
        if known is None:
            engine = self.engine()
            region = registration.region
            if not engine.memory_types >> region.kind & 1:
                raise BackendUnavailableError(
                    f"this UCX cannot move {region.kind.name.lower()} memory; its modules for it did not load"
                )
            memory = engine.register(registration.storage, region)
            epoch = registration.epoch
            page = epoch.page
            page_key = engine.register_page(page).key
            if region.kind is HOST and engine.expose(epoch, region, writable=registration.writable):
                self._registrations.at_end(registration, functools.partial(engine.conceal, epoch))
            address = engine.address + engine.traits.pack()
            card = UcxCard(page.address, page.fd, page_key, engine.contact, address)
            known = self._exports[registration] = ((card.pack(), pack_parts(memory.key)), memory)
        return known[0]


_FORKED = "this process was forked from one that used UCX, which does not survive a fork; start it by spawn instead"
