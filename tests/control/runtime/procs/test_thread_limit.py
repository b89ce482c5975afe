from collections.abc import Callable
from pathlib import Path

from skipper.control.runtime.procs.thread_limit import NEEDED
from tests.control.cgroups import group_of_its_own
from tests.control.conftest import Script

SCRIPT = Path(__file__).with_name("threads_script.py")


def run(script: Callable[..., Script], limit: int, count: int = 1) -> tuple[list[str], str]:
    with group_of_its_own("pids", pids__max=limit) as group:
        code, out, err = script(SCRIPT, str(group), str(count)).finish()
        assert code == 0, err
        return out.splitlines(), err


def test_a_script_that_may_not_start_its_threads_is_told_of_the_limit(script: Callable[..., Script]) -> None:
    (line,), err = run(script, 4)
    assert line.startswith("ThreadLimitError no thread can be started: ")
    assert "may have 4 (pids.max)" in line
    assert err == ""


def test_a_process_that_may_not_start_its_threads_ends_with_the_name_of_the_limit(
    script: Callable[..., Script],
) -> None:
    (line,), err = run(script, NEEDED + 6)
    assert line.startswith("SupervisionError ")
    assert "ended because it could not start its threads: " in line
    assert f"may have {NEEDED + 6} (pids.max)" in line
    assert "pthread_create" not in err


def test_an_actor_that_gets_no_thread_fails_and_the_others_live(script: Callable[..., Script]) -> None:
    lines, err = run(script, 40, count=40)
    assert lines[0] == "1"
    assert lines[-1].startswith("SupervisionError "), err
    assert "could not be constructed: no thread can be started: " in lines[-1]
