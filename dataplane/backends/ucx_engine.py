"""UCX in one process: the library, its context, two workers and their threads.

The *server* worker serves peers: a daemon thread progresses it and sleeps in `ucp_worker_wait` in between. The *client*
worker carries what this process initiates. A short operation runs in the thread that submits it; whatever is not over
after a brief spin is driven to its end by one more daemon thread, which also keeps the deadlines. All of it starts with
the first use, so that a process that only copies within memory never pays for it.
"""

import atexit
import ctypes
import importlib.util
import os
import threading
import time
import weakref
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from dataplane import memfd
from dataplane.config import Config
from dataplane.errors import BackendUnavailableError, RegistrationError
from dataplane.memory import HOST, MemoryKind, Region, Storage

if TYPE_CHECKING:
    from dataplane.backends import _ucp

# RNDV_THRESH: with peer error handling UCX would otherwise give up zero-copy within a host (CMA) and emulate every get
# over TCP. NET_DEVICES: nothing may listen beyond this host unless somebody asks for it. TCP_CONN_NB: to connect must
# not block (no deadline would hold against a silent host), and a connection that is refused at once leaks its socket.
_DEFAULTS = {"RNDV_THRESH": "inf", "NET_DEVICES": "lo", "TCP_CONN_NB": "y"}
_LOG_LEVEL = "LOG_LEVEL"
_IDLE_S = 3600.0
_JOIN_S = 5.0


class Driven(Protocol):
    """What the engine drives."""

    batch: "_ucp.Batch"
    deadline: float

    def claim(self) -> bool:
        """Whether the caller is the one that may drive it."""

    def settle(self) -> bool:
        """Called when the batch is over; whether it goes on with another batch."""

    def expire(self) -> None:
        """Called once when the deadline has passed: see to it that the batch comes to an end soon."""


def find_library(configured: str | None) -> str:
    """Path or name of libucp to load: as configured, from the wheel, or whatever the loader finds."""
    if configured is not None:
        return configured
    spec = importlib.util.find_spec("libucx")
    if spec is not None and spec.origin is not None:
        library = Path(spec.origin).parent / "lib" / "libucp.so.0"
        if library.exists():
            return str(library)
    return "libucp.so.0"


def load(library: str) -> ModuleType:
    """Load libucp from where it was asked for, then the binding, which takes what is loaded by its soname.

    Raises:
        BackendUnavailableError: There is no such library, or the binding was not built.
    """
    try:
        ctypes.CDLL(library)
        from dataplane.backends import _ucp
    except (OSError, ImportError) as error:
        raise BackendUnavailableError(
            f"UCX cannot be loaded: {error}. Install libucx-cu12, or name a libucp.so.0 by "
            "dataplane.configure(ucx_library=...)"
        ) from error
    return _ucp


def options(config: Config) -> dict[str, str]:
    """What is set in code: ours below the environment's NET_DEVICES, the caller's above all."""
    chosen = dict(_DEFAULTS)
    if "UCX_NET_DEVICES" in os.environ:
        del chosen["NET_DEVICES"]
    chosen.update(config.ucx)
    return chosen


class Engine:
    """UCX, started. Thread-safe."""

    def __init__(self, config: Config) -> None:
        """Load and initialise the library, start both threads.

        Raises:
            BackendUnavailableError: It cannot be loaded, or refuses an option.
        """
        ucp = load(find_library(config.ucx_library))
        self.ucp = ucp
        chosen = options(config)
        # Its own messages would repeat on stderr what the typed errors say, once per request.
        level = chosen.pop(_LOG_LEVEL, None if "UCX_LOG_LEVEL" in os.environ else "fatal")
        try:
            if level is not None:
                ucp.set_global_option(_LOG_LEVEL, level)
            self._context: _ucp.Context = ucp.Context(chosen)
            self._server: _ucp.Worker = ucp.Worker(self._context)
            self.client: _ucp.Worker = ucp.Worker(self._context)
            self.address = self._server.address()
        except ucp.UcxError as error:
            raise BackendUnavailableError(f"UCX does not start with {chosen}: {error}") from error
        self.memory_types = self._context.memory_types()
        self._pid = os.getpid()
        self._memory: dict[tuple[int, int, int], weakref.ref[_Registered]] = {}
        self._anchored: dict[tuple[int, int, int], _Registered] = {}
        self._pages: dict[int, _Registered] = {}
        self._condition = threading.Condition()
        self._inbox: list[Driven] = []
        self._closing = False
        self._threads = [
            threading.Thread(target=self._server.serve, name="dataplane-ucx-server", daemon=True),
            threading.Thread(target=self._drive, name="dataplane-ucx-client", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    def register(self, storage: Storage, region: Region) -> "_Registered":
        """Register a region; the storage around it is registered once, for as long as the storage lives.

        Raises:
            RegistrationError: UCX refuses, as it does when the limit of locked memory is reached.
        """
        key = (storage.address, storage.nbytes, region.kind)
        reference = self._memory.get(key)
        known = None if reference is None else reference()
        if known is None:
            known = self._map(storage.address, storage.nbytes, region.kind)
            self._memory[key] = weakref.ref(known)
            if storage.anchor is not None:
                self._anchored[key] = known
                weakref.finalize(storage.anchor, self._anchored.pop, key, None).atexit = False
        return known

    def register_page(self, page: memfd.Mapping) -> "_Registered":
        """Register a page of epoch words, for ever."""
        known = self._pages.get(page.token)
        if known is None:
            known = self._pages[page.token] = self._map(page.address, page.nbytes, HOST)
        return known

    def adopt(self, run: Driven) -> None:
        """Let the client thread drive a run to its end."""
        with self._condition:
            self._inbox.append(run)
            self._condition.notify()
        self.client.wake()

    def close(self) -> None:
        """Stop both threads; for the end of the process. Idempotent.

        Contexts and workers are left to the end of the process: a daemon thread of the caller's may be inside of them.
        """
        if self._closing or os.getpid() != self._pid:
            return
        self._closing = True
        with self._condition:
            self._condition.notify()
        self.client.wake()
        self._server.stop()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _map(self, address: int, nbytes: int, kind: MemoryKind) -> "_Registered":
        try:
            return _Registered(self.ucp.MemoryHandle(self._context, address, nbytes, int(kind)))
        except self.ucp.UcxError as error:
            raise RegistrationError(
                f"UCX cannot register {nbytes} bytes of {kind.name.lower()} memory: {error}. "
                "Where a network card is in use, see the limit of locked memory (ulimit -l)"
            ) from error

    def _drive(self) -> None:
        live: list[Driven] = []
        while True:
            with self._condition:
                while not (self._inbox or live or self._closing):
                    self._condition.wait(_IDLE_S)
                arrived, self._inbox = self._inbox, []
            if self._closing:
                return
            live += [run for run in arrived if run.claim()]
            if live:
                nearest = min(run.deadline for run in live)
                self.client.drive([run.batch for run in live], nearest)
                now = time.monotonic()
                live = [run for run in live if self._goes_on(run, now)]

    def _goes_on(self, run: Driven, now: float) -> bool:
        if run.batch.result != self.ucp.RUNNING:
            return run.settle()
        if now >= run.deadline:
            run.expire()
        return True


class _Registered:
    """A memory handle of UCX, closed with its last reference."""

    __slots__ = ("__weakref__", "handle", "key")

    def __init__(self, handle: "_ucp.MemoryHandle") -> None:
        self.handle = handle
        self.key = handle.key
