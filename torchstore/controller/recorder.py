"""The state of a store and its journal, if it has one. A change is recorded before anyone learns of it."""

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
        state: For reading; only commands change it.
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
        """Bring the state to the end of a journal, and write later changes into it.

        Raises:
            JournalError: The journal cannot be read.
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
                pass  # the client has got the error, or will ask again
            except Exception:  # noqa: BLE001 - it failed at first too, and changed the same
                _log.warning("a command of the journal fails: %s", command.name, exc_info=True)

    def begin(self, tell: Callable[[Effects], None], on_change: Callable[[History], None]) -> None:
        """From now on, report the effects of changes."""
        self._tell = tell
        self.state.on_change = on_change

    def owed(self) -> list[Effects]:
        """Effects that volumes may not have learned before the journal was opened."""
        owed, self._owed = self._owed, None
        return [effects for effects in (owed, self.state.all_effects()) if effects]

    def do(self, command: Command) -> Any:
        """Run a command.

        Raises:
            StoreError: From the command.
            JournalError: It cannot be recorded, and was not done.
        """
        if self._journal is not None and not self.state.was_answered(command):
            self._journal.append(_encode(command))
        try:
            return self.state.apply(command)
        finally:
            self._follow()

    def attempt(self, command: Command, is_change: Callable[[Any], bool], **untold: Any) -> Any:
        """The same for a command that may change nothing. It is recorded only if its outcome ``is_change``.

        ``untold`` are further keyword arguments, which do not affect what the command changes.

        Raises:
            StoreError: From the command.
            JournalError: It could not be recorded, and was not done.
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
        """Commands that give back a process' leases from before the journal was opened, except those it still has.

        No lease number is used twice, so another request does no harm.
        """
        held, of_batches = self._before.get(process, (set(), set()))
        if held - leases:
            yield Command("release", (tuple(sorted(held - leases)), 0))
        for batch in sorted(of_batches - batches):
            yield Command("release", ((), batch))

    def close(self) -> None:
        """Close the journal: the store is shut down."""
        self.state.take_effects()
        self.state.clear()
        if self._journal is not None:
            self._journal.close()

    def _follow(self) -> None:
        """Report the effects, now that the change is recorded."""
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
    """Do nothing: there are no volumes yet."""
