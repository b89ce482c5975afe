"""An owner of memory as UCX reaches it."""

import functools
import itertools
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skipper.dataplane import memfd
from skipper.dataplane.atomic import Atomic, AtomicKind, FetchOperation
from skipper.dataplane.backends.base import Peer, Remote, Transfer
from skipper.dataplane.backends.ucx import packed
from skipper.dataplane.backends.ucx.admission import Contact
from skipper.dataplane.backends.ucx.connection import Abandoned, Connection, Keys, Unpacked
from skipper.dataplane.backends.ucx.engine import Engine
from skipper.dataplane.backends.ucx.lane import Lane
from skipper.dataplane.backends.ucx.run import SPIN_S, AtomicRun, Batches, Run
from skipper.dataplane.backends.ucx.segments import Segments
from skipper.dataplane.backends.ucx.transfer import UcxTransfer
from skipper.dataplane.copying import INLINE_BYTES
from skipper.dataplane.epochs import PAGE_BYTES, WORD
from skipper.dataplane.errors import BackendUnavailableError, DescriptorError, OwnerDiedError, TransferError
from skipper.dataplane.handle import ADDRESSES, UCX, Card, Handle, unpack_section
from skipper.dataplane.identity import OwnerId, ProcessWatch, host_id
from skipper.dataplane.layout import Rows
from skipper.dataplane.operation import DONE, Operation
from skipper.dataplane.regions import HOST, Region

if TYPE_CHECKING:
    from skipper.dataplane.backends.ucx import _ucp

CARD = struct.Struct("<QI")
"""Epoch page: address, descriptor; then, by `ucx_packed`, its key, the contact (see `ucx_admission`), and the worker's
address with its segments."""

_UNREACHABLE = -6  # UCS_ERR_UNREACHABLE of ucs/type/status.h
_NOTHING_IN_COMMON = (
    "the two have no transport of UCX in common. Over TCP both must name network devices, and where one chooses its "
    "transports (TLS) the other must have one of them: dataplane.configure(ucx={...})"
)

_FIRST, _SECOND = (0,), (1,)
_LANE_BYTES = 4 << 20  # for less it is not worth waking a further thread


class UcxPeer(Peer):
    """One owner, with the connections to it."""

    backend = "ucx"

    def __init__(self, engine: Engine, card: Card) -> None:
        self.engine = engine
        self.owner: OwnerId = card.owner
        section = _parse_card(card)
        self._worker_address = address = section.worker
        self._obstacle = engine.segments.obstacle(Segments.after(address))
        # Within the host the kernel knows at once what UCX may take long to find out.
        self._watch = ProcessWatch(card.owner) if card.owner.host == host_id() else None
        self._contact = section.contact
        self._lock = threading.Lock()
        self._abandoned = Abandoned()
        self._connections: list[Connection] = []
        self._widen(0)
        self._next_lane = itertools.count()
        self._pages: dict[int, memfd.Mapping | None] = {}

    @property
    def asks_first(self) -> bool:
        """Whether it has to let this process in before a connection is made, which may take its time."""
        return self._contact is not None

    def usable(self) -> bool:
        """Whether the owner is not known to be dead; a broken connection is renewed at the next use."""
        return self._watch is None or not self._watch.gone

    def close(self) -> None:
        """See `Peer`."""
        with self._lock:
            connections = list(self._connections)
            self._pages.clear()
        for connection in connections:
            connection.close()

    def resolve(self, handle: Handle) -> Remote:
        """See `Peer`. Nothing is sent: UCX has no way to ask."""
        card = _parse_card(handle.card)
        if (handle.slot + 1) * WORD > PAGE_BYTES:
            raise DescriptorError(f"the handle of {handle} reaches beyond the owner's memory")
        page = self._page_here(card.page_fd, handle.card.page_token)
        far_word = card.page_address + handle.slot * WORD
        word = far_word if page is None else page.address + handle.slot * WORD
        (key,) = packed.unpack(handle.sections[UCX], 1)
        packed.require_key(key)
        return Remote(handle, handle.base, word, Keys((key, card.page_key), page, far_word))

    def copy(self, local: Region, remote: Remote, offset: int, *, to_remote: bool, timeout: float) -> Operation:
        """See `Peer`."""
        address = remote.address + offset
        deadline = time.monotonic() + timeout
        small = local.nbytes <= INLINE_BYTES
        try:
            if small and local.kind is HOST:
                way, lane = self._way(remote, deadline)
                batch = way.copy(to_remote, local.address, address, local.nbytes, SPIN_S, deadline)
                if batch is None:
                    return DONE
                batches: Batches = ((lane, batch),)
            else:
                batches = self._copies(local, remote, address, to_remote, deadline)
                if small:
                    batches[0][1].advance(SPIN_S, deadline)
        except TransferError as error:
            return Operation.failed(error)
        operation = Operation(1)
        again = functools.partial(self._copies, local, remote, address, to_remote, deadline)
        run = Run(self, again, (remote,), (local,), deadline, operation.part_done)
        helper = run.begin(batches, begun=small)
        if helper is not None:
            operation.add_helper(helper)
        return operation

    def compile(self, rows: Rows, remotes: Sequence[Remote], locals_: Sequence[Region], *, to_remote: bool) -> Transfer:
        """See `Peer`."""
        return UcxTransfer(self, rows, tuple(remotes), tuple(locals_), to_remote)

    def atomic(self, remote: Remote, offset: int, atomic: Atomic, *, timeout: float) -> FetchOperation:
        """See `Peer`. The owner's UCX thread does it, by an instruction of its CPU."""
        keys: Keys = remote.key
        if remote.handle.kind is not HOST:
            message = f"UCX does atomic operations on host memory only, and that of {remote.handle} is not"
            return FetchOperation.failed(BackendUnavailableError(message))

        deadline = time.monotonic() + timeout

        def make() -> Batches:
            _, (endpoint, _, lane) = self.connected(0, keys, deadline)
            batch: _ucp.Batch = self.engine.ucp.Batch.atomic(
                endpoint,
                atomic.kind is AtomicKind.COMPARE_AND_SWAP,
                remote.address + offset,
                atomic.operand,
                atomic.compare,
                keys.far_word,
                remote.handle.epoch,
            )
            return [(lane, batch)]

        try:
            batches = make()
        except TransferError as error:
            return FetchOperation.failed(error)
        operation = FetchOperation()
        run = AtomicRun(self, make, (remote,), (), deadline, operation.part_done)
        run.operation = operation
        batches[0][1].advance(SPIN_S, deadline)
        run.begin(batches, begun=True)
        return operation

    def spread(self, nbytes: int) -> Sequence[int]:
        """The lanes that are to carry so much: the first alone, or some of the others together."""
        if nbytes < 2 * _LANE_BYTES:
            return _FIRST
        if self._watch is None or any(connection.emulated for connection in self._connections):
            return _SECOND  # the owner's one UCX thread is the bottleneck: several sockets only get in its way
        width = self.engine.width
        count = min(width, nbytes // _LANE_BYTES)
        if count == width:
            return range(1, width + 1)
        first = next(self._next_lane)
        return [1 + (first + i) % width for i in range(count)]

    def connected(self, number: int, keys: Keys, deadline: float) -> "tuple[Connection, Unpacked]":
        """A lane's connection, made if there is none that works, with these keys unpacked for it.

        Raises:
            OwnerDiedError: The owner is gone.
            TransferError: No connection can be made.
            TransferTimeoutError: The deadline (CLOCK_MONOTONIC) passed before the owner had answered.
        """
        try:
            if number >= len(self._connections):
                self._widen(number)
            connection = self._connections[number]
            unpacked = connection.ready(keys, self._require_owner, deadline)
        except self.engine.ucp.UcxError as error:
            unreachable = error.status == _UNREACHABLE
            raise self.failure(_NOTHING_IN_COMMON if unreachable else str(error), error.status) from error
        if self._obstacle is not None and connection.over_tcp:
            raise TransferError(f"{self.owner} cannot be reached over TCP: {self._obstacle}")
        return connection, unpacked

    def cut(self, endpoint: "_ucp.Endpoint") -> None:
        """Close a connection by force: what is on it comes to its end, and nothing of it counts any more."""
        endpoint.close()
        self._abandoned.note(endpoint.number)

    def wait_for_exit(self) -> bool:
        """Whether the owner is gone, after giving a dying one a moment."""
        return self._watch is not None and self._watch.gone_soon()

    def failure(self, text: str, status: int) -> TransferError:
        """The error for a failure that is final. Beyond this host nobody can tell a dead owner from a cut network."""
        if self._watch is None:
            return OwnerDiedError(f"{self.owner} is gone or cannot be reached: {text}", status=status)
        if self.wait_for_exit():
            return OwnerDiedError(f"{self.owner} is gone", status=status)
        return TransferError(f"the transfer with {self.owner} failed: {text}", status=status)

    def _require_owner(self) -> None:
        if not self.usable():
            raise OwnerDiedError(f"{self.owner} is gone")

    def _widen(self, number: int) -> None:
        with self._lock:
            while len(self._connections) <= number:
                lane = self.engine.lane(len(self._connections))
                connection = Connection(
                    self.engine.ucp,
                    lane,
                    self._worker_address,
                    self._contact,
                    self.engine.wire_up_keys,
                    self._abandoned,
                    functools.partial(self.engine.lane_instead, len(self._connections)),
                    far=self._watch is None,
                )
                self._connections.append(connection)

    def _way(self, remote: Remote, deadline: float) -> "tuple[_ucp.Way, Lane]":
        """That of short copies to and from host memory, as it is now, and its lane.

        Raises:
            OwnerDiedError: The owner is gone.
            TransferError: No connection can be made.
            TransferTimeoutError: The deadline passed before the owner had answered.
        """
        keys: Keys = remote.key
        known = keys.way
        told = self._abandoned.count
        if known is None or keys.way_told != told or not known[0].usable:
            connection, (endpoint, unpacked, lane) = self.connected(0, keys, deadline)
            by_message = remote.handle.kind is HOST and connection.emulated
            word = keys.far_word if by_message else remote.word
            here, expected = keys.page is not None, remote.handle.epoch
            way = self.engine.ucp.Way(endpoint, unpacked, word, expected, here, by_message)
            known = keys.way = way, lane
            keys.way_told = told
        return known

    def _copies(self, local: Region, remote: Remote, address: int, to_remote: bool, deadline: float) -> Batches:
        """One contiguous copy, as its lanes carry it."""
        ucp, nbytes = self.engine.ucp, local.nbytes
        keys: Keys = remote.key
        here, expected = keys.page is not None, remote.handle.epoch
        on_host = local.kind is HOST and remote.handle.kind is HOST
        numbers = self.spread(nbytes)
        if len(numbers) == 1:
            connection, (endpoint, unpacked, lane) = self.connected(numbers[0], keys, deadline)
            by_message = on_host and connection.emulated
            batch = ucp.Batch.single(
                endpoint,
                unpacked,
                to_remote,
                local.kind,
                local.address,
                address,
                nbytes,
                keys.far_word if by_message else remote.word,
                expected,
                here,
                by_message,
            )
            return ((lane, batch),)
        share = ucp.Share.single(local.address, address, nbytes)
        batches = []
        for number in numbers:
            connection, (endpoint, unpacked, lane) = self.connected(number, keys, deadline)
            by_message = on_host and connection.emulated
            batch = ucp.Batch(endpoint, unpacked, share, to_remote, local.kind, here, by_message)
            batch.guard(keys.far_word if by_message else remote.word, expected)
            batches.append((lane, batch))
        return batches

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


@dataclass(frozen=True, slots=True)
class _Section:
    """What a card says for UCX."""

    page_address: int
    page_fd: int
    page_key: bytes
    contact: Contact | None
    worker: bytes


def _parse_card(card: Card) -> _Section:
    section = card.sections[UCX]
    page_address, page_fd = unpack_section(CARD, section, "UCX")
    if page_address + PAGE_BYTES > ADDRESSES:
        raise DescriptorError(f"this buffer handle has its epoch page at {page_address:#x}, where no memory can be")
    key, contact, worker = packed.unpack(section[CARD.size :], 3)
    packed.require_key(key)
    if not worker:
        raise DescriptorError("this buffer handle has a damaged section for UCX")
    return _Section(page_address, page_fd, key, Contact.parse(contact), worker)
