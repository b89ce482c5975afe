"""`make bench-gpu`: each benchmark that has something to say on a GPU, into one page and one file of JSON.

When a part has ended, both are written anew with all that is known. They are named by the day and the GPU, as those in
`benchmarks/results` are, in whose folder `gpu` they belong once they have been read.
"""

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.gpu.parts import Part, Runner
from tests.tree import ROOT

_PARTS = (
    Part("facts", ["-m", "tests.gpu.facts"], 60),
    Part("transfers", ["-m", "skipper.benchmarks.gpu"], 180),
    Part("weight sync", ["-m", "skipper.benchmarks.weight_sync", "--device", "cuda"], 180),
    Part("bandwidth", ["-m", "skipper.benchmarks.bandwidth", "--local", "--mem", "cuda", "-s", "1M", "-s", "64M"], 60),
    Part("ucx_perftest", ["-m", "skipper.benchmarks.gpu", "--part", "perftest"], 120),
)


def run(runner: Runner, out: Path, *, quick: bool) -> int:
    """Run all parts; returns 0 where each of them ended well.

    Args:
        runner: Of the environment.
        out: A folder for the results.
        quick: Small sizes and few turns: to see that all of it works.
    """
    facts: dict[str, Any] = {}
    parts: list[dict[str, Any]] = []
    status = 0
    for part in _PARTS:
        file = out / "part.json"
        file.unlink(missing_ok=True)
        is_facts = part.name == "facts"
        options = [str(file)] if is_facts else ["--json", str(file)]
        short = ["--quick"] if quick and not is_facts and part.name != "bandwidth" else []
        ended = runner.run(Part(part.name, [*part.arguments, *short, *options], part.limit_s))
        print(ended.output.strip() or f"{part.name}: no output", flush=True)
        status |= ended.status != 0
        told = json.loads(file.read_text("utf-8")) if file.exists() else {}
        file.unlink(missing_ok=True)
        if is_facts:
            facts = told
            continue
        last = "" if ended.status == 0 else (ended.output.strip().splitlines() or ["cut: its time was over"])[-1]
        parts.append(
            {"name": part.name, "status": ended.status, "seconds": round(ended.seconds, 1), "why": last, **told}
        )
        _write(out, facts, parts, quick=quick)
    return status


def _write(out: Path, facts: dict[str, Any], parts: list[dict[str, Any]], *, quick: bool) -> None:
    gpus = facts.get("GPUs") or ["no GPU"]
    name = re.sub("[^a-z0-9]+", "-", gpus[0].partition(",")[0].lower()).strip("-")
    stem = out / f"{datetime.now(UTC):%Y-%m-%d}_{name}"
    text = ["# Memory of GPUs", "", *(["Quick: small sizes and few turns; trust no figure.", ""] if quick else [])]
    text += [f"- {key}: {_plain(value)}" for key, value in facts.items()]
    for part in parts:
        text += ["", f"## {part['name']}", "", *_table(part.get("results", []))]
        if part["why"]:
            why = "; ".join(part.get("errors", [])) or part["why"]
            text += ["", f"It did not end well after {part['seconds']} s (status {part['status']}): {why}"]
    whole = json.dumps({"facts": facts, "quick": quick, "parts": parts}, indent=1)
    for suffix, content in ((".md", "\n".join(text) + "\n"), (".json", whole)):
        # Where the checkout lay on the machine is nobody's business.
        stem.with_suffix(suffix).write_text(content.replace(f"{ROOT}/", ""), encoding="utf-8")


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items() if each is not None)
    return "; ".join(value) or "none" if isinstance(value, list) else str(value)


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as markdown: what is particular to a row in one column, since the benchmarks differ in that."""
    if not rows:
        return ["No row."]
    lines = ["| row | what | p50 | p99 | n | beside it | ratio |", "|---|---|---|---|---|---|---|"]
    fixed = {"name", "unit", "value", "n", "min", "max", "p50", "p99", "reference", "ratio", "p50_low", "p50_high"}
    for row in rows:
        own = ", ".join(
            f"{key} {_short(value)}" for key, value in row.items() if key not in fixed and value is not None
        )
        beside = row["reference"]
        reference = "" if beside is None else f"{beside['name']} {_short(beside['value'])}"
        figures = f"{_short(row['p50'])} {row['unit']} | {_short(row['p99'])} | {row['n']}"
        ratio = "" if row["ratio"] is None else _short(row["ratio"])
        lines.append(f"| {row['name']} | {own} | {figures} | {reference} | {ratio} |")
    return lines


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
