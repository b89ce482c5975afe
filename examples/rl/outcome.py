"""What a run leaves behind: the report, the table for people, and the picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from examples.rl.loop import History
from skipper.benchmarks.output import significant
from skipper.benchmarks.report import Reference, Report, Result


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run with its yardstick."""

    history: History
    memcpy_seconds: float

    def results(self) -> list[Result]:
        """The rows of the report."""
        history, nbytes = self.history, self.history.nbytes
        where = {"nbytes": nbytes}
        # The first sync comes while nothing else is under way: it has a row of its own.
        warm = history.syncs[1:]
        seconds = [sync.seconds for sync in warm]
        copy_s = self.memcpy_seconds
        first_sync_s = history.syncs[0].seconds
        rewards = [step.reward for step in history.steps]
        return [
            Result.single("reward_first", "1", rewards[0]),
            Result.single("reward_last", "1", history.final_reward),
            Result.single("solved_last", "1", history.final_solved),
            Result.from_samples("sync_s", "s", seconds, reference=Reference("memcpy", copy_s), parameters=where),
            Result.from_samples(
                "sync_gb_per_s",
                "GB/s",
                [nbytes / s / 1e9 for s in seconds],
                reference=Reference("memcpy", nbytes / copy_s / 1e9),
                parameters=where,
            ),
            Result.from_samples("pull_s", "s", [sync.pull_seconds for sync in warm], parameters=where),
            Result.from_samples(
                "transfer_s",
                "s",
                [sync.transfer_seconds for sync in warm],
                reference=Reference("memcpy", copy_s),
                parameters=where,
            ),
            Result.single("first_sync_s", "s", first_sync_s, parameters=where),
            Result.from_samples("step_s", "s", [step.seconds for step in history.steps]),
            Result.from_samples("staleness", "versions", [step.staleness for step in history.steps]),
            Result.single("start_s", "s", history.start_seconds),
        ]

    def report(self, argv: Sequence[str], config: Mapping[str, Any], errors: Sequence[str]) -> Report:
        """The report in the shape that all benchmarks here share."""
        return Report(
            argv=argv,
            config=config,
            results=self.results(),
            errors=errors,
            extra={
                "mismatched_tensors": self.history.mismatched,
                "compared_tensors": self.history.compared,
                "parameters": self.history.parameters,
                "killed_processes": self.history.killed,
                "replaced_replicas": self.history.restarts,
                "lost_requests": self.history.lost,
                "hosts": self.history.hosts,
                "lost_hosts": self.history.lost_hosts,
                "returned_hosts": self.history.returned_hosts,
            },
        )

    def table(self) -> Table:
        """The same for people."""
        history, row = self.history, {result.name: result for result in self.results()}
        last = history.syncs[-1].version
        table = Table(title="RL with weights synced through torchstore", show_header=False)
        table.add_row("steps", f"{len(history.steps)}, {significant(row['step_s'].value, 3)} s each")
        table.add_row("reward, first → last", f"{row['reward_first'].value:.3f} → {history.final_reward:.3f}")
        table.add_row("answers right in every digit", f"{history.final_solved:.1%}")
        table.add_row("versions used", f"0 … {last}")
        staleness = row["staleness"]
        table.add_row("staleness", f"{staleness.min:.0f} … {staleness.max:.0f} versions")
        table.add_row("parameters", f"{history.parameters:,}")
        table.add_row("bytes synced", f"{history.nbytes:,} in each of {len(history.syncs)} syncs")
        sync, rate = row["sync_s"], row["sync_gb_per_s"]
        table.add_row("first sync", f"{history.syncs[0].seconds * 1e3:.1f} ms")
        table.add_row("sync, publish to last generator", f"{sync.value * 1e3:.2f} ms (p99 {sync.p99 * 1e3:.2f})")
        pull_ms, transfer_ms = row["pull_s"].value * 1e3, row["transfer_s"].value * 1e3
        table.add_row("of it in the slowest generator", f"{pull_ms:.2f} ms, moving bytes {transfer_ms:.2f} ms")
        table.add_row("rate", f"{significant(rate.value, 3)} GB/s")
        table.add_row(
            "ratio to memcpy",
            f"{significant(rate.ratio or 0, 3)} (one thread: {self.memcpy_seconds * 1e3:.2f} ms)",
        )
        if history.killed:
            replaced = f"{history.restarts} replica{'s' * (history.restarts != 1)} replaced"
            told = f"{history.killed}, {replaced}, {history.lost} of its requests handed on"
            table.add_row("generators killed", told)
        if history.hosts:
            fates = f", {history.lost_hosts} lost, {history.returned_hosts} of them back" if history.lost_hosts else ""
            table.add_row("hosts", f"{history.hosts}{fates}")
        if history.compared:
            table.add_row("verified", f"{history.compared} tensors bit for bit, {history.mismatched} wrong")
        return table

    def explanation(self) -> str:
        """What the figures of the table mean, and why these ones are what they are."""
        history, row = self.history, {result.name: result for result in self.results()}
        sync_ms, transfer_ms = row["sync_s"].value * 1e3, row["transfer_s"].value * 1e3
        return f"""\
What this means:
* reward: the share of digits that a sampled answer has in the right place, on average; chance gives 0.1.
* staleness: by how many versions the weights that sampled a rollout were older than those that it trained. Sampling
  goes on while the trainers compute, so a version or two is what one expects.
* sync: from the trainers' publication of a version until the last generator computes with it. One replica loads after
  the other, so that there is always one to ask.
* moving bytes: the part of it in which memory is copied. What is left are messages: asking the store for the version,
  the calls to the generators and their answers, and waiting for one of the machine's cores, on which trainers,
  generators and judges work at the same time.
* ratio to memcpy: {history.nbytes / 1e6:.0f} MB are copied in {self.memcpy_seconds * 1e3:.1f} ms by one thread of an \
idle process, so nearly all of a sync of
  {sync_ms:.1f} ms is those messages and waits ({transfer_ms:.1f} ms were copying): they take as long for one tensor \
as for a thousand.
  The larger the model, the less they count."""

    def draw(self, path: str) -> None:
        """Write the curves of reward and sync time to a PNG file."""
        figure = Figure(figsize=(8, 6), layout="constrained")
        FigureCanvasAgg(figure)
        upper, lower = figure.subplots(2, 1, sharex=True)
        steps = self.history.steps
        numbers = [step.number for step in steps]
        upper.plot(numbers, [step.reward for step in steps], label="reward: share of digits that are right")
        upper.plot(numbers, [step.solved for step in steps], label="answers right in every digit")
        upper.axhline(0.1, color="grey", linestyle=":", label="chance, one digit")
        upper.set(ylabel="share", ylim=(0, 1.02), title="Reinforcement learning, sampling and training at once")
        upper.legend(loc="lower right", bbox_to_anchor=(1.0, 0.12))
        lower.plot(numbers, [step.sync.seconds * 1e3 for step in steps], marker=".", label="sync")
        lower.plot(numbers, [step.sync.pull_seconds * 1e3 for step in steps], label="in the slowest generator")
        lower.axhline(self.memcpy_seconds * 1e3, color="grey", linestyle="--", label="memcpy of the same bytes")
        lower.set(xlabel="step", ylabel="ms", ylim=(0, None))
        lower.xaxis.set_major_locator(MaxNLocator(integer=True))
        lower.set_title(f"{self.history.nbytes / 1e6:.1f} MB from trainers' memory to generators' memory")
        lower.legend(loc="upper right")
        for axes in (upper, lower):
            axes.grid(visible=True, alpha=0.3)
        figure.savefig(path, format="png", dpi=120)
