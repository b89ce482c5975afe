"""A benchmark's quick run, as a user starts it."""

import json
import subprocess
import sys
from pathlib import Path

from skipper.benchmarks.report import Report

ROOT = Path(__file__).resolve().parents[2]


def quick_run(module: str, *arguments: str) -> tuple[Report, str]:
    """``python -m MODULE --quick ARGUMENTS --json -``: its report, and what it printed for people."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--quick", *arguments, "--json", "-"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return Report.from_dict(json.loads(done.stdout)), done.stderr
