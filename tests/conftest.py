"""What every folder of tests has: how faults are recorded, Ctrl-C as on a terminal, time for examples of hypothesis."""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Generator

import pytest
from hypothesis import settings

from skipper import dataplane
from tests.conformance import records
from tests.conformance.records import provoke
from tests.reach import TCP_TOO

__all__ = ["provoke"]

LOG_FOLDER = "SKIPPER_LOG_FOLDER"

settings.register_profile("skipper", deadline=None)  # a busy machine is no failure
settings.load_profile("skipper")

# A shell starts what it runs in the background with SIGINT ignored, and every program that a test starts inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

dataplane.configure(ucx=TCP_TOO)


def pytest_addoption(parser: pytest.Parser) -> None:
    records.pytest_addoption(parser)
    parser.addoption("--screenshots", action="store_true", help="write the pictures that the documentation shows")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if LOG_FOLDER not in os.environ:  # what actors print is kept, and not among what the user's own jobs have printed
        os.environ[LOG_FOLDER] = folder = tempfile.mkdtemp(prefix="skipper-tests-logs-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    if (terminal := config.pluginmanager.get_plugin("terminalreporter")) is not None and config.getoption(
        "numprocesses"
    ):
        config.pluginmanager.register(_AtOnce(terminal))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Collect no garbage while pytest parses the source of what failed.

    Before 3.11.8 CPython counts the depth of its parsers in one place (gh-106905): if a finalizer, or a thread that has
    its turn meanwhile, parses too, as traceback does, pytest ends with a SystemError, and the whole run with it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        if was_enabled:
            gc.enable()


class _AtOnce:
    """Tells of failures when they happen. With several processes pytest does so at the end, which a run that is ended
    from outside does not have."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.write_line(f"\n{report.nodeid}: failed in its {report.when}\n{report.longreprtext}")
