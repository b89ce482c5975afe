"""`ExitReasons`: why processes are gone, for those who ask later. The latest few hundred are known."""

from __future__ import annotations

from collections.abc import Callable

from skipper.control.runtime.messages import Loss

KEPT = 512
"""A script may start and lose processes for as long as it runs; what is known of them must not grow with it."""


class ExitReasons:
    """What ended each process. Written on the loop thread, read on any.

    Args:
        forget: told, on the loop thread, of every process that nothing needs to be known of any more.
    """

    def __init__(self, forget: Callable[[str], None]) -> None:
        self._forget = forget
        self._known: dict[str, Loss] = {}

    def __contains__(self, process_id: str) -> bool:
        return process_id in self._known

    def get(self, process_id: str) -> Loss | None:
        """Why this process is gone, if it is and that is still known."""
        return self._known.get(process_id)

    def write(self, process_id: str, loss: Loss) -> None:
        """Note the end of a process."""
        self._known[process_id] = loss
        while len(self._known) > KEPT:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._forget(oldest)
