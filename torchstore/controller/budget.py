"""Room in a volume that is full: idle memory first, then the oldest version that nobody needs. No I/O."""

from __future__ import annotations

from skipper.torchstore.controller.index import Index
from skipper.torchstore.controller.ledger import Ledger
from skipper.torchstore.controller.shared_arenas import SharedArenas


def make_room(
    ledger: Ledger, index: Index, shared: SharedArenas, volume: str, since: int
) -> tuple[int, tuple[str, ...]] | None:
    """Free arenas of a volume, unless some have been freed since the ledger's clock stood at ``since``.

    Idle arenas are freed, else that of the oldest version that nobody reads and that is not the newest of its key.

    Returns:
        The clock and the ids of what has been freed since; None: nothing can be freed now.
    """
    shared.give_back()
    if not ledger.freed_since(since, volume):
        ledger.free_idle(volume)
    if not ledger.freed_since(since, volume) and index.retire_oldest(volume):
        shared.give_back()
        ledger.free_idle(volume)
    freed = ledger.freed_since(since, volume)
    return (ledger.clock, freed) if freed else None
