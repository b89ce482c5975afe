"""A plugin of pytest: a line of JSON for each test, written when the test ends. What was learnt outlives a cut.

SKIPPER_GPU_RECORD=FILE python -m pytest -p tests.gpu.record ...
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.parts import RECORD_VARIABLE


def pytest_configure(config: pytest.Config) -> None:
    # With pytest-xdist the process that collects the reports writes them.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(Path(os.environ[RECORD_VARIABLE])))


class _Recorder:
    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome == "failed":
            self._write(report.nodeid, "failed", _last_line(report), 0.0)
        elif report.outcome == "skipped":
            self._write(report.nodeid, "skipped", _skip_reason(report), 0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._write(report.nodeid, "failed", _last_line(report), report.duration)
        elif report.skipped:
            self._write(report.nodeid, "skipped", _skip_reason(report), report.duration)
        elif report.when == "call":
            self._write(report.nodeid, "passed", "", report.duration)

    def _write(self, test: str, outcome: str, why: str, seconds: float) -> None:
        line = {"test": test, "outcome": outcome, "why": why, "s": round(seconds, 2), "at": round(time.time(), 1)}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _skip_reason(report: Any) -> str:
    reason: str = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")


def _last_line(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[0 if crash is not None else -1][:500] if lines else ""
