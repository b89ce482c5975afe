"""The state of a store and its journal, where it has one. A change is written down before anybody is told of it."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

from skipper.torchstore.controller.history import History
from skipper.torchstore.controller.journal import Journal
from skipper.torchstore.controller.state import Command, Effects, Leases, StoreState
from skipper.torchstore.errors import JournalError, StoreError
from skipper.torchstore.support.process import ProcessId

_log = logging.getLogger("skipper.torchstore")


class Recorder:
    """Changes the state of one store.

    Attributes:
        state: To be looked at; commands change it.
    """

    def __init__(self, store_name: str) -> None:
        self.state = StoreState(store_name)
        self._journal: Journal | None = None
        self._tell: Callable[[Effects], None] = _nobody
        self._owed: Effects | None = None
        self._before: dict[ProcessId, tuple[Leases, set[int]]] = {}

    @property
    def keeps_journal(self) -> bool:
        """Whether the state outlives this process."""
        return self._journal is not None

    def open(self, journal: Journal) -> None:
        """Bring the state to where a journal ends, and write what follows into it.

        Raises:
            JournalError: It cannot be read.
        """
        try:
            self._replay(journal)
        except Exception as error:
            journal.close()
            raise JournalError(f"the journal cannot be read: {type(error).__name__}: {error}") from error
        self._owed = self.state.take_effects()
        self._before = self.state.leases()
        self._journal = journal
        self.do(Command("withdraw_all", ()))

    def _replay(self, journal: Journal) -> None:
        records = journal.read()
        if journal.has_checkpoint:
            self.state = pickle.loads(b"".join(takewhile(bool, records)))
        for record in records:
            command = Command(*pickle.loads(record))
            try:
                self.state.apply(command)
            except StoreError:
                pass  # the client that asked for it has been told, or will ask again
            except Exception:  # noqa: BLE001 - it failed at first too, and changed the same
                _log.warning("a command of the journal fails: %s", command.name, exc_info=True)

    def begin(self, tell: Callable[[Effects], None], on_change: Callable[[History], None]) -> None:
        """From now on, others are told of what follows from changes."""
        self._tell = tell
        self.state.on_change = on_change

    def owed(self) -> list[Effects]:
        """What volumes may not have been told before the journal was opened."""
        owed, self._owed = self._owed, None
        return [effects for effects in (owed, self.state.all_effects()) if effects]

    def do(self, command: Command) -> Any:
        """Do what a command says.

        Raises:
            StoreError: What it raises.
            JournalError: It cannot be written down, and was not done.
        """
        if self._journal is not None and not self.state.was_answered(command):
            self._journal.append(_encode(command))
        try:
            return self.state.apply(command)
        finally:
            self._follow()

    def attempt(self, command: Command, is_change: Callable[[Any], bool], **untold: Any) -> Any:
        """The same for a command that may change nothing. It is written down only if its outcome ``is_change``.

        ``untold`` are more keyword arguments, which have no part in what the command changes.

        Raises:
            StoreError: What the command raises.
            JournalError: It could not be written down, and was not done.
        """
        record = b""
        if self._journal is not None:
            record = _encode(command)
            self._journal.prepare(len(record))
        mark = self.state.mark()
        outcome = getattr(self.state, command.name)(*command.arguments, **untold)
        if is_change(outcome) or self.state.mark() != mark:
            if self._journal is not None:
                self._journal.append(record)
            self._follow()
        return outcome

    def abandoned(
        self, process: ProcessId, leases: frozenset[tuple[str, int]], batches: frozenset[int]
    ) -> Iterator[Command]:
        """Commands that give back what a process had leased before the journal was opened, except what it still has.

        No number of a lease is given twice, so it does no harm to ask again.
        """
        held, of_batches = self._before.get(process, (set(), set()))
        if held - leases:
            yield Command("release", (tuple(sorted(held - leases)), 0))
        for batch in sorted(of_batches - batches):
            yield Command("release", ((), batch))

    def close(self) -> None:
        """The store is shut down."""
        self.state.take_effects()
        self.state.clear()
        if self._journal is not None:
            self._journal.close()

    def _follow(self) -> None:
        """Tell others, now that it is written down."""
        effects = self.state.take_effects()
        if effects is not None:
            self._tell(effects)
        if self._journal is not None and self._journal.needs_checkpoint:
            try:
                self._journal.write_checkpoint(_checkpoint_of(self.state))
            except Exception as error:  # noqa: BLE001 - the change is done; the journal is only longer than it need be
                self._journal.postpone_checkpoint()
                _log.warning("the journal could not be rewritten: %s: %s", type(error).__name__, error)


def _checkpoint_of(state: StoreState) -> bytes:
    return pickle.dumps(state, protocol=5)


def _encode(command: Command) -> bytes:
    return pickle.dumps(tuple(command), protocol=5)


def _nobody(_effects: Effects) -> None:
    """There are no volumes yet."""
