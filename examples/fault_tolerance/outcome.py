"""What a run leaves behind: the comparison with an undisturbed one, the report, and the table for people."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from torch import Tensor

from examples.fault_tolerance.loop import Learned
from examples.fault_tolerance.record import Held, Record, Recovery
from skipper.benchmarks.report import Report, Result

TOLERANCE = 1e-6
"""How far losses (relatively) and weights may be from those of the undisturbed run. Sums of another order are all that
differs; each is wrong by 1e-16 of itself, and Adam, which divides by small numbers, makes that some 1e-10."""

ALL = "all"


@dataclass(frozen=True, slots=True)
class Comparison:
    """With the undisturbed run.

    Attributes:
        loss: of its last step.
        loss_error: of all steps the largest difference, as a part of the loss.
        state_error: of all weights and moments the largest difference.
    """

    loss: float
    loss_error: float
    state_error: float

    @staticmethod
    def of(record: Record, learned: Learned, losses: Sequence[float], state: Tensor) -> Comparison:
        """Compare every loss, and the weights and moments in the end."""
        errors = [abs(record.losses[step] - loss) / abs(loss) for step, loss in enumerate(losses, start=1)]
        return Comparison(losses[-1], max(errors), float((learned.states[0] - state).abs().max()))

    @property
    def is_equal(self) -> bool:
        """Whether the faults have changed nothing."""
        return self.loss_error <= TOLERANCE and self.state_error <= TOLERANCE


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run."""

    record: Record
    learned: Learned
    comparison: Comparison | None

    def errors(self, max_recovery_s: float | None) -> list[str]:
        """What is wrong with it, a sentence each."""
        errors = []
        if any(not state.equal(self.learned.states[0]) for state in self.learned.states[1:]):
            errors.append("the processes do not have the same weights")
        if self.comparison is not None and not self.comparison.is_equal:
            errors.append(
                f"it is not what the undisturbed run has learned: losses differ by {self.comparison.loss_error:.1e} of "
                f"themselves, weights and moments by {self.comparison.state_error:.1e}"
            )
        costs = self.record.recoveries()
        if len(costs) < len(self.record.faults):
            errors.append(f"of {len(self.record.faults)} deaths {len(costs)} were recovered from")
        if max_recovery_s is not None and costs:
            mean_s = statistics.fmean(cost.recovered_s for cost in costs)
            if mean_s > max_recovery_s:
                errors.append(f"recovery took {mean_s:.2f} s in the mean, more than {max_recovery_s:g} s")
        return errors

    def results(self) -> list[Result]:
        """The rows of the report."""
        record = self.record
        rows = [
            Result.single("loss_first", "1", record.losses[1]),
            Result.single("loss_last", "1", record.losses[self.learned.step]),
            Result.from_samples("step_s", "s", record.step_seconds() or [0.0]),
        ]
        if self.comparison is not None:
            rows.append(Result.single("loss_last_undisturbed", "1", self.comparison.loss))
            rows.append(Result.single("loss_error", "1", self.comparison.loss_error))
            rows.append(Result.single("state_error", "1", self.comparison.state_error))
        for kind, costs in self._by_kind().items():
            for name, samples in (
                ("recovery_s", [cost.recovered_s for cost in costs]),
                ("standstill_s", [cost.standstill_s for cost in costs]),
            ):
                parameters: dict[str, str | float] = {"kind": kind, "mean": statistics.fmean(samples)}
                rows.append(Result.from_samples(name, "s", samples, parameters=parameters))
        return rows

    def report(self, argv: Sequence[str], config: Mapping[str, Any], errors: Sequence[str]) -> Report:
        """The report in the shape that all benchmarks here share."""
        record = self.record
        return Report(
            argv=argv,
            config=config,
            results=self.results(),
            errors=errors,
            extra={
                "steps": self.learned.step,
                "seconds": record.seconds,
                "deaths": len(record.faults),
                "deaths_of_newcomers": sum(fault.is_newcomer for fault in record.faults),
                "recovered": len(record.recoveries()),
                "replaced_without_death": self._false_alarms(),
                "voided_attempts": record.voided,
                "steps_made_again": record.again,
                "smallest_quorum": min(record.quorums),
                **_held("after_first_deaths", record.held[0]),
                **_held("at_the_end", record.held[-1]),
            },
        )

    def table(self) -> Table:
        """The run for people."""
        record, again = self.record, f", {self.record.again} of them again" if self.record.again else ""
        table = Table(title="Data-parallel training while processes die", show_header=False)
        steps = statistics.median(record.step_seconds() or [0.0])
        table.add_row(
            "steps", f"{self.learned.step:,} in {record.seconds:.1f} s{again}, {steps * 1e3:.1f} ms each (p50)"
        )
        by_groups = ", ".join(f"{groups}: {count:,}" for groups, count in sorted(record.quorums.items(), reverse=True))
        table.add_row("steps by groups that made them", by_groups)
        table.add_row("attempts given up", f"{record.voided:,}")
        newcomers = sum(fault.is_newcomer for fault in record.faults)
        table.add_row("deaths", f"{len(record.faults):,}, {newcomers:,} of them during recovery")
        table.add_row("replaced without a death", f"{self._false_alarms():,}, since they missed the deadline")
        table.add_row("loss, first → last", f"{record.losses[1]:.6f} → {record.losses[self.learned.step]:.9f}")
        if (compared := self.comparison) is not None:
            table.add_row("the same without deaths", f"{compared.loss:.9f}")
            found = f"losses {compared.loss_error:.1e}, weights and moments {compared.state_error:.1e}"
            table.add_row("largest differences", found)
        if len(record.held) > 1:
            first, last = record.held[0], record.held[-1]
            table.add_row(
                "held by the script",
                f"{first.rss_nbytes / 2**20:.0f} → {last.rss_nbytes / 2**20:.0f} MiB, "
                f"{first.descriptors} → {last.descriptors} descriptors",
            )
        return table

    def recovery_table(self) -> Table:
        """What deaths have cost, by their kind."""
        table = Table(title="Seconds from a death until its group takes part in a step again | until the next step")
        for column in ("death by", "n", "mean", "p50", "max", "next step: mean", "p50", "max"):
            table.add_column(column, justify="left" if column == "death by" else "right")
        for kind, costs in self._by_kind().items():
            recovered, still = [cost.recovered_s for cost in costs], [cost.standstill_s for cost in costs]
            figures = [
                f"{figure(samples):.3f}"
                for samples in (recovered, still)
                for figure in (statistics.fmean, statistics.median, max)
            ]
            table.add_row(kind, f"{len(costs):,}", *figures)
        return table

    def _false_alarms(self) -> int:
        """Lives that were given up though nothing had been done to them: a busy machine has kept them waiting."""
        return self.record.replaced - len(self.record.faults)

    def _by_kind(self) -> dict[str, list[Recovery]]:
        costs = self.record.recoveries()
        kinds = sorted({cost.fault.kind for cost in costs})
        by_kind = {kind: [cost for cost in costs if cost.fault.kind == kind] for kind in kinds}
        return by_kind | ({ALL: costs} if costs else {})


def _held(when: str, held: Held) -> dict[str, int]:
    return {f"rss_nbytes_{when}": held.rss_nbytes, f"descriptors_{when}": held.descriptors}
