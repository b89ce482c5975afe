"""`Reporters`: parts of a process that say something of themselves whenever somebody asks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_log = logging.getLogger("skipper.control")


class Reporters(Generic[T]):
    """Functions by the part of the process that they speak for.

    Args:
        failed: what the log says of a function that raises, with ``%s`` for its part.
    """

    def __init__(self, failed: str) -> None:
        self._failed = failed
        self._by_part: dict[str, Callable[[], T]] = {}

    def set(self, part: str, report: Callable[[], T] | None) -> None:
        """Have a function speak for a part, in place of another; None: nobody does."""
        if report is None:
            self._by_part.pop(part, None)
        else:
            self._by_part[part] = report

    def ask(self) -> Iterator[tuple[str, T]]:
        """What each part says; without those whose function raises."""
        for part, report in list(self._by_part.items()):
            try:
                said = report()
            except Exception:  # noqa: BLE001  (one part that fails must not hide the others)
                _log.exception(self._failed, part)
            else:
                yield part, said
