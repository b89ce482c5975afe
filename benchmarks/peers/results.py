"""From samples to figures: medians of rounds, ratios to the yardstick of the same round, and who is first.

A round's figure is the median of its samples. A row's figure is the median of its rounds' figures, with the least and
the greatest of them. A ratio is taken within a round, where both ran under the same load, and the ratios of the rounds
are summarized in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skipper.benchmarks.peers.roster import PeerLibrary
from skipper.benchmarks.peers.runner import Outcome
from skipper.benchmarks.peers.work import Row
from skipper.benchmarks.report import Reference, Result, Scalar
from skipper.benchmarks.statistics import Summary, percentile, summarize

__all__ = ["Figure", "Standing", "figures", "results", "standings"]


@dataclass(frozen=True, slots=True)
class Figure:
    """What one peer reached in one row.

    Attributes:
        by_round: The median of each round that has samples, in the row's unit.
        n: Samples of all rounds.
        ratio: To the yardstick, over the rounds that both have.
    """

    row: Row
    peer: PeerLibrary
    by_round: Mapping[int, float]
    n: int
    ratio: Summary | None

    @property
    def value(self) -> float:
        """The median of the rounds."""
        return percentile(sorted(self.by_round.values()), 50)


@dataclass(frozen=True, slots=True)
class Standing:
    """How ours compares with the best of the others in one row.

    Attributes:
        other: The best of the others; None if no other does the row.
        times: How many times as fast as that one ours is, round by round.
    """

    row: Row
    ours: Figure
    other: Figure | None
    times: Summary | None

    @property
    def first(self) -> bool:
        """Whether no other is faster."""
        return self.times is None or self.times.p50 >= 1


def figures(outcome: Outcome, rows: Sequence[Row], peers: Sequence[PeerLibrary]) -> dict[tuple[str, str], Figure]:
    """All figures by names of row and peer."""
    medians = {
        (row.name, peer.name): {
            number: row.figure(percentile(sorted(samples), 50))
            for number, samples in sorted(outcome.samples[row.name, peer.name].items())
        }
        for row in rows
        for peer in peers
        if outcome.samples.get((row.name, peer.name))
    }
    found = {}
    for row in rows:
        yardstick = medians.get((row.name, row.yardstick), {})
        for peer in peers:
            key = row.name, peer.name
            if key in medians:
                n = sum(map(len, outcome.samples[key].values()))
                found[key] = Figure(row, peer, medians[key], n, _ratios(medians[key], yardstick))
    return found


def results(found: Mapping[tuple[str, str], Figure]) -> list[Result]:
    """The figures as rows of a report; ``ratio_...`` are those of the rounds."""
    rows = []
    for (name, _), figure in found.items():
        yardstick = found.get((name, figure.row.yardstick))
        parameters: dict[str, Scalar] = {
            "peer": figure.peer.name,
            "family": figure.row.family,
            "rounds": len(figure.by_round),
            "samples": figure.n,
        }
        if figure.ratio is not None:
            parameters |= {
                "ratio_p50": figure.ratio.p50,
                "ratio_min": figure.ratio.min,
                "ratio_max": figure.ratio.max,
                "ratio_n": figure.ratio.n,
            }
        rows.append(
            Result.from_samples(
                name,
                figure.row.unit,
                list(figure.by_round.values()),
                reference=None if yardstick is None else Reference(yardstick.peer.name, yardstick.value),
                parameters=parameters,
            )
        )
    return rows


def standings(found: Mapping[tuple[str, str], Figure], rows: Sequence[Row], ours: str) -> list[Standing]:
    """The comparison for every row that ours has; floors and our other variants are left out."""
    out = []
    for row in rows:
        mine = found.get((row.name, ours))
        if mine is None:
            continue
        others = [
            figure
            for (name, peer), figure in found.items()
            if name == row.name and not figure.peer.floor and not peer.startswith(ours)
        ]
        if not others:
            out.append(Standing(row, mine, None, None))
            continue
        best = (max if row.is_rate else min)(others, key=lambda figure: figure.value)
        pair = (mine, best) if row.is_rate else (best, mine)
        out.append(Standing(row, mine, best, _ratios(pair[0].by_round, pair[1].by_round)))
    return out


def _ratios(above: Mapping[int, float], below: Mapping[int, float]) -> Summary | None:
    both = [above[number] / below[number] for number in above if number in below]
    return summarize(both) if both else None
