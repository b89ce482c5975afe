"""Everything that the controller of one store knows, and all ways to change it. No I/O, no clock, no actor.

Each change is a command: the name of a method and plain arguments. The same commands in the same order, from an empty
state, make the same state in any process; a journal (`torchstore.controller.journal`) depends on that. What a command
means for others, such as memory of volumes to free, is only noted here: see `Effects`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from skipper.control import ProcMesh
from skipper.torchstore.algebra.manifest import WHOLE
from skipper.torchstore.controller.batches import Batches
from skipper.torchstore.controller.grants import grant_all
from skipper.torchstore.controller.history import History
from skipper.torchstore.controller.index import Index
from skipper.torchstore.controller.ledger import Ledger, SharedArenas
from skipper.torchstore.controller.members import KnownRecords, Members
from skipper.torchstore.controller.peer_read_scheduler import Patience
from skipper.torchstore.controller.version import Contribution
from skipper.torchstore.errors import StoreError
from skipper.torchstore.protocol.batches import BatchGrant, BatchPublication
from skipper.torchstore.protocol.messages import ArenaFreedError, Grant, Publication, Published, Retired, Share, Wanted
from skipper.torchstore.protocol.origin import ALONE
from skipper.torchstore.support.lru_cache import LRUCache
from skipper.torchstore.support.process import ProcessId


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """The outcome of a request: a value, or an error."""

    outcome: Any

    def open(self) -> Any:
        """The value.

        Raises:
            StoreError: The request was refused.
        """
        if isinstance(self.outcome, StoreError):
            raise copy.copy(self.outcome)
        return self.outcome


class Answers:
    """The answers that clients may not have got yet, by the clients' numbers of their requests."""

    def __init__(self) -> None:
        self._answers: dict[int, dict[int, RecordedAnswer]] = {}

    def find(self, client: int, request: int) -> RecordedAnswer | None:
        """The answer to this request, if there was one."""
        return self._answers.get(client, {}).get(request)

    def put(self, client: int, request: int, oldest: int, outcome: Any) -> RecordedAnswer:
        """Remember an answer, and forget those before the client's ``oldest`` request that it still waits for."""
        answers = self._answers.setdefault(client, {})
        for number in [number for number in answers if number < oldest]:
            del answers[number]
        if isinstance(outcome, StoreError):  # its frames keep the whole request alive
            outcome.__traceback__ = outcome.__context__ = outcome.__cause__ = None
        answers[request] = RecordedAnswer(outcome)
        return answers[request]

    def forget(self, client: int) -> None:
        """Forget a client's answers: it will not ask again."""
        self._answers.pop(client, None)

    def clear(self) -> None:
        """The store is shut down."""
        self._answers.clear()


_DEAD = 256

Leases = set[tuple[str, int]]
"""Leases by key and number."""


class Command(NamedTuple):
    """One change of the state.

    Attributes:
        name: The name of a method of `StoreState`.
        arguments: The arguments of the method.
        client: The client that requested it; 0 if no client will ask again.
        request: The client's number for it.
        oldest: The client's number for its oldest request without an answer.
    """

    name: str
    arguments: tuple[Any, ...]
    client: int = 0
    request: int = 0
    oldest: int = 0


class DeadWriter(NamedTuple):
    """A process that no longer uses its memory.

    Attributes:
        process: The process.
        kept: The parts of its memory that versions still use.
        clients_below: Its clients have lower numbers. If the process joins the job again, its next client has this
            number or a higher one.
    """

    process: ProcessId
    kept: tuple[str, ...]
    clients_below: int


@dataclass(slots=True)
class Effects:
    """What volumes must learn. Telling them twice does no harm.

    Attributes:
        freed: Arenas, and ranges of arenas, by volume.
        dead: Processes that have died, or have left the job.
    """

    freed: dict[str, list[str]] = field(default_factory=dict)
    dead: list[DeadWriter] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.freed or self.dead)


class StoreState:
    """The state of one store's controller.

    Attributes:
        on_change: Called after every possible change of the readable value of a key. Not part of the state.
    """

    def __init__(self, store_name: str) -> None:
        self.members = Members(store_name)
        self._ledger = Ledger(self._free, self.members.holds)
        self._shared = SharedArenas(self._ledger, self._cut)
        self.index = Index(self._shared.idle, self._shared.gone, self._changed)
        self.homes: dict[ProcessId, ProcMesh] = {}
        self._known = KnownRecords()
        self._batches = Batches(self.index, self._known, self._ledger, self._shared)
        self._answers = Answers()
        self._dead: LRUCache[ProcessId, int] = LRUCache(_DEAD)
        self._effects: Effects | None = None
        self.on_change: Callable[[History], None] = _nothing

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "on_change": _nothing, "_effects": None}

    def clear(self) -> None:
        """Forget everything: the store is shut down. Its clients are recognized as stale."""
        self.index.clear()
        self._ledger.clear()
        self._shared.clear()
        self._batches.clear()
        self._known.clear()
        self.members.clear()
        self.homes.clear()
        self._answers.clear()

    # Commands -------------------------------------------------------------------------------------------

    def apply(self, command: Command) -> Any:
        """Run a command, and return or raise its outcome; a request that was answered gets the same answer."""
        if not command.request:
            return self._do(command)
        found = self._answers.find(command.client, command.request)
        if found is None:
            outcome: Any
            try:
                outcome = self._do(command)
            except StoreError as error:
                outcome = error
            found = self._answers.put(*command[2:], outcome)
        return found.open()

    def was_answered(self, command: Command) -> bool:
        """Whether this request has been done before."""
        return bool(command.request) and self._answers.find(command.client, command.request) is not None

    def _do(self, command: Command) -> Any:
        try:
            return getattr(self, command.name)(*command.arguments)
        finally:
            self._shared.give_back()

    def take_effects(self) -> Effects | None:
        """What volumes must learn since the last call, if anything."""
        effects, self._effects = self._effects, None
        return effects

    def all_effects(self) -> Effects:
        """What volumes may not have learned from a controller that is gone."""
        numbers = dict(self._dead.items())
        kept = self.index.memory_of(list(numbers))
        dead = [DeadWriter(process, tuple(arenas), numbers[process]) for process, arenas in kept.items()]
        return Effects(self._ledger.freed_by_volume(), dead)

    def mark(self) -> tuple[int, int]:
        """A value that changes when memory was freed, or versions were retired for that."""
        return self._ledger.clock, self.index.retired

    # Clients --------------------------------------------------------------------------------------------

    def welcome(self, process: ProcessId, home: ProcMesh | None) -> int:
        """Register a client. Returns its number."""
        if home is not None:
            self.homes[process] = home
        self._dead.pop(process)  # the process had left the job, and is back
        return self.members.welcome(process)

    def process_died(self, process: ProcessId, volumes: tuple[str, ...]) -> None:
        """Note that a process, and with it these volumes, is gone."""
        for client in self.members.process_died(process):
            self._answers.forget(client)
        self.homes.pop(process, None)
        self._dead.put(process, self.members.upcoming)
        self._ledger.forget(process)
        self._batches.process_died(process)
        kept = self.index.process_died(process, list(volumes))
        if not volumes:
            self._noted().dead.append(DeadWriter(process, tuple(kept), self.members.upcoming))

    # Publishing -----------------------------------------------------------------------------------------

    def publish(
        self, now: float, client: int, publications: tuple[Publication | BatchPublication, ...]
    ) -> tuple[Published, ...]:
        """See `StoreController.publish`; ``now``: the time of the clock that stamps shares."""
        writer = self.members.process_of(client)
        plain = [p for p in publications if isinstance(p, Publication)]
        resolved = [(publication, self._contribution(publication, now)) for publication in plain]
        batches = [self._batches.contributions(p, now) for p in publications if isinstance(p, BatchPublication)]
        resolved.sort(
            key=lambda pair: pair[0].turn == ALONE
        )  # shares can be refused: handle them before the rest is visible
        answers: list[Published] = []
        waiting = deque(resolved)
        try:
            for publication in plain:
                if publication.turn == ALONE:  # and so can numbers
                    self.index.check_number(publication.key, publication.version)
            while waiting:
                publication, contribution = waiting.popleft()
                answers.append(
                    self.index.contribute(publication.key, contribution, publication.version, keep=publication.keep)
                )
        except StoreError:
            for _, unused in waiting:
                for binding in unused.holders:
                    self._shared.idle(unused.writer, binding)
            raise
        answers += [Published(self._batches.add(batch), True) for batch in batches]
        if answers:
            answers[-1] = replace(answers[-1], retired=self._ledger.take_retired(writer))
        return tuple(answers)

    def _contribution(self, publication: Publication, now: float) -> Contribution:
        manifest, binding = self._known.manifest(publication.manifest), self._known.binding(publication.binding)
        copies = self._known.bindings(publication.copies)
        for holder in (binding, *copies) if binding is not None else ():
            if self._ledger.is_freed(holder):
                raise ArenaFreedError(holder.id)
            self._ledger.in_use(holder)
        return Contribution.of(publication, manifest, binding, now, copies)

    def put_inline(self, client: int, key: str, value: bytes) -> int:
        """See `StoreController.put_inline`."""
        contribution = Contribution(self.members.process_of(client), WHOLE, None, None, inline=value)
        return self.index.contribute(key, contribution, None).version

    def reserve(self, client: int, key: str) -> int:
        """See `StoreController.reserve`."""
        self.members.process_of(client)
        return self.index.reserve(key)

    def reclaim(self, client: int) -> tuple[Retired, ...]:
        """See `StoreController.reclaim`."""
        return self._ledger.take_retired(self.members.process_of(client))

    def make_room(self, client: int, volume: str, since: int) -> tuple[int, tuple[str, ...]] | None:
        """Free arenas of a volume, unless some have been freed since the ledger's clock stood at ``since``.

        Idle arenas are freed. If there are none, the store retires the oldest version that nobody reads and that is not
        the newest of its key.

        Returns:
            The clock, and the ids of what has been freed since; None: nothing can be freed now.
        """
        self.members.process_of(client)
        ledger = self._ledger
        self._shared.give_back()
        if not ledger.freed_since(since, volume):
            ledger.free_idle(volume)
        if not ledger.freed_since(since, volume) and self.index.retire_oldest(volume):
            self._shared.give_back()
            ledger.free_idle(volume)
        freed = ledger.freed_since(since, volume)
        return (ledger.clock, freed) if freed else None

    # Reading --------------------------------------------------------------------------------------------

    def grant(
        self, client: int, wanted: tuple[Wanted, ...], waited_s: float = 0.0, patience: Patience | None = None
    ) -> tuple[Grant, ...] | None:
        """See `grants.grant_all`."""
        return grant_all(self.index, wanted, self.members.process_of(client), waited_s, patience)

    def grant_values(self, client: int, keys: tuple[str, ...], waited_s: float = 0.0) -> BatchGrant | None:
        """See `Batches.grant`."""
        return self._batches.grant(keys, self.members.process_of(client), waited_s)

    def release(self, leases: tuple[tuple[str, int], ...], batch: int) -> None:
        """Take back leases, and those of a batch."""
        self._batches.release(batch)
        for key, lease in leases:
            self.index.release(key, lease)

    def leases(self) -> dict[ProcessId, tuple[Leases, set[int]]]:
        """The leases of each process on single versions, and on batches."""
        found: dict[ProcessId, tuple[Leases, set[int]]] = {}
        batches, within = self._batches.leases()
        for process, numbers in batches.items():
            found[process] = (set(), numbers)
        for history in self.index.histories():
            for lease, reader in history.leases():
                if lease not in within:
                    found.setdefault(reader, (set(), set()))[0].add((history.key, lease))
        return found

    def finish(self, client: int, key: str, lease: int, share: Share | None, failed: bool) -> None:
        """Take back a lease, and note what its reader offers to others; see `PeerReadScheduler.finish`."""
        known = None
        if share is not None and self.members.find(client) is not None:
            known = self._known.share(share)  # None: there is no offer, and the group reads from the publisher
        self.index.finish(key, lease, known, failed=failed)

    def withdraw(self, client: int, key: str) -> None:
        """See `StoreController.withdraw`."""
        history, process = self.index.get(key), self.members.find(client)
        if history is not None and process is not None:
            history.withdraw(process)

    def withdraw_all(self) -> None:
        """Let no reader begin to read earlier offered copies: messages that withdraw them may be lost."""
        for history in self.index.histories():
            history.withdraw_all()

    # Taking back ----------------------------------------------------------------------------------------

    def close(self, client: int, key: str) -> None:
        """Let no reader begin to read from this client's process any more."""
        history, process = self.index.get(key), self.members.find(client)
        if history is not None and process is not None:
            history.close(process)

    def rollback(self, key: str, version: int) -> None:
        """See `Index.rollback`."""
        self.index.rollback(key, version)

    def delete(self, keys: tuple[str, ...], missing_ok: bool) -> None:
        """See `Index.delete`."""
        self.index.delete(keys, missing_ok=missing_ok)

    # What follows from it -------------------------------------------------------------------------------

    def _noted(self) -> Effects:
        if self._effects is None:
            self._effects = Effects()
        return self._effects

    def _free(self, volume: str, arena: str) -> None:
        self._noted().freed.setdefault(volume, []).append(arena)

    def _cut(self, volume: str, stretches: tuple[str, ...]) -> None:
        self._noted().freed.setdefault(volume, []).extend(stretches)

    def _changed(self, history: History) -> None:
        self.on_change(history)


def _nothing(_history: History) -> None:
    """Do nothing: nothing is posted for readers."""
