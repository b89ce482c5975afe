"""One owner as this process reaches it over verbs: its connection, and the programs made for it."""

import functools
import logging
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence

from skipper.dataplane.atomic import Atomic, FetchOperation
from skipper.dataplane.backends.base import Done, Peer, Remote, Transfer
from skipper.dataplane.backends.verbs.chain import Program, compile_atomic, compile_program, reuse_atomic
from skipper.dataplane.backends.verbs.device import Atomics
from skipper.dataplane.backends.verbs.engine import Engine
from skipper.dataplane.backends.verbs.exchange import NOBODY, hung_up
from skipper.dataplane.backends.verbs.keys import contact_of, remote_of
from skipper.dataplane.backends.verbs.link import Link
from skipper.dataplane.backends.verbs.memory import Memory
from skipper.dataplane.backends.verbs.run import AtomicRun, VerbsRun, epochs_of
from skipper.dataplane.backends.verbs.staging import Stage, StagedTransfer
from skipper.dataplane.copying import dropped
from skipper.dataplane.errors import (
    BackendUnavailableError,
    DataplaneError,
    OwnerDiedError,
    RegistrationError,
    TransferTimeoutError,
)
from skipper.dataplane.handle import Card, Handle
from skipper.dataplane.identity import ProcessWatch, host_id
from skipper.dataplane.layout import Rows, single
from skipper.dataplane.operation import DONE, Helper, Operation
from skipper.dataplane.regions import HOST, Region

_LOG = logging.getLogger(__name__)

_PROGRAMS = 256  # kept for the same copy to come again
_SPARE = 4  # of one kind of atomic operation on one word
_AVOID_S = 10.0  # a rail that had no way to the owner is left out for so long


class VerbsPeer(Peer):
    """See `Peer`. The connection is made at the first use, and anew after each failure.

    Attributes:
        engine: Moves the bytes.
        owner: Who it is.
        rails: Those that both sides have.
    """

    backend = "verbs"

    def __init__(self, engine: Engine, card: Card) -> None:
        self.engine = engine
        self.owner = card.owner
        self._contact = contact = contact_of(card)
        self.rails = tuple(range(min(len(engine.rails.rails), len(contact.page_keys))))
        # Within the host the kernel knows at once; beyond it the connection's own socket tells.
        self._watch = ProcessWatch(card.owner) if card.owner.host == host_id() else None
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._forsaken: weakref.finalize[[Link], VerbsPeer] | None = None
        self._avoid: dict[int, float] = {}  # rails, until when
        self._programs: OrderedDict[tuple[object, ...], Program] = OrderedDict()
        self._atomics: dict[tuple[object, ...], deque[Program]] = {}

    def usable(self) -> bool:
        """Whether the owner is not known to be dead."""
        return self._watch is None or not self._watch.gone

    def close(self) -> None:
        """See `Peer`."""
        with self._lock:
            self._programs.clear()
            self._atomics.clear()
            if self._link is not None:
                self.engine.cut(self._link)

    def resolve(self, handle: Handle) -> Remote:
        """See `Peer`. Nothing is sent."""
        return remote_of(handle)

    def copy(self, local: Region, remote: Remote, offset: int, *, to_remote: bool, timeout: float) -> Operation:
        """See `Peer`."""
        if local.kind is not HOST:
            return self._copy_device(local, remote, remote.address + offset, to_remote, timeout)
        address = remote.address + offset
        try:
            begun = self._copy_at_once(local, remote, address, to_remote, timeout)
            if begun is not None:
                return begun
            operation, run = self._run(local, remote, address, to_remote, timeout)
            over = run.begin()
        except DataplaneError as error:
            return Operation.failed(error)
        if over:
            return DONE if run.error is None else Operation.failed(run.error)
        operation.add_helper(run.help)
        return operation

    def compile(self, rows: Rows, remotes: Sequence[Remote], locals_: Sequence[Region], *, to_remote: bool) -> Transfer:
        """See `Peer`."""
        if all(region.kind is HOST for region in locals_):
            return VerbsTransfer(self, rows, tuple(remotes), tuple(locals_), to_remote)
        try:
            return VerbsTransfer(self, rows, tuple(remotes), tuple(locals_), to_remote)
        except RegistrationError as error:
            self.engine.rails.stage(str(error))
        stage = Stage(rows, locals_)
        inner = VerbsTransfer(self, stage.rows, tuple(remotes), stage.regions, to_remote)
        return StagedTransfer(stage, inner, to_remote=to_remote)

    def atomic(self, remote: Remote, offset: int, atomic: Atomic, *, timeout: float) -> FetchOperation:
        """See `Peer`."""
        rails = self.engine.rails
        if remote.handle.kind is not HOST:
            return FetchOperation.failed(
                BackendUnavailableError(f"atomic operations over verbs reach host memory only, not {remote.handle}")
            )
        if Atomics.NONE in (self._contact.atomics, rails.devices[0].atomics):
            where = "that of its owner" if self._contact.atomics is Atomics.NONE else f"{rails.devices[0].port} here"
            return FetchOperation.failed(
                BackendUnavailableError(f"atomic operations on {remote.handle}: {where} is an RDMA device without them")
            )
        operation = FetchOperation(1)
        address = remote.address + offset

        spare = self._spare_atomics(remote, address, atomic)

        def make(_: tuple[int, ...]) -> Program:
            try:
                return reuse_atomic(spare.pop(), remote, address, atomic)
            except IndexError:
                return compile_atomic(rails.devices[0], remote, address, atomic, rails.words)

        run = AtomicRun(self, make, remote, timeout, operation, spare)
        try:
            over = run.begin()
        except DataplaneError as error:
            return FetchOperation.failed(error)
        if over:
            run.finish()
        else:
            operation.add_helper(run.help)
        return operation

    def link(self, run: VerbsRun) -> Link:
        """The present connection, made if there is none that works.

        Raises:
            OwnerDiedError: The owner is gone.
            TransferError: No connection can be made.
            TransferTimeoutError: The deadline of the run passed.
        """
        link = self._link
        if link is not None and self._good(link, run.needs):
            return link
        deadline = run.due()
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TransferTimeoutError(f"the deadline passed before {self.owner} had answered")
        try:
            if self._link is link or self._link is None or not self._link.alive:
                self._link = self._connect(run.needs, deadline)
            return self._link
        finally:
            self._lock.release()

    def gone(self) -> bool:
        """Whether the owner is gone, after giving a dying one a moment."""
        return self._watch is not None and self._watch.gone_soon()

    def compiled(
        self,
        rows: Rows,
        remotes: tuple[Remote, ...],
        memories: tuple[Memory, ...],
        rails: tuple[int, ...],
        to_remote: bool,
    ) -> Program:
        """A program for this peer; see `compile_program`.

        Raises:
            RegistrationError: There is no room for the words.
        """
        here = self.engine.rails
        return compile_program(
            here.devices,
            rails,
            rows,
            remotes,
            memories,
            here.words,
            to_remote=to_remote,
            turn=next(here.turns),
        )

    def _run(
        self, local: Region, remote: Remote, address: int, to_remote: bool, timeout: float
    ) -> tuple[Operation, VerbsRun]:
        """One contiguous copy, not begun."""
        operation = Operation(1)
        make = functools.partial(self._program, local, remote, address, to_remote)
        run = VerbsRun(self, make, (remote,), epochs_of((remote,)), (local,), timeout, operation.part_done)
        return operation, run

    def _copy_at_once(
        self, local: Region, remote: Remote, address: int, to_remote: bool, timeout: float
    ) -> Operation | None:
        """Begin a copy that was done before, over a connection with nothing else to do; None where that is not so."""
        link, engine = self._link, self.engine
        if link is None or not self._good(link, ()):
            return None
        program = self._programs.get(_key(local, remote, address, to_remote, link.rails))
        if program is None or program.sole is None or not program.valid:
            return None
        rail, chunk = program.sole
        lane = link.lanes[rail]
        with engine.lock:
            sole = engine.post_sole(lane, chunk)
            if sole is None:
                return None
            if not sole.over:
                operation, run = self._run(local, remote, address, to_remote, timeout)
                run.resume(link, program)
                engine.adopt(run, sole, lane)
        engine.report()
        if not sole.over:
            operation.add_helper(run.help)
            return operation
        if program.words.found.item(0) != remote.handle.epoch:
            return Operation.failed(dropped(remote.handle))
        return DONE

    def _copy_device(self, local: Region, remote: Remote, address: int, to_remote: bool, timeout: float) -> Operation:
        """A copy to or from GPU memory, registered or staged."""
        try:
            rows = single(local.address, address, local.nbytes)
            return self.compile(rows, (remote,), (local,), to_remote=to_remote).submit(timeout)
        except DataplaneError as error:
            return Operation.failed(error)

    def _spare_atomics(self, remote: Remote, address: int, atomic: Atomic) -> deque[Program]:
        """Programs for a kind of operation on a word that no operation is using: making one takes longer than it."""
        key = (remote.word, remote.key.memory, address, atomic.kind)
        spare = self._atomics.get(key)
        if spare is None:
            with self._lock:
                if len(self._atomics) >= _PROGRAMS:
                    self._atomics.clear()
                spare = self._atomics[key] = deque(maxlen=_SPARE)
        return spare

    def _good(self, link: Link, needs: tuple[int, ...]) -> bool:
        if not link.alive or (self._watch is None and hung_up(link.connection)):
            return False
        for rail in needs:
            if rail not in link.lanes:
                return False
        return link.widen_at is None or time.monotonic() < link.widen_at or not link.idle

    def _connect(self, needed: tuple[int, ...], deadline: float) -> Link:
        if not self.usable():
            raise OwnerDiedError(f"{self.owner} is gone")
        failed, replaced = (None, NOBODY) if self._link is None else (self._link.failed_rail, self._link.name)
        if self._forsaken is not None:
            self._forsaken()
        now = time.monotonic()
        if failed is not None and len(self.rails) > 1:
            self._avoid[failed] = now + _AVOID_S
            _LOG.warning(
                "%s does not reach %s; using the other ports for %d s",
                self.engine.rails.devices[failed].port,
                self.owner,
                _AVOID_S,
            )
        self._avoid = {rail: until for rail, until in self._avoid.items() if until > now and rail not in needed}
        # Where none is left, all of them: then what the device says of them is what the caller is told.
        wanted = tuple(rail for rail in self.rails if self._promising(rail)) or self.rails
        contact = self._contact
        link = self.engine.connect(contact.address, contact.token, wanted, deadline, replaces=replaced)
        if len(wanted) < len(self.rails):
            link.widen_at = min(self._avoid.values(), default=now + _AVOID_S)
        self._forsaken = weakref.finalize(self, self.engine.cut, link)
        self._forsaken.atexit = False
        return link

    def _promising(self, rail: int) -> bool:
        return rail not in self._avoid and (len(self.rails) == 1 or self.engine.rails.devices[rail].port.active)

    def _program(self, local: Region, remote: Remote, address: int, to_remote: bool, rails: tuple[int, ...]) -> Program:
        key = _key(local, remote, address, to_remote, rails)
        program = self._programs.get(key)
        if program is not None and program.valid:
            return program
        memory = self.engine.rails.memory.local(local)
        rows = single(local.address, address, local.nbytes)
        program = self.compiled(rows, (remote,), (memory,), rails, to_remote)
        if memory.kept:
            with self._lock:
                self._programs[key] = program
                if len(self._programs) > _PROGRAMS:
                    self._programs.popitem(last=False)
        return program


def _key(local: Region, remote: Remote, address: int, to_remote: bool, rails: tuple[int, ...]) -> tuple[object, ...]:
    """What makes a copy the same as another."""
    return local.address, local.nbytes, address, remote.word, remote.key.memory, to_remote, rails


class VerbsTransfer(Transfer):
    """Rows for one peer, as chains of work requests."""

    def __init__(
        self, peer: VerbsPeer, rows: Rows, remotes: tuple[Remote, ...], locals_: tuple[Region, ...], to_remote: bool
    ) -> None:
        self._peer = peer
        self._rows = rows
        self._remotes = remotes
        self._locals = locals_
        self._to_remote = to_remote
        self._epochs = epochs_of(remotes)
        local = peer.engine.rails.memory.local
        self._memories = tuple({id(memory): memory for memory in map(local, locals_)}.values())
        self._programs: dict[tuple[int, ...], Program] = {}
        self._program(peer.rails)

    def start(self, deadline: float, done: Done) -> Helper | None:
        """See `Transfer`."""
        left = deadline - time.monotonic()
        run = VerbsRun(self._peer, self._program, self._remotes, self._epochs, self._locals, left, done)
        try:
            over = run.begin()
        except DataplaneError as error:
            done(error)
            return None
        if over:
            done(run.error)
            return None
        return run.help

    def _program(self, rails: tuple[int, ...]) -> Program:
        program = self._programs.get(rails)
        if program is None:
            program = self._programs[rails] = self._peer.compiled(
                self._rows, self._remotes, self._memories, rails, self._to_remote
            )
        return program
