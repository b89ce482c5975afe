"""Breakpoints in actors: who is parked, what pdb says there, and every way in which it goes on."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skipper.control import ActorError, ActorMesh, FailureKind, ProcMesh, SupervisionError, this_host, this_proc
from skipper.control.observe import BreakpointReport, cast_command, job_status, parked
from skipper.control.runtime import breakpoints
from tests.control.actors import Echo
from tests.control.conftest import PATIENCE_S, Failures, Script, wait_until
from tests.control.observe.conftest import Skipper
from tests.control.observe.steppers import AsyncStepper, Stepper


@pytest.fixture(scope="module")
def steppers(workers: ProcMesh) -> ActorMesh[Stepper]:
    return workers.spawn("steppers", Stepper)


@pytest.fixture(autouse=True)
def nobody_stays_parked() -> Iterator[None]:
    yield
    assert parked() == []


def wait_for(number: int) -> list[BreakpointReport]:
    """Those who are parked, once there are so many."""
    wait_until(lambda: [report.state for report in parked()] == ["parked"] * number, f"{number} are parked")
    return parked()


def test_a_breakpoint_parks_its_actor_and_nothing_else(
    steppers: ActorMesh[Stepper], echoes: ActorMesh[Echo], workers: ProcMesh
) -> None:
    future = steppers.slice(gpus=0).double.call_one(21)
    (report,) = wait_for(1)
    assert (report.actor, report.process_id) == ("steppers{'gpus': 0}", workers.root_members[0].id)
    assert (report.function, report.code) == ("Stepper.double", "value += 1")
    assert report.file.endswith("steppers.py")
    assert len(echoes.pid.call().get(PATIENCE_S)) == 2
    assert steppers.slice(gpus=1).ping.call_one().get(PATIENCE_S) == "pong"
    states = {actor.label: actor.state for actor in job_status().actors}
    assert (states["steppers{'gpus': 0}"], states["steppers{'gpus': 1}"]) == ("parked", "idle")
    waiting = steppers.slice(gpus=0).ping.call_one()
    assert not waiting.done()
    assert cast_command("continue") == {"steppers{'gpus': 0}": ""}
    assert future.get(PATIENCE_S) == 43
    assert waiting.get(PATIENCE_S) == "pong"


def test_who_is_seen_takes_commands_at_once(steppers: ActorMesh[Stepper]) -> None:
    for _ in range(10):
        future = steppers.slice(gpus=0).double.call_one(21)
        while not parked():
            pass
        assert cast_command("!value = 100") == {"steppers{'gpus': 0}": ""}
        assert cast_command("continue") == {"steppers{'gpus': 0}": ""}
        assert future.get(PATIENCE_S) == 101


def test_a_command_is_cast_to_all_or_to_some(steppers: ActorMesh[Stepper]) -> None:
    futures = [steppers.slice(gpus=rank).double.call_one(10 * (rank + 1)) for rank in range(2)]
    wait_for(2)
    assert cast_command("p value") == {"steppers{'gpus': 0}": "20\n", "steppers{'gpus': 1}": "40\n"}
    assert cast_command("!value = 100", ["steppers:1"]) == {"steppers{'gpus': 1}": ""}
    assert cast_command("p value", ["steppers"]) == {"steppers{'gpus': 0}": "20\n", "steppers{'gpus': 1}": "100\n"}
    assert cast_command("p value", ["nobody"]) == {}
    assert list(cast_command("c", ["steppers:0"])) == ["steppers{'gpus': 0}"]
    assert futures[0].get(PATIENCE_S) == 21
    cast_command("c")
    assert futures[1].get(PATIENCE_S) == 101


def test_steps_go_up_to_the_end_of_the_endpoint(steppers: ActorMesh[Stepper]) -> None:
    future = steppers.slice(gpus=0).double.call_one(1)
    wait_for(1)
    assert "-> return value" in cast_command("next")["steppers{'gpus': 0}"]
    assert parked()[0].code == "return value"
    assert "--Return--" in cast_command("next")["steppers{'gpus': 0}"]
    cast_command("next")
    assert future.get(PATIENCE_S) == 3
    assert steppers.slice(gpus=0).ping.call_one().get(PATIENCE_S) == "pong"


def test_the_next_breakpoint_stops_again(steppers: ActorMesh[Stepper]) -> None:
    future = steppers.slice(gpus=0).twice.call_one()
    wait_for(1)
    cast_command("continue")
    wait_until(lambda: [report.code for report in parked()] == ["return first + second"], "it has stopped again")
    cast_command("continue")
    assert future.get(PATIENCE_S) == 3


def test_breakpoints_of_pdb_stop_it_again(steppers: ActorMesh[Stepper]) -> None:
    future = steppers.slice(gpus=0).double.call_one(1)
    (report,) = wait_for(1)
    assert "Breakpoint 1" in cast_command(f"break {report.file}:{report.line + 1}")["steppers{'gpus': 0}"]
    assert "-> return value" in cast_command("continue")["steppers{'gpus': 0}"]
    cast_command("clear 1")
    cast_command("continue")
    assert future.get(PATIENCE_S) == 3


def test_quit_ends_the_endpoint_and_not_the_actor(steppers: ActorMesh[Stepper]) -> None:
    future = steppers.slice(gpus=0).double.call_one(1)
    wait_for(1)
    cast_command("quit")
    with pytest.raises(ActorError, match="BdbQuit"):
        future.get(PATIENCE_S)
    assert steppers.slice(gpus=0).ping.call_one().get(PATIENCE_S) == "pong"


def test_an_async_endpoint_is_stepped_through(workers: ProcMesh) -> None:
    mesh = workers.slice(gpus=1).spawn("async", AsyncStepper)
    future = mesh.double.call_one(4)
    wait_for(1)
    assert cast_command("p value") == {"async": "8\n"}
    cast_command("next")
    wait_until(lambda: [report.state for report in parked()] == ["parked"], "it has come to the next line")
    assert cast_command("p value") == {"async": "9\n"}
    cast_command("continue")
    assert future.get(PATIENCE_S) == 10


def test_a_step_over_a_long_call_goes_on_in_its_own_time(steppers: ActorMesh[Stepper], tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    future = steppers.slice(gpus=0).wait_at.call_one(str(fifo))
    wait_for(1)
    cast_command("next")
    assert cast_command("next", timeout=1.0) == {"steppers{'gpus': 0}": ""}
    assert [report.state for report in parked()] == ["running"]
    assert cast_command("p 1", timeout=0.3) == {}  # it does not listen
    fifo.write_text("over")
    wait_for(1)
    assert cast_command("p said") == {"steppers{'gpus': 0}": "'over'\n"}
    cast_command("continue")
    assert future.get(PATIENCE_S) == "over"


def test_a_thread_that_an_actor_has_started_is_parked_too(steppers: ActorMesh[Stepper]) -> None:
    future = steppers.slice(gpus=0).on_a_thread.call_one()
    (report,) = wait_for(1)
    assert report.actor == "workers{'gpus': 0} helper"
    assert cast_command("p number", ["helper"]) == {"workers{'gpus': 0} helper": "7\n"}
    cast_command("continue")
    assert future.get(PATIENCE_S) == [7]


def test_an_actor_of_the_scripts_own_process_is_parked_too() -> None:
    stepper = this_proc().spawn("here", Stepper)
    future = stepper.double.call_one(5)
    wait_for(1)
    assert cast_command("p value") == {"here": "10\n"}
    cast_command("continue")
    assert future.get(PATIENCE_S) == 11
    stepper.stop().get(PATIENCE_S)


def test_a_breakpoint_of_the_script_is_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[tuple[object, ...]] = []
    monkeypatch.setattr(breakpoints, "_before", lambda *args, **kwargs: reached.append(args))
    breakpoint("something")
    assert reached == [("something",)]
    assert sys.breakpointhook is breakpoints._hook


def test_what_is_said_at_length_is_cut(steppers: ActorMesh[Stepper]) -> None:
    future = steppers.slice(gpus=0).double.call_one(1)
    wait_for(1)
    said = cast_command("p 'x' * 1_000_000 + 'end'")["steppers{'gpus': 0}"]
    assert said.startswith("[...]x")
    assert said.endswith("xend'\n")
    assert len(said) < 200_000
    cast_command("continue")
    assert future.get(PATIENCE_S) == 3


def test_an_actor_that_fails_is_parked_no_more(failures: Failures) -> None:
    stepper = this_host().spawn_procs(name="owner").spawn("stepper", Stepper)
    future = stepper.own_and_stop.call_one()
    wait_for(1)
    os.kill(int(cast_command("p self.pid")["stepper"]), signal.SIGKILL)
    with pytest.raises(SupervisionError, match="has failed: actor owned died"):
        future.get(PATIENCE_S)
    assert failures.wait().kind is FailureKind.OWNED
    wait_until(lambda: parked() == [], "no actor has stopped")


def test_the_environment_can_turn_breakpoints_off(own_procs: Callable[..., ProcMesh]) -> None:
    procs = own_procs(env={"PYTHONBREAKPOINT": "0"})
    assert procs.spawn("off", Stepper).double.call_one(1).get(PATIENCE_S) == 3


def test_the_command_leaves_what_it_has_attached_to(skipper: Skipper, steppers: ActorMesh[Stepper]) -> None:
    future = steppers.slice(gpus=1).double.call_one(3)
    wait_for(1)
    typed = skipper("debug", stdin="attach steppers:1\np value\n")
    assert typed.returncode == 0
    assert "steppers{'gpus': 1}  Stepper.double (" in typed.stdout
    assert "(steppers{'gpus': 1}) 6\n" in typed.stdout
    assert [report.state for report in parked()] == ["parked"]
    again = skipper("debug", "-c", "attach steppers:1", "-c", "next", "-c", "detach", "-c", "cast p value", "-c", "c")
    assert (again.returncode, again.stderr) == (0, "")
    assert "-> return value\n" in again.stdout
    assert again.stdout.endswith("steppers{'gpus': 1}:\n  7\nsteppers{'gpus': 1}:\n  goes on\n")
    assert future.get(PATIENCE_S) == 7


def test_the_command_says_that_nobody_is_parked(here: Skipper, steppers: ActorMesh[Stepper]) -> None:
    done = here("debug", "-c", "continue", "-c", "list")
    assert (done.returncode, done.stdout) == (1, "no actor has stopped at a breakpoint\n" * 2)
    assert "there is no command 'dance'" in here("debug", "-c", "dance").stdout


def test_a_job_is_served_when_it_comes_to_a_breakpoint(
    script: Callable[[str], Script], skipper: Skipper, runtime_folder: Path
) -> None:
    running = script(
        f"""
        import os
        os.environ["XDG_RUNTIME_DIR"] = {str(runtime_folder)!r}
        from skipper.control import this_host
        from tests.control.observe.steppers import Stepper
        print(this_host().spawn_procs({{"x": 2}}).spawn("steppers", Stepper).double.call(3).get(20))
        """
    )
    assert running.process.stderr is not None
    hint = re.fullmatch(
        r"(?:\[.+\] )?control: steppers{'x': \d} is parked at .*steppers.py:\d+: skipper debug --job (\S+)\n",
        running.process.stderr.readline(),
    )
    assert hint is not None
    running.process.stderr.readline()
    assert "goes on" in skipper("debug", "-c", "continue", job=hint[1]).stdout
    assert running.finish()[:2] == (0, "[7, 7]\n")
