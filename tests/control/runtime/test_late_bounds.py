"""What `configure` bounds, each test in a job of its own: constructors and stops; and bounds that come too late."""

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skipper import control
from skipper.control import Actor, FailureKind, StopTimeoutError, SupervisionError, endpoint, this_host, this_proc
from skipper.control.model.settings import adopt, settings
from tests.control.conftest import PATIENCE_S, Failures, wait_until
from tests.control.runtime.test_stops import BOUND_S, SLACK_S, begin, lines
from tests.control.stuck import AsyncStuck, Stuck


@pytest.fixture(autouse=True)
def a_job_of_its_own() -> Iterator[None]:
    control.shutdown()
    before = settings()
    yield
    control.shutdown()
    adopt(before)


def test_an_actor_that_stops_itself_keeps_the_bound(tmp_path: Path) -> None:
    control.configure(stop_timeout_s=3.0)
    stuck: Any = this_proc().spawn("stuck", Stuck, str(tmp_path / "log"))
    stuck.stop_itself.call_one().get(PATIENCE_S)
    stuck = this_proc().spawn("stuck", Stuck, str(tmp_path / "log"), "cleanup computes")
    stuck.stop_itself.call_one().get(PATIENCE_S)
    wait_until(lambda: lines(tmp_path / "log") == ["cleanup", "finally of cleanup"], "both have ended")


@pytest.mark.parametrize("cls", [Stuck, AsyncStuck])
def test_an_init_that_does_not_return_within_its_bound_is_a_failure_that_says_where_it_stands(
    tmp_path: Path, failures: Failures, cls: type[Actor]
) -> None:
    control.configure(init_timeout_s=0.5)
    stuck: Any = this_host().spawn_procs(name="loading").spawn("stuck", cls, str(tmp_path / "log"), "init computes")
    waiting = stuck.initialized
    with pytest.raises(SupervisionError, match=r"__init__ has not returned within 0\.5 s \(init_timeout_s\)"):
        stuck.ping.call_one().get(PATIENCE_S)
    with pytest.raises(SupervisionError, match=r"actor stuck\{\} in loading: __init__ has not returned"):
        waiting.get(PATIENCE_S)
    failure = failures.wait()
    assert failure.kind is FailureKind.CONSTRUCTION
    assert "in compute" in failure.details
    assert "in __init__" in failure.details
    wait_until(lambda: lines(tmp_path / "log") == ["finally of init"], "it is unwound")


def test_bounds_that_come_too_late_are_a_warning_that_names_who_keeps_the_old_ones() -> None:
    this_host().spawn_procs(name="early").initialized.get(PATIENCE_S)
    with pytest.warns(RuntimeWarning, match=r"early are already running and keep send_timeout_s=30\.0") as caught:
        control.configure(send_timeout_s=7.0, exit_grace_s=2.0)
    assert caught[0].filename == __file__
    assert "exit_grace_s" not in str(caught[0].message)
    with pytest.warns(RuntimeWarning, match="the running job keeps heartbeat_s=10 to its end"):
        control.configure(heartbeat_s=7.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        control.configure(heartbeat_s=7.0, tree_threshold=5)  # as it is; and of the caller alone
    late: Any = this_host().spawn_procs(name="late").spawn("settings", SettingsOfItsProcess)
    assert late.get.call_one().get(PATIENCE_S) == (7.0, 10.0)
    control.shutdown()
    late = this_host().spawn_procs(name="late").spawn("settings", SettingsOfItsProcess)
    assert late.get.call_one().get(PATIENCE_S) == (7.0, 7.0)


class SettingsOfItsProcess(Actor):
    @endpoint
    def get(self) -> tuple[float, float]:
        return settings().send_timeout_s, settings().heartbeat_s


def test_a_stop_timeout_holds_at_once_for_what_runs() -> None:
    stuck: Any = this_host().spawn_procs(name="early").spawn("stuck", Stuck)
    begin(stuck, "sleeps")
    with pytest.warns(RuntimeWarning, match=r"early.* keep stop_timeout_s=30"):
        control.configure(stop_timeout_s=BOUND_S)
    began = time.monotonic()
    with pytest.raises(StopTimeoutError, match="sleeps has been running"):
        stuck.stop().get(PATIENCE_S)
    assert time.monotonic() - began < BOUND_S + SLACK_S
