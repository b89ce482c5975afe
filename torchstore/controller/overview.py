"""The keys of a store and their versions as a table, for people who watch the job."""

from __future__ import annotations

import heapq

from skipper.control.runtime.status_providers import MAX_ROWS, Entry, Table
from skipper.torchstore.controller.index import Index
from skipper.torchstore.controller.versions import History

_COLUMNS = ("key", "versions", "in the making", "retired, still read", "readers")
_MAX_LISTED = 8


def overview(store_name: str, index: Index) -> Table:
    """What a store has at this moment, the keys first that changed last.

    From any thread: the controller goes on meanwhile, so rows may be of slightly different moments.

    Args:
        store_name: For the title.
        index: The controller's.
    """
    histories = index.histories()
    shown = heapq.nlargest(MAX_ROWS, histories, key=_changed)
    rows = [_row(history) for history in shown]
    return Table(f"Store {store_name}", _COLUMNS, rows, len(histories) - len(rows))


def _changed(history: History) -> int:
    return max((version.ready_as for version in list(history.ready.values())), default=0)


def _row(history: History) -> tuple[Entry, ...]:
    ready, staging, draining = sorted(history.ready.items()), list(history.staging), list(history.draining)
    numbers = [str(number) + _remark(version.closed, version.lost is not None) for number, version in ready]
    listed = ", ".join(numbers[-_MAX_LISTED:])
    if len(numbers) > _MAX_LISTED:
        listed = f"{len(numbers) - _MAX_LISTED} older, {listed}"
    readers = sum(len(version.leases) for version in [*(version for _, version in ready), *draining])
    making = ", ".join(map(str, sorted(staging)))
    return history.key, listed or None, making or None, len(draining), readers


def _remark(is_closed: bool, is_lost: bool) -> str:
    return " (lost)" if is_lost else " (taken back)" if is_closed else ""
