"""`ReplicaMetrics`: what is known of one replica of a service."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from skipper.control.services.router import Tally
from skipper.control.services.table import ReplicaState


@dataclass(frozen=True, slots=True)
class ReplicaMetrics:
    """What is known of one replica, over all that have had its number and all processes that call the service.

    Attributes:
        replica: its number.
        state: of the present one.
        restarts: how often it was replaced because it had died or was unhealthy.
        outstanding: requests that are with it.
        sessions: open sessions that are bound to it.
        done: requests that it has answered, by a value or an exception.
        errors: those among them that it has answered by an exception.
        lost: requests that it has not answered because it died; some of them were answered by others.
        mean_s: mean time from the sending of a request to its answer, in seconds; 0.0 where none was answered.
        longest_s: the longest of these times.
    """

    replica: int
    state: ReplicaState
    restarts: int
    outstanding: int
    sessions: int
    done: int
    errors: int
    lost: int
    mean_s: float
    longest_s: float


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
