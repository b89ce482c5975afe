"""UCX in one process: the library, its context, its workers and their threads.

The *server* worker serves peers: a daemon thread progresses it and sleeps in between. *Client* workers run the
operations of this process: one for short operations, so that none waits behind a large copy, and as many as there are
copy threads for large ones, which divide the bytes among them. A short operation runs in the thread that submits it. If
it is not over after a brief spin, the thread of its client worker drives it to its end; that thread also checks the
deadlines. All of this starts with the first use, so that a process that only copies within memory never pays for it.
"""

import atexit
import contextlib
import ctypes
import fnmatch
import importlib.util
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from skipper.dataplane import memfd
from skipper.dataplane.array_ends import call_before_end
from skipper.dataplane.backends.handshake import WireUpKeys
from skipper.dataplane.backends.ucx.admission import AdmissionServer
from skipper.dataplane.backends.ucx.card import Traits
from skipper.dataplane.backends.ucx.wheels import installed_wheels
from skipper.dataplane.config import HOST_VARIABLE, Config
from skipper.dataplane.epochs import Epoch
from skipper.dataplane.errors import BackendUnavailableError, ConfigurationError, RegistrationError
from skipper.dataplane.identity import limit_hint
from skipper.dataplane.regions import HOST, MemoryKind, Region, Storage
from skipper.trust import own_sockets, socket_filter
from skipper.trust.own_sockets import SocketPlace

if TYPE_CHECKING:
    from skipper.dataplane.backends.ucx import _ucp

_IDLE_S = 3600.0
_JOIN_S = 5.0
_LOOK_S = 0.1  # between two checks whether the owners of current operations still live
_WITHOUT_TCP = "^sysv,tcp"
"""The transports for use only within a host. UCX's TCP port requires no proof: any process that finds it may read and
write everything that its owner can. Peers of one host would need TCP only to detect each other's failures; posix does
that, too."""
_WITHOUT_TCP_SINCE = (1, 22, 0)
"""1.13 ignores the option for posix if it is set in code. The versions between have not been tried."""

# Each is set if the environment does not set it and the library knows it.
_DEFAULTS = {
    # With peer error handling UCX would otherwise give up zero-copy within a host (CMA) and emulate every get over TCP.
    "RNDV_THRESH": "inf",
    # Nothing may listen beyond this host unless the user wants it.
    "NET_DEVICES": "lo",
    # The address of a host of virtual machines belongs to a bridge. Devices are named, so this admits no others.
    "TCP_BRIDGE_ENABLE": "y",
    # System V segments are open to the owner's group.
    "TLS": "^sysv",
    # So that processes of one host do not need TCP.
    "POSIX_ERROR_HANDLING": "y",
    # Connecting must not block, or a silent host would break deadlines. And a connection that is refused at once leaks
    # its socket.
    "TCP_CONN_NB": "y",
    # So that one of our messages fits into a segment: fewer system calls for the same bytes.
    "TCP_TX_SEG_SIZE": "256k",
    "TCP_RX_SEG_SIZE": "256k",
    # A copy within the host is one system call per posted piece, not one per 512 KiB with a poll of all sockets in
    # between; many short copies are done between two such polls.
    "CMA_SEG_SIZE": "16m",
    "CMA_TX_QUOTA": "16",
}
# Before 1.14, closing an endpoint with keepalive before it is connected aborts the process, by an assertion that
# openucx/ucx#8175 removed. Deadlines need such closing, and they also detect what keepalive would.
_KEEPALIVE_SINCE = (1, 14, 0)
_LIBRARY = "libucp.so.0"
_SHARED_MEMORY = frozenset({"all", "shm", "sm", "mm", "posix", "cma", "xpmem", "knem"})
_LOG_LEVEL = "LOG_LEVEL"
_DESCRIPTORS = 48  # for two workers with one TCP connection each, and UCX's own thread


class Driven(Protocol):
    """Part of an operation, which the thread of a client worker drives."""

    batch: "_ucp.Batch"
    deadline: float

    def claim(self) -> bool:
        """Whether the caller may drive it: only one thread may."""

    def settle(self) -> None:
        """Called when the batch is over."""

    def look(self) -> None:
        """Called from time to time before that, to end the batch if its owner is gone."""

    def expire(self) -> None:
        """Called once when the deadline has passed: make the batch end soon."""


class ClientWorker:
    """One worker. Its thread starts with the first batch that it gets. Thread-safe.

    Attributes:
        worker: UCX's own object.
        running: The result of a batch that is not over.
        sources: The addresses from which it connects over TCP.
    """

    def __init__(
        self, worker: "_ucp.UcpWorker", name: str, running: int, sources: tuple[SocketPlace, ...] = ()
    ) -> None:
        self.worker = worker
        self.running = running
        self.sources = sources
        self._condition = threading.Condition()
        self._inbox: list[Driven] = []
        self._closing = False
        self._retired = False
        self._users = 0
        self._name = name
        self._thread: threading.Thread | None = None

    def adopt(self, run: Driven) -> None:
        """Make this worker's thread drive a run to its end."""
        thread = None
        with self._condition:
            self._inbox.append(run)
            if self._thread is None:
                thread = self._thread = threading.Thread(target=self._drive, name=self._name, daemon=True)
            self._condition.notify()
        if thread is not None:
            # Without the lock: a garbage collection in that thread, before it has begun, may call `_left`.
            thread.start()
        self.worker.wake()

    def join(self, user: object) -> Callable[[], object]:
        """Count a connection that uses it, until that is collected or calls the returned function."""
        with self._condition:
            self._users += 1
        leave = weakref.finalize(user, self._left)
        leave.atexit = False
        return leave

    def _left(self) -> None:
        with self._condition:
            self._users -= 1
            self._condition.notify()

    def retire(self) -> None:
        """Another worker replaces it. Its thread and UCX's worker end once no connection uses them."""
        self.worker.retire()
        with self._condition:
            self._retired = True
            self._condition.notify()

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        with self._condition:
            self._closing = True
            self._condition.notify()
            thread = self._thread
        self.worker.wake()
        if thread is not None and thread.is_alive():
            thread.join(_JOIN_S)

    def _drive(self) -> None:
        live: list[Driven] = []
        while True:
            with self._condition:
                while not (self._inbox or live or self._closing or self._deserted):
                    self._condition.wait(_IDLE_S)
                if self._deserted and not (self._inbox or live):
                    self._thread = None
                    return
                arrived, self._inbox = self._inbox, []
            if self._closing:
                return
            live += [run for run in arrived if run.claim()]
            if live:
                nearest = min(run.deadline for run in live)
                self.worker.drive([run.batch for run in live], min(nearest, time.monotonic() + _LOOK_S))
                now = time.monotonic()
                live = [run for run in live if self._goes_on(run, now)]

    @property
    def _deserted(self) -> bool:
        return self._retired and not self._users

    def _goes_on(self, run: Driven, now: float) -> bool:
        if run.batch.result != self.running:
            run.settle()
            return False
        if now >= run.deadline:
            run.expire()
        else:
            run.look()
        return True


def find_library(configured: str | None) -> str:
    """Path or name of the libucp to load: as configured, the one in this process, the wheel's, or the loader's."""
    if configured is not None:
        return configured
    loaded = _loaded()
    if loaded is not None:
        return str(loaded)
    spec = importlib.util.find_spec("libucx")
    if spec is not None and spec.origin is not None:
        library = Path(spec.origin).parent / "lib" / _LIBRARY
        if library.exists():
            return str(library)
    return _LIBRARY


def _loaded() -> Path | None:
    """The libucp of the UCX that this process has loaded already: MPI, and torch with it, may do so.

    A process can have only one: UCX's libraries find each other by soname, so a second libucp would use the libucs of
    the first.
    """
    try:
        # The loader is asked first: reading the list of mappings takes a millisecond.
        ctypes.CDLL("libucs.so.0", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        found = re.search(r"/.*/(?=libuc[sp]\.so\.0)", Path("/proc/self/maps").read_text())
    except OSError:
        return None  # there is none, or it cannot be found out
    library = Path(found[0], _LIBRARY) if found is not None else None
    return library if library is not None and library.exists() else None


def has_cuda_modules(library: str) -> bool:
    """Whether this UCX has its modules for CUDA memory; whether they load depends on the driver."""
    return any((Path(library).parent / "ucx").glob("libuct_cuda.so*"))


def load(library: str) -> ModuleType:
    """Load the requested libucp, then the binding, which finds the loaded one by its soname.

    Raises:
        BackendUnavailableError: There is no such library, or the binding was not built.
    """
    try:
        ctypes.CDLL(library)
        from skipper.dataplane.backends.ucx import _ucp
    except (OSError, ImportError) as error:
        loaded = _loaded()
        other = (
            f" This process has loaded {loaded} already, and a process can load only one." if loaded is not None else ""
        )
        raise BackendUnavailableError(
            f"UCX cannot be loaded: {error}.{other} Install it ({installed_wheels().command}), or name a libucp.so.0 "
            "by dataplane.configure(ucx_library=...)"
        ) from error
    return _ucp


def options(config: Config, version: tuple[int, int, int]) -> dict[str, str]:
    """The options to set in code: the caller's, and our defaults if neither caller nor environment sets them."""
    chosen = dict(_DEFAULTS)
    names_devices = "NET_DEVICES" in config.ucx or "UCX_NET_DEVICES" in os.environ
    if not names_devices and version >= _WITHOUT_TCP_SINCE:
        chosen["TLS"] = _WITHOUT_TCP
    if version < _KEEPALIVE_SINCE:
        chosen["KEEPALIVE_INTERVAL"] = "inf"
    chosen = {name: value for name, value in chosen.items() if f"UCX_{name}" not in os.environ}
    chosen.update(config.ucx)
    return chosen


def may_listen(chosen: Mapping[str, str]) -> bool:
    """Whether the options let UCX open a TCP port; if they do not say, it may."""
    named = _transports(chosen)
    if named.startswith("^"):
        return "tcp" not in named[1:].split(",")
    patterns = [name.strip().lstrip("\\").partition(":")[0] for name in named.split(",")]
    return "all" in patterns or any(fnmatch.fnmatchcase("tcp", pattern) for pattern in patterns)


def lacks_shared_memory(chosen: Mapping[str, str], version: tuple[int, int, int]) -> bool:
    """Whether, according to the options, processes of this host also reach this one over TCP.

    A process that finds it out later only needs longer to connect.
    """
    named = _transports(chosen)
    return version < _WITHOUT_TCP_SINCE or not (named.startswith("^") or _SHARED_MEMORY.intersection(named.split(",")))


def _transports(chosen: Mapping[str, str]) -> str:
    """The transports for UCX: names or patterns, separated by commas; after a ^, those that it must not use."""
    return chosen.get("TLS", os.environ.get("UCX_TLS", "all"))


def check_options(config: Config) -> None:
    """Check that UCX knows the caller's options. Loads the library, starts nothing.

    Raises:
        ConfigurationError: It does not know one of them, or its value.
    """
    try:
        ucp = load(find_library(config.ucx_library))
    except BackendUnavailableError:
        return  # the first use raises the reason
    taken = {_LOG_LEVEL, *ucp.taken(dict(config.ucx))}
    for name, value in config.ucx.items():
        if name not in taken:
            version = ".".join(map(str, ucp.library_version()))
            raise ConfigurationError(f"UCX {version} has no option {name} that can be {value!r} (see ucx_info -cf)")


class UcxEngine:
    """UCX, started. Thread-safe.

    Attributes:
        ucp: The binding.
        wire_up_keys: The argument.
        address: Of the server worker, for peers.
        contact: Where peers ask for access to its TCP port; None if it has none.
        traits: What peers need to know about this process's UCX.
        memory_types: Bit mask of the memory types that it can move.
        width: Client workers that a large operation may use.
    """

    def __init__(self, config: Config, wire_up_keys: WireUpKeys) -> None:
        """Load and initialise the library, start the server.

        Args:
            config: With UCX's options.
            wire_up_keys: For the handshakes that let peers connect over TCP.

        Raises:
            BackendUnavailableError: It cannot be loaded, or refuses an option, or its port could not be closed to
                others.
        """
        ucp = load(find_library(config.ucx_library))
        _require_descriptors()
        ucp.guard()
        ucp.guard_bells()
        self.ucp = ucp
        self.wire_up_keys = wire_up_keys
        self.width = config.threads
        chosen = options(config, ucp.library_version())
        # UCX would repeat the typed errors on stderr, once per request.
        level = chosen.pop(_LOG_LEVEL, None if "UCX_LOG_LEVEL" in os.environ else "fatal")
        taken = {*config.ucx, *ucp.taken(chosen)}
        chosen = {name: value for name, value in chosen.items() if name in taken}
        self._may_listen = may_listen(chosen)
        if self._may_listen and (obstacle := socket_filter.obstacle()):
            raise BackendUnavailableError(f"UCX's TCP port would be open to all users: {obstacle}")
        self.traits = Traits.of(chosen, ucp.library_version())
        try:
            if level is not None:
                ucp.set_global_option(_LOG_LEVEL, level)
            self._context: _ucp.UcpContext = ucp.UcpContext(chosen)
            within_host = lacks_shared_memory(chosen, ucp.library_version())
            with self._new_worker() as (self._server, self.address, listeners):
                self._admission = _admission(listeners, wire_up_keys, within_host=within_host)
            self._exports: _ucp.Exports = ucp.Exports()
            self._server.answer(self._exports)
            self._clients = [self._new_client(0)]
        except ucp.UcxError as error:
            raise BackendUnavailableError(f"UCX does not start with {chosen}: {error}") from error
        self.contact = None if self._admission is None else self._admission.contact
        self.memory_types = self._context.memory_types()
        self._pid = os.getpid()
        self._memory: dict[tuple[int, int, int], weakref.ref[_MemoryHandle]] = {}
        self._anchored: dict[tuple[int, int, int], _MemoryHandle] = {}
        self._pages: dict[int, _MemoryHandle] = {}
        self._retired: weakref.WeakSet[ClientWorker] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._server.serve, name="dataplane-ucx-server", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def client(self, number: int) -> ClientWorker:
        """A client worker: number 0 is for short operations; the others are for large ones, made when first needed.

        Raises:
            UcxError: There cannot be another worker.
        """
        if number < len(self._clients):
            return self._clients[number]
        with self._lock:
            while len(self._clients) <= number:
                self._clients.append(self._new_client(len(self._clients)))
            return self._clients[number]

    def replace_client(self, number: int, used: ClientWorker) -> ClientWorker:
        """A worker with that number other than `used`: the present one, or a new one in place of `used`.

        Raises:
            UcxError: There cannot be another worker.
        """
        with self._lock:
            if self._clients[number] is used:
                self._clients[number] = self._new_client(number)
                self._retired.add(used)
                used.retire()
            return self._clients[number]

    def register(self, storage: Storage, region: Region) -> "_MemoryHandle":
        """Register a region; the storage around it is registered once, while the storage lives.

        Raises:
            RegistrationError: UCX refuses, for example at the limit of locked memory.
        """
        key = (storage.address, storage.nbytes, region.kind)
        reference = self._memory.get(key)
        known = None if reference is None else reference()
        if known is None:
            known = self._map(storage.address, storage.nbytes, region.kind)
            self._memory[key] = weakref.ref(known)
            if storage.anchor is not None:
                self._anchored[key] = known
                call_before_end(storage.anchor, self._anchored.pop, key, None)
        return known

    def register_page(self, page: memfd.Mapping) -> "_MemoryHandle":
        """Register a page of epoch words, for ever."""
        known = self._pages.get(page.token)
        if known is not None:
            return known
        with self._lock:
            known = self._pages.get(page.token)
            if known is None:
                known = self._map(page.address, page.nbytes, HOST)
                self._exports.cover(page.address, page.nbytes)
                self._pages[page.token] = known
            return known

    def expose(self, epoch: Epoch, region: Region, *, writable: bool) -> bool:
        """Let peers use host memory in messages, once its page of words is registered. Returns whether that is new."""
        return self._exports.add(epoch.address, epoch.value, region.address, region.nbytes, writable)

    def conceal(self, epoch: Epoch) -> None:
        """Undo `expose`. After this returns, no message touches the memory any more."""
        self._exports.remove(epoch.address, epoch.value)

    def close(self) -> None:
        """Stop all threads; for the end of the process. Idempotent.

        Contexts and workers stay until the end of the process: a daemon thread of the caller may be using them.
        """
        if self._closing or os.getpid() != self._pid:
            return
        self._closing = True
        for client in [*self._clients, *self._retired]:
            client.close()
        if self._admission is not None:
            self._admission.close()
        self._server.stop()
        self._thread.join(_JOIN_S)

    def _new_client(self, number: int) -> ClientWorker:
        with self._new_worker() as (worker, _, listeners):
            sources = _stop_listening(listeners)
        return ClientWorker(worker, f"dataplane-ucx-client-{number}", self.ucp.RUNNING, sources)

    @contextlib.contextmanager
    def _new_worker(self) -> "Iterator[tuple[_ucp.UcpWorker, bytes, dict[int, SocketPlace]]]":
        """A worker, its address, and the descriptors on which it listens. The next worker waits for the block's end."""
        if not self._may_listen:
            worker = self.ucp.UcpWorker(self._context)
            yield worker, worker.address(), {}
            return
        with _opening:
            known = own_sockets.descriptors()
            worker = self.ucp.UcpWorker(self._context)
            address = worker.address()
            yield worker, address, _listeners(known, address)

    def _map(self, address: int, nbytes: int, kind: MemoryKind) -> "_MemoryHandle":
        try:
            return _MemoryHandle(self.ucp.MemoryHandle(self._context, address, nbytes, int(kind)))
        except self.ucp.UcxError as error:
            raise RegistrationError(
                f"UCX cannot register {nbytes} bytes of {kind.name.lower()} memory: {error}. "
                "Where a network card is in use, see the limit of locked memory (ulimit -l)"
            ) from error


def _require_descriptors() -> None:
    """Check that descriptors are left: UCX ends the process if it finds none for its own thread."""
    found: list[int] = []
    try:
        found.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        while len(found) < _DESCRIPTORS:
            found.append(os.dup(found[0]))
    except OSError as error:
        raise BackendUnavailableError(
            f"UCX needs some {_DESCRIPTORS} file descriptors to start: {error.strerror}{limit_hint(error)}"
        ) from error
    finally:
        for descriptor in found:
            os.close(descriptor)


_opening = threading.Lock()
"""Held while a worker is made, so that new sockets belong to that worker."""


def _listeners(known: Mapping[int, int], address: bytes) -> dict[int, SocketPlace]:
    """The descriptors on which a new worker listens on TCP; UCX tells its peers, but not its caller."""
    return {
        fd: place
        for fd, place in own_sockets.listening(known).items()
        if place.port.to_bytes(2, "big") in address  # otherwise another thread of this process has begun to listen
    }


def _stop_listening(listeners: Mapping[int, SocketPlace]) -> tuple[SocketPlace, ...]:
    """Close the port of a worker that only connects to others. Returns the addresses from which it will connect.

    The worker keeps the port number while it lives. UCX identifies connections by it: a second worker with the same
    number would be taken for the first, and never get an answer.
    """
    places = tuple(listeners.values())
    for fd, place in listeners.items():
        version_4 = place.address.ipv4_mapped
        with socket.socket(socket.AF_INET6 if version_4 is None else socket.AF_INET) as keeper:
            os.dup2(keeper.fileno(), fd, inheritable=False)  # UCX holds the descriptor, and closes it at the end
            with contextlib.suppress(OSError):  # another socket has taken the number since
                keeper.bind((str(version_4 or place.address), place.port))
    if listeners:
        own_sockets.disown(places)
    return places


def _admission(
    listeners: Mapping[int, SocketPlace], wire_up_keys: WireUpKeys, *, within_host: bool
) -> AdmissionServer | None:
    """Close the port of a worker that serves peers until it admits them. None if the worker has no port.

    The worker has not been progressed so far, so nothing was read from peers that have connected already.
    """
    if not listeners:
        return None
    copies = [socket.socket(fileno=os.dup(fd)) for fd in listeners]
    for copy in copies:
        socket_filter.admit(copy, ())
        _refuse_queued(copy)
    places = tuple(listeners.values())
    own_sockets.disown(places)
    hosts = [str(place.address.ipv4_mapped or place.address) for place in places]
    beyond = [host for place, host in zip(places, hosts, strict=True) if not _is_loopback(place)]
    told = os.environ.get(HOST_VARIABLE, "")
    try:
        address = told if told in hosts else [*beyond, *hosts][0]
        return AdmissionServer(copies, address, wire_up_keys, within_host=within_host)
    except BaseException:
        for copy in copies:
            copy.close()
        raise


def _refuse_queued(listener: socket.socket) -> None:
    """Close connections that were made before the filter was there. UCX's sockets do not block."""
    while True:
        try:
            listener.accept()[0].close()
        except OSError:
            return


def _is_loopback(place: SocketPlace) -> bool:
    return (place.address.ipv4_mapped or place.address).is_loopback


class _MemoryHandle:
    """Memory registered with UCX. Its handle is closed with the last reference."""

    __slots__ = ("__weakref__", "handle", "key")

    def __init__(self, handle: "_ucp.MemoryHandle") -> None:
        self.handle = handle
        self.key = handle.key
