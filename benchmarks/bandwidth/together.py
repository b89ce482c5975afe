"""Samples of several processes at once: rates of rounds that all of them began at the same moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from skipper.benchmarks.bandwidth.pair import TimeSpan
from skipper.benchmarks.statistics import Samples, percentile

__all__ = ["Together"]


@dataclass(slots=True)
class Together:
    """What was timed for one size, by all pairs.

    Attributes:
        nbytes: Of one run.
        rates: GB/s of all pairs together, a round each.
        pair_rates: For each pair its own GB/s, a round each.
        durations: Of single runs, all pairs mixed.
    """

    nbytes: int
    rates: list[float] = field(default_factory=list)
    pair_rates: list[list[float]] = field(default_factory=list)
    durations: Samples = field(default_factory=Samples)

    def add(self, spans: Sequence[TimeSpan]) -> None:
        """Take in a round."""
        runs = len(spans[0].durations_ns)
        span_ns = max(span.end_ns for span in spans) - min(span.begin_ns for span in spans)
        self.rates.append(len(spans) * runs * self.nbytes / max(span_ns, 1))
        self.pair_rates = self.pair_rates or [[] for _ in spans]
        for rates, span in zip(self.pair_rates, spans, strict=True):
            rates.append(runs * self.nbytes / max(span.end_ns - span.begin_ns, 1))
            self.durations.extend(span.durations_ns)

    def medians(self) -> list[float]:
        """The median rate of each pair."""
        return [percentile(sorted(rates), 50) for rates in self.pair_rates]
