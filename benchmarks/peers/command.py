"""``python -m skipper.benchmarks.peers`` from the command line to the files."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from skipper.benchmarks.environment import gather_environment
from skipper.benchmarks.errors import BenchmarkError, UsageError
from skipper.benchmarks.output import check_can_plot
from skipper.benchmarks.peers.environments import ROOT, versions
from skipper.benchmarks.peers.page import machine_label, page, renewed
from skipper.benchmarks.peers.pictures import draw
from skipper.benchmarks.peers.results import figures, results, standings
from skipper.benchmarks.peers.roster import OURS, ROSTER, PeerLibrary
from skipper.benchmarks.peers.runner import Outcome, PeersPlan, run
from skipper.benchmarks.peers.work import ROWS, Row
from skipper.benchmarks.program import Parser
from skipper.benchmarks.report import Report
from skipper.commandline import INTERRUPTED, add_quick, number, whole

__all__ = ["main"]

_RESULTS = ROOT / "benchmarks" / "results"
_QUICK_RESULTS = _RESULTS / "local"  # which git ignores
_DOCUMENT = ROOT / "docs" / "performance.md"

T = TypeVar("T", PeerLibrary, Row)


def main(argv: Sequence[str], *, prog: str = "python -m skipper.benchmarks.peers") -> int:
    """Measure, and write the page, the report and the pictures; returns the exit code, as ``--help`` lists them."""
    given = _parser(prog).read(argv)
    if isinstance(given, int):
        return given
    try:
        plan = _plan(given)
        if not given.no_plots:
            check_can_plot()
    except UsageError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return error.exit_code
    begun = time.monotonic()

    def tell(sentence: str) -> None:
        print(f"[{time.monotonic() - begun:5.0f} s] {sentence}", file=sys.stderr, flush=True)

    outcome = Outcome()
    exit_code = 0
    try:
        run(plan, outcome, tell)
    except KeyboardInterrupt:
        print(f"{prog}: interrupted; what was measured is written", file=sys.stderr)
        exit_code = INTERRUPTED
    except BenchmarkError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        exit_code = error.exit_code
    if not outcome.samples:
        print(f"{prog}: no peer gave a figure", file=sys.stderr)
        return exit_code or 1
    folder = _QUICK_RESULTS if given.quick else _RESULTS
    _write(plan, outcome, argv, Path(given.output or folder), prog=prog, plots=not given.no_plots)
    return exit_code


def _write(plan: PeersPlan, outcome: Outcome, argv: Sequence[str], folder: Path, *, prog: str, plots: bool) -> None:
    found = figures(outcome, plan.rows, plan.peers)
    environment = gather_environment()
    installed = versions({peer.name: peer.environment for peer in plan.peers if peer.environment is not None})
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{str(environment['time'])[:10]}_{machine_label(environment)}"
    report = Report(
        argv=[*prog.split(), *("PATH" if "/" in word else word for word in argv)],
        config={
            "tool": "peers",
            "rounds": outcome.rounds,
            "quick": plan.quick,
            "versions": installed,
            "not_measured": [
                {"row": row, "peer": peer, "reason": reason} for (row, peer), reason in outcome.reasons.items()
            ],
        },
        results=results(found),
        environment=environment,
    )
    text = page(
        found,
        standings(found, plan.rows, OURS),
        outcome.reasons,
        rows=plan.rows,
        peers=plan.peers,
        versions=installed,
        rounds=outcome.rounds,
        environment=environment,
        pictures=draw(found, plan.rows, plan.peers, stem) if plots else [],
    )
    stem.with_name(f"{stem.name}.json").write_text(report.to_json())
    stem.with_name(f"{stem.name}.md").write_text(text)
    print(f"{stem}.md")
    if folder == _RESULTS:
        _DOCUMENT.write_text(renewed(_DOCUMENT, stem.with_name(f"{stem.name}.md")), encoding="utf-8")
        print(_DOCUMENT)


def _plan(given: argparse.Namespace) -> PeersPlan:
    if given.torchstore is not None and not (Path(given.torchstore) / "torchstore" / "__init__.py").is_file():
        raise UsageError(f"{given.torchstore} is no checkout of torchstore: it has no torchstore/__init__.py")
    return PeersPlan(
        peers=_chosen(given.peers, ROSTER, "peer"),
        rows=_chosen(given.rows, ROWS, "row"),
        rounds=1 if given.quick else given.rounds,
        minutes=given.minutes,
        quick=given.quick,
        checkout=None if given.torchstore is None else Path(given.torchstore).resolve(),
    )


def _chosen(names: str | None, known: Sequence[T], kind: str) -> list[T]:
    """The elements of ``known`` that the user named, or all."""
    if names is None:
        return list(known)
    words = set(names.split(","))
    if unknown := words - {each.name for each in known}:
        there_are = ", ".join(each.name for each in known)
        raise UsageError(f"there is no {kind} {sorted(unknown)[0]!r}; there are {there_are}")
    return [each for each in known if each.name in words]


def _parser(prog: str) -> Parser:
    parser = Parser(
        prog=prog,
        description="Compare Skipper with Monarch, Ray, NIXL, Mooncake and others, which do the same work in turns.",
        exit_codes={0: "a page was written", 1: "no peer gave a figure"},
    )
    parser.add_argument("--rounds", type=whole(1, 1000), default=8, metavar="N", help="rounds, at most (default: 8)")
    parser.add_argument(
        "--minutes", type=number(), default=25.0, metavar="MIN", help="begin no round that ends later (default: 25)"
    )
    parser.add_argument("--peers", metavar="NAME,...", help="only these: " + ", ".join(peer.name for peer in ROSTER))
    parser.add_argument("--rows", metavar="NAME,...", help="only these: " + ", ".join(row.name for row in ROWS))
    parser.add_argument("--torchstore", metavar="PATH", help="a checkout of Meta's torchstore; without: no rows of it")
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        help="where to write (default: benchmarks/results; with --quick, its subfolder local)",
    )
    parser.add_argument("--no-plots", action="store_true", help="draw no pictures")
    add_quick(parser, "one round of a few samples, to see that it works")
    return parser
