"""`Failures`: what has gone wrong on the workers, and whether the script has seen it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from skipper.control import Future
from skipper.control.api.tensor_engine_plugin import failed_unseen
from skipper.tensor_engine.errors import RemoteError
from skipper.tensor_engine.shared.stacks import Stack, describe
from skipper.tensor_engine.worker.heap import Poison

_log = logging.getLogger("skipper.tensor_engine")

_KEPT = 1000
"""Failed instructions that are remembered one by one; later ones are counted."""


@dataclass(slots=True)
class _Failure:
    """One failed instruction, on any number of ranks."""

    first: Poison
    stack: Stack | None
    ranks: set[int] = field(default_factory=set)
    is_observed: bool = False


class Failures:
    """The failed instructions of a session. Safe to use from any thread.

    Args:
        stack_of: where the script issued an instruction, by the number of its instruction stream and its own.

    Attributes:
        next_report: what the workers are going to report next.
    """

    def __init__(self, stack_of: Callable[[int, int], Stack | None]) -> None:
        self.next_report: Future[Poison] | None = None
        self._stack_of = stack_of
        self._lock = threading.Lock()
        self._failed: dict[tuple[int, int, int | None], _Failure] = {}
        self._more = 0

    def add(self, poison: Poison) -> None:
        """Take note of what a worker reports."""
        key = (poison.instruction_stream, poison.sequence, poison.step)
        with self._lock:
            failure = self._failed.get(key)
            if failure is None:
                if len(self._failed) >= _KEPT:
                    self._more += 1
                    return
                stack = self._stack_of(poison.instruction_stream, poison.sequence)
                failure = self._failed[key] = _Failure(poison, stack)
            failure.ranks.add(poison.rank)

    def error(self, poison: Poison) -> RemoteError:
        """What to raise where the script meets poison. The failure counts as seen from then on."""
        self.add(poison)
        key = (poison.instruction_stream, poison.sequence, poison.step)
        with self._lock:
            failure = self._failed.get(key)
            if failure is not None:
                failure.is_observed = True
        stack = failure.stack if failure is not None else None
        text = describe(stack, poison.step) if stack is not None else ""
        return RemoteError(poison.rank, poison.operation, poison.summary, text, poison.traceback)

    def report_unobserved(self) -> None:
        """Log the failures that nobody has seen: the first in full. The script then ends with code 1."""
        with self._lock:
            unseen = [failure for failure in self._failed.values() if not failure.is_observed]
            for failure in unseen:
                failure.is_observed = True
            more, self._more = self._more, 0
        if unseen:
            failed_unseen()
        for index, failure in enumerate(unseen):
            first = failure.first
            if index == 0:
                stack = describe(failure.stack, first.step) if failure.stack is not None else ""
                error = RemoteError(first.rank, first.operation, first.summary, stack, first.traceback)
                _log.error("an operation failed, and nothing that depends on it was fetched: %s", error)
                continue
            ranks = ", ".join(map(str, sorted(failure.ranks)))
            _log.error("%s failed on ranks %s, also unseen: %s", first.operation, ranks, first.summary)
        if more:
            _log.error("%d more reports of failures are not listed", more)
