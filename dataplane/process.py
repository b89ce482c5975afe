"""Everything that the data plane holds for one process, as one object; and the functions that users call on it.

There is no other global state. A forked child starts with an empty one: it owns none of its parent's memory, and reads
it like any other process would.
"""

import os
import threading
from collections.abc import Mapping
from typing import Any

from dataplane import config as configuration
from dataplane.arena import Arena
from dataplane.backends.base import Backend, BackendStatus
from dataplane.backends.local import LocalBackend
from dataplane.backends.shared_memory import SharedMemoryBackend
from dataplane.backends.ucx import UcxBackend
from dataplane.backends.verbs import VerbsBackend
from dataplane.config import Config
from dataplane.copying import CopyPool
from dataplane.epochs import EpochTable
from dataplane.errors import BackendUnavailableError, BufferDroppedError
from dataplane.handle import Card, Handle
from dataplane.identity import new_owner
from dataplane.registration import Registration, RegistrationTable
from dataplane.select import Selector


class Process:
    """The data plane of this process.

    Attributes:
        owner: Its identity.
        config: As configured last.
        arena: Its shareable memory.
        registrations: Its buffers.
        pool: Its copy threads.
        local: The backend for its own memory.
        transports: The backends for other processes, by name.
        selector: Finds the way to a handle.
    """

    def __init__(self, config: Config, *, parent: "Process | None" = None) -> None:
        self.owner = new_owner()
        self.config = config
        self.epochs = EpochTable(self.owner)
        self.arena = Arena(self.owner)
        self.registrations = RegistrationTable(self.epochs, self.arena)
        self.pool = CopyPool(config.threads)
        self.local = LocalBackend(self.registrations, self.pool)
        self.ucx: UcxBackend = UcxBackend(config, forbidden=parent is not None and parent.ucx.ran)
        verbs_ran = parent is not None and parent.verbs.ran
        self.verbs: VerbsBackend = VerbsBackend(config, self.owner, self.registrations, forbidden=verbs_ran)
        self.transports: dict[str, Backend] = {
            "shm": SharedMemoryBackend(self.owner, self.pool),
            "ucx": self.ucx,
            "verbs": self.verbs,
        }
        self.selector = Selector(self.owner, self.local, self.transports, config)
        self._cards: dict[tuple[int, tuple[bytes, ...]], Card] = {}

    def export(self, registration: Registration) -> Handle:
        """What peers need to reach a registration, by the present configuration.

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
                obstacles.append(f"{name}: the memory was not made by dataplane.empty")
                continue
            card_sections[backend.number], sections[backend.number] = exported
            if self.config.export == "nearest":
                break
        if not sections:
            raise BackendUnavailableError(f"{registration} cannot be exported: {'; '.join(obstacles)}")
        return self._handle(registration, card_sections, sections)

    def home_handle(self, registration: Registration) -> Handle:
        """A handle that is good within this process only.

        Raises:
            BufferDroppedError: It was dropped.
        """
        return self._handle(registration, {}, {})

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
        """Take over a new configuration, for every use that begins after it."""
        for backend in self.transports.values():
            backend.configure(config)
        self.pool.resize(config.threads)
        self.config = config
        self.selector = Selector(self.owner, self.local, self.transports, config)


_lock = threading.Lock()
_current: Process | None = None


def current() -> Process:
    """The data plane of this process, made on first use."""
    return _current or _first()


def _first() -> Process:
    global _current
    with _lock:
        if _current is None:
            os.register_at_fork(after_in_child=_start_afresh)
            _current = Process(Config())
        return _current


def _start_afresh() -> None:
    global _current, _lock
    _lock = threading.Lock()  # another thread of the parent may have held it
    if _current is not None:
        parent, _current = _current, None
        _abandoned.append(parent)
        parent.arena.disown()
        parent.registrations.disown()
        _current = Process(parent.config, parent=parent)


# What a forked child inherits is kept for ever: letting go of it would release what belongs to the parent.
_abandoned: list[Process] = []


def configure(
    *,
    backend: str | None = None,
    copy_threads: int | None = None,
    export: str | None = None,
    ucx: Mapping[str, Any] | None = None,
    ucx_library: str | os.PathLike[str] | None = None,
    verbs: Mapping[str, Any] | None = None,
) -> None:
    """Change how this process moves data. What is None stays as it is.

    Applies to operations submitted and handles exported from then on; an `RDMAAction` that was compiled before keeps
    its way. The UCX and verbs arguments must come before the first use of theirs.

    Args:
        backend: "auto" (default): the first of shm, ucx, verbs that works. A name: only that one between processes.
        copy_threads: Threads that copy large blocks; at most 4 by default, and no more than CPUs.
        export: "nearest" (default): a handle carries what the best backend needs; for memory from `empty` no UCX is
            started. "all": a handle carries every backend that is allowed and usable.
        ucx: Options of UCX by name without the prefix, e.g. {"NET_DEVICES": "mlx5_0:1"}; replaces an earlier mapping.
            Without NET_DEVICES (here or in the environment) nothing is reachable from beyond this host.
        ucx_library: Path of the libucp.so.0 to use in place of the one from the wheel.
        verbs: What the verbs backend uses instead of its own choice; replaces an earlier mapping. device, port,
            gid_index, mtu (bytes), timeout and retry_cnt (as in ibv_modify_qp; 14 and 6: a dead link is an error after
            half a second), depth (work requests per queue pair), and listen ("HOST:PORT"): where peers of other hosts
            connect; without it only this host can.

    Raises:
        ConfigurationError: A value does not exist, or comes too late.
    """
    process = current()
    process.configure(
        configuration.checked(
            process.config,
            backend=backend,
            copy_threads=copy_threads,
            export=export,
            ucx=ucx,
            ucx_library=ucx_library,
            verbs=verbs,
        )
    )


def backends() -> list[BackendStatus]:
    """Every backend with whether it is usable here, and why not. Starts nothing."""
    process = current()
    return [process.local.status(), *(backend.status() for backend in process.transports.values())]


def get_rdma_backend() -> str:
    """The backend that moves ordinary memory between processes here: "ucx", "verbs", or "none"."""
    process = current()
    for name in process.config.order:
        backend = process.transports[name]
        if name != "shm" and backend.status().usable:
            return name
    return "none"


def is_ibverbs_available() -> bool:
    """Whether the kernel has an RDMA device: for the verbs backend, or for a UCX with IB support."""
    try:
        return bool(os.listdir("/sys/class/infiniband"))
    except FileNotFoundError:
        return False
