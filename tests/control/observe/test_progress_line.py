"""The line of progress: its words, and that it is on terminals only, and gone where anything else is written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skipper.control import ProcMesh, Progress, on_progress, track_progress
from skipper.control.observe import terminal_line
from skipper.control.observe.progress_line import text_of
from tests.control.actors import Echo
from tests.control.conftest import PATIENCE_S, Failures, wait_until
from tests.control.observe.terminal import Screen, in_terminal

SLOW_START = Path(__file__).with_name("slow_start.py")
LONG_S = 60.0


def task(description: str = "spawn trainers", **known: object) -> Progress:
    figures = {"completed": 0, "total": None, "unit": "processes", "elapsed_s": 2.0, "process": "", "task_id": 1}
    return Progress(description=description, **{**figures, **known})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tasks", "text"),
    [
        ([task(total=64)], "spawn trainers: 0 of 64 processes, 2 s"),
        (
            [task(total=1000, completed=996, elapsed_s=125.0, waiting_for=("a{'gpus': 3}", "b", "c", "d"))],
            "spawn trainers: 996 of 1,000 processes, 2:05, waiting for a gpus=3, b, c and 1 more",
        ),
        (
            [task("get policy", total=16_100_000_000, completed=3_200_000_000, unit="bytes")],
            "get policy: 3.2 of 16.1 GB, 1.60 GB/s, 8 s left",
        ),
        (
            [task("put w", total=90_000_000, completed=30_000_000, unit="bytes", process=name) for name in "ab"],
            "put w: 60.0 of 180.0 MB, 2 processes, 0.03 GB/s, 4 s left",
        ),
        ([task("train", completed=5, unit="steps", elapsed_s=3700.0)], "train: 5 steps, 1:01:40"),
        (
            [task(total=2, unit="actors", elapsed_s=1.0), task(total=2)],
            "spawn trainers: 0 of 2 processes, 2 s",  # its actors come later
        ),
        (
            [task("b", total=4, completed=1, unit="steps", elapsed_s=1.0), task("a", unit="hosts")],
            "a: 2 s · b: 1 of 4 steps, 3 s left",
        ),
        ([task("a\x1b[2Jb\n", unit="steps")], "a [2Jb : 2 s"),
        ([], ""),
    ],
)
def test_the_line_says_how_far_it_is(tasks: list[Progress], text: str) -> None:
    assert text_of(tasks, 200) == text


def test_the_line_fits_the_terminal() -> None:
    assert text_of([task(total=64)], 20) == "spawn trainers: 0 o…"


def test_a_terminal_has_the_line_below_what_is_printed_and_in_the_end_none(tmp_path: Path) -> None:
    with in_terminal(SLOW_START, str(tmp_path)) as terminal:
        terminal.read_until(
            lambda: "1 of 3 actors" in terminal.text and "a line of the script" in terminal.text, LONG_S
        )
        wanted = "waiting for trainers gpus=1, trainers gpus=2"
        terminal.read_until(lambda: terminal.screen.rows[-1].endswith(wanted), LONG_S)
        assert terminal.screen.rows[-1].startswith("spawn trainers: 1 of 3 actors, ")
        os.write(terminal.ours, b"\n")
        assert terminal.run(LONG_S) == 0
        rows = terminal.screen.rows
    lines = [row for row in rows if row]
    assert sorted(lines) == ["[trainers gpus=0] rank 0 is there", "a line of the script", "all are there"]


def test_a_pipe_and_who_wants_none_get_no_line(tmp_path: Path) -> None:
    (tmp_path / "0").touch()
    done = subprocess.run(
        [sys.executable, str(SLOW_START), str(tmp_path)], input="\n", capture_output=True, text=True, timeout=LONG_S
    )
    assert done.returncode == 0, done.stderr
    assert "spawn" not in done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    for variable in ({"CI": "true"}, {"TERM": "dumb"}, {"SKIPPER_PROGRESS": "off"}):
        with in_terminal(SLOW_START, str(tmp_path), **variable) as terminal:
            os.write(terminal.ours, b"\n")
            assert terminal.run(LONG_S) == 0
            assert "spawn" not in terminal.text


def test_a_word_that_the_variable_has_not_is_refused(tmp_path: Path) -> None:
    environment = {**os.environ, "SKIPPER_PROGRESS": "on"}
    done = subprocess.run(
        [sys.executable, str(SLOW_START), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )
    assert done.returncode == 1
    assert "SKIPPER_PROGRESS is off, or not set, not 'on'" in done.stderr


def work(steps: int) -> None:
    """Runs in an actor, longer than what is not worth telling."""
    import time

    with track_progress("work", steps) as task:
        for _ in range(steps):
            time.sleep(0.2)
            task.advance()


def test_the_script_is_told_of_what_takes_its_actors_long() -> None:
    from skipper.control import this_host

    told: list[Progress] = []
    with on_progress(told.append):
        procs: ProcMesh = this_host().spawn_procs({"gpus": 2}, name="workers")
        echoes = procs.spawn("echoes", Echo)
        echoes.run.call(work, 6).get(PATIENCE_S)
        wait_until(
            lambda: sum(each.state == "finished" and each.description == "work" for each in told) == 2, "the ends"
        )
        procs.stop().get(PATIENCE_S)
    spawned = {(each.description, each.unit): each for each in told if each.state == "finished"}
    assert spawned["spawn workers", "processes"].completed == 2
    assert spawned["spawn echoes", "actors"].completed == 2
    assert {each.process for each in told if each.description == "work"} == {"workers{'gpus': 0}", "workers{'gpus': 1}"}
    assert any(each.state == "running" and each.total == 6 for each in told if each.description == "work")


def test_following_hides_no_failure_from_the_fault_hook(failures: Failures) -> None:
    from skipper.control import this_host
    from tests.control.actors import BadConstruction

    failures.expected = True
    told: list[Progress] = []
    with on_progress(told.append):
        this_host().spawn_procs({"gpus": 2}).spawn("broken", BadConstruction)
        failures.wait()
        wait_until(lambda: any(each.state == "failed" for each in told), "the end of the spawn")


def test_there_is_no_line_while_something_else_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    with open(theirs, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        terminal_line.draw(lambda _: "before")
        with terminal_line.none_meanwhile():
            terminal_line.draw(lambda _: "within")
        terminal_line.draw(lambda _: "after")
        print("a line", file=stream)
        shown = ""
        while "a line\r\n" not in shown:  # what is written comes through in parts
            shown += os.read(ours, 4096).decode()
    os.close(ours)
    screen = Screen(80)
    screen.feed(shown)
    assert screen.rows == ["a line", ""]
    assert "before" in shown
    assert "within" not in shown
    assert "after" in shown


def test_screen_obeys() -> None:
    screen = Screen(20)
    screen.feed("one\r\ntwo\x1b[J\x1bD\x1b[A\x1b7\x1bEline\x1b8 more\r\nx")
    assert screen.rows == ["one", "two more", "xine"]
    screen.feed("\x1b[J\r\n")
    assert screen.rows == ["one", "two more", "x", ""]
