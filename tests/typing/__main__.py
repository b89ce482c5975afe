"""Runs mypy and pyright over this folder: ``python -m tests.typing``. Each has to report exactly the marked lines.

A line is marked by ``# error: what is wrong``; `planted` has such lines, and so has `outside`, whose files are checked
where a user's would be: in a folder of their own, without this project's settings.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_MARK = re.compile(r"#\s*error:\s*(.*)")

Line = tuple[str, int]
"""A file by its name, and the number of a line."""


def main() -> int:
    """Print what differs; 1 where something does."""
    faults = _check(sorted(HERE.glob("*.py")), ROOT)
    with tempfile.TemporaryDirectory(prefix="skipper-typing-") as folder:
        copies = [Path(shutil.copy(file, folder)) for file in sorted((HERE / "outside").glob("*.py"))]
        faults += _check(copies, Path(folder), "--strict", f"--cache-dir={ROOT / '.mypy_cache' / 'outside'}")
    return 1 if faults else 0


def _check(files: list[Path], folder: Path, *options: str) -> int:
    """Check files from within a folder, mypy with these options; how many lines are not reported as they are marked."""
    marked = {
        (file.name, number): found[1]
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if file != Path(__file__) and (found := _MARK.search(line))
    }
    faults = 0
    for name, reported in (("mypy", _mypy(files, folder, options)), ("pyright", _pyright(files, folder))):
        missed = [(line, f"is not found: {marked[line]}") for line in marked.keys() - reported.keys()]
        wrong = [(line, f"is not a mistake: {reported[line]}") for line in reported.keys() - marked.keys()]
        for (file, number), what in sorted(missed + wrong):
            print(f"{file}:{number}: {name}: {what}", file=sys.stderr)
        faults += len(missed) + len(wrong)
        summary = f"{len(marked) - len(missed)} of {len(marked)} mistakes found, {len(wrong)} false alarms"
        print(f"{name}{'' if folder == ROOT else ', outside of the checkout'}: {summary}")
    return faults


def _mypy(files: list[Path], folder: Path, options: tuple[str, ...]) -> dict[Line, str]:
    output = _run(folder, "mypy", "--output=json", *options, *map(str, files))
    reports = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {
        (Path(report["file"]).name, report["line"]): report["message"]
        for report in reports
        if report["severity"] == "error"
    }


def _pyright(files: list[Path], folder: Path) -> dict[Line, str]:
    reports = json.loads(_run(folder, "pyright", "--outputjson", "--pythonpath", sys.executable, *map(str, files)))
    return {
        (Path(report["file"]).name, report["range"]["start"]["line"] + 1): report["message"]
        for report in reports["generalDiagnostics"]
        if report["severity"] in ("error", "warning")
    }


def _run(folder: Path, checker: str, *args: str) -> str:
    """What a type checker prints; both end with 0 where there is nothing to report, and with 1 where there is."""
    done = subprocess.run(
        [sys.executable, "-m", checker, *args], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{checker} ended with {done.returncode}: {done.stderr or done.stdout}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
