"""The run: every round asks each peer once for each row that it can do; the order of peers rotates."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from skipper.benchmarks.errors import BenchmarkError, PeerError
from skipper.benchmarks.peers.environments import Prepared, prepare
from skipper.benchmarks.peers.roster import PeerLibrary
from skipper.benchmarks.peers.session import Bounds, PeerSession
from skipper.benchmarks.peers.work import FAMILIES, Family, Row

__all__ = ["Outcome", "PeersPlan", "run"]

Tell = Callable[[str], object]

_STRIKES = 2
_QUICK_N = 3


@dataclass(frozen=True, slots=True)
class PeersPlan:
    """What a run does.

    Attributes:
        peers: Who takes part.
        rows: What they are asked for.
        rounds: At most.
        minutes: Begin no round that would exceed this limit if it took as long as the longest; there is always one.
        limit_s: Limit for one row of one peer in one round, once it has begun.
        quick: A few samples of each row, to see that it works.
        checkout: The sources of the peers that need a checkout.
        bounds: What a peer may take.
    """

    peers: Sequence[PeerLibrary]
    rows: Sequence[Row]
    rounds: int = 8
    minutes: float = 25.0
    limit_s: float = 1.0
    quick: bool = False
    checkout: Path | None = None
    bounds: Bounds = field(default_factory=Bounds)


@dataclass(slots=True)
class Outcome:
    """What a run has found.

    Attributes:
        samples: Durations in ns, by row and peer, by round.
        reasons: Why there are none, by row and peer.
        rounds: How many there were.
    """

    samples: dict[tuple[str, str], dict[int, list[int]]] = field(default_factory=lambda: defaultdict(dict))
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)
    rounds: int = 0


def run(plan: PeersPlan, outcome: Outcome, tell: Tell) -> None:
    """Measure, and leave no process behind.

    Args:
        plan: What to do.
        outcome: Receives samples and reasons at once, so that an interrupted run keeps them.
        tell: Takes lines about the progress.
    """
    rounds = _Rounds(plan, _prepare(plan, outcome, tell), outcome, tell)
    begun = time.monotonic()
    longest_s = 0.0
    while outcome.rounds < plan.rounds:
        begin = time.monotonic()
        if outcome.rounds and begin - begun + longest_s > plan.minutes * 60:
            tell(f"{plan.minutes:g} minutes have room for no further round")
            break
        outcome.rounds += 1
        rounds.once(outcome.rounds - 1)
        longest_s = max(longest_s, time.monotonic() - begin)


def _prepare(plan: PeersPlan, outcome: Outcome, tell: Tell) -> dict[str, Prepared]:
    """The environments; peers without one, and rows that a peer is not made for, get their reasons."""
    prepared = {}
    for peer in plan.peers:
        reason = None
        if peer.checkout and plan.checkout is None:
            reason = "no checkout was given"
        elif peer.environment is None:
            prepared[peer.name] = Prepared(Path(sys.executable), {})
        else:
            tell(f"{peer.title}: its environment")
            try:
                prepared[peer.name] = prepare(peer.environment)
            except BenchmarkError as error:
                reason = str(error)
        for row in plan.rows:
            if row.family in peer.lacks:
                outcome.reasons[row.name, peer.name] = peer.lacks[row.family]
            elif row.family in peer.ways and reason is not None:
                outcome.reasons[row.name, peer.name] = reason
    return prepared


class _Rounds:
    def __init__(self, plan: PeersPlan, prepared: Mapping[str, Prepared], outcome: Outcome, tell: Tell) -> None:
        self._plan = plan
        self._prepared = prepared
        self._outcome = outcome
        self._tell = tell
        self._strikes: dict[tuple[str, str], int] = defaultdict(int)

    def once(self, number: int) -> None:
        """One round."""
        for family in FAMILIES:
            peers = [peer for peer in self._plan.peers if family in peer.ways]
            turn = number % max(len(peers), 1)
            for peer in peers[turn:] + peers[:turn]:
                rows = [row for row in self._plan.rows if row.family == family]
                while rows and (rows := self._left(peer, rows)):
                    begin = time.monotonic()
                    done, rows = self._visit(peer, family, rows, number)
                    self._tell(
                        f"round {number + 1}, {family}: {peer.title}, {done} rows in {time.monotonic() - begin:.0f} s"
                    )

    def _left(self, peer: PeerLibrary, rows: Sequence[Row]) -> list[Row]:
        """The rows without those that the peer cannot do or has failed too often."""
        keys = [(row.name, peer.name) for row in rows]
        hopeless = {
            key for key in keys if key in self._outcome.reasons and self._strikes.get(key, _STRIKES) >= _STRIKES
        }
        return [row for row, key in zip(rows, keys, strict=True) if key not in hopeless]

    def _visit(self, peer: PeerLibrary, family: Family, rows: list[Row], number: int) -> tuple[int, list[Row]]:
        """Run one session; returns how many rows it did, and the rows that are left if one of them ended it."""
        left, done, started = list(rows), 0, False
        try:
            with PeerSession.start(self._command(peer, family), self._variables(peer), self._plan.bounds) as session:
                started = True
                while left:
                    n = min(left[0].n, _QUICK_N) if self._plan.quick else left[0].n
                    answer = session.ask(left[0].name, n=n, limit_s=self._plan.limit_s)
                    done += "samples" in answer
                    self._note(left.pop(0), peer, number, answer)
        except PeerError as error:
            if left:
                self._tell(f"{peer.title}, {left[0].name if started else family}: {error}")
            for row in left[:1] if started else left:
                self._strike(row, peer, str(error))
            left = left[1:] if started else []
        return done, left

    def _note(self, row: Row, peer: PeerLibrary, number: int, answer: Mapping[str, object]) -> None:
        key = row.name, peer.name
        samples = answer.get("samples")
        if isinstance(samples, list) and samples:
            self._outcome.samples[key][number] = samples
        elif "cannot" in answer:
            self._outcome.reasons[key] = str(answer["cannot"])
        else:
            self._tell(f"{peer.title}, {row.name}: {answer}")
            self._strike(row, peer, str(answer.get("failed", "it gave no samples")))

    def _strike(self, row: Row, peer: PeerLibrary, reason: str) -> None:
        key = row.name, peer.name
        self._strikes[key] += 1
        self._outcome.reasons[key] = reason

    def _command(self, peer: PeerLibrary, family: Family) -> list[str]:
        return [str(self._prepared[peer.name].python), "-m", "skipper.benchmarks.peers.child", peer.name, family]

    def _variables(self, peer: PeerLibrary) -> dict[str, str]:
        variables = dict(self._prepared[peer.name].variables)
        if peer.environment is not None:
            variables["PYTHONPATH"] = str(self._plan.checkout) if peer.checkout else ""
        return variables
