"""Runs mypy and pyright over this folder: ``python -m tests.typing``. Each has to report exactly the marked lines.

A line is marked by ``# error: what is wrong``; `planted` has such lines, the other files have none.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_MARK = re.compile(r"#\s*error:\s*(.*)")

Line = tuple[str, int]
"""A file by its name, and the number of a line."""


def main() -> int:
    """Print what differs; 1 where something does."""
    files = sorted(HERE.glob("*.py"))
    marked = {
        (file.name, number): found[1]
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if file != Path(__file__) and (found := _MARK.search(line))
    }
    faults = 0
    for name, reported in (("mypy", _mypy(files)), ("pyright", _pyright(files))):
        missed = [(line, f"is not found: {marked[line]}") for line in marked.keys() - reported.keys()]
        wrong = [(line, f"is not a mistake: {reported[line]}") for line in reported.keys() - marked.keys()]
        for (file, number), what in sorted(missed + wrong):
            print(f"{(HERE / file).relative_to(ROOT)}:{number}: {name}: {what}", file=sys.stderr)
        faults += len(missed) + len(wrong)
        print(f"{name}: {len(marked) - len(missed)} of {len(marked)} mistakes found, {len(wrong)} false alarms")
    return 1 if faults else 0


def _mypy(files: list[Path]) -> dict[Line, str]:
    output = _run("mypy", "--output=json", *map(str, files))
    reports = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {
        (Path(report["file"]).name, report["line"]): report["message"]
        for report in reports
        if report["severity"] == "error"
    }


def _pyright(files: list[Path]) -> dict[Line, str]:
    reports = json.loads(_run("pyright", "--outputjson", "--pythonpath", sys.executable, *map(str, files)))
    return {
        (Path(report["file"]).name, report["range"]["start"]["line"] + 1): report["message"]
        for report in reports["generalDiagnostics"]
        if report["severity"] in ("error", "warning")
    }


def _run(checker: str, *args: str) -> str:
    """What a type checker prints; both end with 0 where there is nothing to report, and with 1 where there is."""
    done = subprocess.run([sys.executable, "-m", checker, *args], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{checker} ended with {done.returncode}: {done.stderr or done.stdout}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
