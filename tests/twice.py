"""Runs pytest, and what failed once more by itself: `python -m tests.twice <arguments of pytest>`.

Thousands of tests kill, freeze and starve processes beside each other, on however few cores a machine has. One that
fails there and passes alone is to be mended and is named at the end of the output, but it does not keep back what has
nothing to do with it. What fails twice fails the run; so does a run that was cut short, or of which many tests fail.
"""

import subprocess
import sys

import pytest

MOST = 12  # of failures that are tried again: more of them are no accident


class Watcher:
    """A plugin of pytest: which tests failed, and whether all of them ran."""

    def __init__(self) -> None:
        self.failed: dict[str, None] = {}
        self.whole = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.whole = False

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, error: object) -> None:
        """A process of pytest-xdist has ended; with an error its tests have not all run."""
        if error:
            self.whole = False


def run(arguments: list[str]) -> int:
    watcher = Watcher()
    first = pytest.main(arguments, plugins=[watcher])
    if first != pytest.ExitCode.TESTS_FAILED or not watcher.whole or len(watcher.failed) > MOST:
        return int(first)
    print(f"\n=== {len(watcher.failed)} failed: each of them once more, one after the other", flush=True)
    second = subprocess.run([sys.executable, "-m", "pytest", *watcher.failed]).returncode
    if second == pytest.ExitCode.OK:
        print("\n=== passed by themselves, failed beside other tests (to be mended):", *watcher.failed, sep="\n    ")
    return second


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
