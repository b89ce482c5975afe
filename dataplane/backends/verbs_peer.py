"""One owner as this process reaches it over verbs: its connection, the programs made for it, and the runs of those.

A run whose connection fails is told by the device's own status why. Flushed by another run's failure, it begins again
on a new connection. Refused access, it asks for the words first, which tell a buffer that was dropped from a key that
never was good. A link or an owner that does not answer has been tried often enough by the device itself.
"""

import asyncio
import struct
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataplane.backends.base import Done, Peer, Remote, Transfer
from dataplane.backends.verbs_chain import Chunk, Program, compile_program
from dataplane.backends.verbs_engine import EXPIRED, FLUSHED, UNATTENDED, Engine, Link
from dataplane.backends.verbs_exchange import TOKEN_BYTES, hung_up
from dataplane.copying import dropped
from dataplane.epochs import PAGE_BYTES, WORD
from dataplane.errors import DataplaneError, DescriptorError, OwnerDiedError, TransferError, TransferTimeoutError
from dataplane.handle import VERBS, Card, Handle, unpack_section
from dataplane.identity import ProcessWatch, host_id
from dataplane.layout import Rows, single
from dataplane.memory import Region
from dataplane.operation import Helper, Operation

CARD = struct.Struct(f"<{TOKEN_BYTES}sQI")
"""Token, address and key of the epoch page; the text of the address to dial follows."""
BODY = struct.Struct("<I")
"""Key of the memory."""

_PROGRAMS = 256  # kept for the same copy to come again
_EXIT_S = 0.05  # a queue pair fails a moment before its process counts as gone
_TRIES = 8
_ACCESS = 10
_TEXTS = {
    1: "a local length error",
    2: "a local queue pair error, as when its own link is down",
    4: "a local protection error",
    9: "the peer's device refused the request",
    _ACCESS: "the peer's device refused access to that memory",
    11: "the peer's device failed",
    12: "no answer after all retries: the peer or the link to it is down",
}


@dataclass(frozen=True, slots=True)
class Keys:
    """What an owner's device wants to see: the keys of the memory and of its epoch page."""

    memory: int
    page: int


@dataclass(frozen=True, slots=True)
class Contact:
    """The verbs section of a card."""

    token: bytes
    page: int
    page_key: int
    address: str


def parse_card(card: Card) -> Contact:
    """How to reach the owner of a card.

    Raises:
        DescriptorError: The section is damaged.
    """
    section = card.sections[VERBS]
    if len(section) < CARD.size:
        raise DescriptorError("this buffer handle has a damaged section for verbs")
    token, page, page_key = CARD.unpack_from(section)
    try:
        address = section[CARD.size :].decode("ascii")
    except UnicodeDecodeError:
        address = ""
    kind, _, where = address.partition(":")
    if not where or kind not in ("unix", "tcp") or (kind == "tcp" and not where.rpartition(":")[2].isdecimal()):
        raise DescriptorError("this buffer handle has a damaged section for verbs")
    return Contact(token, page, page_key, address)


class VerbsPeer(Peer):
    """See `Peer`. The connection is made at the first use, and anew after each failure."""

    backend = "verbs"

    def __init__(self, engine: Engine, card: Card) -> None:
        self.engine = engine
        self.owner = card.owner
        self._contact = parse_card(card)
        # Within the host the kernel knows at once; beyond it the connection's own socket tells.
        self._watch = ProcessWatch(card.owner) if card.owner.host == host_id() else None
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._forsaken: weakref.finalize[[Link], VerbsPeer] | None = None
        self._programs: OrderedDict[tuple[int, ...], Program] = OrderedDict()

    def usable(self) -> bool:
        """Whether the owner is not known to be dead."""
        return self._watch is None or not self._watch.gone

    def close(self) -> None:
        """See `Peer`."""
        with self._lock:
            self._programs.clear()
            if self._link is not None:
                self.engine.cut(self._link)

    def resolve(self, handle: Handle) -> Remote:
        """See `Peer`. Nothing is sent."""
        if (handle.slot + 1) * WORD > PAGE_BYTES:
            raise DescriptorError(f"the handle of {handle} reaches beyond the owner's memory")
        (key,) = unpack_section(BODY, handle.sections[VERBS], "verbs")
        contact = parse_card(handle.card)
        return Remote(handle, handle.base, contact.page + handle.slot * WORD, Keys(key, contact.page_key))

    def copy(self, local: Region, remote: Remote, offset: int, *, to_remote: bool, timeout: float) -> Operation:
        """See `Peer`."""
        deadline = time.monotonic() + timeout
        operation = Operation(1)
        try:
            program = self._program(local, remote, remote.address + offset, to_remote)
        except DataplaneError as error:
            return Operation.failed(error)
        epochs = np.array([remote.handle.epoch], dtype=np.uint64)
        run = VerbsRun(self, program, (remote,), epochs, (local,), deadline, operation.part_done)
        helper = run.begin()
        if helper is not None:
            operation.add_helper(helper)
        return operation

    def compile(self, rows: Rows, remotes: Sequence[Remote], locals_: Sequence[Region], *, to_remote: bool) -> Transfer:
        """See `Peer`."""
        return VerbsTransfer(self, rows, tuple(remotes), tuple(locals_), to_remote)

    def link(self, deadline: float) -> Link:
        """The present connection, made if there is none that works.

        Raises:
            OwnerDiedError: The owner is gone.
            TransferError: No connection can be made.
            TransferTimeoutError: The deadline passed.
        """
        link = self._link
        if link is not None and link.alive and (self._watch is not None or not hung_up(link.connection)):
            return link
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TransferTimeoutError(f"the deadline passed before {self.owner} had answered")
        try:
            if self._link is link or self._link is None or not self._link.alive:
                if not self.usable():
                    raise OwnerDiedError(f"{self.owner} is gone")
                if self._forsaken is not None:
                    self._forsaken()
                self._link = self.engine.connect(self._contact.address, self._contact.token, deadline)
                self._forsaken = weakref.finalize(self, self.engine.cut, self._link)
                self._forsaken.atexit = False
            return self._link
        finally:
            self._lock.release()

    def gone(self) -> bool:
        """Whether the owner is gone, after giving a dying one a moment."""
        if self._watch is None:
            return False
        end = time.monotonic() + _EXIT_S
        while not self._watch.gone:
            if time.monotonic() > end:
                return False
            time.sleep(_EXIT_S / 50)
        return True

    def verdict(self, status: int) -> TransferError:
        """The error for a status of the device after which there is no more to try."""
        text = _TEXTS.get(status, "a status that is never expected")
        return TransferError(f"transfer with {self.owner} failed: {text} (status {status})", status=status)

    def _program(self, local: Region, remote: Remote, address: int, to_remote: bool) -> Program:
        key = (local.address, local.nbytes, address, remote.word, remote.key.memory, to_remote)
        program = self._programs.get(key)
        if program is not None and program.valid:
            return program
        memory = self.engine.memory.local(local)
        rows = single(local.address, address, local.nbytes)
        words = self.engine.words.take(1)
        program = compile_program(self.engine.device, rows, (remote,), (memory,), words, to_remote=to_remote)
        if memory.kept:
            with self._lock:
                self._programs[key] = program
                if len(self._programs) > _PROGRAMS:
                    self._programs.popitem(last=False)
        return program


class VerbsTransfer(Transfer):
    """Rows for one peer, as chains of work requests."""

    def __init__(
        self, peer: VerbsPeer, rows: Rows, remotes: tuple[Remote, ...], locals_: tuple[Region, ...], to_remote: bool
    ) -> None:
        self._peer = peer
        self._remotes = remotes
        self._locals = locals_
        self._epochs = np.array([remote.handle.epoch for remote in remotes], dtype=np.uint64)
        memories = tuple({id(memory): memory for memory in map(peer.engine.memory.local, locals_)}.values())
        words = peer.engine.words.take(len(remotes))
        self._program = compile_program(peer.engine.device, rows, remotes, memories, words, to_remote=to_remote)

    def start(self, deadline: float, done: Done) -> Helper | None:
        """See `Transfer`."""
        run = VerbsRun(self._peer, self._program, self._remotes, self._epochs, self._locals, deadline, done)
        return run.begin()


class VerbsRun:
    """One start of a program; see `verbs_engine.Run`."""

    def __init__(
        self,
        peer: VerbsPeer,
        program: Program,
        remotes: tuple[Remote, ...],
        epochs: NDArray[np.uint64],
        pinned: tuple[Region, ...],
        deadline: float,
        done: Done,
    ) -> None:
        self.deadline = deadline
        self.link: Link | None = None
        self.outstanding = 0
        self.over = False
        # An event loop awaits; other threads mostly call `get`, which leads by itself.
        self.born = UNATTENDED if asyncio._get_running_loop() is not None else time.monotonic()
        self._peer = peer
        self._program = program
        self._remotes = remotes
        self._epochs = epochs
        self._pinned = pinned
        self._done = done
        self._error: DataplaneError | None = None
        self._phases: tuple[tuple[Chunk, ...], ...] = (program.chunks,)
        self._phase = 0
        self._at = 0
        self._tries = 0

    def begin(self) -> Helper | None:
        """Post it; what a waiting thread may call while it is not over."""
        try:
            link = self._peer.link(self.deadline)
        except DataplaneError as error:
            self._report(error)
            return None
        self._peer.engine.start(self, link)
        return None if self.over else self._help

    def next_chunk(self) -> Chunk | None:
        """See `Run`."""
        chunks = self._phases[self._phase]
        return chunks[self._at] if self._at < len(chunks) else None

    def posted(self) -> None:
        """See `Run`."""
        self._at += 1

    def phase_over(self) -> bool:
        """See `Run`. Every phase fetches the words."""
        changed = np.flatnonzero(self._program.words.found != self._epochs)
        if len(changed):
            self._error = dropped(self._remotes[changed[0]].handle)
            return False
        self._phase += 1
        self._at = 0
        return self._phase < len(self._phases)

    def finish(self) -> None:
        """See `Run`."""
        self._report(self._error)

    def failed(self, status: int) -> None:
        """See `Run`."""
        peer = self._peer
        self._tries += 1
        probed = len(self._phases) > 1
        if status == EXPIRED:
            self._report(TransferTimeoutError(f"the deadline passed before {peer.owner} had answered"))
        elif self._tries < _TRIES and (status == FLUSHED or (status == _ACCESS and not probed)):
            self._again()
        elif peer.gone():
            self._report(OwnerDiedError(f"{peer.owner} is gone", status=status))
        else:
            self._report(peer.verdict(status))

    def _again(self) -> None:
        """Over a new connection: first the words, and only if they are as they should be, the data."""
        self._phases = (self._program.probe, self._program.chunks)
        self._phase = self._at = 0
        try:
            link = self._peer.link(self.deadline)
        except DataplaneError as error:
            self._report(error)
        else:
            self._peer.engine.start(self, link)

    def _report(self, error: DataplaneError | None) -> None:
        self._done(error)
        if not self.over:
            self._peer.engine.over(self)

    def _help(self) -> None:
        self._peer.engine.lead(self)
