"""`make test-gpu`: what was found, the tests that need no GPU, and then each file of those that do.

Each part has its time. When one has ended, `tests.md` and `tests.json` are written anew with all that is known, so that
a run which is cut loses only the part that it was in.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.parts import RECORD_VARIABLE, Ended, Part, Runner
from tests.tree import ROOT

_FACTS_S = 60
_FILE_S = 150
_CORE = ("tests/conformance", "tests/dataplane")
"""What shows within minutes that this Python and these versions work at all: the compiled part and what rests on it."""

_PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout", "xdist.plugin", "_hypothesis_pytestplugin", "tests.gpu.record")
"""All that are loaded: others that the machine has may warn, and warnings are errors here."""


def run(runner: Runner, out: Path, options: Sequence[str], *, core_s: float) -> int:
    """Run all parts; returns the exit status: 0 where nothing failed and nothing was cut.

    Args:
        runner: Of the environment.
        out: A folder for the results.
        options: Of pytest, for every part.
        core_s: For the tests that need no GPU; 0: they are left out.
    """
    page = _Page(out)
    page.add_facts(runner.run(Part("facts", ["-m", "tests.gpu.facts", str(out / "facts.json")], _FACTS_S)))
    workers = ["--numprocesses", str(min(8, os.cpu_count() or 1)), "--dist=loadfile", "--max-worker-restart=0"]
    parts = [Part("core", ["-m", "not cuda and not verbs", *workers, *_CORE], core_s)] if core_s else []
    parts += [Part(file, ["-m", "cuda", file], _FILE_S) for file in files()]
    for part in parts:
        record = out / "record.jsonl"
        record.unlink(missing_ok=True)
        pytest = ["-m", "pytest", *(f"-p{name}" for name in _PLUGINS), "-p", "no:cacheprovider", "--color=no", "-q"]
        ended = runner.run(
            Part(part.name, [*pytest, *part.arguments, *options], part.limit_s),
            {RECORD_VARIABLE: str(record), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        )
        lines = record.read_text("utf-8").splitlines() if record.exists() else []
        page.add_tests(part, ended, [json.loads(line) for line in lines])
        record.unlink(missing_ok=True)
    return page.status


def files() -> list[str]:
    """The files that have tests for a GPU, by what they say themselves; nearest to the hardware first."""
    found = [
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if "from tests.gpu.gates import" in file.read_text("utf-8")
    ]
    rooms = ("tests/dataplane", "tests/torchstore", "tests/tensor_engine")
    rank = {room: place for place, room in enumerate(rooms)}
    return sorted(found, key=lambda name: (rank.get("/".join(name.split("/")[:2]), len(rooms)), name))


class _Page:
    """What is known so far, on the terminal and in the folder."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._facts = ""
        self._parts: list[dict[str, Any]] = []
        self.status = 0

    def add_facts(self, ended: Ended) -> None:
        self._facts = ended.output.strip()
        print(self._facts, flush=True)
        self.status |= ended.status != 0
        self._write()

    def add_tests(self, part: Part, ended: Ended, tests: list[dict[str, Any]]) -> None:
        counts = Counter(test["outcome"] for test in tests)
        # pytest's 5: no test was chosen, as in a file whose tests for a GPU are all skipped when it is collected.
        well = ended.status in (0, 5) and not counts["failed"]
        self.status |= not well
        entry = {"name": part.name, "status": ended.status, "seconds": round(ended.seconds, 1), "tests": tests}
        self._parts.append(entry)
        lines = _lines(entry)
        if not well and not counts["failed"]:
            lines += [f"  {line}" for line in ended.output.strip().splitlines()[-15:]]
        print("\n".join(lines), flush=True)
        self._write()

    def _write(self) -> None:
        text = ["# The tests on a GPU", "", "```", self._facts, "```", ""]
        for entry in self._parts:
            head, *rest = _lines(entry)
            text += [f"## {head}", "", "```", *rest, "```", ""]
        (self._out / "tests.md").write_text("\n".join(text), encoding="utf-8")
        (self._out / "tests.json").write_text(json.dumps(self._parts, indent=1), encoding="utf-8")


def _lines(entry: dict[str, Any]) -> list[str]:
    tests = entry["tests"]
    counts = Counter(test["outcome"] for test in tests)
    told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped") if counts[outcome])
    end = (
        ""
        if entry["status"] in (0, 1, 5)
        else ", CUT: its time was over"
        if entry["status"] is None
        else (f", ENDED with status {entry['status']}")
    )
    lines = [f"{entry['name']}: {told or 'no test'} in {entry['seconds']} s{end}"]
    lines += [f"  FAILED {test['test']}: {test['why']}" for test in tests if test["outcome"] == "failed"]
    for (where, why), count in Counter(
        (test["test"].partition("::")[0], test["why"]) for test in tests if test["outcome"] == "skipped"
    ).items():
        lines.append(f"  skipped {count} of {where}: {why}")
    return lines
