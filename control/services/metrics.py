"""How what each caller has counted of a service becomes the metrics of its replicas."""

from __future__ import annotations

from collections.abc import Iterable

from skipper.control.api.service import ReplicaMetrics, ReplicaState
from skipper.control.services.router import Tally


def merge(into: dict[int, Tally], tallies: dict[int, Tally], *, is_gone: bool = False) -> None:
    """Add what one caller has counted; of one that is gone only what is over."""
    for number, tally in tallies.items():
        total = into.setdefault(number, Tally())
        if not is_gone:
            total.outstanding += tally.outstanding
            total.sessions += tally.sessions
        total.done += tally.done
        total.errors += tally.errors
        total.lost += tally.lost
        total.total_ns += tally.total_ns
        total.longest_ns = max(total.longest_ns, tally.longest_ns)


def summary(number: int, state: ReplicaState, restarts: int, tallies: Iterable[dict[int, Tally]]) -> ReplicaMetrics:
    """The metrics of one replica from what everybody has counted."""
    whole: dict[int, Tally] = {}
    for each in tallies:
        merge(whole, {number: each.get(number, Tally())})
    tally = whole.get(number, Tally())
    return ReplicaMetrics(
        number,
        state,
        restarts,
        tally.outstanding,
        tally.sessions,
        tally.done,
        tally.errors,
        tally.lost,
        tally.total_ns / tally.done / 1e9 if tally.done else 0.0,
        tally.longest_ns / 1e9,
    )
