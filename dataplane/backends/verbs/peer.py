"""One owner that this process reaches over verbs, and the programs made for it."""

import functools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence

from skipper.dataplane.backends.base import Done, Peer, Remote, Transfer
from skipper.dataplane.backends.verbs.card import remote_of
from skipper.dataplane.backends.verbs.chain import VerbsProgram, compile_atomic, compile_program, reuse_atomic
from skipper.dataplane.backends.verbs.connector import OwnerConnector
from skipper.dataplane.backends.verbs.device import Atomics
from skipper.dataplane.backends.verbs.engine import VerbsEngine
from skipper.dataplane.backends.verbs.memory import RegisteredMemory
from skipper.dataplane.backends.verbs.run import VerbsAtomicRun, VerbsRun, epochs_of
from skipper.dataplane.backends.verbs.staging import HostStage, StagedTransfer
from skipper.dataplane.copying import dropped
from skipper.dataplane.errors import BackendUnavailableError, DataplaneError, RegistrationError
from skipper.dataplane.handle import Card, Handle
from skipper.dataplane.layout import Rows, single
from skipper.dataplane.operation import DONE, Atomic, FetchOperation, Helper, Operation
from skipper.dataplane.regions import HOST, Region

_PROGRAMS = 256  # kept in case the same copy comes again
_SPARE = 4  # of one kind of atomic operation on one word


class VerbsPeer(Peer):
    """See `Peer`.

    Attributes:
        engine: Moves the bytes.
        connector: Connects to the owner, at the first use and again after each failure.
        rails: The rails that both sides have.
    """

    backend = "verbs"

    def __init__(self, engine: VerbsEngine, card: Card) -> None:
        self.engine = engine
        self.connector = OwnerConnector(engine, card)
        self.rails = self.connector.rails
        self._lock = threading.Lock()
        self._programs: OrderedDict[tuple[object, ...], VerbsProgram] = OrderedDict()
        self._atomics: dict[tuple[object, ...], deque[VerbsProgram]] = {}

    def usable(self) -> bool:
        """Whether the owner is not known to be dead."""
        return self.connector.usable()

    def close(self) -> None:
        """See `Peer`."""
        with self._lock:
            self._programs.clear()
            self._atomics.clear()
        self.connector.close()

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
        stage = HostStage(rows, locals_)
        inner = VerbsTransfer(self, stage.rows, tuple(remotes), stage.regions, to_remote)
        return StagedTransfer(stage, inner, to_remote=to_remote)

    def atomic(self, remote: Remote, offset: int, atomic: Atomic, *, timeout: float) -> FetchOperation:
        """See `Peer`."""
        rails = self.engine.rails
        if remote.handle.kind is not HOST:
            return FetchOperation.failed(
                BackendUnavailableError(f"atomic operations over verbs reach host memory only, not {remote.handle}")
            )
        if Atomics.NONE in (self.connector.card.atomics, rails.devices[0].atomics):
            where = (
                "that of its owner" if self.connector.card.atomics is Atomics.NONE else f"{rails.devices[0].port} here"
            )
            return FetchOperation.failed(
                BackendUnavailableError(f"atomic operations on {remote.handle}: {where} is an RDMA device without them")
            )
        operation = FetchOperation(1)
        address = remote.address + offset

        spare = self._spare_atomics(remote, address, atomic)

        def make(_: tuple[int, ...]) -> VerbsProgram:
            try:
                return reuse_atomic(spare.pop(), remote, address, atomic)
            except IndexError:
                return compile_atomic(rails.devices[0], remote, address, atomic, rails.words)

        run = VerbsAtomicRun(self.connector, make, remote, timeout, operation, spare)
        try:
            over = run.begin()
        except DataplaneError as error:
            return FetchOperation.failed(error)
        if over:
            run.finish()
        else:
            operation.add_helper(run.help)
        return operation

    def compiled(
        self,
        rows: Rows,
        remotes: tuple[Remote, ...],
        memories: tuple[RegisteredMemory, ...],
        rails: tuple[int, ...],
        to_remote: bool,
    ) -> VerbsProgram:
        """A program for this peer; see `compile_program`.

        Raises:
            RegistrationError: There is no room for the words.
        """
        here = self.engine.rails
        return compile_program(
            here.devices, rails, rows, remotes, memories, here.words, to_remote=to_remote, turn=next(here.turns)
        )

    def _run(
        self, local: Region, remote: Remote, address: int, to_remote: bool, timeout: float
    ) -> tuple[Operation, VerbsRun]:
        """One contiguous copy, not begun yet."""
        operation = Operation(1)
        make = functools.partial(self._program, local, remote, address, to_remote)
        run = VerbsRun(self.connector, make, (remote,), epochs_of((remote,)), (local,), timeout, operation.part_done)
        return operation, run

    def _copy_at_once(
        self, local: Region, remote: Remote, address: int, to_remote: bool, timeout: float
    ) -> Operation | None:
        """Begin a repeated copy over an idle connection; None if the copy is new or the connection is not idle."""
        connection, engine = self.connector.present, self.engine
        if connection is None or not self.connector.good(connection, ()):
            return None
        program = self._programs.get(_key(local, remote, address, to_remote, connection.rails))
        if program is None or program.sole is None or not program.valid:
            return None
        rail, chain = program.sole
        queue = connection.queues[rail]
        with engine.lock:
            sole = engine.post_sole(queue, chain)
            if sole is None:
                return None
            if not sole.over:
                operation, run = self._run(local, remote, address, to_remote, timeout)
                run.resume(connection, program)
                engine.adopt(run, sole, queue)
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

    def _spare_atomics(self, remote: Remote, address: int, atomic: Atomic) -> deque[VerbsProgram]:
        """Unused programs for one kind of operation on a word: making one takes longer than the operation."""
        key = (remote.word, remote.key.memory, address, atomic.kind)
        spare = self._atomics.get(key)
        if spare is None:
            with self._lock:
                if len(self._atomics) >= _PROGRAMS:
                    self._atomics.clear()
                spare = self._atomics[key] = deque(maxlen=_SPARE)
        return spare

    def _program(
        self, local: Region, remote: Remote, address: int, to_remote: bool, rails: tuple[int, ...]
    ) -> VerbsProgram:
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
    """Two copies with the same key use the same program."""
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
        self._programs: dict[tuple[int, ...], VerbsProgram] = {}
        self._program(peer.rails)

    def start(self, deadline: float, done: Done) -> Helper | None:
        """See `Transfer`."""
        left = deadline - time.monotonic()
        run = VerbsRun(self._peer.connector, self._program, self._remotes, self._epochs, self._locals, left, done)
        try:
            over = run.begin()
        except DataplaneError as error:
            done(error)
            return None
        if over:
            done(run.error)
            return None
        return run.help

    def _program(self, rails: tuple[int, ...]) -> VerbsProgram:
        program = self._programs.get(rails)
        if program is None:
            program = self._programs[rails] = self._peer.compiled(
                self._rows, self._remotes, self._memories, rails, self._to_remote
            )
        return program
