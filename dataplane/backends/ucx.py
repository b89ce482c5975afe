"""Any memory, any process that UCX reaches: CMA within a host, TCP or RDMA beyond it, CUDA where UCX has it.

UCX itself protects nothing: it reads and writes wherever a request points to. So bounds are checked before a request is
made, and the epoch words are looked at around every transfer: in the owner's page where it can be mapped (within the
host), else by requests of their own.
"""

import struct
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dataplane import memfd
from dataplane.backends.base import Backend, BackendStatus, Done, Peer, Remote, Transfer
from dataplane.backends.ucx_engine import Engine, find_library, load
from dataplane.backends.ucx_run import SPIN_S, Run
from dataplane.config import Config
from dataplane.copying import INLINE_BYTES
from dataplane.epochs import PAGE_BYTES, WORD
from dataplane.errors import (
    BackendUnavailableError,
    ConfigurationError,
    DescriptorError,
    OwnerDiedError,
    TransferError,
)
from dataplane.handle import UCX, Card, Handle, Sections, unpack_section
from dataplane.identity import OwnerId, ProcessWatch, host_id
from dataplane.layout import Rows, row_bytes
from dataplane.memory import MemoryKind, Region
from dataplane.operation import DONE, Helper, Operation
from dataplane.registration import Registration

if TYPE_CHECKING:
    from dataplane.backends import _ucp

_CARD = struct.Struct("<QIH")  # epoch page: address, descriptor, length of its key; then the key, the worker address
_KEYS = 16384  # unpacked keys kept per connection
_EXIT_S = 0.05  # a socket closes a moment before its process counts as gone


class UcxBackend(Backend):
    """libucp, loaded and started when it is first needed."""

    name = "ucx"
    number = UCX
    memory_kinds = frozenset(MemoryKind)

    def __init__(self, config: Config, *, forbidden: bool) -> None:
        self._config = config
        self._forbidden = forbidden
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._exports: weakref.WeakKeyDictionary[Registration, tuple[Sections, object]] = weakref.WeakKeyDictionary()

    @property
    def ran(self) -> bool:
        """Whether UCX was started in this process, or in one that this was forked from."""
        return self._forbidden or self._engine is not None

    def configure(self, config: Config) -> None:
        """Take over a new configuration.

        Raises:
            ConfigurationError: UCX runs already with other options.
        """
        changed = (config.ucx, config.ucx_library) != (self._config.ucx, self._config.ucx_library)
        if changed and self._engine is not None:
            raise ConfigurationError("UCX runs already in this process; configure its options before its first use")
        self._config = config

    def status(self) -> BackendStatus:
        """Loads the library if need be, starts nothing."""
        if self._forbidden:
            return BackendStatus(self.name, False, _FORKED)
        library = find_library(self._config.ucx_library)
        try:
            version = load(library).library_version()
        except BackendUnavailableError as error:
            return BackendStatus(self.name, False, str(error))
        where = f"UCX {'.'.join(map(str, version))} from {library}"
        if self._engine is None:
            return BackendStatus(self.name, True, f"{where}, not started", ("host",))
        kinds = tuple(kind.name.lower() for kind in MemoryKind if self._engine.memory_types >> kind & 1)
        return BackendStatus(self.name, True, f"{where}, running", kinds)

    def engine(self) -> Engine:
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
                self._engine = Engine(self._config)
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
            page = registration.epoch.page
            page_key = engine.register_page(page).key
            card = _CARD.pack(page.address, page.fd, len(page_key)) + page_key + engine.address
            known = self._exports[registration] = ((card, memory.key), memory)
        return known[0]

    def close(self) -> None:
        """Shut UCX down. Idempotent."""
        if self._engine is not None:
            self._engine.close()


_FORKED = "this process was forked from one that used UCX, which does not survive a fork; start it by spawn instead"


class UcxPeer(Peer):
    """One owner, with the connection to it and the keys that were unpacked for that connection."""

    backend = "ucx"

    def __init__(self, engine: Engine, card: Card) -> None:
        self.engine = engine
        self.owner: OwnerId = card.owner
        self._worker_address = _parse_card(card).worker
        # Within the host the kernel knows at once what UCX may take long to find out.
        self._watch = ProcessWatch(card.owner) if card.owner.host == host_id() else None
        self._lock = threading.Lock()
        self._endpoint: _ucp.Endpoint | None = None
        self._unpacked: OrderedDict[bytes, _ucp.RemoteKey] = OrderedDict()
        self._pages: dict[int, memfd.Mapping | None] = {}

    def usable(self) -> bool:
        """Whether the owner is not known to be dead; a broken connection is renewed at the next use."""
        return self._watch is None or not self._watch.gone

    def close(self) -> None:
        """See `Peer`."""
        with self._lock:
            endpoint, self._endpoint = self._endpoint, None
            self._unpacked.clear()
            self._pages.clear()
        if endpoint is not None:
            endpoint.close()

    def resolve(self, handle: Handle) -> Remote:
        """See `Peer`. Nothing is sent: UCX has no way to ask."""
        card = _parse_card(handle.card)
        if (handle.slot + 1) * WORD > PAGE_BYTES:
            raise DescriptorError(f"the handle of {handle} reaches beyond the owner's memory")
        page = self._page_here(card.page_fd, handle.card.page_token)
        far_word = card.page_address + handle.slot * WORD
        word = far_word if page is None else page.address + handle.slot * WORD
        return Remote(handle, handle.base, word, _Keys((handle.sections[UCX], card.page_key), page, far_word))

    def copy(self, local: Region, remote: Remote, offset: int, *, to_remote: bool, timeout: float) -> Operation:
        """See `Peer`."""
        keys: _Keys = remote.key

        def batch() -> "_ucp.Batch":
            endpoint, (key, page_key) = self.connected(keys)
            made: _ucp.Batch = self.engine.ucp.Batch.single(
                endpoint,
                key,
                page_key,
                to_remote,
                local.kind,
                local.address,
                remote.address + offset,
                local.nbytes,
                remote.word,
                remote.handle.epoch,
                keys.page is not None,
            )
            return made

        return self._submit(batch, (remote,), (local,), local.nbytes, timeout)

    def compile(self, rows: Rows, remotes: Sequence[Remote], locals_: Sequence[Region], *, to_remote: bool) -> Transfer:
        """See `Peer`."""
        return UcxTransfer(self, rows, tuple(remotes), tuple(locals_), to_remote)

    def connected(self, keys: "_Keys") -> "tuple[_ucp.Endpoint, tuple[_ucp.RemoteKey, ...]]":
        """The present connection, made if there is none that works, with these keys unpacked for it.

        Raises:
            OwnerDiedError: The owner is gone.
            TransferError: No connection can be made.
        """
        known = keys.unpacked
        if known is not None and known[0] is self._endpoint and known[0].usable:
            return known
        ucp = self.engine.ucp
        with self._lock:
            try:
                endpoint = self._endpoint
                if endpoint is None or not endpoint.usable:
                    if not self.usable():
                        raise OwnerDiedError(f"{self.owner} is gone")
                    self._unpacked.clear()
                    if endpoint is not None:
                        endpoint.close()
                    endpoint = self._endpoint = ucp.Endpoint(self.engine.client, self._worker_address)
                keys.unpacked = endpoint, tuple([self._unpack(endpoint, packed) for packed in keys.packed])
                return keys.unpacked
            except ucp.UcxError as error:
                raise self.failure(str(error), error.status) from error

    def wait_for_exit(self) -> bool:
        """Whether the owner is gone, after giving a dying one a moment."""
        if self._watch is None:
            return False
        end = time.monotonic() + _EXIT_S
        while not self._watch.gone:
            if time.monotonic() > end:
                return False
            time.sleep(_EXIT_S / 50)
        return True

    def failure(self, text: str, status: int) -> TransferError:
        """The error for a failure that is final. Beyond this host nobody can tell a dead owner from a cut network."""
        if self._watch is None:
            return OwnerDiedError(f"{self.owner} is gone or cannot be reached: {text}", status=status)
        if self.wait_for_exit():
            return OwnerDiedError(f"{self.owner} is gone", status=status)
        return TransferError(f"the transfer with {self.owner} failed: {text}", status=status)

    def _unpack(self, endpoint: "_ucp.Endpoint", packed: bytes) -> "_ucp.RemoteKey":
        key = self._unpacked.get(packed)
        if key is None:
            key = self._unpacked[packed] = self.engine.ucp.RemoteKey(endpoint, packed)
            if len(self._unpacked) > _KEYS:
                self._unpacked.popitem(last=False)
        return key

    def _page_here(self, fd: int, token: int) -> memfd.Mapping | None:
        """The owner's epoch page as mapped here: a word then costs a load in place of a round trip. None from afar."""
        if self._watch is None:
            return None
        with self._lock:
            if token not in self._pages:
                try:
                    self._pages[token] = memfd.attach(self.owner, fd, token)
                except BackendUnavailableError:
                    self._pages[token] = None  # another user's process: its words are fetched like its data
            return self._pages[token]

    def _submit(
        self,
        batch: "Callable[[], _ucp.Batch]",
        remotes: tuple[Remote, ...],
        pinned: tuple[Region, ...],
        nbytes: int,
        timeout: float,
    ) -> Operation:
        deadline = time.monotonic() + timeout
        try:
            first = batch()
        except TransferError as error:
            return Operation.failed(error)
        if nbytes <= INLINE_BYTES and first.advance(SPIN_S, deadline) == self.engine.ucp.FINISHED:
            return DONE
        operation = Operation(1)
        run = Run(self, batch, first, remotes, pinned, deadline, operation.part_done)
        helper = run.begin(begun=nbytes <= INLINE_BYTES)
        if helper is not None:
            operation.add_helper(helper)
        return operation


class UcxTransfer(Transfer):
    """Rows for one peer, in the order in which UCX gets them."""

    def __init__(
        self, peer: UcxPeer, rows: Rows, remotes: tuple[Remote, ...], locals_: tuple[Region, ...], to_remote: bool
    ) -> None:
        self._peer = peer
        self._remotes = remotes
        self._locals = locals_
        self._to_remote = to_remote
        self._nbytes = int(row_bytes(rows).sum())
        # Many registrations share a storage and its key, all share the few epoch pages: unpack each once.
        keys: dict[bytes, int] = {}
        of_remote = [keys.setdefault(remote.key.packed[0], len(keys)) for remote in remotes]
        word_keys = [keys.setdefault(remote.key.packed[1], len(keys)) for remote in remotes]
        self._word_keys = np.array(word_keys, dtype=np.int64)
        self._keys = _Keys(tuple(keys))
        # A batch looks at all of its words in the same way.
        self._words_here = all(remote.key.page is not None for remote in remotes)
        words = [remote.word if self._words_here else remote.key.far_word for remote in remotes]
        self._rows = rows.copy()
        self._rows[:, 3] = np.array(of_remote, dtype=np.int64)[rows[:, 3]]
        self._words = np.array(words, dtype=np.uint64)
        self._epochs = np.array([remote.handle.epoch for remote in remotes], dtype=np.uint64)

    def start(self, deadline: float, done: Done) -> Helper | None:
        """See `Transfer`."""
        try:
            first = self._batch()
        except TransferError as error:
            done(error)
            return None
        run = Run(self._peer, self._batch, first, self._remotes, self._locals, deadline, done)
        small = self._nbytes <= INLINE_BYTES
        if small:
            first.advance(SPIN_S, deadline)
        return run.begin(begun=small)

    def _batch(self) -> "_ucp.Batch":
        endpoint, keys = self._peer.connected(self._keys)
        batch: _ucp.Batch = self._peer.engine.ucp.Batch.many(
            endpoint,
            keys,
            self._to_remote,
            self._locals[0].kind,
            self._rows,
            self._words,
            self._word_keys,
            self._epochs,
            self._words_here,
        )
        return batch


@dataclass(slots=True)
class _Keys:
    """Packed keys, and what they were last unpacked to.

    For a single registration also: the page of its epoch word, if it is mapped here, and the word's address over there.
    """

    packed: tuple[bytes, ...]
    page: memfd.Mapping | None = None
    far_word: int = 0
    unpacked: "tuple[_ucp.Endpoint, tuple[_ucp.RemoteKey, ...]] | None" = None


@dataclass(frozen=True, slots=True)
class _Section:
    """What a card says for UCX."""

    page_address: int
    page_fd: int
    page_key: bytes
    worker: bytes


def _parse_card(card: Card) -> _Section:
    section = card.sections[UCX]
    page_address, page_fd, length = unpack_section(_CARD, section, "UCX")
    key = section[_CARD.size : _CARD.size + length]
    worker = section[_CARD.size + length :]
    if len(key) < length or not worker:
        raise DescriptorError("this buffer handle has a damaged section for UCX")
    return _Section(page_address, page_fd, key, worker)
